"""CSI volumes with a filesystem: stage, publish, unpublish, unstage, and the directories around them.

Owns: `globalmount`, `mount` and their vol_data.json. Only empty directories are ever removed here.
May not touch: the world, the pod's processes.
Start reading at: `FilesystemMounter`.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from moorage.csi import csi_pb2 as pb
from moorage.host import mountinfo, mounts
from moorage.host.hung_paths import DoesNotAnswer, probe
from moorage.host.safe_remove import remove_empty, remove_empty_tree
from moorage.host.threads import in_thread
from moorage.kube.names import CSI_PLUGIN
from moorage.kube.volumes import attachment_name
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.registry import DriverRegistry
from moorage.node.volumes import rules, wire
from moorage.node.volumes.driver_calls import (
    Undone,
    after_asking,
    clearing_after,
    confirming,
    driver_and_capabilities,
    uncover,
)
from moorage.node.volumes.driver_calls import call as called
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.mounters import ownership
from moorage.node.volumes.mounters import vol_data as metadata
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import ActualVolume, CsiSource, MountState, StepFailure, VolumeUse

log = get_logger(__name__)

UseProgress = Callable[[VolumeUse, int], None]


class FilesystemMounter:
    """Everything that needs a driver, for volumes that hold a filesystem."""

    def __init__(
        self, layout: NodeLayout, node: str, registry: DriverRegistry, fetch: Fetch, progress: UseProgress | None = None
    ) -> None:
        self._layout = layout
        self._node = node
        self._registry = registry
        self._fetch = fetch
        self._progress = progress
        self._undone = Undone()
        self._mounted_at: set[Path] = set()  # staging paths at which a driver has mounted something
        self._asked_again: set[Path] = set()  # where a lost mount is being made again, until it is there

    async def stage(self, use: VolumeUse, is_staged: bool, is_reconstructed: bool) -> None:
        source = _csi(use.source)
        obstacle = rules.lifecycle_obstacle(source, self._fetch.driver_spec(source.driver))
        if obstacle:
            raise StepFailed(StepFailure.TRANSIENT, "device", obstacle)
        directory = self._layout.staging(source.driver, source.handle)
        target = directory / "globalmount"
        if source.is_ephemeral or (is_staged and await self._is_still_staged(target)):
            return
        driver, capabilities = await driver_and_capabilities(self._registry, source.driver, "device")
        if rules.STAGE not in capabilities:
            return
        await self._fetch.confirm_attached(use)
        extras = await self._fetch.for_stage(use, source)
        metadata.make_directory(directory)
        try:
            os.mkdir(target, 0o750)
        except FileExistsError:
            await remove_dead_mount(target, "device")
        metadata.write(directory, metadata.for_device(source, extras.se_linux_context))
        request = wire.stage_request(use, source, target, extras, capabilities)
        try:
            await called("device", driver.client.NodeStageVolume(request))
        except StepFailed as error:
            if error.failure is StepFailure.FINAL and not is_staged and not is_reconstructed:
                self._after_refusal(target, directory, error)
            raise
        with after_asking("device"):
            if mountinfo.is_mounted(target):
                self._mounted_at.add(target)

    async def _is_still_staged(self, target: Path) -> bool:
        """A mount that was taken away or died is staged again: drivers must take a repeated call. A driver that mounts
        nothing there is not asked twice."""
        return target not in self._mounted_at or (_is_mounted(target) and not await is_dead(target, "device"))

    async def publish(self, use: VolumeUse, state: MountState, may_be_used: bool) -> None:
        source = _csi(use.source)
        driver, capabilities = await driver_and_capabilities(self._registry, source.driver, "pod")
        if not source.is_ephemeral and rules.STAGE not in capabilities:
            await self._fetch.confirm_attached(use)
        directory = self._layout.csi_volume(use.pod.uid, source.spec_name)
        target = directory / "mount"
        async with confirming(self._fetch.confirm_claim(use.pod, source) if not may_be_used else None):
            extras = await self._fetch.for_publish(use, source)
            attachment = attachment_name(source.driver, source.handle, self._node)
            if state is MountState.UNCERTAIN:
                await remove_dead_mount(target, "pod")
            data = metadata.for_pod(source, self._node, attachment, extras.se_linux_context)
            times = self._times(directory, target, state) if may_be_used and not source.is_ephemeral else 1
            metadata.write(directory, metadata.with_times(data, times))
            is_staged = rules.STAGE in capabilities and not source.is_ephemeral
            staging = self._layout.staging_target(source.driver, source.handle) if is_staged else None
            request = wire.publish_request(use, source, staging, target, extras, capabilities)
            try:
                await called("pod", driver.client.NodePublishVolume(request))
            except StepFailed as error:
                if error.failure is StepFailure.FINAL and not may_be_used:
                    self._after_refusal(target, directory, error)
                raise
        self._asked_again.discard(target)
        with after_asking("pod"):
            if rules.agent_applies_fs_group(use, self._fetch.driver_spec(source.driver), capabilities):
                await self._apply_group(use, target)

    def _times(self, directory: Path, target: Path, state: MountState) -> int:
        """How often the driver will have been asked to publish this. Some drivers count that, and do not unstage before
        they were asked as often to undo it: so it counts when one is asked again because its mount is gone."""
        times = metadata.times_published(_read_or_none(directory))
        if state is MountState.MOUNTED or target in self._asked_again or mountinfo.is_mounted(target):
            return times  # asked of the path: what hangs there has been looked for just before
        self._asked_again.add(target)
        return times + 1

    async def unpublish(self, volume: ActualVolume, uid: PodUid) -> None:
        source = _csi(volume.source_of(uid))
        directory = self._layout.csi_volume(uid, source.spec_name)
        target = directory / "mount"
        self._fetch.forget_pod(uid)
        unmount_subpaths(self._layout, uid, source.spec_name)
        data = _data_or(directory, target, source)
        if data is not None:
            driver, _ = await driver_and_capabilities(self._registry, data["driverName"], "pod")
            await in_thread(uncover, target)
            request = pb.NodeUnpublishVolumeRequest(volume_id=data["volumeHandle"], target_path=str(target))
            for _ in range(metadata.times_published(data)):
                await called("pod", driver.client.NodeUnpublishVolume(request))
        self._asked_again.discard(target)
        await in_thread(self._undone.check, target, "pod")
        remove_empty(target)
        metadata.remove(directory)
        remove_empty(directory)

    async def unstage(self, volume: ActualVolume) -> None:
        source = _csi(volume.source)
        directory = self._layout.staging(source.driver, source.handle)
        target = directory / "globalmount"
        held_by = await in_thread(self._references, target)
        if held_by:
            raise StepFailed(
                StepFailure.TRANSIENT, "device", f"{target} is still mounted at {', '.join(sorted(held_by))}"
            )
        data = _data_or(directory, target, source)
        if data is not None:
            driver, capabilities = await driver_and_capabilities(self._registry, data["driverName"], "device")
            if rules.STAGE in capabilities:
                await in_thread(uncover, target)
                request = pb.NodeUnstageVolumeRequest(volume_id=data["volumeHandle"], staging_target_path=str(target))
                await called("device", driver.client.NodeUnstageVolume(request))
        await in_thread(self._undone.check, target, "device")
        self._mounted_at.discard(target)
        remove_empty(target)
        metadata.remove(directory)
        remove_empty(directory)

    def _references(self, target: Path) -> set[str]:
        """Pods of this agent that still show what is mounted at the staging path."""
        table = mountinfo.mounts()
        staged = mountinfo.mount_at(target, table)
        if staged is None:
            return set()
        below = f"{self._layout.pods}/"
        found = {
            one.target
            for one in table
            if (one.device, one.root) == (staged.device, staged.root) and one.target.startswith(below)
        }
        return found if found and not mounts.is_corrupted(target) else set()  # what hangs is not asked without need

    def _after_refusal(self, target: Path, directory: Path, error: StepFailed) -> None:
        """Remove what was prepared; if something is mounted nevertheless, the refusal is not believed."""
        with clearing_after(error, directory):
            if _is_mounted(target):
                error.failure = StepFailure.UNCERTAIN
                return
            remove_empty(target)
            metadata.remove(directory)
            remove_empty(directory)

    async def _apply_group(self, use: VolumeUse, target: Path) -> None:
        assert use.fs_group is not None
        progress = self._progress

        def report(count: int) -> None:
            log.info("still changing ownership", volume=use.volume, pod=use.pod.uid, entries=count)
            if progress is not None:
                loop.call_soon_threadsafe(progress, use, count)

        loop = asyncio.get_running_loop()
        try:
            await in_thread(
                ownership.apply_group,
                target,
                use.fs_group,
                only_on_root_mismatch=use.fs_group_on_root_mismatch,
                progress=report,
            )
        except OSError as error:
            message = f"files of {target} cannot be given to group {use.fs_group}: {error}"
            raise StepFailed(StepFailure.UNCERTAIN, "pod", message) from error


async def is_dead(target: Path, step: str) -> bool:
    """Whether a mount answers with the errors of a server or a device that is gone."""
    try:
        return await probe(target, "is it dead", lambda: mounts.is_corrupted(target))
    except DoesNotAnswer as error:
        raise StepFailed(StepFailure.TRANSIENT, step, str(error)) from None


async def remove_dead_mount(target: Path, step: str) -> None:
    """Take away a mount whose server is gone, so that the driver can mount again; a live one is left alone."""
    if await is_dead(target, step):
        log.warning("dead mount is taken away", path=str(target))
        await in_thread(mounts.unmount_all, target)


def unmount_subpaths(layout: NodeLayout, uid: PodUid, volume: str) -> None:
    """Take away the subPath binds that a kubelet may have left for this volume."""
    directory = layout.subpaths_of(uid) / volume
    if not directory.exists():
        return
    for one in reversed(mountinfo.mounts_below(directory)):
        mounts.unmount(one.target, lazy=True)
    for container in directory.iterdir():
        for entry in container.iterdir():
            entry.unlink() if entry.is_file() and not entry.is_symlink() and not entry.stat().st_size else None
    remove_empty_tree(directory)


def _data_or(directory: Path, target: Path, source: CsiSource) -> Mapping[str, str] | None:
    """Whom to ask to undo a mount, from the volume's data; where that is lost, from what else is known of the volume.
    None when nothing was ever asked for: there is no data, and nothing is mounted."""
    known = {"driverName": source.driver, "volumeHandle": source.handle}
    try:
        data = metadata.read(directory)
    except metadata.UnreadableVolumeData as error:
        log.warning("volume data is unreadable", reason=str(error))
        return known
    return known if data is None and _is_mounted(target) else data


def _read_or_none(directory: Path) -> Mapping[str, str] | None:
    with contextlib.suppress(metadata.UnreadableVolumeData):  # it is about to be rewritten
        return metadata.read(directory)
    return None


def _is_mounted(target: Path) -> bool:
    return mountinfo.mount_at(target) is not None


def _csi(source: object) -> CsiSource:
    if not isinstance(source, CsiSource):
        raise StepFailed(StepFailure.FINAL, "device", f"{source!r} is no volume of plugin {CSI_PLUGIN}")
    return source
