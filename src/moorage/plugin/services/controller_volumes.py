"""Controller calls on volumes: create, delete, list, validate, expand, modify, capacity.

Owns: CSI messages in, domain calls out.
Start reading at: `VolumeCalls`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.errors import InvalidRequest, MoorageError
from moorage.host import filesystems, loop
from moorage.log import get_logger
from moorage.plugin.access import Access, why_inconsistent, why_unsupported
from moorage.plugin.context import PluginContext, volume_key
from moorage.plugin.node.tuning import retune
from moorage.plugin.parameters import ClassParameters, fs_type_from, pool_from
from moorage.plugin.services import create_request, wire
from moorage.plugin.services.paging import collect, shown
from moorage.plugin.topology import is_here
from moorage.storage import Pool, Volume, VolumeKind, errors, ids, tunables

log = get_logger(__name__)


class VolumeCalls:
    """Mixed into the controller service."""

    _parts: PluginContext

    async def CreateVolume(self, request: pb.CreateVolumeRequest, context: Any) -> pb.CreateVolumeResponse:
        wish = create_request.parse_create(request)
        with self._parts.in_flight.claim("CreateVolume", volume_key(wish.volume_id)):
            volume = await self._parts.work.run(create_request.create, self._parts, wish)
        return pb.CreateVolumeResponse(volume=wire.volume_message(volume, self._parts.settings))

    async def DeleteVolume(self, request: pb.DeleteVolumeRequest, context: Any) -> pb.DeleteVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        with self._parts.in_flight.claim("DeleteVolume", volume_key(volume_id)):
            await self._parts.work.run(_delete, self._parts, volume_id)
        return pb.DeleteVolumeResponse()

    async def ListVolumes(self, request: pb.ListVolumesRequest, context: Any) -> pb.ListVolumesResponse:
        entries, token = await self._parts.work.run(_list, self._parts, request.max_entries, request.starting_token)
        return pb.ListVolumesResponse(entries=entries, next_token=token)

    async def ControllerGetVolume(
        self, request: pb.ControllerGetVolumeRequest, context: Any
    ) -> pb.ControllerGetVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        return await self._parts.work.run(_get, self._parts, volume_id)

    async def ValidateVolumeCapabilities(
        self, request: pb.ValidateVolumeCapabilitiesRequest, context: Any
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        wire.accesses_from(request.volume_capabilities)
        volume = await self._parts.work.run(persistent_volume, self._parts, volume_id)
        why = _why_not_valid(volume, request)
        if why:
            return pb.ValidateVolumeCapabilitiesResponse(message=wire.short(why))
        confirmed = pb.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
            mutable_parameters=request.mutable_parameters,
        )
        return pb.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.GetCapacityResponse:
        return await self._parts.work.run(_capacity, self._parts, request)

    async def ControllerExpandVolume(
        self, request: pb.ControllerExpandVolumeRequest, context: Any
    ) -> pb.ControllerExpandVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        if not request.HasField("capacity_range"):
            raise InvalidRequest("capacity_range is needed")
        sizes = wire.size_range_from("capacity_range", request.capacity_range)
        with self._parts.in_flight.claim("ControllerExpandVolume", volume_key(volume_id)):
            return await self._parts.work.run(_expand, self._parts, request, sizes)

    async def ControllerModifyVolume(
        self, request: pb.ControllerModifyVolumeRequest, context: Any
    ) -> pb.ControllerModifyVolumeResponse:
        volume_id = wire.required("volume_id", request.volume_id)
        changes = dict(request.mutable_parameters)
        with self._parts.in_flight.claim("ControllerModifyVolume", volume_key(volume_id)):
            await self._parts.work.run(_modify, self._parts, volume_id, changes)
        return pb.ControllerModifyVolumeResponse()


def persistent_pool(parts: PluginContext, volume_id: str) -> Pool:
    """The pool of a volume that the controller may touch: those that live with a pod are not shown to it."""
    if ids.is_ephemeral(volume_id):
        raise errors.VolumeNotFound(volume_id)
    return parts.pool_of_volume(volume_id)


def persistent_volume(parts: PluginContext, volume_id: str) -> Volume:
    return persistent_pool(parts, volume_id).volume(volume_id)


def _delete(parts: PluginContext, volume_id: str) -> None:
    if ids.is_ephemeral(volume_id):
        return
    for pool in parts.pools:
        if pool.delete_volume(volume_id):
            log.info("volume deleted", volume=volume_id, pool=pool.name)


def _list(parts: PluginContext, max_entries: int, token: str) -> tuple[list[pb.ListVolumesResponse.Entry], str]:
    volumes, next_token = collect(
        parts.pools,
        shown(
            lambda pool, after, limit: pool.volumes(after=after, limit=limit),
            lambda volume: not volume.ephemeral,
        ),
        lambda volume: volume.id,
        max_entries,
        token,
    )
    entries = [entry for volume in volumes if (entry := _entry(parts, volume)) is not None]
    return entries, next_token


def _entry(parts: PluginContext, volume: Volume) -> pb.ListVolumesResponse.Entry | None:
    """One line of the list; None for a volume that was deleted meanwhile."""
    try:
        return _listed(parts, volume)
    except errors.VolumeNotFound:
        return None


def _listed(parts: PluginContext, volume: Volume) -> pb.ListVolumesResponse.Entry:
    pool = parts.pools.named(volume.pool)
    status = pb.ListVolumesResponse.VolumeStatus(
        published_node_ids=_attached_nodes(parts, pool, volume.id),
        volume_condition=wire.condition_message(pool.health(volume.id)),
    )
    return pb.ListVolumesResponse.Entry(volume=wire.volume_message(volume, parts.settings), status=status)


def _get(parts: PluginContext, volume_id: str) -> pb.ControllerGetVolumeResponse:
    pool = persistent_pool(parts, volume_id)
    status = pb.ControllerGetVolumeResponse.VolumeStatus(
        published_node_ids=_attached_nodes(parts, pool, volume_id),
        volume_condition=wire.condition_message(pool.health(volume_id)),
    )
    volume = wire.volume_message(pool.volume(volume_id), parts.settings)
    return pb.ControllerGetVolumeResponse(volume=volume, status=status)


def _attached_nodes(parts: PluginContext, pool: Pool, volume_id: str) -> list[str]:
    if not parts.settings.is_shared:
        return []
    return sorted(each.node_id for each in pool.attachments(volume_id))


def _why_not_valid(volume: Volume, request: pb.ValidateVolumeCapabilitiesRequest) -> str:
    is_directory = volume.kind is VolumeKind.DIRECTORY
    for access in wire.accesses_from(request.volume_capabilities):
        why = why_unsupported(access, is_directory=is_directory, filesystem=volume.filesystem or "block")
        if why:
            return why
    own = wire.context_of(volume)
    for key, value in request.volume_context.items():
        if key in own and own[key] != value:
            return f"volume_context: {key} is {value!r}, but the volume's is {own[key]!r}"
    if request.parameters or request.mutable_parameters:
        try:
            chosen = ClassParameters.parse(request.parameters, request.mutable_parameters)
            tunables.validated(chosen.mutable)
        except MoorageError as error:
            return str(error)
        return _why_of_another_class(volume, chosen)
    return ""


def _why_of_another_class(volume: Volume, chosen: ClassParameters) -> str:
    """Why the volume is not one that this class makes; what a class leaves open fits every volume."""
    thickness = {True: "thick", False: "thin"}
    pairs = (
        ("kind", chosen.kind.value, volume.kind.value),
        ("pool", chosen.pool or volume.pool, volume.pool),
        ("provisioning", thickness[chosen.thick], thickness[volume.thick]),
        ("fsType", chosen.fs_type or volume.filesystem, volume.filesystem),
        ("snapshotInUse", chosen.in_use.value, volume.in_use.value),
    )
    for key, asked, own in pairs:
        if asked != own:
            return f"parameters: {key} is {asked}, but the volume's is {own or 'none'}"
    return ""


def _capacity(parts: PluginContext, request: pb.GetCapacityRequest) -> pb.GetCapacityResponse:
    """Other keys of a class are of no concern here: the caller passes all of them."""
    segments = wire.segments_from("accessible_topology", request.accessible_topology)
    if segments and not parts.settings.is_shared and not is_here(segments, parts.settings):
        return pb.GetCapacityResponse(available_capacity=0)
    name = pool_from(request.parameters)
    pool = parts.pools.named(name)
    accesses = wire.accesses_from(request.volume_capabilities) if request.volume_capabilities else []
    is_directory = request.parameters.get("kind") == VolumeKind.DIRECTORY
    if why_inconsistent(accesses) or any(why_unsupported(each, is_directory=is_directory) for each in accesses):
        return pb.GetCapacityResponse(available_capacity=0)
    filesystem = "" if is_directory else _filesystem_of(accesses, fs_type_from(request.parameters))
    room = pool.capacity()
    return pb.GetCapacityResponse(
        available_capacity=max(0, room.available_bytes),
        maximum_volume_size=wire.int64(max(0, room.largest_bytes)),
        minimum_volume_size=wire.int64(filesystems.MINIMUM_BYTES.get(filesystem, 0)),
    )


def _filesystem_of(accesses: list[Access], of_class: str) -> str:
    """Whose smallest size counts; a class alone may be for block devices, which have the smallest of all."""
    if any(access.is_block for access in accesses):
        return ""
    named = next((access.fs_type for access in accesses if access.fs_type), "") or of_class
    return named or ("ext4" if accesses else "")


def _expand(
    parts: PluginContext, request: pb.ControllerExpandVolumeRequest, sizes: tuple[int, int]
) -> pb.ControllerExpandVolumeResponse:
    pool = persistent_pool(parts, request.volume_id)
    before = pool.volume(request.volume_id)
    if request.HasField("volume_capability"):
        access = wire.access_from("volume_capability", request.volume_capability)
        is_directory = before.kind is VolumeKind.DIRECTORY
        why = why_unsupported(access, is_directory=is_directory, filesystem=before.filesystem or "block")
        if why:
            raise InvalidRequest(f"volume_capability: {why}")
    volume = pool.expand_volume(request.volume_id, sizes[0], sizes[1])
    if volume.kind is VolumeKind.IMAGE:
        loop.grow_all(volume.data)
    # A raw device on this machine has grown by now; one on another node has to be told there.
    needs_node = volume.kind is VolumeKind.IMAGE and (bool(volume.filesystem) or parts.settings.is_shared)
    return pb.ControllerExpandVolumeResponse(capacity_bytes=volume.size_bytes, node_expansion_required=needs_node)


def _modify(parts: PluginContext, volume_id: str, changes: dict[str, str]) -> None:
    pool = persistent_pool(parts, volume_id)
    create_request.check_limits(parts, changes, pool.volume(volume_id).kind)
    volume = pool.modify_volume(volume_id, changes)
    retune(parts, pool, volume)
    log.info("volume modified", volume=volume_id, keys=sorted(changes))
