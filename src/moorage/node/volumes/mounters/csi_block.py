"""CSI block volumes: stage, publish to a file, map the device for the pod, and the way back.

Owns: everything below `volumeDevices`, of the plugin and of the pod.
Start reading at: `BlockMounter`.
"""

import os
import stat
from dataclasses import replace
from pathlib import Path

from moorage.csi import csi_pb2 as pb
from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from moorage.host.safe_remove import remove_empty, remove_empty_up_to
from moorage.host.threads import in_thread
from moorage.kube.volumes import attachment_name
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.registry import DriverRegistry
from moorage.node.volumes import rules, wire
from moorage.node.volumes.driver_calls import Undone, call, clearing_after, confirming, driver_and_capabilities
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.mounters import vol_data
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import ActualVolume, CsiSource, MountState, StepFailure, VolumeUse

log = get_logger(__name__)


class BlockMounter:
    """Everything that needs a driver, for volumes that are devices."""

    def __init__(self, layout: NodeLayout, node: str, registry: DriverRegistry, fetch: Fetch) -> None:
        self._layout = layout
        self._node = node
        self._registry = registry
        self._fetch = fetch
        self._undone = Undone()
        self._staged: set[str] = set()  # PersistentVolumes; two may name one volume, and each has a place of its own

    async def stage(self, use: VolumeUse, is_staged: bool, is_reconstructed: bool) -> None:
        source = _block(use.source)
        if is_staged and source.spec_name in self._staged:
            return
        driver, capabilities = await driver_and_capabilities(self._registry, source.driver, "device")
        await self._fetch.confirm_attached(use)
        if rules.STAGE not in capabilities:
            self._write_data(source)
            self._staged.add(source.spec_name)
            return
        extras = await self._fetch.for_stage(use, source)
        staging = self._layout.block_staging(source.spec_name)
        self._write_data(source)
        if not mountinfo.mount_at(staging):
            vol_data.make_directory(staging)
        request = wire.stage_request(use, source, staging, extras, capabilities)
        try:
            await call("device", driver.client.NodeStageVolume(request))
        except StepFailed as error:
            if error.failure is StepFailure.FINAL and not is_reconstructed:
                self._after_stage_refusal(source.spec_name, error)
            raise
        self._staged.add(source.spec_name)

    async def publish(self, use: VolumeUse, state: MountState, may_be_used: bool) -> None:
        source = _block(use.source)
        driver, capabilities = await driver_and_capabilities(self._registry, source.driver, "pod")
        target = self._layout.block_publish(source.spec_name, use.pod.uid)
        async with confirming(self._fetch.confirm_claim(use.pod, source) if not may_be_used else None):
            extras = await self._fetch.for_publish(use, source)
            vol_data.make_directory(target.parent)
            staging = self._layout.block_staging(source.spec_name)
            request = wire.publish_request(use, source, staging, target, extras, capabilities)
            self._link(source.spec_name, use.pod.uid)
            try:
                await call("pod", driver.client.NodePublishVolume(request))
            except StepFailed as error:
                if error.failure is StepFailure.FINAL and not may_be_used:
                    await in_thread(self._after_publish_refusal, source.spec_name, use.pod.uid, error)
                raise
        try:
            await in_thread(self._map, source.spec_name, use.pod.uid, target)
        except (MoorageError, OSError) as error:  # the driver has published: it must be told to undo that
            message = f"device of volume {source.spec_name} cannot be mapped: {error}"
            raise StepFailed(StepFailure.UNCERTAIN, "pod", message) from error

    def _map(self, spec_name: str, uid: PodUid, published: Path) -> None:
        if not stat.S_ISBLK(os.stat(published).st_mode):
            raise MoorageError(f"the driver published no block device at {published}")
        device = self._layout.block_map(spec_name, uid)
        vol_data.make_directory(device.parent)
        if mountinfo.mount_at(device) is None:
            device.touch(mode=0o660)
            mounts.bind(published, device)
        elif os.stat(device).st_rdev != os.stat(published).st_rdev:
            mounts.unmount_all(device)  # the volume came back as another device
            mounts.bind(published, device)

    def _link(self, spec_name: str, uid: PodUid) -> None:
        """The pod's link to its device, before there is one: it tells the next agent that a driver was asked."""
        device, link = self._layout.block_map(spec_name, uid), self._layout.block_link(uid, spec_name)
        vol_data.make_directory(link.parent)
        if not (link.is_symlink() and os.readlink(link) == str(device)):
            link.unlink(missing_ok=True)
            link.symlink_to(device)

    def _unlink(self, spec_name: str, uid: PodUid) -> None:
        link = self._layout.block_link(uid, spec_name)
        link.unlink(missing_ok=True)
        remove_empty_up_to(link.parent, self._layout.pod(uid))

    def _write_data(self, source: CsiSource) -> None:
        attachment = attachment_name(source.driver, source.handle, self._node)
        vol_data.write(self._layout.block_data(source.spec_name), vol_data.for_pod(source, self._node, attachment))

    def _after_stage_refusal(self, spec_name: str, error: StepFailed) -> None:
        """Remove what was prepared; if there is something at the staging path, the refusal is not believed."""
        staging = self._layout.block_staging(spec_name)
        with clearing_after(error, staging):
            is_clean = not os.path.lexists(staging) or (staging.is_dir() and not any(staging.iterdir()))
            if mountinfo.mount_at(staging) is not None or not is_clean:
                error.failure = StepFailure.UNCERTAIN
                return
            if (self._layout.block_devices / "publish" / spec_name).exists():
                return  # a pod may still have it: what its unpublishing needs to know is kept
            remove_empty(staging)
            self._remove_data(spec_name)

    def _after_publish_refusal(self, spec_name: str, uid: PodUid, error: StepFailed) -> None:
        """The same for the publish target, which is a mounted device or a node of one. An earlier try that ended
        uncertain may have mapped the device, and what is mapped is never unstaged."""
        target = self._layout.block_publish(spec_name, uid)
        with clearing_after(error, target):
            if mountinfo.mount_at(target) is not None or target.is_block_device():
                error.failure = StepFailure.UNCERTAIN
                return
            self._unmap(spec_name, uid)
            if target.is_file() and not target.stat().st_size:
                target.unlink()
            remove_empty_up_to(target.parent, self._layout.block_devices)
            self._unlink(spec_name, uid)

    async def unpublish(self, volume: ActualVolume, uid: PodUid) -> None:
        source = _block(volume.source_of(uid))
        data = self._data(source)
        await in_thread(self._unmap, source.spec_name, uid)
        driver, _ = await driver_and_capabilities(self._registry, data["driverName"], "pod")
        target = self._layout.block_publish(source.spec_name, uid)
        request = pb.NodeUnpublishVolumeRequest(volume_id=data["volumeHandle"], target_path=str(target))
        await call("pod", driver.client.NodeUnpublishVolume(request))
        await in_thread(self._undone.check, target, "pod")
        if target.is_dir() and not target.is_symlink():
            remove_empty(target)
        else:
            target.unlink(missing_ok=True)
        remove_empty_up_to(target.parent, self._layout.block_devices)
        self._unlink(source.spec_name, uid)

    def _unmap(self, spec_name: str, uid: PodUid) -> None:
        """The device file goes; the pod's link stays to the end, so that a crash in between is found again."""
        device = self._layout.block_map(spec_name, uid)
        mounts.unmount_all(device)
        device.unlink(missing_ok=True)

    async def unstage(self, volume: ActualVolume) -> None:
        """Under the name of every PersistentVolume that it was staged as; none is fine."""
        source = volume.source
        assert isinstance(source, CsiSource)
        for spec_name in await in_thread(self._staged_as, source):
            await self._unstage(replace(source, spec_name=spec_name))

    def _staged_as(self, source: CsiSource) -> list[str]:
        """Read from the disk: what an earlier agent staged counts, too."""
        found = {source.spec_name} if source.is_block else set()
        for place in self._layout.block_devices.glob("*"):
            data = self._read(place.name) if place.name not in ("staging", "publish") else None
            if data is not None and (data["driverName"], data["volumeHandle"]) == (source.driver, source.handle):
                found.add(place.name)
        return sorted(found)

    async def _unstage(self, source: CsiSource) -> None:
        self._staged.discard(source.spec_name)
        base = self._layout.block_devices / source.spec_name
        left = sorted(entry.name for entry in (base / "dev").iterdir()) if (base / "dev").is_dir() else []
        if left:
            raise StepFailed(
                StepFailure.TRANSIENT, "device", f"{base / 'dev'} still holds the device for {', '.join(left)}"
            )
        data = self._data(source)
        staging = self._layout.block_staging(source.spec_name)
        driver, capabilities = await driver_and_capabilities(self._registry, data["driverName"], "device")
        if rules.STAGE in capabilities and os.path.lexists(staging):
            request = pb.NodeUnstageVolumeRequest(volume_id=data["volumeHandle"], staging_target_path=str(staging))
            await call("device", driver.client.NodeUnstageVolume(request))
        await in_thread(self._undone.check, staging, "device")
        if staging.is_dir():
            remove_empty(staging)
        else:
            staging.unlink(missing_ok=True)
        self._remove_data(source.spec_name)

    def _remove_data(self, spec_name: str) -> None:
        vol_data.remove(self._layout.block_data(spec_name))
        base = self._layout.block_devices / spec_name
        for directory in (base / "data", base / "dev", base):
            remove_empty(directory)

    def _data(self, source: CsiSource) -> dict[str, str]:
        return self._read(source.spec_name) or {"driverName": source.driver, "volumeHandle": source.handle}

    def _read(self, spec_name: str) -> dict[str, str] | None:
        try:
            return vol_data.read(self._layout.block_data(spec_name))
        except vol_data.UnreadableVolumeData as error:
            log.warning("volume data is unreadable", reason=str(error))
            return None


def _block(source: object) -> CsiSource:
    if not isinstance(source, CsiSource) or not source.is_block:
        raise MoorageError(f"{source!r} is no block volume")
    return source
