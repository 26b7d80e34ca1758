"""Node calls carried out by the hooks of a driver: mount points are made, checked and removed around them.

Owns: the order of the steps of each call. What is mounted is asked of the kernel, in threads, because it may hang.
Start reading at: `NodeHooks.publish`.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moorage.errors import InvalidRequest
from moorage.host import mountinfo, mounts
from moorage.host.targets import Target
from moorage.sdk.controller_hooks import why_unsupported
from moorage.sdk.driver import Driver
from moorage.sdk.errors import FailedPrecondition, NotFound
from moorage.sdk.model import Access, Health, NodeVolume, SizeRange, Stats, StorageHealth
from moorage.sdk.operations import ALPHA, BlockingCalls, NodeInfo, NodeOperations, VolumeUse
from moorage.sdk.publications import Publications
from moorage.sdk.targets import (
    PublishTarget,
    StagingTarget,
    live_mount,
    make_target,
    stats_of,
    undo_publish,
    verify_publish,
)

_HOOKS = {  # where operation and hooks have other names; "publish" is what makes a driver serve nodes
    "unstage": ("stage",),
    "unpublish": ("publish",),
    "stats": ("publish",),
    "expand": ("expand_on_node",),
    "health": ("node_health",),
}


class NodeHooks(NodeOperations):
    """The hooks of one driver."""

    def __init__(self, driver: Driver, publications: Publications, work: BlockingCalls) -> None:
        self._driver = driver
        self._publications = publications
        self._run = work.run
        self.hidden = frozenset() if driver.announces_alpha else ALPHA

    def serves(self, *operations: str) -> bool:
        if operations == ("mount_group",):
            return self._driver.supports_mount_group
        return all(self._driver.defines(*_HOOKS.get(each, (each,))) for each in operations)

    def info(self) -> NodeInfo:
        driver = self._driver
        return NodeInfo(driver.environment.node_id, driver.max_volumes_per_node, dict(driver.topology()))

    async def stage(self, volume: NodeVolume, path: str) -> None:
        self._check_use(volume.access)
        target, is_mounted = await self._run(_prepared_staging, path)
        if not is_mounted:
            volume = replace(volume, staging=Path(target.path))
            await self._run(self._driver.stage, volume, StagingTarget(target, volume.access))

    async def unstage(self, volume_id: str, path: str) -> None:
        target = await self._run(Target.from_request, "staging_target_path", path)
        await self._run(target.unmount)
        if self._driver.defines("unstage"):
            await self._run(self._driver.unstage, volume_id, Path(target.path))

    async def publish(self, volume: NodeVolume, path: str) -> None:
        self._check_use(volume.access)
        if volume.is_ephemeral and not self._driver.supports_ephemeral:
            raise InvalidRequest("volume_context: this driver has no volumes that live with their pod")
        if volume.is_ephemeral or not self._driver.defines("stage"):
            volume = replace(volume, staging=None)
        elif volume.staging is None:
            raise FailedPrecondition("staging_target_path is needed: volumes of this driver are staged first")
        target, volume, is_mounted = await self._run(self._prepared_publish, volume, path)
        if is_mounted:
            return
        existed = await self._run(make_target, target, volume.access)
        try:
            where = PublishTarget(target, volume.access, volume.is_read_only)
            await self._run(self._driver.publish, volume, where)
            await self._run(verify_publish, target, volume.is_read_only)
        except BaseException:
            await self._run(undo_publish, target, existed)
            raise
        await self._run(self._publications.add, volume, target.path)

    def _prepared_publish(self, volume: NodeVolume, path: str) -> tuple[Target, NodeVolume, bool]:
        if volume.staging is not None:
            staging = Target.from_request("staging_target_path", str(volume.staging))
            volume = replace(volume, staging=Path(staging.path))
        target = Target.from_request("target_path", path)
        is_mounted = live_mount(target) is not None
        self._publications.check(volume, target.path, is_mounted=is_mounted)
        return target, volume, is_mounted

    async def unpublish(self, volume_id: str, path: str) -> None:
        target = await self._run(Target.from_request, "target_path", path)
        await self._run(target.unmount)
        if self._driver.defines("unpublish"):
            await self._run(self._driver.unpublish, volume_id, Path(target.path))
        await self._run(target.remove)
        await self._run(self._publications.remove, volume_id, target.path)

    async def stats(self, volume_id: str, path: str) -> VolumeUse:
        where = await self._run(_mounted, volume_id, path)
        if self._driver.defines("stats"):
            found = await self._run(self._driver.stats, volume_id, where)
        else:
            found = await self._run(filesystem_stats, where)
        is_told = self._driver.defines("node_health")
        return VolumeUse(found, await self._run(self._driver.node_health, volume_id, [where]) if is_told else None)

    async def expand(self, volume_id: str, path: str, size: SizeRange, access: Access | None) -> int:
        where = await self._run(_mounted, volume_id, path)
        return await self._run(self._driver.expand_on_node, volume_id, where, size)

    async def health(self, volume_id: str, paths: Sequence[str]) -> Sequence[Health]:
        return await self._run(self._driver.node_health, volume_id, [Path(path) for path in paths])

    async def storage_health(self) -> Sequence[StorageHealth]:
        return await self._run(self._driver.storage_health)

    def _check_use(self, access: Access) -> None:
        if why := why_unsupported(self._driver, access):
            raise InvalidRequest(f"volume_capability: {why}")


def _prepared_staging(path: str) -> tuple[Target, bool]:
    target = Target.from_request("staging_target_path", path)
    if live_mount(target) is not None:
        return target, True
    target.ensure_directory("staging_target_path")
    return target, False


def _mounted(volume_id: str, path: str) -> Path:
    """Return a path at which something is mounted. Raises NotFound if nothing is."""
    real = os.path.realpath(path) if path.startswith("/") else ""
    if not real or not mountinfo.is_mounted(real):
        raise NotFound(f"volume {volume_id} is not mounted at {path}")
    return Path(real)


def filesystem_stats(path: Path) -> Stats:
    """Return what the kernel says of a mounted filesystem or block device."""
    if stat.S_ISBLK(os.stat(path).st_mode):
        with open(path, "rb") as device:
            return Stats(device.seek(0, os.SEEK_END))
    return stats_of(mounts.space_of(path))
