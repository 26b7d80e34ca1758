"""Find words that the style guide asks to replace by a named actor or the standard term.

    python scripts/words.py [FILE...]

Prints each place. Without files it looks through everything that a reader sees: source, documentation, manifests.
Start reading at: `FORBIDDEN`, `places_in`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = (
    *("somebody", "someone", "whoever", "nobody", "anew", "is told", "was told"),
    *("word of", "look again", "let go", "of use", "becomes of"),
)
_PATTERN = re.compile(r"(?<![\w-])(" + "|".join(each.replace(" ", r"\s+") for each in FORBIDDEN) + r")(?![\w-])", re.I)
_READ = (".py", ".md", ".yaml", ".yml", ".toml", ".json", "Makefile")
_FOLDERS = ("src", "docs", "deploy", "scripts", "benchmarks", "examples", "README.md", "CONTRIBUTING.md", "Makefile")
_LEFT_OUT = ("scripts/words.py", "src/moorage/csi/generated/", "src/moorage/csi/proto/", "src/moorage/apiserver/data/")


def files() -> list[Path]:
    """Return the files in git that a reader sees."""
    listed = subprocess.run(["git", "ls-files", *_FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(_READ)]


def places_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and word of each forbidden word in a file."""
    name = str(path.resolve().relative_to(ROOT))
    if name.startswith(_LEFT_OUT) or not path.is_file():
        return
    text = path.read_text()
    for found in _PATTERN.finditer(text):
        if text[found.start() - 1 : found.start()] == text[found.end() : found.end() + 1] == '"':
            continue  # a name in the code, such as the user "nobody"
        yield text.count("\n", 0, found.start()) + 1, " ".join(found[1].lower().split())


def main(names: list[str]) -> int:
    found = [
        f"{path.resolve().relative_to(ROOT)}:{line}: {word}"
        for path in ([Path(name) for name in names] if names else files())
        for line, word in places_in(path)
    ]
    print("\n".join(found) if found else "no forbidden words")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
