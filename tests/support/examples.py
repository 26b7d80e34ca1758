"""How many examples a property test tries: few for `make quick`, many for a thorough run.

HYPOTHESIS_PROFILE=quick (at most 10) or thorough (2,000); anything else is the usual number of each test.
"""

import os

QUICK = 10
THOROUGH = 2000


def examples(usual: int) -> int:
    """Return the number of examples for a test that usually tries `usual`."""
    match os.environ.get("HYPOTHESIS_PROFILE", ""):
        case "quick":
            return min(usual, QUICK)
        case "thorough":
            return max(usual, THOROUGH)
        case _:
            return usual
