"""What one check works with: calls, names, objects of its own, and their clean-up.

Owns: the steps that most checks begin with (create, snapshot), and the list of what is to be undone at the end.
Start reading at: `Bench`.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moorage.conformance.caller import Caller
from moorage.conformance.leftovers import clean_up
from moorage.conformance.model import CheckConfig, CheckFailed, DriverCrashed, DriverHung, LeftBehind, NotMet, require
from moorage.conformance.session import Session
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.host.threads import in_thread

WRITER = "SINGLE_NODE_WRITER"
_PENDING_S = 30.0  # how long ABORTED is taken for an answer
_NOT_READY_S = 120.0
_PAUSE_S = 0.05


@dataclass
class Undo:
    """One step of the clean-up, and the check that is about it."""

    owner: str
    act: Callable[[], Awaitable[Any]]


@dataclass
class Bench:
    """What a check works with. Whatever it makes is undone in reverse order when it ends."""

    session: Session
    client: Caller
    undo: list[Undo] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)

    @property
    def config(self) -> CheckConfig:
        return self.session.config

    @property
    def node(self) -> pb.NodeGetInfoResponse:
        return self.session.node

    @property
    def is_block(self) -> bool:
        return self.config.block

    def has(self, *capabilities: str) -> bool:
        return set(capabilities) <= self.session.capabilities

    def folder(self) -> Path:
        """Make a directory for the driver's mounts, which is removed at the end."""
        made = self.config.workdir / uuid.uuid4().hex[:12]
        made.mkdir(parents=True)
        self.folders.append(made)
        return made

    def name(self, prefix: str = "check") -> str:
        return f"{prefix}-{uuid.uuid4()}"

    def unknown_id(self, kind: str = "volume") -> str:
        return f"no-such-{kind}-{uuid.uuid4().hex[:8]}"

    def on_end(self, owner: str, act: Callable[[], Awaitable[Any]]) -> None:
        """Call `act` when the check ends. If it fails, the check `owner` is to blame."""
        self.undo.append(Undo(owner, act))

    @contextmanager
    def given(self, owner: str) -> Iterator[None]:
        """A step that the check relies on. If it fails, or if `owner` failed before, this check is not run."""
        if (known := self.session.broken.get(owner)) is not None:
            raise NotMet(owner, CheckFailed(known.detail))
        try:
            yield
        except (CheckFailed, CsiError) as error:
            raise NotMet(owner, error) from error

    # --- volumes -----------------------------------------------------------------------------------------------------

    def capability(self, mode: str = WRITER) -> pb.VolumeCapability:
        access = pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.Mode.Value(mode))
        if self.is_block:
            return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=access)
        mount = pb.VolumeCapability.MountVolume(fs_type=self.config.fs_type)
        return pb.VolumeCapability(mount=mount, access_mode=access)

    def create_request(self, name: str = "", **changes: Any) -> pb.CreateVolumeRequest:
        request = pb.CreateVolumeRequest(
            name=name or self.name(),
            capacity_range=pb.CapacityRange(required_bytes=self.config.size_bytes),
            volume_capabilities=[self.capability()],
            parameters=self.config.parameters,
            secrets=self.config.secrets,
        )
        if self.has("plugin:VOLUME_ACCESSIBILITY_CONSTRAINTS") and self.node.accessible_topology.segments:
            request.accessibility_requirements.requisite.append(self.node.accessible_topology)
            request.accessibility_requirements.preferred.append(self.node.accessible_topology)
        for replaced in ("volume_capabilities", "capacity_range"):
            if replaced in changes:
                request.ClearField(replaced)  # merging would add to it
        request.MergeFrom(pb.CreateVolumeRequest(**changes))
        if "capacity_range" not in changes:  # a driver may refuse a copy that is smaller than its source
            source = request.volume_content_source
            least = self.session.sizes.get(source.snapshot.snapshot_id or source.volume.volume_id, 0)
            request.capacity_range.required_bytes = max(request.capacity_range.required_bytes, least)
        return request

    async def make(self, request: pb.CreateVolumeRequest) -> pb.Volume:
        """Call CreateVolume, and delete the volume at the end. Its failure is the check's."""
        volume = (await self.client.CreateVolume(request)).volume
        self.session.own("volume", volume.volume_id, request.name)
        self.session.sizes[volume.volume_id] = volume.capacity_bytes
        self.deleted.discard(volume.volume_id)
        self.on_end("DeleteVolume.works", partial(self.delete_unless_deleted, self.delete, volume.volume_id))
        return volume

    async def create(self, name: str = "", **changes: Any) -> pb.Volume:
        """Create a volume as a step that the check relies on."""
        with self.given("CreateVolume.works"):
            return await self.make(self.create_request(name, **changes))

    async def delete(self, volume_id: str) -> None:
        await self.client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=volume_id, secrets=self.config.secrets))
        self.deleted.add(volume_id)

    async def delete_unless_deleted(self, delete: Callable[[str], Awaitable[None]], object_id: str) -> None:
        """Delete what the check itself has not deleted: a second deletion is the subject of other checks."""
        if object_id not in self.deleted:
            await delete(object_id)

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot_request(self, volume_id: str, name: str = "") -> pb.CreateSnapshotRequest:
        return pb.CreateSnapshotRequest(
            source_volume_id=volume_id,
            name=name or self.name("snap"),
            parameters=self.config.snapshot_parameters,
            secrets=self.config.secrets,
        )

    async def make_snapshot(self, request: pb.CreateSnapshotRequest) -> pb.Snapshot:
        """Call CreateSnapshot until the snapshot is ready, and delete it at the end."""
        deadline = time.monotonic() + _NOT_READY_S
        while True:
            snapshot = (await self.client.CreateSnapshot(request)).snapshot
            if request.name not in self.session.owned.values():
                self.session.own("snapshot", snapshot.snapshot_id, request.name)
                made = snapshot.snapshot_id
                self.session.sizes[made] = snapshot.size_bytes
                self.on_end("DeleteSnapshot.works", partial(self.delete_unless_deleted, self.delete_snapshot, made))
            if snapshot.ready_to_use:
                return snapshot
            if time.monotonic() > deadline:
                raise DriverHung(f"making snapshot {snapshot.snapshot_id} ready", _NOT_READY_S)
            await asyncio.sleep(_PAUSE_S)

    async def snapshot(self, volume_id: str, name: str = "") -> pb.Snapshot:
        """Take a snapshot as a step that the check relies on."""
        with self.given("CreateSnapshot.works"):
            return await self.make_snapshot(self.snapshot_request(volume_id, name))

    async def delete_snapshot(self, snapshot_id: str) -> None:
        request = pb.DeleteSnapshotRequest(snapshot_id=snapshot_id, secrets=self.config.secrets)
        await self.client.DeleteSnapshot(request)
        self.deleted.add(snapshot_id)

    async def restore(self, snapshot_id: str, **changes: Any) -> pb.Volume:
        """Make a volume of a snapshot, as a step that the check relies on."""
        with self.given("CreateVolume.restore"):
            return await self.make(self.create_request(volume_content_source=of_snapshot(snapshot_id), **changes))

    async def clone(self, volume_id: str) -> pb.Volume:
        """Make a volume of a volume, as a step that the check relies on."""
        with self.given("CreateVolume.clone"):
            return await self.make(self.create_request(volume_content_source=of_volume(volume_id)))

    # --- asking and cleaning -----------------------------------------------------------------------------------------

    async def in_time(self, what: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do in a thread what may hang, because it reads or writes through a mount of the driver."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await in_thread(work, *arguments)
        except TimeoutError:
            raise DriverHung(what, self.config.timeout_s) from None

    async def clean_up(self) -> Sequence[LeftBehind | NotMet]:
        """Undo everything. Returns what failed, each with the check that is about it."""
        problems: list[LeftBehind | NotMet] = []
        self.client.is_cleanup = True
        is_whole = True
        while self.undo:
            if not self.session.is_alive:
                self._leave_to_the_end()
                is_whole = False
                break
            step = self.undo.pop()
            try:
                await settled(step.act)
            except DriverCrashed:
                self.undo.append(step)
                self._leave_to_the_end()
                is_whole = False
                break
            except NotMet as unmet:  # the call would hang again
                is_whole = False
                problems.append(unmet)
            except (CsiError, CheckFailed) as error:
                problems.append(NotMet(step.owner, error))
        for folder in self.folders:
            found = await in_thread(clean_up, folder)
            problems += [NotMet(owner, LeftBehind(sentence)) for owner, sentence in found if is_whole]
        return problems

    def _leave_to_the_end(self) -> None:
        """Keep the rest of the clean-up for when the driver is back."""
        self.session.unfinished += [step.act for step in reversed(self.undo)]
        self.undo.clear()
        self.notes.append("the driver is gone; its objects are removed at the end of the run, if it comes back")


def of_snapshot(snapshot_id: str) -> pb.VolumeContentSource:
    return pb.VolumeContentSource(snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=snapshot_id))


def of_volume(volume_id: str) -> pb.VolumeContentSource:
    return pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=volume_id))


async def settled(act: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call for as long as the driver answers that an earlier one is still running."""
    deadline = time.monotonic() + _PENDING_S
    while True:
        try:
            return await act()
        except CsiError as error:
            if error.code != "ABORTED" or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_PAUSE_S)


async def expect(call: Awaitable[Any], *codes: str) -> None:
    """The call must fail with one of these codes."""
    wanted = " or ".join(codes)
    try:
        answer = await call
    except CsiError as error:
        require(error.code in codes, f"{error.method} answered {error.code}: {error.message}", wanted)
        return
    require(False, f"the call succeeded ({type(answer).__name__})", wanted)
