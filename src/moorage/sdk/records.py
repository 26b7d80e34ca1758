"""What the library remembers of volumes, snapshots and groups, unless the driver does.

Owns: the documents in the state directory and their translation.
Start reading at: `Records`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import msgspec

from moorage.sdk.driver import Driver
from moorage.sdk.errors import NotFound
from moorage.sdk.model import Group, Snapshot, Volume
from moorage.sdk.operations import BlockingCalls
from moorage.sdk.store import Store

T = TypeVar("T")


class AttachmentRecord(msgspec.Struct, frozen=True):
    """How a volume was attached to a node."""

    mode: int
    is_block: bool
    is_read_only: bool
    context: dict[str, str]


class Records:
    """Volumes, snapshots, groups and attachments by id."""

    def __init__(self, driver: Driver, state_dir: Path, work: BlockingCalls) -> None:
        self._driver = driver
        self._run = work.run
        self._keeps_volumes = not driver.defines("find_volume", "list_volumes")
        self._volumes = Store(state_dir / "volumes") if self._keeps_volumes else None
        self._snapshots = Store(state_dir / "snapshots")
        self._groups = Store(state_dir / "groups")
        self._attachments = Store(state_dir / "attachments")

    def close(self) -> None:
        """Release the state directory."""
        for store in (self._volumes, self._snapshots, self._groups, self._attachments):
            if store is not None:
                store.close()

    async def find_volume(self, volume_id: str) -> Volume | None:
        if self._volumes is None:
            return await self._run(self._driver.find_volume, volume_id)
        return _decoded(self._volumes, volume_id, Volume)

    async def volume(self, volume_id: str) -> Volume:
        """Return a volume. Raises NotFound if it does not exist."""
        found = await self.find_volume(volume_id)
        if found is None:
            raise NotFound(f"there is no volume {volume_id}")
        return found

    async def list_volumes(self) -> list[Volume]:
        if self._volumes is None:
            found: Iterable[Volume] = await self._run(self._driver.list_volumes)
        else:
            found = _all(self._volumes, Volume)
        return sorted(found, key=lambda volume: volume.id)

    def keep_volume(self, volume: Volume) -> None:
        if self._volumes is not None:
            self._volumes.put(volume.id, asdict(volume))

    def drop_volume(self, volume_id: str) -> None:
        if self._volumes is not None:
            self._volumes.delete(volume_id)
        self._attachments.delete(volume_id)

    def find_snapshot(self, snapshot_id: str) -> Snapshot | None:
        return _decoded(self._snapshots, snapshot_id, Snapshot)

    def list_snapshots(self) -> list[Snapshot]:
        return sorted(_all(self._snapshots, Snapshot), key=lambda snapshot: snapshot.id)

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.put(snapshot.id, asdict(snapshot))

    def drop_snapshot(self, snapshot_id: str) -> None:
        self._snapshots.delete(snapshot_id)

    def find_group(self, group_id: str) -> Group | None:
        return _decoded(self._groups, group_id, Group)

    def keep_group(self, group: Group) -> None:
        """Record the members first: a group that exists is complete."""
        for snapshot in group.snapshots:
            self.keep_snapshot(snapshot)
        self._groups.put(group.id, asdict(group))

    def drop_group(self, group: Group) -> None:
        self._groups.delete(group.id)
        for snapshot in group.snapshots:
            self.drop_snapshot(snapshot.id)

    def attachments(self, volume_id: str) -> dict[str, AttachmentRecord]:
        """Return the nodes that a volume is attached to."""
        return _decoded(self._attachments, volume_id, dict[str, AttachmentRecord]) or {}

    def keep_attachments(self, volume_id: str, nodes: Mapping[str, AttachmentRecord]) -> None:
        if nodes:
            self._attachments.put(volume_id, dict(nodes))
        else:
            self._attachments.delete(volume_id)


def _decoded(store: Store, key: str, kind: type[T]) -> T | None:
    document = store.get(key)
    return None if document is None else msgspec.convert(document, kind)


def _all(store: Store, kind: type[T]) -> list[T]:
    return [msgspec.convert(document, kind) for _, document in store.items()]
