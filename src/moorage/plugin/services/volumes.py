"""Controller calls on volumes: create, delete, list, validate, expand, modify, capacity, health.

Start reading at: `Volumes`.
"""

from collections.abc import Mapping, Sequence

from moorage.errors import InvalidRequest, MoorageError
from moorage.host import filesystems, loop
from moorage.log import get_logger
from moorage.plugin.access import why_unsupported, why_unsupported_by
from moorage.plugin.context import PluginContext
from moorage.plugin.node.tuning import retune
from moorage.plugin.parameters import ClassParameters, fs_type_from, pool_from
from moorage.plugin.services import create_request
from moorage.plugin.services.paging import collect, shown
from moorage.plugin.services.values import context_of, health_from, volume_from
from moorage.plugin.topology import is_here
from moorage.sdk import model
from moorage.sdk.model import Access, why_inconsistent
from moorage.sdk.operations import CapacityRequest, ControllerOperations, Page, Validation, VolumeStatus
from moorage.storage import Pool, Volume, VolumeKind, errors, ids, tunables

log = get_logger(__name__)


class Volumes(ControllerOperations):
    """Part of the controller's operations."""

    _parts: PluginContext
    clones = True

    def create_volume(self, request: model.CreateVolume) -> model.Volume:
        volume = create_request.create(self._parts, create_request.parse_create(request))
        return volume_from(volume, self._parts.settings)

    def delete_volume(self, volume_id: str) -> None:
        if ids.is_ephemeral(volume_id):
            return
        for pool in self._parts.pools:
            if pool.delete_volume(volume_id):
                log.info("volume deleted", volume=volume_id, pool=pool.name)

    def list_volumes(self, after: str, most: int) -> Page[VolumeStatus]:
        found = collect(
            self._parts.pools,
            shown(
                lambda pool, start, limit: pool.volumes.page(after=start, limit=limit),
                lambda volume: not volume.ephemeral,
            ),
            lambda volume: volume.id,
            after,
            most,
        )
        return Page([status for volume in found.items if (status := self._find_status(volume))], found.next)

    def _find_status(self, volume: Volume) -> VolumeStatus | None:
        """Return one entry of the list; None for a volume that was deleted meanwhile."""
        try:
            return self._status(self._parts.pools.named(volume.pool), volume)
        except errors.VolumeNotFound:
            return None

    def get_volume(self, volume_id: str) -> VolumeStatus:
        pool = self._parts.persistent_pool(volume_id)
        return self._status(pool, pool.volumes.get(volume_id))

    def _status(self, pool: Pool, volume: Volume) -> VolumeStatus:
        settings = self._parts.settings
        attached = pool.attachments.of_volume(volume.id) if settings.is_shared else ()
        nodes = sorted(each.node_id for each in attached)
        return VolumeStatus(volume_from(volume, settings), nodes, health_from(pool.health.of(volume.id)))

    def volume_health(self, volume_id: str) -> list[model.Health]:
        """Return what a pool can see. A record or a pool that cannot be read is an answer here, not an error."""
        pool = None if ids.is_ephemeral(volume_id) else self._parts.pools.of_sick_volume(volume_id)
        if pool is None:
            raise errors.VolumeNotFound(volume_id)
        return health_from(pool.health.of(volume_id))

    def list_health(self, after: str, most: int) -> Page[tuple[str, Sequence[model.Health]]]:
        found = collect(
            self._parts.pools,
            shown(
                lambda pool, start, limit: pool.health.unhealthy(after=start, limit=limit),
                lambda health: not ids.is_ephemeral(health.volume_id),
            ),
            lambda health: health.volume_id,
            after,
            most,
        )
        return Page([(each.volume_id, health_from(each.entries)) for each in found.items], found.next)

    def why_not_valid(self, question: Validation) -> str:
        volume = self._parts.persistent_pool(question.volume_id).volumes.get(question.volume_id)
        for access in question.accesses:
            if why := why_unsupported_by(volume, access):
                return why
        own = context_of(volume)
        for key, value in question.context.items():
            if key in own and own[key] != value:
                return f"volume_context: {key} is {value!r}, but the volume's is {own[key]!r}"
        if question.parameters or question.mutable_parameters:
            try:
                chosen = ClassParameters.parse(question.parameters, question.mutable_parameters)
                tunables.validated(chosen.mutable)
            except MoorageError as error:
                return str(error)
            return _why_of_another_class(volume, chosen)
        return ""

    def capacity(self, request: CapacityRequest) -> model.Capacity:
        """Keys of the class other than pool and filesystem do not matter here: the caller passes all of them."""
        settings = self._parts.settings
        if request.segments and not settings.is_shared and not is_here(request.segments, settings):
            return model.Capacity(0)
        pool = self._parts.pools.named(pool_from(request.parameters))
        accesses = request.accesses
        is_directory = request.parameters.get("kind") == VolumeKind.DIRECTORY
        is_impossible = any(why_unsupported(each, is_directory=is_directory) for each in accesses)
        if is_impossible or why_inconsistent(accesses):
            return model.Capacity(0)
        filesystem = "" if is_directory else _filesystem_of(accesses, fs_type_from(request.parameters))
        room = pool.capacity()
        return model.Capacity(room.available_bytes, filesystems.MINIMUM_BYTES.get(filesystem, 0), room.largest_bytes)

    def expand_volume(self, volume_id: str, size: model.SizeRange, access: Access | None) -> model.Expanded:
        pool = self._parts.persistent_pool(volume_id)
        if access is not None and (why := why_unsupported_by(pool.volumes.get(volume_id), access)):
            raise InvalidRequest(f"volume_capability: {why}")
        volume = pool.expand_volume(volume_id, size.required, size.limit)
        is_image = volume.kind is VolumeKind.IMAGE
        if is_image:
            loop.grow_all(volume.data)
        # A raw device on this machine has grown by now; one on another node is grown there.
        needs_node = is_image and (bool(volume.filesystem) or self._parts.settings.is_shared)
        return model.Expanded(volume.size_bytes, needs_node)

    def modify_volume(self, volume_id: str, parameters: Mapping[str, str]) -> None:
        pool, changes = self._parts.persistent_pool(volume_id), dict(parameters)
        self._parts.check_io_limits(changes, pool.volumes.get(volume_id).kind)
        volume = pool.volumes.modify(volume_id, changes)
        retune(self._parts, pool, volume)
        log.info("volume modified", volume=volume_id, keys=sorted(changes))


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


def _filesystem_of(accesses: Sequence[Access], of_class: str) -> str:
    """Whose smallest size counts; a class alone may be for block devices, which have the smallest of all."""
    if any(access.is_block for access in accesses):
        return ""
    named = next((access.fs_type for access in accesses if access.fs_type), "") or of_class
    return named or ("ext4" if accesses else "")
