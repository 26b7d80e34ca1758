"""Which volumes this node shows at which paths, and how: what a repeated or a second publish is compared with.

Owns: the documents in the state directory. What is not mounted any more does not count, whatever they say.
Start reading at: `Publications.check`.
"""

from pathlib import Path

import msgspec

from moorage.host import mountinfo
from moorage.sdk.errors import AlreadyExists, FailedPrecondition
from moorage.sdk.model import AccessMode, NodeVolume
from moorage.sdk.store import Store


class Publication(msgspec.Struct, frozen=True):
    """How a volume was published at one path."""

    mode: AccessMode
    is_block: bool
    is_read_only: bool


class Publications:
    """The publications of this node, by volume and path."""

    def __init__(self, state_dir: Path) -> None:
        self._store = Store(state_dir / "published")

    def close(self) -> None:
        """Release the state directory."""
        self._store.close()

    def check(self, volume: NodeVolume, path: str, *, is_mounted: bool) -> None:
        """Raise AlreadyExists if the volume is there in another way, FailedPrecondition if it has a single writer."""
        known = self._known(volume.id)
        wanted = _publication(volume)
        if is_mounted and known.get(path, wanted) != wanted:
            raise AlreadyExists(f"volume {volume.id} is published at {path} in another way")
        single = AccessMode.SINGLE_NODE_SINGLE_WRITER
        for other, how in known.items():
            is_single = single in (how.mode, wanted.mode)
            if other != path and is_single and mountinfo.is_mounted(other):
                raise FailedPrecondition(f"volume {volume.id} has a single writer, at {other}")

    def add(self, volume: NodeVolume, path: str) -> None:
        """Record a publish, and forget those that are mounted no more."""
        live = {other: how for other, how in self._known(volume.id).items() if mountinfo.is_mounted(other)}
        self._store.put(volume.id, {**live, path: _publication(volume)})

    def remove(self, volume_id: str, path: str) -> None:
        known = self._known(volume_id)
        known.pop(path, None)
        if known:
            self._store.put(volume_id, known)
        else:
            self._store.delete(volume_id)

    def _known(self, volume_id: str) -> dict[str, Publication]:
        return msgspec.convert(self._store.get(volume_id) or {}, dict[str, Publication])


def _publication(volume: NodeVolume) -> Publication:
    return Publication(volume.access.mode, volume.access.is_block, volume.is_read_only)
