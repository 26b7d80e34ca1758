"""Run every benchmark, one after the other, each in its own process.

    python benchmarks/all.py [NAME...] [--json FILE]

NAME picks the scripts whose names contain it. With --json (usually benchmarks/figures.json) the figures that the
scripts report replace the older ones in that file; `make docs` makes the table in docs/reference/figures.md from it.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import COLLECT

FOLDER = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path, help="the file of figures to update")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-figures-") as folder:
        collected = Path(folder) / "figures"
        collected.touch()
        failed = run_all(options.names, collected)
        if options.json:
            update(options.json, [json.loads(line) for line in collected.read_text().splitlines()])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run_all(names: list[str], collected: Path) -> list[str]:
    """Run the scripts and return the names of those that failed."""
    failed = []
    for script in sorted(FOLDER.glob("*_*.py")):
        if names and not any(word in script.name for word in names):
            continue
        print(f"== {script.name}", flush=True)
        began = time.monotonic()
        environment = {**os.environ, COLLECT: str(collected)}
        if subprocess.run([sys.executable, script], check=False, cwd=FOLDER.parent, env=environment).returncode:
            failed.append(script.name)
        print(f"   ({time.monotonic() - began:.0f} s)", flush=True)
    return failed


def update(path: Path, measured: list[dict[str, object]]) -> None:
    """Replace the figures that were measured now, and keep the others with their dates."""
    now = {each["promise"]: each for each in measured}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entries = json.loads(path.read_text())
    for entry in entries:
        if found := now.get(entry["promise"]):
            entry.pop("met", None)
            entry |= {"measured": found["measured"], "date": today} | ({} if found["met"] else {"met": False})
    lines = ",\n".join(" " + json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    sys.exit(main())
