"""Defaults, validation and immutability, kind by kind.

Owns: `Rules` and the table from a stored resource to its rules.
May not touch: storage, HTTP; a rule is a function of one object, or of a new and an old one.
Start reading at: `rules_for`.
"""

from functools import lru_cache

from moorage.apiserver.rules.base import Rules


@lru_cache(maxsize=1)
def _table() -> dict[str, Rules]:
    return {}


_NONE = Rules()


def rules_for(stored_as: str) -> Rules:
    """The rules of a resource; one without its own has only those of metadata."""
    return _table().get(stored_as, _NONE)
