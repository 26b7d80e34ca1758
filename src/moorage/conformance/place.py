"""A volume on this node: attached, staged and published, each step verified against the kernel.

Owns: the requests of the node calls, the order of the steps and their undoing, and data through the published path.
Start reading at: `place`, `Placed`.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moorage.conformance import files
from moorage.conformance.bench import WRITER, Bench
from moorage.conformance.model import NotMet, fail, require
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

T = TypeVar("T")
ATTACHES = "controller:PUBLISH_UNPUBLISH_VOLUME"
STAGES = "node:STAGE_UNSTAGE_VOLUME"


@dataclass
class Placed:
    """A volume on this node, and the paths it is at."""

    bench: Bench
    volume: pb.Volume
    staging: str
    target: str
    mode: str = WRITER
    context: dict[str, str] = field(default_factory=dict)
    is_read_only: bool = False
    group: str = ""
    done: set[str] = field(default_factory=set)  # paths of steps that are not undone yet
    registered: set[str] = field(default_factory=set)

    def begin(self, owner: str, path: str, undo: Callable[[], Awaitable[None]]) -> None:
        """Take note of a step. When the check ends it is undone, once, and only if the check has not done so."""

        async def act() -> None:
            if path in self.done:
                await undo()

        self.done.add(path)
        if path not in self.registered:
            self.registered.add(path)
            self.bench.on_end(owner, act)

    def capability(self) -> pb.VolumeCapability:
        capability = self.bench.capability(self.mode)
        if self.group:
            capability.mount.volume_mount_group = self.group
        return capability

    # --- requests ----------------------------------------------------------------------------------------------------

    def attach_request(self) -> pb.ControllerPublishVolumeRequest:
        return pb.ControllerPublishVolumeRequest(
            volume_id=self.volume.volume_id,
            node_id=self.bench.node.node_id,
            volume_capability=self.capability(),
            volume_context=self.volume.volume_context,
            secrets=self.bench.config.secrets,
        )

    def stage_request(self) -> pb.NodeStageVolumeRequest:
        return pb.NodeStageVolumeRequest(
            volume_id=self.volume.volume_id,
            publish_context=self.context,
            staging_target_path=self.staging,
            volume_capability=self.capability(),
            secrets=self.bench.config.secrets,
            volume_context=self.volume.volume_context,
        )

    def publish_request(self, target: str = "", **changes: Any) -> pb.NodePublishVolumeRequest:
        request = pb.NodePublishVolumeRequest(
            volume_id=self.volume.volume_id,
            publish_context=self.context,
            staging_target_path=self.staging if self.bench.has(STAGES) else "",
            target_path=target or self.target,
            volume_capability=self.capability(),
            readonly=self.is_read_only,
            secrets=self.bench.config.secrets,
            volume_context=self.volume.volume_context,
        )
        if "volume_capability" in changes:
            request.ClearField("volume_capability")
        request.MergeFrom(pb.NodePublishVolumeRequest(**changes))
        return request

    # --- steps -------------------------------------------------------------------------------------------------------

    async def attach(self) -> None:
        if self.bench.has(ATTACHES):
            self.begin("ControllerUnpublishVolume.works", "", self.detach)
            answer = await self.bench.client.ControllerPublishVolume(self.attach_request())
            self.context = dict(answer.publish_context)

    async def detach(self) -> None:
        if self.bench.has(ATTACHES):
            request = pb.ControllerUnpublishVolumeRequest(
                volume_id=self.volume.volume_id, node_id=self.bench.node.node_id, secrets=self.bench.config.secrets
            )
            await self.bench.client.ControllerUnpublishVolume(request)
            self.done.discard("")

    async def stage(self) -> None:
        if self.bench.has(STAGES):
            Path(self.staging).mkdir(exist_ok=True)
            self.begin("NodeUnstageVolume.works", self.staging, self.unstage)
            await self.bench.client.NodeStageVolume(self.stage_request())

    async def unstage(self) -> None:
        if self.bench.has(STAGES):
            request = pb.NodeUnstageVolumeRequest(volume_id=self.volume.volume_id, staging_target_path=self.staging)
            await self.bench.client.NodeUnstageVolume(request)
            self.done.discard(self.staging)

    async def publish(self, target: str = "", **changes: Any) -> str:
        target = target or self.target
        self.begin("NodeUnpublishVolume.works", target, lambda: self.unpublish(target))
        await self.bench.client.NodePublishVolume(self.publish_request(target, **changes))
        await self.verify(target)
        return target

    async def unpublish(self, target: str = "") -> None:
        target = target or self.target
        request = pb.NodeUnpublishVolumeRequest(volume_id=self.volume.volume_id, target_path=target)
        await self.bench.client.NodeUnpublishVolume(request)
        self.done.discard(target)

    async def verify(self, target: str = "") -> None:
        """Ask the kernel whether the volume is at the target."""
        with self.bench.given("NodePublishVolume.works"):
            await self._verify(target or self.target)

    async def _verify(self, target: str) -> None:
        kind = files.kind_of(target)
        wanted = "a block device" if self.bench.is_block else "a directory"
        require(kind == wanted, f"NodePublishVolume succeeded, and {target} is {kind}", f"{wanted} at the target")
        if not self.bench.is_block and files.mount_at(target) is None:
            fail(f"NodePublishVolume succeeded, and nothing is mounted at {target}", "a mount in mountinfo")
        found = await self.bench.in_time(f"looking at {target}", files.loop_device_of, target)
        if found is not None:
            self.bench.session.loop_devices[found[0]] = found[1]

    def must_be_gone(self, target: str = "") -> None:
        """Ask the kernel whether an unpublished target is gone."""
        target = target or self.target
        with self.bench.given("NodeUnpublishVolume.works"):
            kind = files.kind_of(target)
            require(kind == "nothing", f"{target} is still there, {kind}", "NodeUnpublishVolume removes it")

    def must_be_unstaged(self) -> None:
        """Ask the kernel whether nothing is mounted at the staging path any more."""
        with self.bench.given("NodeUnstageVolume.works"):
            require(files.mount_at(self.staging) is None, f"{self.staging} is still mounted")

    async def down(self) -> None:
        """Unpublish and unstage, as steps that the check relies on."""
        with self.bench.given("NodeUnpublishVolume.works"):
            await self.unpublish()
        with self.bench.given("NodeUnstageVolume.works"):
            await self.unstage()

    async def up(self) -> None:
        """Stage and publish, as steps that the check relies on."""
        with self.bench.given("NodeStageVolume.works"):
            await self.stage()
        with self.bench.given("NodePublishVolume.works"):
            await self.publish()

    async def leave(self) -> None:
        """Take the volume from the node, as a step that the check relies on."""
        await self.down()
        with self.bench.given("ControllerUnpublishVolume.works"):
            await self.detach()

    async def come_back(self) -> None:
        """Bring the volume to the node again, as a step that the check relies on."""
        with self.bench.given("ControllerPublishVolume.works"):
            await self.attach()
        await self.up()

    async def unless_in_use(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do something with a volume in use; if the driver refuses that, with the volume taken from the node."""
        try:
            return await act()
        except NotMet as unmet:
            if not (isinstance(unmet.cause, CsiError) and unmet.cause.code == "FAILED_PRECONDITION"):
                raise
        await self.leave()
        done = await act()
        await self.come_back()
        return done

    async def snapshot(self) -> pb.Snapshot:
        """Take a snapshot as a step that the check relies on."""
        return await self.unless_in_use(lambda: self.bench.snapshot(self.volume.volume_id))

    # --- data --------------------------------------------------------------------------------------------------------

    async def write(self, content: bytes, offset: int = 0) -> None:
        await self._through("writing", files.write, content, offset)

    async def read(self, size: int, offset: int = 0) -> bytes:
        found: bytes = await self._through("reading", files.read, size, offset)
        return found

    async def size(self) -> int:
        found: int = await self.bench.in_time(f"asking the size of {self.target}", files.size_of, self.target)
        return found

    async def _through(self, what: str, work: Any, *arguments: Any) -> Any:
        try:
            return await self.bench.in_time(
                f"{what} through {self.target}", work, self.target, self.bench.is_block, *arguments
            )
        except OSError as error:
            fail(f"{what} through {self.target} failed: {error.strerror}", "the published volume can be used")

    async def must_hold(self, content: bytes, after: str) -> None:
        """Fail unless the volume begins with exactly these bytes."""
        found = await self.read(len(content))
        if found == content:
            return
        same = next((at for at, (a, b) in enumerate(zip(found, content, strict=False)) if a != b), len(found))
        got = f"{after}, the data differs from byte {same} of {len(content)}" if found else f"{after}, no data is there"
        fail(got, "the checksum of what was written")


async def place(bench: Bench, volume: pb.Volume | None = None, mode: str = WRITER, publish: bool = True) -> Placed:
    """Create, attach, stage and publish a volume, as far as the driver has these steps. The check's end undoes them."""
    if volume is None:
        volume = await bench.create(volume_capabilities=[bench.capability(mode)])
    folder = bench.folder()
    placed = Placed(bench, volume, os.fspath(folder / "staging"), os.fspath(folder / "target"), mode)
    with bench.given("ControllerPublishVolume.works"):
        await placed.attach()
    if publish:
        await placed.up()
    else:
        with bench.given("NodeStageVolume.works"):
            await placed.stage()
    return placed
