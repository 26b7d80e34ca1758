"""Who owns whom: dependents by the uid of their owner.

Owns: the index behind garbage collection and propagation policies.
May not touch: deletion itself.
Start reading at: `Owners`.
"""

import msgspec

Key = tuple[str, str]


class _Owner(msgspec.Struct):
    uid: str = ""


class _Meta(msgspec.Struct):
    ownerReferences: list[_Owner] | None = None


class _Owned(msgspec.Struct):
    metadata: _Meta


_decode = msgspec.json.Decoder(_Owned).decode


class Owners:
    """The index, kept up to date with every committed change."""

    __slots__ = ("_dependents",)

    def __init__(self) -> None:
        self._dependents: dict[str, set[tuple[str, Key]]] = {}

    def note(self, resource: str, key: Key, before: bytes | None, after: bytes | None) -> None:
        old, new = owners_in(before), owners_in(after)
        for uid in old - new:
            left = self._dependents.get(uid)
            if left is not None:
                left.discard((resource, key))
                if not left:
                    del self._dependents[uid]
        for uid in new - old:
            self._dependents.setdefault(uid, set()).add((resource, key))

    def get(self, uid: str) -> list[tuple[str, Key]]:
        """The objects that name this uid as an owner."""
        return sorted(self._dependents.get(uid, ()))


def owners_in(body: bytes | None) -> set[str]:
    """The uids of an object's owners; the cheap test first, as most objects have none."""
    if body is None or b'"ownerReferences":' not in body:
        return set()
    return {owner.uid for owner in _decode(body).metadata.ownerReferences or ()}
