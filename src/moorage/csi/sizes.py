"""Sizes written with a unit: `500Mi`, `10Gi`, `2G`.

Owns: whole sizes in bytes, for the parameters of classes and for calls made by hand. The plugin does without the
quantities of Kubernetes, which are in `moorage.kube.quantity`.
"""

import re

from moorage.errors import InvalidRequest

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"([0-9]{1,18})([kMGT]|[KMGT]i)?")


def size_from(what: str, text: str) -> int:
    """Return the bytes of a size without fractions. Raises InvalidRequest, naming `what`, if it is none or zero."""
    found = _SIZE.fullmatch(text.strip())
    if not found or not int(found[1]):
        raise InvalidRequest(f"{what} {text[:64]!r} is not a size such as 500Mi or 10Gi")
    return int(found[1]) * _UNITS[found[2] or ""]
