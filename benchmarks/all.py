"""Every benchmark, one after the other, each in its own process; `all.py NAME…` runs those whose name contains NAME."""

import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    wanted = sys.argv[1:]
    folder = Path(__file__).parent
    scripts = [
        path for path in sorted(folder.glob("*_*.py")) if not wanted or any(word in path.name for word in wanted)
    ]
    failed = []
    for script in scripts:
        print(f"== {script.name}", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, script], check=False, cwd=folder.parent, env={**os.environ}).returncode:
            failed.append(script.name)
        print(f"   ({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
