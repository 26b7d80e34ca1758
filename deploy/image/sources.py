"""Write this machine's package sources into one file and print its name, so that no registry is named here."""

import sys
from pathlib import Path


def main() -> None:
    target = Path(sys.argv[1]) / "sources.list"
    lines = []
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.list"))]:
        if path.exists():
            lines += [line for line in path.read_text().splitlines() if line.startswith("deb ")]
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for stanza in path.read_text().split("\n\n"):
            lines += one_line_form(stanza)
    target.write_text("\n".join(lines) + "\n")
    sys.stdout.write(str(target))


def one_line_form(stanza: str) -> list[str]:
    """A deb822 stanza as classical lines."""
    pairs = (line.partition(":") for line in stanza.splitlines() if ":" in line and not line.startswith(("#", " ")))
    fields = {key.lower(): value.strip() for key, _, value in pairs}
    if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
        return []
    signed = fields.get("signed-by", "")
    option = f"[signed-by={signed}] " if signed.startswith("/") else ""
    components = fields.get("components", "main")
    return [
        f"deb {option}{uri} {suite} {components}"
        for uri in fields.get("uris", "").split()
        for suite in fields.get("suites", "").split()
    ]


if __name__ == "__main__":
    main()
