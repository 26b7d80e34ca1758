"""A caller such as kubelet, in few words: for walks, tests and benchmarks.

Owns: short ways to make requests, paths below one directory, and taking away what was put there.
May not touch: the plugin's insides.
Start reading at: `Caller`.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError

MIB = 1024 * 1024
GIB = 1024 * MIB

Mode = pb.VolumeCapability.AccessMode


def mounted(
    fs_type: str = "",
    mode: "pb.VolumeCapability.AccessMode.Mode.ValueType" = Mode.SINGLE_NODE_WRITER,
    flags: Sequence[str] = (),
    group: str = "",
) -> pb.VolumeCapability:
    mount = pb.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=flags, volume_mount_group=group)
    return pb.VolumeCapability(mount=mount, access_mode=Mode(mode=mode))


def block(
    mode: "pb.VolumeCapability.AccessMode.Mode.ValueType" = Mode.SINGLE_NODE_WRITER,
) -> pb.VolumeCapability:
    return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=Mode(mode=mode))


def from_snapshot(snapshot_id: str) -> pb.VolumeContentSource:
    return pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=snapshot_id))


def from_volume(volume_id: str) -> pb.VolumeContentSource:
    return pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=volume_id))


class Caller:
    """Each volume has one staging path, each pod one target path for it."""

    def __init__(self, client: CsiClient, base: Path) -> None:
        self.client = client
        self.base = base
        self._targets: dict[tuple[str, str], None] = {}  # each once, however often it was tried; in this order
        self._staged: set[tuple[str, str]] = set()

    def staging(self, volume_id: str) -> str:
        path = self.base / "staging" / volume_id
        with contextlib.suppress(FileExistsError):  # also when a dead mount is there
            os.makedirs(path)
        return str(path)

    def target(self, volume_id: str, pod: str = "pod") -> str:
        path = self.base / "pods" / pod / "volumes" / volume_id
        path.mkdir(parents=True, exist_ok=True)
        return str(path / "mount")

    async def create(
        self,
        name: str = "v",
        capability: pb.VolumeCapability | None = None,
        size: int = 64 * MIB,
        *,
        source: pb.VolumeContentSource | None = None,
        parameters: Mapping[str, str] | None = None,
        mutable: Mapping[str, str] | None = None,
    ) -> pb.Volume:
        request = pb.CreateVolumeRequest(
            name=name,
            capacity_range=pb.CapacityRange(required_bytes=size),
            volume_capabilities=[capability or mounted()],
            parameters=parameters,
            mutable_parameters=mutable,
            volume_content_source=source,
        )
        return (await self.client.CreateVolume(request)).volume

    async def stage(
        self,
        volume_id: str,
        capability: pb.VolumeCapability | None = None,
        path: str = "",
        context: Mapping[str, str] | None = None,
    ) -> str:
        path = path or self.staging(volume_id)
        self._staged.add((volume_id, path))
        request = pb.NodeStageVolumeRequest(
            volume_id=volume_id,
            staging_target_path=path,
            volume_capability=capability or mounted(),
            publish_context=context,
        )
        await self.client.NodeStageVolume(request)
        return path

    async def publish(
        self,
        volume_id: str,
        capability: pb.VolumeCapability | None = None,
        pod: str = "pod",
        *,
        readonly: bool = False,
        path: str = "",
        context: Mapping[str, str] | None = None,
    ) -> Path:
        path = path or self.target(volume_id, pod)
        self._targets[volume_id, path] = None
        request = pb.NodePublishVolumeRequest(
            volume_id=volume_id,
            staging_target_path=self.staging(volume_id),
            target_path=path,
            volume_capability=capability or mounted(),
            readonly=readonly,
            publish_context=context,
        )
        await self.client.NodePublishVolume(request)
        return Path(path)

    async def up(self, volume_id: str, capability: pb.VolumeCapability | None = None, pod: str = "pod") -> Path:
        """Stage and publish; returns the target."""
        await self.stage(volume_id, capability)
        return await self.publish(volume_id, capability, pod)

    async def unpublish(self, volume_id: str, path: str | Path = "", pod: str = "pod") -> None:
        target = str(path) or self.target(volume_id, pod)
        await self.client.NodeUnpublishVolume(pb.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target))

    async def unstage(self, volume_id: str, path: str = "") -> None:
        await self.client.NodeUnstageVolume(
            pb.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=path or self.staging(volume_id))
        )

    async def down(self, volume_id: str, pod: str = "pod") -> None:
        await self.unpublish(volume_id, pod=pod)
        await self.unstage(volume_id)

    async def delete(self, volume_id: str) -> None:
        await self.client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=volume_id))

    async def snapshot(
        self, volume_id: str, name: str = "s", parameters: Mapping[str, str] | None = None
    ) -> pb.Snapshot:
        request = pb.CreateSnapshotRequest(name=name, source_volume_id=volume_id, parameters=parameters)
        return (await self.client.CreateSnapshot(request)).snapshot

    async def expand(self, volume_id: str, size: int) -> pb.ControllerExpandVolumeResponse:
        wanted = pb.CapacityRange(required_bytes=size)
        return await self.client.ControllerExpandVolume(
            pb.ControllerExpandVolumeRequest(volume_id=volume_id, capacity_range=wanted)
        )

    async def expand_on_node(self, volume_id: str, path: str | Path) -> None:
        await self.client.NodeExpandVolume(pb.NodeExpandVolumeRequest(volume_id=volume_id, volume_path=str(path)))

    async def leave(self) -> None:
        """Unpublish and unstage everything; what was not there is no error, what cannot be is left."""
        for volume_id, path in reversed(self._targets):
            with contextlib.suppress(CsiError):
                await self.unpublish(volume_id, path)
        for volume_id, path in sorted(self._staged):
            with contextlib.suppress(CsiError):
                await self.unstage(volume_id, path)
