"""Put the fragments of `changes/` into CHANGELOG.md.

    python scripts/changelog.py             show the section of the next release
    python scripts/changelog.py VERSION     write it into CHANGELOG.md and remove the fragments

A fragment is `changes/NAME.KIND.md` with KIND added, changed, fixed or removed: one sentence or two for users.
Start reading at: `section`.
"""

import datetime
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("added", "changed", "fixed", "removed")


def fragments(folder: Path) -> dict[str, list[Path]]:
    """Return the fragments by kind. Raises SystemExit for a file that is no fragment."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        kind = path.name.removesuffix(".md").rpartition(".")[2]
        if kind not in found:
            raise SystemExit(f"{path}: name it NAME.KIND.md with KIND one of {', '.join(KINDS)}")
        found[kind].append(path)
    return found


def section(folder: Path) -> str:
    """Return the fragments as the body of a release: a heading for each kind, a list entry for each fragment."""
    parts = []
    for kind, paths in fragments(folder).items():
        entries = ["- " + path.read_text().strip().replace("\n", "\n  ") for path in paths]
        if entries:
            parts.append(f"### {kind.capitalize()}\n\n" + "\n".join(entries) + "\n")
    return "\n".join(parts)


def released(changelog: str, version: str, date: str, body: str) -> str:
    """Return the changelog with a release on top, or with its body added to the section of that version."""
    heading = f"## {version} ({date})"
    unreleased = f"## {version} (unreleased)\n"
    if unreleased in changelog:
        before, after = changelog.split(unreleased, 1)
        first, separator, rest = after.partition("\n## ")
        joined = "\n\n".join(part.strip() for part in (first, body) if part.strip())
        return f"{before}{heading}\n\n{joined}\n" + (f"{separator}{rest}" if separator else "")
    top, separator, rest = changelog.partition("\n## ")
    return f"{top.rstrip()}\n\n{heading}\n\n{body.strip()}\n" + (f"{separator}{rest}" if separator else "")


def main(arguments: list[str]) -> int:
    folder, changelog = ROOT / "changes", ROOT / "CHANGELOG.md"
    body = section(folder)
    if not arguments:
        print(body or "no fragments in changes/")
        return 0
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    changelog.write_text(released(changelog.read_text(), arguments[0], today, body))
    for paths in fragments(folder).values():
        for path in paths:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
