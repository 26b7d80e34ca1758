"""Refuse files that do not belong in git because of their size: `python scripts/large_files.py FILE...`."""

import sys
from pathlib import Path

LIMIT_BYTES = 400_000


def main(names: list[str]) -> int:
    large = [name for name in names if Path(name).is_file() and Path(name).stat().st_size > LIMIT_BYTES]
    for name in large:
        print(f"{name} is larger than {LIMIT_BYTES // 1000} kB")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
