"""Compare the coverage of each package with its floor in pyproject.toml.

Reads what `coverage json` wrote and prints one line per package. A package below its floor fails; one that is two
points above it should raise it. Usage: coverage.py COVERAGE.json [-o json]
"""

import json
import math
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measured(report: dict[str, object]) -> dict[str, float]:
    """Percent of statements and branches that ran, for each package of moorage."""
    ran: Counter[str] = Counter()
    there: Counter[str] = Counter()
    files = report["files"]
    assert isinstance(files, dict)
    for name, file in files.items():
        parts = Path(name).parts
        inside = parts[parts.index("moorage") + 1 :]
        package = inside[0] if len(inside) > 1 else "moorage"
        found = file["summary"]
        ran[package] += found["covered_lines"] + found["covered_branches"]
        there[package] += found["num_statements"] + found["num_branches"]
    return {package: 100.0 * ran[package] / there[package] for package in sorted(there) if there[package]}


def floors() -> dict[str, int]:
    found: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["moorage"]["coverage-floors"]
    return found


def compare(found: dict[str, float], wanted: dict[str, int]) -> list[str]:
    """The packages whose coverage fell below their floor, those without a floor, and floors without a package."""
    below = [
        f"{name}: {percent:.1f} % is below {wanted[name]} %"
        for name, percent in found.items()
        if percent < wanted.get(name, 0)
    ]
    below += [f"{name}: has no floor; {math.floor(found[name])} would hold" for name in found if name not in wanted]
    return below + [f"{name}: has a floor, and no code was measured" for name in wanted if name not in found]


def main() -> None:
    found, wanted = measured(json.loads(Path(sys.argv[1]).read_text())), floors()
    failures = compare(found, wanted)
    if sys.argv[2:] == ["-o", "json"]:
        print(json.dumps({"percent": found, "floors": wanted, "failures": failures}))
    else:
        for name, percent in found.items():
            raise_it = "  raise the floor" if percent >= wanted.get(name, 0) + 2 else ""
            print(f"{name:12} {percent:5.1f} %  floor {wanted.get(name, 0)} %{raise_it}")
        print(*failures, sep="\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
