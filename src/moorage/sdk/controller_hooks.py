"""Controller calls carried out by the hooks of a driver, with the library's records.

Owns: which hooks a call needs, idempotency, and what makes a repeated request compatible.
Start reading at: `ControllerHooks.create_volume`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moorage.errors import InvalidRequest
from moorage.sdk import model
from moorage.sdk.driver import Driver
from moorage.sdk.errors import (
    AlreadyExists,
    DriverError,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    ResourceExhausted,
)
from moorage.sdk.model import (
    Access,
    Attachment,
    Capacity,
    Expanded,
    Group,
    Health,
    SizeRange,
    Snapshot,
    Source,
    SourceKind,
    Volume,
)
from moorage.sdk.operations import (
    ALPHA,
    BlockingCalls,
    Blocks,
    CapacityRequest,
    ControllerOperations,
    GroupRequest,
    Page,
    SnapshotRequest,
    Validation,
    VolumeStatus,
)
from moorage.sdk.paging import page
from moorage.sdk.records import AttachmentRecord, Records
from moorage.storage.ids import GroupId, member_id

_HOOKS = {  # where operation and hooks have other names
    "list_volumes": ("create_volume",),
    "get_volume": ("create_volume",),
    "why_not_valid": ("create_volume",),
    "list_health": ("volume_health",),
    "list_snapshots": ("create_snapshot",),
    "get_snapshot": ("create_snapshot",),
    "find_group": ("create_group",),
    "clones": ("copy_volume",),
}


class ControllerHooks(ControllerOperations):
    """The hooks of one driver."""

    def __init__(self, driver: Driver, records: Records, work: BlockingCalls) -> None:
        self._driver = driver
        self._records = records
        self._run = work.run
        self.hidden = frozenset() if driver.announces_alpha else ALPHA

    def serves(self, *operations: str) -> bool:
        return all(self._driver.defines(*_HOOKS.get(each, (each,))) for each in operations)

    async def create_volume(self, request: model.CreateVolume) -> Volume:
        for access in request.accesses:
            if why := why_unsupported(self._driver, access):
                raise InvalidRequest(f"volume_capabilities: {why}")
        found = await self._records.find_volume(request.volume_id)
        if found is not None:
            _check_compatible(request, found)
            return found
        if request.source is None:
            made = await self._run(self._driver.create_volume, request)
        else:
            request = await self._with_size_of_source(request, request.source)
            made = await self._run(self._driver.copy_volume, request)
        try:
            _check_made(request, made)
        except DriverError:
            await self._run(self._driver.delete_volume, made.id)
            raise
        self._records.keep_volume(made)
        return made

    async def _with_size_of_source(self, request: model.CreateVolume, source: Source) -> model.CreateVolume:
        if not self._driver.defines("copy_volume"):
            raise InvalidRequest("volume_content_source: this driver makes no copies")
        if source.kind is SourceKind.VOLUME:
            least = (await self._records.volume(source.id)).size_bytes
        else:
            least = self.get_snapshot(source.id).size_bytes
        if request.size.limit and request.size.limit < least:
            raise OutOfRange(f"the source has {least} bytes, which is more than the limit of the request")
        return replace(request, size=replace(request.size, required=max(request.size.required, least)))

    async def delete_volume(self, volume_id: str) -> None:
        if await self._records.find_volume(volume_id) is not None:
            if nodes := self._records.attachments(volume_id):
                raise FailedPrecondition(f"volume {volume_id} is attached to {', '.join(sorted(nodes))}")
            await self._run(self._driver.delete_volume, volume_id)
            self._records.drop_volume(volume_id)

    async def list_volumes(self, after: str, most: int) -> Page[VolumeStatus]:
        found = page(await self._records.list_volumes(), lambda volume: volume.id, after, most)
        return Page([await self._status(volume) for volume in found.items], found.next)

    async def get_volume(self, volume_id: str) -> VolumeStatus:
        return await self._status(await self._records.volume(volume_id))

    async def _status(self, volume: Volume) -> VolumeStatus:
        return VolumeStatus(volume, sorted(self._records.attachments(volume.id)), await self._health(volume))

    async def _health(self, volume: Volume) -> Sequence[Health]:
        return await self._run(self._driver.volume_health, volume) if self._driver.defines("volume_health") else []

    async def volume_health(self, volume_id: str) -> Sequence[Health]:
        return await self._health(await self._records.volume(volume_id))

    async def list_health(self, after: str, most: int) -> Page[tuple[str, Sequence[Health]]]:
        found = [(volume.id, await self._health(volume)) for volume in await self._records.list_volumes()]
        return page([(volume_id, health) for volume_id, health in found if health], lambda pair: pair[0], after, most)

    async def why_not_valid(self, question: Validation) -> str:
        volume = await self._records.volume(question.volume_id)
        reasons = [why for access in question.accesses if (why := why_unsupported(self._driver, access))]
        given, own = question.context, volume.context
        reasons += [f"volume_context: {key} differs" for key in given if given[key] != own.get(key)]
        if question.parameters and volume.parameters not in (None, question.parameters):
            reasons.append("parameters: the volume was made with others")
        return reasons[0] if reasons else ""

    async def capacity(self, request: CapacityRequest) -> Capacity:
        if any(why_unsupported(self._driver, access) for access in request.accesses):
            return Capacity(0)
        return await self._run(self._driver.capacity, request.parameters, request.segments)

    async def expand_volume(self, volume_id: str, size: SizeRange, access: Access | None) -> Expanded:
        volume = await self._records.volume(volume_id)
        if size.limit and volume.size_bytes > size.limit:
            raise OutOfRange(f"volume {volume_id} has {volume.size_bytes} bytes already")
        if volume.size_bytes >= size.required:
            return Expanded(volume.size_bytes, self._driver.defines("expand_on_node"))
        done = await self._run(self._driver.expand_volume, volume, size)
        if not size.admits(done.size_bytes):
            raise OutOfRange(f"volume {volume_id} has {done.size_bytes} bytes now, which the request does not admit")
        self._records.keep_volume(replace(volume, size_bytes=done.size_bytes))
        return done

    async def modify_volume(self, volume_id: str, parameters: Mapping[str, str]) -> None:
        await self._run(self._driver.modify_volume, await self._records.volume(volume_id), parameters)

    # --- attaching ---------------------------------------------------------------------------------------------------

    async def attach(self, volume_id: str, node_id: str, access: Access, is_read_only: bool) -> Attachment:
        volume = await self._records.volume(volume_id)
        if not await self._run(self._driver.has_node, node_id):
            raise NotFound(f"there is no node {node_id}")
        if why := why_unsupported(self._driver, access):
            raise InvalidRequest(f"volume_capability: {why}")
        nodes = self._records.attachments(volume_id)
        known = nodes.get(node_id)
        if known is None:
            if nodes and not access.mode.is_multi_node:
                raise FailedPrecondition(f"volume {volume.id} is attached to {', '.join(sorted(nodes))}")
            made = await self._run(self._driver.attach, volume, node_id, access, is_read_only)
            known = AttachmentRecord(access.mode, access.is_block, is_read_only, dict(made.context))
            self._records.keep_attachments(volume.id, {**nodes, node_id: known})
        elif (known.mode, known.is_block, known.is_read_only) != (access.mode, access.is_block, is_read_only):
            raise AlreadyExists(f"volume {volume_id} is attached to {node_id} in another way")
        return Attachment(known.context)

    async def detach(self, volume_id: str, node_id: str) -> None:
        nodes = self._records.attachments(volume_id)
        for each in [node_id] if node_id else sorted(nodes):
            if each in nodes:
                await self._run(self._driver.detach, volume_id, each)
                del nodes[each]
                self._records.keep_attachments(volume_id, nodes)

    # --- snapshots ---------------------------------------------------------------------------------------------------

    async def create_snapshot(self, request: SnapshotRequest) -> Snapshot:
        found = self._records.find_snapshot(request.snapshot_id)
        if found is not None and found.volume_id != request.volume_id:
            raise AlreadyExists(f"snapshot {request.name!r} exists, of volume {found.volume_id}")
        if found is None or not found.is_ready:
            wanted = model.CreateSnapshot(
                name=request.name,
                snapshot_id=request.snapshot_id,
                volume=await self._records.volume(request.volume_id),
                parameters=request.parameters,
                secrets=request.secrets,
            )
            made = await self._run(self._driver.create_snapshot, wanted)
            # The moment of a snapshot does not change while it is being completed.
            found = made if found is None else replace(made, created_ns=found.created_ns)
            self._records.keep_snapshot(found)
        return found

    async def delete_snapshot(self, snapshot_id: str) -> None:
        found = self._records.find_snapshot(snapshot_id)
        if found is not None:
            if found.group_id:
                raise InvalidRequest(f"snapshot {snapshot_id} belongs to group {found.group_id}; delete the group")
            await self._run(self._driver.delete_snapshot, snapshot_id)
            self._records.drop_snapshot(snapshot_id)

    def get_snapshot(self, snapshot_id: str) -> Snapshot:
        found = self._records.find_snapshot(snapshot_id)
        if found is None:
            raise NotFound(f"there is no snapshot {snapshot_id}")
        return found

    def list_snapshots(self, snapshot_id: str, volume_id: str, after: str, most: int) -> Page[Snapshot]:
        found = [
            snapshot
            for snapshot in self._records.list_snapshots()
            if snapshot_id in ("", snapshot.id) and volume_id in ("", snapshot.volume_id)
        ]
        return page(found, lambda snapshot: snapshot.id, after, most)

    async def create_group(self, request: GroupRequest) -> Group:
        if len(set(request.volume_ids)) != len(request.volume_ids):
            raise InvalidRequest("source_volume_ids names a volume twice")
        found = self._records.find_group(request.group_id)
        if found is None:
            volumes = [await self._records.volume(each) for each in request.volume_ids]
            wanted = model.CreateGroup(
                name=request.name,
                group_id=request.group_id,
                volumes=volumes,
                snapshot_ids=[member_id(GroupId(request.group_id), index) for index in range(len(volumes))],
                parameters=request.parameters,
                secrets=request.secrets,
            )
            found = await self._run(self._driver.create_group, wanted)
            self._records.keep_group(found)
        elif {each.volume_id for each in found.snapshots} != set(request.volume_ids):
            raise AlreadyExists(f"group {request.name!r} exists, of other volumes")
        return found

    async def delete_group(self, group: Group) -> None:
        await self._run(self._driver.delete_group, group.id, [each.id for each in group.snapshots])
        self._records.drop_group(group)

    def find_group(self, group_id: str) -> Group | None:
        return self._records.find_group(group_id)

    async def allocated_blocks(self, snapshot: Snapshot, offset: int) -> Blocks:
        return self._driver.allocated_blocks(snapshot, offset)

    async def changed_blocks(self, base: Snapshot, target: Snapshot, offset: int) -> Blocks:
        return self._driver.changed_blocks(base, target, offset)


def why_unsupported(driver: Driver, access: Access) -> str:
    """Return why volumes of a driver cannot be used so, "" if they can."""
    if access.is_block and not driver.supports_block:
        return "this driver has no block devices"
    if access.mode.is_multi_node and not access.mode.is_read_only and not driver.supports_multi_node:
        return f"this driver cannot give a volume to several nodes ({access.mode.name})"
    return ""


def _check_made(wanted: model.CreateVolume, made: Volume) -> None:
    """Raise OutOfRange or ResourceExhausted if a new volume is not what the request asks for."""
    if not wanted.size.admits(made.size_bytes):
        raise OutOfRange(f"volume {made.id} has {made.size_bytes} bytes, which the request does not admit")
    if wanted.requisite and made.topology and not any(map(made.is_usable_in, wanted.requisite)):
        raise ResourceExhausted(f"volume {made.id} would not be usable in any of the required places")


def _check_compatible(wanted: model.CreateVolume, found: Volume) -> None:
    """Raise AlreadyExists if the volume is not what the request asks for."""
    reasons = []
    if not wanted.size.admits(found.size_bytes):
        reasons.append(f"its size is {found.size_bytes} bytes")
    if found.parameters is not None and dict(found.parameters) != dict(wanted.parameters):
        reasons.append("its parameters differ")
    if found.source != wanted.source:
        reasons.append("its source differs")
    if reasons:
        raise AlreadyExists(f"volume {wanted.name!r} exists, but {', '.join(reasons)}")
