"""The node side of the scripted driver: volumes are directories, which it publishes by real bind mounts.

Owns: the work of each node method. It touches nothing outside its `data` directory and the paths that it is given.
Start reading at: `NodeService`.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.host import mountinfo, mounts


class NodeService:
    """The Node methods of a driver. Override one to change what it does."""

    def __init__(self, data: Path | None) -> None:
        self.data = data
        self.node_id = "node-1"
        self.max_volumes = 0
        self.sizes: dict[str, int] = {}  # of volumes that were expanded on the node
        self.published: Counter[str] = Counter()
        # As the official host-path driver does: a volume published twice must be unpublished twice.
        self.counts_publishes = False

    def _directory(self) -> Path:
        if self.data is None:
            raise CsiError("", "UNIMPLEMENTED", "this driver has no `data` directory to mount from")
        return self.data

    async def NodeStageVolume(self, request: pb.NodeStageVolumeRequest) -> pb.NodeStageVolumeResponse:
        source = self._directory() / request.volume_id
        source.mkdir(exist_ok=True)
        if not request.volume_capability.HasField("block") and not _is_mount_point(request.staging_target_path):
            mounts.bind(source, request.staging_target_path)
        return pb.NodeStageVolumeResponse()

    async def NodeUnstageVolume(self, request: pb.NodeUnstageVolumeRequest) -> pb.NodeUnstageVolumeResponse:
        if self.counts_publishes and self.published.total():
            raise RuntimeError(f"volume is still published at {sorted(self.published.elements())}")
        mounts.unmount_all(request.staging_target_path)
        return pb.NodeUnstageVolumeResponse()

    async def NodePublishVolume(self, request: pb.NodePublishVolumeRequest) -> pb.NodePublishVolumeResponse:
        target = Path(request.target_path)
        if request.volume_capability.HasField("block"):
            device = self._directory() / f"{request.volume_id}.device"
            if mountinfo.mount_at(target) is None:
                target.touch()
                mounts.bind(os.readlink(device), target)
            return pb.NodePublishVolumeResponse()
        staged = request.staging_target_path
        source = Path(staged) if staged else self._directory() / request.volume_id
        if not staged:
            source.mkdir(exist_ok=True)
        if not _is_mount_point(target):
            target.mkdir(exist_ok=True)
            mounts.bind(source, target, ["ro"] if request.readonly else [])
            self.published[str(target)] += 1
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(self, request: pb.NodeUnpublishVolumeRequest) -> pb.NodeUnpublishVolumeResponse:
        target = Path(request.target_path)
        mounts.unmount_all(target)
        self.published -= Counter((str(target),))
        if target.is_dir():
            target.rmdir()
        else:
            target.unlink(missing_ok=True)
        return pb.NodeUnpublishVolumeResponse()

    async def NodeExpandVolume(self, request: pb.NodeExpandVolumeRequest) -> pb.NodeExpandVolumeResponse:
        self.sizes[request.volume_id] = request.capacity_range.required_bytes
        return pb.NodeExpandVolumeResponse(capacity_bytes=request.capacity_range.required_bytes)

    async def NodeGetVolumeStats(self, _request: Any) -> pb.NodeGetVolumeStatsResponse:
        usage = [
            pb.VolumeUsage(unit=pb.VolumeUsage.BYTES, total=100, used=40, available=60),
            pb.VolumeUsage(unit=pb.VolumeUsage.INODES, total=10, used=4, available=6),
        ]
        return pb.NodeGetVolumeStatsResponse(usage=usage)


def _is_mount_point(path: str | Path) -> bool:
    """Compare the mounts of a path and of its parent, which is faster than reading the whole mount table."""
    try:
        return _mount_id(path) != _mount_id(Path(path).parent)
    except FileNotFoundError:
        return False


def _mount_id(path: str | Path) -> str:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return next(line for line in lines if line.startswith("mnt_id:"))
