"""Where a benchmark reports what it measured: `benchmarks/all.py --json` collects it into figures.json."""

import json
import os
from pathlib import Path

COLLECT = "MOORAGE_FIGURES"


def record(promise: str, value: str, met: bool = True) -> None:
    """Report one figure. `promise` is its key in figures.json; `met` says whether it is within its bound.

    Does nothing unless all.py collects figures. Raises KeyError if figures.json has no such promise.
    """
    known = {each["promise"] for each in json.loads((Path(__file__).parent / "figures.json").read_text())}
    if promise not in known:
        raise KeyError(f"benchmarks/figures.json has no promise {promise!r}")
    if collected := os.environ.get(COLLECT):
        with Path(collected).open("a") as file:
            file.write(json.dumps({"promise": promise, "measured": value, "met": bool(met)}) + "\n")
