"""Sizes as a person types them.

Owns: the option's name in the error.
"""

from moorage.errors import UsageError
from moorage.kube.quantity import BadQuantity, bytes_of


def bytes_from(option: str, text: str) -> int:
    """Return the bytes of a size such as 10Gi; an empty text is 0. Raises UsageError if it is none, or less than 1."""
    try:
        found = bytes_of(text)
    except BadQuantity as error:
        raise UsageError(f"{option}: {error}") from error
    if text and found <= 0:
        raise UsageError(f"{option} {text!r}: a size must be more than nothing")
    return found
