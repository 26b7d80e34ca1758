"""Controller calls on snapshots, on groups of them, and on their blocks.

Owns: which pool a call is for. A group lives in one pool.
Start reading at: `Snapshots`.
"""

from collections.abc import Iterator

from moorage.errors import InvalidRequest, MoorageError
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.parameters import SnapshotParameters
from moorage.plugin.services.paging import collect, pool_and_id
from moorage.plugin.services.values import group_from, snapshot_from
from moorage.plugin.topology import check_snapshot_place
from moorage.sdk import model
from moorage.sdk.operations import ControllerOperations, GroupRequest, Page, SnapshotRequest
from moorage.storage import BlockDiff, CreateSnapshot, Pool, VolumeKind

log = get_logger(__name__)


class SeveralPools(MoorageError):
    """Volumes of different pools have no common point in time."""

    code = "FAILED_PRECONDITION"
    retryable = False


class Snapshots(ControllerOperations):
    """Part of the controller's operations."""

    _parts: PluginContext

    def create_snapshot(self, request: SnapshotRequest) -> model.Snapshot:
        parts = self._parts
        parameters = SnapshotParameters.parse(request.parameters)
        # One that was cut before is found again also if its volume was deleted since.
        cut_before = parts.pools.of_snapshot(request.snapshot_id)
        pool = cut_before or parts.persistent_pool(request.volume_id)
        check_snapshot_place(request.requisite, parts.settings)
        wish = CreateSnapshot(name=request.name, volume_id=request.volume_id, in_use=parameters.in_use)
        snapshot = pool.create_snapshot(wish)
        if cut_before is None:
            way = snapshot.copy_path.value
            parts.copies[way] += 1
            log.info("snapshot taken", snapshot=snapshot.id, volume=snapshot.volume_id, copied_by=way)
        return snapshot_from(snapshot, parts.settings)

    def delete_snapshot(self, snapshot_id: str) -> None:
        for pool in self._parts.pools:
            if pool.delete_snapshot(snapshot_id):
                log.info("snapshot deleted", snapshot=snapshot_id, pool=pool.name)

    def list_snapshots(self, snapshot_id: str, volume_id: str, after: str, most: int) -> Page[model.Snapshot]:
        """Return a page; a filter that matches nothing is an empty list."""
        pools, settings = self._parts.pools, self._parts.settings
        if snapshot_id:
            pool_and_id(after)
            known = [each for pool in pools if (each := pool.snapshots.find(snapshot_id)) is not None]
            return Page([snapshot_from(each, settings) for each in known if volume_id in ("", each.volume_id)])
        found = collect(
            pools,
            lambda pool, start, limit: pool.snapshots.page(after=start, limit=limit, volume_id=volume_id),
            lambda snapshot: snapshot.id,
            after,
            most,
        )
        return Page([snapshot_from(each, settings) for each in found.items], found.next)

    def get_snapshot(self, snapshot_id: str) -> model.Snapshot:
        found = self._parts.pool_of_snapshot(snapshot_id).snapshots.get(snapshot_id)
        return snapshot_from(found, self._parts.settings)

    def create_group(self, request: GroupRequest) -> model.Group:
        parts, wanted = self._parts, list(request.volume_ids)
        in_use = SnapshotParameters.parse(request.parameters).in_use
        own = {key: value for key, value in request.parameters.items() if key == "snapshotInUse"}
        pool = parts.pools.of_group(request.group_id)
        if pool is not None:  # it is found again also if its volumes were deleted since
            return group_from(pool.create_group(request.name, wanted, own, in_use), parts.settings)
        pools = {pool.name: pool for pool in map(parts.persistent_pool, wanted)}
        if len(pools) > 1:
            raise SeveralPools(f"source_volume_ids are in several pools ({', '.join(sorted(pools))}); use one a group")
        group = next(iter(pools.values())).create_group(request.name, wanted, own, in_use)
        parts.copies.update(member.copy_path.value for member in group.snapshots)
        log.info("group snapshot taken", group=group.id, members=len(group.snapshots), held_ms=group.held_ms)
        return group_from(group, parts.settings)

    def delete_group(self, group: model.Group) -> None:
        for pool in self._parts.pools:
            if pool.delete_group(group.id, tuple(member.id for member in group.snapshots)):
                log.info("group snapshot deleted", group=group.id, pool=pool.name)

    def find_group(self, group_id: str) -> model.Group | None:
        pool = self._parts.pools.of_group(group_id)
        return None if pool is None else group_from(pool.snapshots.get_group(group_id), self._parts.settings)

    def allocated_blocks(self, snapshot: model.Snapshot, offset: int) -> Iterator[model.Block]:
        return _ranges(self._pool_of_block_snapshot("snapshot_id", snapshot.id).blocks.allocated(snapshot.id, offset))

    def changed_blocks(self, base: model.Snapshot, target: model.Snapshot, offset: int) -> Iterator[model.Block]:
        pool = self._pool_of_block_snapshot("base_snapshot_id", base.id)
        self._pool_of_block_snapshot("target_snapshot_id", target.id)
        diff = pool.blocks.changed(base.id, target.id, offset)
        log.info("changed blocks are read", base=base.id, method=diff.method)
        return _ranges(diff)

    def _pool_of_block_snapshot(self, field: str, snapshot_id: str) -> Pool:
        pool = self._parts.pool_of_snapshot(snapshot_id)
        snapshot = pool.snapshots.get(snapshot_id)
        if snapshot.kind is not VolumeKind.IMAGE or snapshot.filesystem:
            raise InvalidRequest(
                f"{field}: snapshot {snapshot.id} is of a filesystem volume; only block volumes have this"
            )
        return pool


def _ranges(diff: BlockDiff) -> Iterator[model.Block]:
    return (model.Block(each.offset, each.length) for each in diff.ranges)
