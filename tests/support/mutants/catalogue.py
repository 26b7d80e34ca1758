"""The table of planted bugs: what each does, and the check that must name it.

Owns: `MUTANTS`. The page "How good are the checks" shows the same table.
"""

import asyncio
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.host import mounts
from moorage.sdk import CreateGroup, Driver, Expanded, Group, NodeVolume, SizeRange, StagingTarget, Volume
from tests.support.mutants.proxy import Call, Mutation
from tests.support.mutants.reference import MIB, Reference


async def forwarded(call: Call) -> Any:
    return await call.forward()


@dataclass(frozen=True)
class Planted:
    """One bug. `caught_by` is the check that must fail, and the only one of the small set that does."""

    name: str
    bug: str
    caught_by: str
    mutation: Mutation = forwarded
    on: frozenset[str] = frozenset()
    driver: Callable[[], Driver] = Reference
    block: bool = True
    kind: str = "wrong answer"
    settings: dict[str, Any] = field(default_factory=dict)
    on_kill: Callable[[Path], None] | None = None
    also: tuple[str, ...] = ()  # checks that meet the bug, and do not name it


MUTANTS: dict[str, Planted] = {}


def plant(name: str, caught_by: str, bug: str, *on: str, **more: Any) -> Callable[[Mutation], Mutation]:
    """Add a bug to the table: `on` are the calls that it changes."""

    def add(mutation: Mutation) -> Mutation:
        assert name not in MUTANTS, name
        MUTANTS[name] = Planted(name, bug, caught_by, mutation, frozenset(on), **more)
        return mutation

    return add


def plant_driver(name: str, caught_by: str, bug: str, **more: Any) -> Callable[[type[Driver]], type[Driver]]:
    """Add a driver whose own code has the bug."""

    def add(driver: type[Driver]) -> type[Driver]:
        assert name not in MUTANTS, name
        MUTANTS[name] = Planted(name, bug, caught_by, driver=driver, **more)
        return driver

    return add


MOUNT = {"block": False}
SHORT = {"kind": "hang", "settings": {"timeout_s": 1.0}}
CRASH = {"kind": "crash"}


# --- creating ---


@plant("create-not-idempotent", "CreateVolume.repeated", "each CreateVolume makes another volume", "CreateVolume")
async def _(call: Call) -> Any:
    if call.request.name in call.state:
        call.request.name += uuid.uuid4().hex
    call.state[call.request.name] = True
    return await call.forward()


@plant("create-ignores-size", "CreateVolume.size", "CreateVolume ignores required_bytes", "CreateVolume")
async def _(call: Call) -> Any:
    call.request.capacity_range.required_bytes = min(call.request.capacity_range.required_bytes, 8 * MIB)
    return await call.forward()


@plant("create-lies-about-size", "Data.size-is-real", "a smaller device than capacity_bytes says", "CreateVolume")
async def _(call: Call) -> Any:
    wanted = call.request.capacity_range.required_bytes
    call.request.capacity_range.required_bytes = 8 * MIB
    answer = await call.forward()
    answer.volume.capacity_bytes = wanted
    return answer


@plant("create-ignores-limit", "CreateVolume.limit", "CreateVolume ignores limit_bytes", "CreateVolume")
async def _(call: Call) -> Any:
    if call.request.capacity_range.limit_bytes:
        call.request.capacity_range.required_bytes += MIB
        call.request.capacity_range.limit_bytes = 0
    return await call.forward()


@plant("create-takes-conflict", "CreateVolume.other-size", "a used name with another size is OK", "CreateVolume")
async def _(call: Call) -> Any:
    try:
        answer = await call.forward()
    except CsiError as error:
        if error.code != "ALREADY_EXISTS":
            raise
        return call.state[call.request.name]
    call.state[call.request.name] = answer
    return answer


@plant("create-wrong-code", "CreateVolume.needs-name", "a missing name is INTERNAL", "CreateVolume")
async def _(call: Call) -> Any:
    if not call.request.name:
        raise call.error("INTERNAL")
    return await call.forward()


@plant(
    "create-without-capabilities",
    "CreateVolume.needs-volume-capabilities",
    "missing volume_capabilities are taken",
    "CreateVolume",
)
async def _(call: Call) -> Any:
    if not call.request.volume_capabilities:
        mode = pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
        call.request.volume_capabilities.add(block=pb.VolumeCapability.BlockVolume(), access_mode=mode)
    return await call.forward()


@plant("create-races", "CreateVolume.concurrent", "two CreateVolume at once make two volumes", "CreateVolume")
async def _(call: Call) -> Any:
    running = call.state.setdefault("running", set())
    name = call.request.name
    if name in running:
        call.request.name += uuid.uuid4().hex
        return await call.forward()
    running.add(name)
    try:
        await asyncio.sleep(0.02)
        return await call.forward()
    finally:
        running.discard(name)


@plant("create-one-id", "CreateVolume.works", "two names have one volume", "CreateVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.volume.volume_id = call.state.setdefault("id", answer.volume.volume_id)
    return answer


@plant("create-cuts-names", "CreateVolume.long-name", "names are cut at 100 characters", "CreateVolume")
async def _(call: Call) -> Any:
    call.request.name = call.request.name[:100]
    return await call.forward()


@plant(
    "create-loses-answer", "CreateVolume.given-up", "a CreateVolume after a lost answer makes another", "CreateVolume"
)
async def _(call: Call) -> Any:
    lost = call.state.setdefault("lost", {})
    name = call.request.name
    if lost.get(name):
        lost[name] = False
        await call.forward()
        call.request.name += "-2"
        call.state[name] = True
    try:
        await asyncio.sleep(0 if name in call.state else 0.6)
        return await call.forward()
    except asyncio.CancelledError:
        lost[name] = name not in call.state
        raise


@plant("restore-without-source", "CreateVolume.restore", "content_source is not repeated", "CreateVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.volume.ClearField("content_source")
    return answer


@plant("restore-is-empty", "Data.snapshot-keeps", "a restore is an empty volume", "CreateVolume")
async def _(call: Call) -> Any:
    return await _without_source(call, "snapshot")


@plant("clone-is-empty", "Data.clone-is-a-copy", "a clone is an empty volume", "CreateVolume")
async def _(call: Call) -> Any:
    return await _without_source(call, "volume")


async def _without_source(call: Call, kind: str) -> Any:
    source = pb.VolumeContentSource()
    source.CopyFrom(call.request.volume_content_source)
    if source.WhichOneof("type") == kind:
        call.request.ClearField("volume_content_source")
    answer = await call.forward()
    if source.WhichOneof("type"):
        answer.volume.content_source.CopyFrom(source)
    return answer


@plant(
    "restore-of-now", "Data.snapshot-keeps", "a restore shows the source as it is now", "CreateVolume", "CreateSnapshot"
)
async def _(call: Call) -> Any:
    if call.method == "CreateSnapshot":
        answer = await call.forward()
        call.state[answer.snapshot.snapshot_id] = call.request.source_volume_id
        return answer
    source = pb.VolumeContentSource()
    source.CopyFrom(call.request.volume_content_source)
    if source.snapshot.snapshot_id in call.state:
        call.request.volume_content_source.volume.volume_id = call.state[source.snapshot.snapshot_id]
    answer = await call.forward()
    if source.WhichOneof("type"):
        answer.volume.content_source.CopyFrom(source)
    return answer


@plant(
    "restore-of-nothing", "CreateVolume.unknown-source-snapshot", "an unknown source is an empty volume", "CreateVolume"
)
async def _(call: Call) -> Any:
    try:
        return await call.forward()
    except CsiError as error:
        if error.code != "NOT_FOUND":
            raise
        return await _without_source(call, "snapshot")


@plant("topology-is-wrong", "CreateVolume.topology", "a volume is said to be on another node", "CreateVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    for place in answer.volume.accessible_topology:
        for key in place.segments:
            place.segments[key] = "node-2"
    return answer


@plant("topology-is-ignored", "CreateVolume.unreachable-topology", "the required place is ignored", "CreateVolume")
async def _(call: Call) -> Any:
    call.request.ClearField("accessibility_requirements")
    return await call.forward()


# --- deleting, reading ---


@plant("delete-does-nothing", "DeleteVolume.is-gone", "DeleteVolume answers OK and keeps the volume", "DeleteVolume")
async def _(call: Call) -> Any:
    if not call.request.volume_id:
        return await call.forward()
    return call.answer()


@plant("delete-unknown-fails", "DeleteVolume.unknown-volume", "an unknown volume is NOT_FOUND", "DeleteVolume")
async def _(call: Call) -> Any:
    if call.request.volume_id.startswith("no-such"):
        raise call.error("NOT_FOUND")
    return await call.forward()


@plant("delete-twice-fails", "DeleteVolume.repeated", "the second DeleteVolume is INTERNAL", "DeleteVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    if call.state.setdefault(call.request.volume_id, 0) == 1:
        call.state[call.request.volume_id] = 2
        raise call.error("INTERNAL")
    call.state[call.request.volume_id] += 1
    return answer


@plant("delete-attached", "DeleteVolume.attached", "an attached volume is deleted", "DeleteVolume")
async def _(call: Call) -> Any:
    await call.forward(
        pb.ControllerUnpublishVolumeRequest(volume_id=call.request.volume_id), "ControllerUnpublishVolume"
    )
    return await call.forward()


@plant("get-other-context", "ControllerGetVolume.agrees", "volume_context differs", "ControllerGetVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.volume.volume_context["more"] = "1"
    return answer


@plant("validate-nothing", "ValidateVolumeCapabilities.confirms", "nothing is confirmed", "ValidateVolumeCapabilities")
async def _(call: Call) -> Any:
    await call.forward()
    return call.answer(message="no")


@plant("modify-takes-all", "ControllerModifyVolume.refuses-unknown", "any parameter is taken", "ControllerModifyVolume")
async def _(call: Call) -> Any:
    return call.answer()


# --- lists ---


@plant("list-double-page", "ListVolumes.pages", "the last entry of a page is on the next one too", "ListVolumes")
async def _(call: Call) -> Any:
    token = call.request.starting_token
    answer = await call.forward()
    if token in call.state:
        answer.entries.insert(0, call.state[token])
        del answer.entries[-1:]
    if answer.next_token and answer.entries:
        call.state[answer.next_token] = answer.entries[-1]
    return answer


@plant(
    "list-by-index", "ListVolumes.pages-under-change", "the token is an index, so deletions shift pages", "ListVolumes"
)
async def _(call: Call) -> Any:
    start, size = call.request.starting_token, call.request.max_entries
    if start and not start.isdigit():
        raise call.error("ABORTED")
    if size < 0:
        raise call.error("INVALID_ARGUMENT")
    entries = (await call.forward(pb.ListVolumesRequest())).entries
    first = int(start or 0)
    last = first + size if size else len(entries)
    return call.answer(entries=entries[first:last], next_token=str(last) if last < len(entries) else "")


@plant("list-ignores-max", "ListVolumes.pages", "max_entries is ignored", "ListVolumes")
async def _(call: Call) -> Any:
    call.request.max_entries = 0
    return await call.forward()


@plant("list-never-ends", "ListVolumes.ids", "the same token comes with each page", "ListVolumes")
async def _(call: Call) -> Any:
    call.request.starting_token = ""
    answer = await call.forward()
    answer.next_token = "more"
    return answer


@plant("list-bad-token", "ListVolumes.bad-token", "a bad token is INVALID_ARGUMENT", "ListVolumes")
async def _(call: Call) -> Any:
    try:
        return await call.forward()
    except CsiError as error:
        raise call.error("INVALID_ARGUMENT") from error


@plant("list-keeps-deleted", "ListVolumes.follows", "deleted volumes are still listed", "ListVolumes")
async def _(call: Call) -> Any:
    answer = await call.forward()
    seen = call.state.setdefault("seen", {})
    seen.update({entry.volume.volume_id: entry for entry in answer.entries})
    if not call.request.max_entries:
        del answer.entries[:]
        answer.entries.extend(seen.values())
    return answer


@plant("list-without-nodes", "ListVolumes.published-nodes", "published_node_ids are empty", "ListVolumes")
async def _(call: Call) -> Any:
    answer = await call.forward()
    for entry in answer.entries:
        del entry.status.published_node_ids[:]
    return answer


@plant("snapshots-unfiltered", "ListSnapshots.filters", "the filter by source is ignored", "ListSnapshots")
async def _(call: Call) -> Any:
    call.request.source_volume_id = ""
    return await call.forward()


@plant("snapshots-filter-fails", "ListSnapshots.filters", "a filter without a match is NOT_FOUND", "ListSnapshots")
async def _(call: Call) -> Any:
    answer = await call.forward()
    if not answer.entries and call.request.snapshot_id:
        raise call.error("NOT_FOUND")
    return answer


# --- capacity ---


@plant("capacity-is-zero", "GetCapacity.no-room", "available_capacity is 0, and volumes are made", "GetCapacity")
async def _(call: Call) -> Any:
    return call.answer(available_capacity=0)


@plant("capacity-is-lost", "GetCapacity.follows", "the room of deleted volumes does not come back", "GetCapacity")
async def _(call: Call) -> Any:
    answer = await call.forward()
    least = call.state["least"] = min(call.state.get("least", answer.available_capacity), answer.available_capacity)
    answer.available_capacity = least
    return answer


@plant("capacity-largest", "GetCapacity.largest", "larger volumes than maximum_volume_size are made", "GetCapacity")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.maximum_volume_size.value = 32 * MIB
    return answer


@plant("capacity-negative", "Answers.numbers", "available_capacity is negative", "GetCapacity")
async def _(call: Call) -> Any:
    return call.answer(available_capacity=-1)


# --- attaching ---


@plant("attach-unknown-node", "ControllerPublishVolume.unknown-node", "any node is taken", "ControllerPublishVolume")
async def _(call: Call) -> Any:
    if call.request.node_id:
        call.request.node_id = "node-1"
    return await call.forward()


@plant("attach-other-context", "ControllerPublishVolume.repeated", "publish_context differs", "ControllerPublishVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.publish_context["lun"] = uuid.uuid4().hex
    return answer


@plant(
    "attach-any-way", "ControllerPublishVolume.other-way", "read-only after writable is OK", "ControllerPublishVolume"
)
async def _(call: Call) -> Any:
    call.request.readonly = False
    return await call.forward()


@plant("detach-twice", "ControllerUnpublishVolume.repeated", "a second detachment fails", "ControllerUnpublishVolume")
async def _(call: Call) -> Any:
    if call.state.pop(call.request.volume_id, False):
        raise call.error("FAILED_PRECONDITION")
    call.state[call.request.volume_id] = True
    return await call.forward()


# --- snapshots and groups ---


@plant("snapshot-not-idempotent", "CreateSnapshot.repeated", "each CreateSnapshot takes another", "CreateSnapshot")
async def _(call: Call) -> Any:
    if call.request.name in call.state:
        call.request.name += uuid.uuid4().hex
    call.state[call.request.name] = True
    return await call.forward()


@plant("snapshot-time-moves", "CreateSnapshot.repeated", "creation_time is that of the answer", "CreateSnapshot")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.snapshot.creation_time.GetCurrentTime()
    return answer


@plant(
    "snapshot-other-source", "CreateSnapshot.other-source", "a used name with another source is OK", "CreateSnapshot"
)
async def _(call: Call) -> Any:
    if call.request.name:
        call.request.source_volume_id = call.state.setdefault(call.request.name, call.request.source_volume_id)
    return await call.forward()


@plant("snapshot-stays", "DeleteSnapshot.is-gone", "DeleteSnapshot answers OK and keeps it", "DeleteSnapshot")
async def _(call: Call) -> Any:
    if not call.request.snapshot_id:
        return await call.forward()
    return call.answer()


@plant_driver("group-is-torn", "Data.group-is-one-instant", "members are taken one after the other", **MOUNT)
class _Torn(Reference):
    def create_group(self, request: CreateGroup) -> Group:
        return self.copies(request, pause_s=0.05)


@plant(
    "group-leaves-members",
    "CreateVolumeGroupSnapshot.whole-or-nothing",
    "a failed group leaves a snapshot",
    "CreateVolumeGroupSnapshot",
)
async def _(call: Call) -> Any:
    try:
        return await call.forward()
    except CsiError as error:
        if error.code == "NOT_FOUND" and len(call.request.source_volume_ids) > 1:
            first = call.request.source_volume_ids[0]
            await call.forward(pb.CreateSnapshotRequest(name="left", source_volume_id=first), "CreateSnapshot")
        raise


@plant(
    "group-without-id", "CreateVolumeGroupSnapshot.works", "members do not name the group", "CreateVolumeGroupSnapshot"
)
async def _(call: Call) -> Any:
    answer = await call.forward()
    for snapshot in answer.group_snapshot.snapshots:
        snapshot.group_snapshot_id = ""
    return answer


# --- on the node ---


@plant(
    "publish-mounts-nothing",
    "NodePublishVolume.works",
    "publish makes a directory and mounts nothing",
    "NodePublishVolume",
    **MOUNT,
)
async def _(call: Call) -> Any:
    answer = await call.forward()
    mounts.unmount_all(call.request.target_path)
    return answer


@plant("publish-writable", "NodePublishVolume.read-only", "readonly is forgotten", "NodePublishVolume", **MOUNT)
async def _(call: Call) -> Any:
    call.request.readonly = False
    return await call.forward()


@plant(
    "publish-writable-block",
    "NodePublishVolume.read-only",
    "readonly is forgotten for block volumes",
    "NodePublishVolume",
)
async def _(call: Call) -> Any:
    call.request.readonly = False
    return await call.forward()


@plant("publish-stacks", "NodePublishVolume.repeated", "each publish mounts once more", "NodePublishVolume", **MOUNT)
async def _(call: Call) -> Any:
    answer = await call.forward()
    if call.request.target_path in call.state:
        mounts.bind(call.request.staging_target_path, call.request.target_path)
    call.state[call.request.target_path] = True
    return answer


@plant("publish-any-way", "NodePublishVolume.other-way", "read-only over writable is OK", "NodePublishVolume")
async def _(call: Call) -> Any:
    call.request.readonly = call.state.setdefault(call.request.target_path, call.request.readonly)
    return await call.forward()


@plant(
    "publish-two-writers", "NodePublishVolume.single-writer", "a single writer gets two targets", "NodePublishVolume"
)
async def _(call: Call) -> Any:
    if call.request.volume_capability.access_mode.mode == pb.VolumeCapability.AccessMode.SINGLE_NODE_SINGLE_WRITER:
        mode = pb.VolumeCapability.AccessMode.SINGLE_NODE_MULTI_WRITER
        call.request.volume_capability.access_mode.mode = mode
    return await call.forward()


@plant(
    "unpublish-does-nothing", "NodeUnpublishVolume.works", "unpublish leaves the mount", "NodeUnpublishVolume", **MOUNT
)
async def _(call: Call) -> Any:
    if not call.request.volume_id or not call.request.target_path:
        return await call.forward()
    return call.answer()


@plant(
    "unpublish-leaves-target",
    "NodeUnpublishVolume.works",
    "unpublish leaves the directory",
    "NodeUnpublishVolume",
    **MOUNT,
)
async def _(call: Call) -> Any:
    answer = await call.forward()
    if Path(call.request.target_path).parent.exists():
        Path(call.request.target_path).mkdir(exist_ok=True)
    return answer


@plant("unpublish-once", "NodeUnpublishVolume.repeated", "a second unpublish is INTERNAL", "NodeUnpublishVolume")
async def _(call: Call) -> Any:
    if not Path(call.request.target_path).exists() and call.state.setdefault(call.request.target_path, True):
        call.state[call.request.target_path] = False
        raise call.error("INTERNAL")
    return await call.forward()


@plant(
    "unpublish-all",
    "NodePublishVolume.second-target",
    "unpublish takes all targets down",
    "NodeUnpublishVolume",
    "NodePublishVolume",
)
async def _(call: Call) -> Any:
    if call.method == "NodePublishVolume":
        call.state.setdefault(call.request.volume_id, set()).add(call.request.target_path)
        return await call.forward()
    for target in call.state.pop(call.request.volume_id, set()) - {call.request.target_path}:
        await call.forward(pb.NodeUnpublishVolumeRequest(volume_id=call.request.volume_id, target_path=target))
    return await call.forward()


@plant("unstage-does-nothing", "NodeUnstageVolume.works", "unstage leaves the mount", "NodeUnstageVolume", **MOUNT)
async def _(call: Call) -> Any:
    if not call.request.volume_id or not call.request.staging_target_path:
        return await call.forward()
    return call.answer()


@plant("unstage-leaves-file", "NodeUnstageVolume.works", "unstage leaves a file", "NodeUnstageVolume", **MOUNT)
async def _(call: Call) -> Any:
    answer = await call.forward()
    staging = Path(call.request.staging_target_path)
    if staging.parent.exists():
        staging.mkdir(exist_ok=True)
        (staging / "vol_data.json").write_text("{}")
    return answer


@plant("stage-once", "NodeStageVolume.repeated", "a second stage is ALREADY_EXISTS", "NodeStageVolume")
async def _(call: Call) -> Any:
    if call.request.staging_target_path in call.state:
        raise call.error("ALREADY_EXISTS")
    call.state[call.request.staging_target_path] = True
    return await call.forward()


@plant_driver("stage-erases", "Data.survives-restage", "staging makes the volume empty")
class _Erasing(Reference):
    def stage(self, volume: NodeVolume, target: StagingTarget) -> None:
        with open(self.image(volume.id), "r+b") as image:
            image.write(bytes(MIB))
        super().stage(volume, target)


@plant_driver(
    "unstage-keeps-loop",
    "Leaks.loop-devices",
    "unstage leaves the loop device",
    kind="leftover",
    also=("NodePublishVolume.works",),
)
class _Keeping(Reference):
    def unstage(self, volume_id: str, path: Path) -> None:
        pass


@plant(
    "publish-without-staging",
    "NodePublishVolume.needs-staging",
    "publish needs no staging",
    "NodePublishVolume",
    "NodeStageVolume",
)
async def _(call: Call) -> Any:
    if call.method == "NodeStageVolume":
        call.state[call.request.volume_id] = call.request.staging_target_path
    elif not call.request.staging_target_path:
        call.request.staging_target_path = call.state.get(call.request.volume_id, "")
    return await call.forward()


@plant("stats-are-zero", "NodeGetVolumeStats.figures", "the total is 0", "NodeGetVolumeStats")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.usage[0].total = 0
    return answer


@plant(
    "stats-stand-still", "NodeGetVolumeStats.follows", "the first figures are repeated", "NodeGetVolumeStats", **MOUNT
)
async def _(call: Call) -> Any:
    answer = await call.forward()
    return call.state.setdefault(call.request.volume_id, answer)


@plant("stats-anywhere", "NodeGetVolumeStats.wrong-path", "any path is taken", "NodeGetVolumeStats")
async def _(call: Call) -> Any:
    if call.request.volume_id and not call.request.volume_id.startswith("no-such"):
        return call.answer(usage=[pb.VolumeUsage(unit=pb.VolumeUsage.BYTES, total=1)])
    return await call.forward()


# --- growing ---


@plant("expand-too-little", "ControllerExpandVolume.works", "the volume grows by one byte", "ControllerExpandVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.capacity_bytes = 16 * MIB + 1
    return answer


@plant("expand-not-on-node", "Data.grows-while-published", "NodeExpandVolume does nothing", "NodeExpandVolume")
async def _(call: Call) -> Any:
    return call.answer(capacity_bytes=call.request.capacity_range.required_bytes)


@plant_driver("expand-only-says-so", "Data.grows-before-publish", "only the record of the size grows")
class _Saying(Reference):
    def expand_volume(self, volume: Volume, size: SizeRange) -> Expanded:
        return Expanded(size.required, needs_node=False)


@plant_driver("expand-loses-data", "Data.grows-before-publish", "growing makes the volume empty")
class _Losing(Reference):
    def expand_volume(self, volume: Volume, size: SizeRange) -> Expanded:
        self.image(volume.id).write_bytes(b"")
        grown: Expanded = super().expand_volume(volume, size)
        return grown


# --- changed blocks ---


@plant(
    "delta-off-by-one", "GetMetadataDelta.is-complete", "each block is reported one block too far", "GetMetadataDelta"
)
async def _(call: Call) -> Any:
    messages = await call.forward()
    for message in messages:
        for block in message.block_metadata:
            block.byte_offset += block.size_bytes
    return messages


@plant("allocated-misses-last", "GetMetadataAllocated.is-complete", "the last block is missing", "GetMetadataAllocated")
async def _(call: Call) -> Any:
    messages = await call.forward()
    if messages and messages[-1].block_metadata:
        del messages[-1].block_metadata[-1]
    return messages


@plant("delta-unsorted", "GetMetadataDelta.is-complete", "blocks come in descending order", "GetMetadataDelta")
async def _(call: Call) -> Any:
    messages = await call.forward()
    for message in messages:
        blocks = sorted(message.block_metadata, key=lambda block: -block.byte_offset)
        del message.block_metadata[:]
        message.block_metadata.extend(blocks)
    return messages


@plant("allocated-from-start", "GetMetadataAllocated.resumes", "starting_offset is ignored", "GetMetadataAllocated")
async def _(call: Call) -> Any:
    call.request.starting_offset = 0
    return await call.forward()


# --- claims and answers ---


@plant("claims-unknown", "Claims.controller", "a capability that CSI does not define", "ControllerGetCapabilities")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.capabilities.add().rpc.type = 99
    return answer


@plant("claims-not-served", "Claims.served", "ListSnapshots is claimed and UNIMPLEMENTED", "ListSnapshots")
async def _(call: Call) -> Any:
    raise call.error("UNIMPLEMENTED")


@plant("claims-incomplete", "Claims.complete", "PUBLISH_READONLY without attaching", "ControllerGetCapabilities")
async def _(call: Call) -> Any:
    answer = await call.forward()
    kept = [
        one
        for one in answer.capabilities
        if one.rpc.type != pb.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME
    ]
    return call.answer(capabilities=kept)


@plant("node-id-changes", "NodeGetInfo.works", "node_id is another one each time", "NodeGetInfo")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.node_id += uuid.uuid4().hex
    return answer


@plant("name-is-invalid", "Identity.name", "the name has a blank", "GetPluginInfo")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.name = "my driver"
    return answer


@plant("secret-in-error", "Secrets.not-echoed", "an error repeats the secrets", "CreateVolume")
async def _(call: Call) -> Any:
    try:
        return await call.forward()
    except CsiError as error:
        raise call.error(error.code, f"{error.message}: {dict(call.request.secrets)}") from error


@plant("secret-in-context", "Secrets.not-echoed", "volume_context repeats a secret", "CreateVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    for value in call.request.secrets.values():
        answer.volume.volume_context["user"] = value
    return answer


@plant("error-without-message", "Answers.messages", "errors have no message", "DeleteVolume")
async def _(call: Call) -> Any:
    try:
        return await call.forward()
    except CsiError as error:
        raise call.error(error.code, "") from error


@plant("context-too-large", "Answers.sizes", "volume_context has more than 4 KiB", "CreateVolume")
async def _(call: Call) -> Any:
    answer = await call.forward()
    answer.volume.volume_context["padding"] = "x" * 5000
    return answer


# --- hangs, crashes, restarts ---


@plant("snapshot-hangs", "CreateSnapshot.works", "CreateSnapshot never returns", "CreateSnapshot", **SHORT)
async def _(call: Call) -> Any:
    return await call.hang()


@plant(
    "second-unpublish-hangs",
    "NodeUnpublishVolume.repeated",
    "unpublish of nothing never returns",
    "NodeUnpublishVolume",
    **SHORT,
)
async def _(call: Call) -> Any:
    if not Path(call.request.target_path).exists() and call.state.setdefault(call.request.target_path, True):
        call.state[call.request.target_path] = False
        return await call.hang()
    return await call.forward()


@plant("stage-hangs", "NodeStageVolume.works", "NodeStageVolume never returns", "NodeStageVolume", **SHORT)
async def _(call: Call) -> Any:
    return await call.hang()


@plant(
    "delete-unknown-crashes",
    "DeleteVolume.unknown-volume",
    "an unknown volume ends the driver",
    "DeleteVolume",
    **CRASH,
)
async def _(call: Call) -> Any:
    if call.request.volume_id.startswith("no-such"):
        return await call.crash()
    return await call.forward()


@plant(
    "publish-crashes",
    "NodePublishVolume.works",
    "the driver ends after the mount, before the answer",
    "NodePublishVolume",
    **CRASH,
)
async def _(call: Call) -> Any:
    await call.forward()
    return await call.crash()


@plant(
    "race-crashes", "CreateVolume.concurrent", "two CreateVolume of one name end the driver", "CreateVolume", **CRASH
)
async def _(call: Call) -> Any:
    running = call.state.setdefault("running", set())
    name = call.request.name
    if name in running:
        running.clear()
        return await call.crash()
    running.add(name)
    try:
        await asyncio.sleep(0.02)
        return await call.forward()
    finally:
        running.discard(name)


def _forget_volumes(state: Path) -> None:
    shutil.rmtree(state / "volumes", ignore_errors=True)


def _forget_data(state: Path) -> None:
    for image in (state / "data" / "volumes").iterdir():
        with open(image, "r+b") as file:
            file.write(bytes(MIB))


MUTANTS["restart-forgets"] = Planted(
    "restart-forgets", "volumes are kept in memory only", "Restart.keeps-volumes", on_kill=_forget_volumes
)
MUTANTS["restart-loses-data"] = Planted(
    "restart-loses-data", "a restart erases what was written", "Restart.keeps-data", on_kill=_forget_data
)
