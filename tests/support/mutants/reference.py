"""A driver that keeps every rule: the example driver of images, with everything else that CSI can ask for.

Owns: attaching, groups at one instant, changed blocks, topology, and a capacity that is counted.
"""

import contextlib
import importlib.util
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moorage.host import freeze, loop, mountinfo
from moorage.sdk import (
    Access,
    Attachment,
    Block,
    Capacity,
    CreateGroup,
    CreateVolume,
    FailedPrecondition,
    Group,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
    Snapshot,
    Volume,
)
from moorage.sdk.backends import building, copy_file

MIB = 1 << 20
_TOTAL = 8 << 30
_BLOCK = 64 * 1024
_KEY = "topology.reference.example.org/node"


def _images() -> Any:
    path = Path(__file__).parents[3] / "examples" / "drivers" / "images.py"
    spec = importlib.util.spec_from_file_location("example_images", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reference(_images().Images):  # type: ignore[misc]  # an example is no package
    """Volumes are image files; the controller and the node are one process."""

    name = "reference.example.org"

    def topology(self) -> Mapping[str, str]:
        return {_KEY: self.environment.node_id}

    def create_volume(self, request: CreateVolume) -> Volume:
        self.check_place(request)
        self.check_parameters(request.mutable_parameters)
        size = request.size.choose(default=16 * MIB, step=MIB, least=8 * MIB, most=_TOTAL)
        if size > self.free():
            raise ResourceExhausted(f"{size} bytes are asked for, and {self.free()} are free")
        with building(self.image(request.volume_id)) as image:
            os.truncate(image, size)
        return request.volume(size, topology=[self.topology()])

    def copy_volume(self, request: CreateVolume) -> Volume:
        self.check_place(request)
        copy: Volume = super().copy_volume(request)
        return request.volume(copy.size_bytes, topology=[self.topology()])

    def check_place(self, request: CreateVolume) -> None:
        here = dict(self.topology())
        if request.requisite and here not in [dict(place) for place in request.requisite]:
            raise ResourceExhausted("no place of the request can be reached")

    def free(self) -> int:
        return _TOTAL - sum(_size_of(image) for image in (self.root / "volumes").iterdir())

    def capacity(self, parameters: object, segments: object) -> Capacity:
        return Capacity(self.free(), smallest_bytes=8 * MIB, largest_bytes=_TOTAL)

    def modify_volume(self, volume: Volume, parameters: Mapping[str, str]) -> None:
        self.check_parameters(parameters)

    def check_parameters(self, parameters: Mapping[str, str]) -> None:
        if set(parameters) - {"speed"}:
            raise InvalidArgument("the only parameter is speed")

    def attach(self, volume: Volume, node_id: str, access: Access, is_read_only: bool) -> Attachment:
        return Attachment({"port": "1"})

    def detach(self, volume_id: str, node_id: str) -> None:
        pass

    def has_node(self, node_id: str) -> bool:
        return bool(node_id == self.environment.node_id)

    # --- groups and blocks -------------------------------------------------------------------------------------------

    def create_group(self, request: CreateGroup) -> Group:
        with self.held(request):
            return self.copies(request)

    def held(self, request: CreateGroup) -> contextlib.AbstractContextManager[Any]:
        """Hold the filesystems of all members still."""
        images = [self.image(volume.id) for volume in request.volumes]
        devices = [device.device for image in images for device in loop.find(image)]
        targets = [mount.target for device in devices for mount in mountinfo.mounts_of_device(device)[:1]]
        if len(targets) < len(devices):
            raise FailedPrecondition("a block device cannot be held still; unpublish it first")
        return freeze.frozen(targets) if targets else contextlib.nullcontext()

    def copies(self, request: CreateGroup, pause_s: float = 0.0) -> Group:
        members = []
        for volume, snapshot_id in zip(request.volumes, request.snapshot_ids, strict=True):
            with building(self.snapshot(snapshot_id)) as copy:
                copy_file(self.image(volume.id), copy)
            size = volume.size_bytes
            members.append(Snapshot(id=snapshot_id, volume_id=volume.id, size_bytes=size, group_id=request.group_id))
            time.sleep(pause_s)
        return Group(id=request.group_id, snapshots=members)

    def delete_group(self, group_id: str, snapshot_ids: Sequence[str]) -> None:
        for snapshot_id in snapshot_ids:
            self.snapshot(snapshot_id).unlink(missing_ok=True)

    async def allocated_blocks(self, snapshot: Snapshot, offset: int) -> AsyncIterator[Block]:
        for block in self.blocks(None, snapshot, offset):
            yield block

    async def changed_blocks(self, base: Snapshot, target: Snapshot, offset: int) -> AsyncIterator[Block]:
        for block in self.blocks(base, target, offset):
            yield block

    def blocks(self, base: Snapshot | None, target: Snapshot, offset: int) -> list[Block]:
        """Return the blocks of a snapshot that differ from an earlier one, or from zeros."""
        if offset >= target.size_bytes:
            raise OutOfRange("starting_offset is beyond the end")
        new = self.snapshot(target.id).read_bytes()
        old = self.snapshot(base.id).read_bytes() if base is not None else bytes(len(new))
        first = offset // _BLOCK * _BLOCK
        changed = [at for at in range(first, len(new), _BLOCK) if new[at : at + _BLOCK] != old[at : at + _BLOCK]]
        return [Block(at, min(_BLOCK, len(new) - at)) for at in changed]


def _size_of(image: Path) -> int:
    try:
        return image.stat().st_size
    except FileNotFoundError:  # another call has just removed or renamed it
        return 0
