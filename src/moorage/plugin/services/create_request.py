"""From a CreateVolume request to a wish that a pool understands.

Owns: the parameters of the class, choosing the pool, and matching the wish with its source.
Start reading at: `parse_create`, `create`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moorage.errors import InvalidRequest
from moorage.plugin.access import why_unsupported
from moorage.plugin.context import PluginContext
from moorage.plugin.node.staging import default_filesystem
from moorage.plugin.parameters import ClassParameters, claim_from
from moorage.plugin.topology import check_place
from moorage.sdk import model
from moorage.sdk.model import Access
from moorage.storage import CreateVolume, Pool, Snapshot, Source, Volume, VolumeKind, errors, ids, tunables


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A request in the words of a class; `create` lacks only what depends on the source."""

    pool_name: str
    create: CreateVolume
    asked: model.CreateVolume
    fs_type: str


def parse_create(request: model.CreateVolume) -> CreateRequest:
    """InvalidRequest names the parameter that is wrong."""
    chosen = ClassParameters.parse(request.parameters, request.mutable_parameters)
    tunables.validated(chosen.mutable)
    for access in request.accesses:
        if why := why_unsupported(access, is_directory=chosen.kind is VolumeKind.DIRECTORY):
            raise InvalidRequest(f"volume_capabilities: {why}")
    create = CreateVolume(
        name=request.name,
        required_bytes=request.size.required,
        limit_bytes=request.size.limit,
        kind=chosen.kind,
        thick=chosen.thick,
        source=None if request.source is None else Source(request.source.kind, request.source.id),
        in_use=chosen.in_use,
        mutable=chosen.mutable,
        claim=claim_from(request.parameters),
    )
    return CreateRequest(chosen.pool, create, request, _fs_type(request.accesses, chosen))


def _fs_type(accesses: Sequence[Access], chosen: ClassParameters) -> str:
    """The filesystem that the capabilities name, or else the class."""
    asked = next((access.fs_type for access in accesses if access.fs_type), "")
    if asked and chosen.fs_type and asked != chosen.fs_type:
        raise InvalidRequest(f"parameters: fsType is {chosen.fs_type}, but volume_capabilities ask for {asked}")
    if chosen.fs_type and chosen.kind is VolumeKind.DIRECTORY:
        raise InvalidRequest("parameters: a directory volume has no filesystem of its own; leave out fsType")
    return asked or chosen.fs_type


def create(parts: PluginContext, wish: CreateRequest) -> Volume:
    """The volume of this name, made now or found; every error leaves nothing behind."""
    check_place(wish.asked.requisite, parts.settings)
    parts.check_io_limits(wish.create.mutable, wish.create.kind)
    existing = _existing(parts, wish)
    pool = _pool_for(parts, wish) if existing is None else parts.pools.named(existing.pool)
    # A volume that was made before is found again also when its source has been deleted since.
    source = _source_object(pool, wish.create.source) if existing is None else None
    filesystem = _filesystem_for(wish, source, existing)
    parameters = {"pool": pool.name, "snapshotInUse": wish.create.in_use.value}
    was_chosen = bool(wish.fs_type) or source is not None
    smallest = 0 if was_chosen or filesystem != "xfs" else 1 << 20  # the default was chosen to fit
    volume = pool.create_volume(
        replace(wish.create, filesystem=filesystem, parameters=parameters, smallest_bytes=smallest)
    )
    if volume.copy_path and existing is None:
        parts.copies[volume.copy_path.value] += 1
    return volume


def _existing(parts: PluginContext, wish: CreateRequest) -> Volume | None:
    """The volume of this name, in whichever pool; a name that exists stays where it is."""
    pool = parts.pools.of_volume(wish.asked.volume_id)
    if pool is None:
        return None
    if wish.pool_name not in ("", pool.name):
        raise errors.NameTaken("volume", wish.create.name, f"it is in pool {pool.name}")
    return pool.volumes.find(wish.asked.volume_id)


def _pool_for(parts: PluginContext, wish: CreateRequest) -> Pool:
    """The pool of the source or of the class."""
    source = wish.create.source
    if source is not None:
        pool = _pool_of_source(parts, source)
        if wish.pool_name and wish.pool_name != pool.name:
            raise InvalidRequest(
                f"parameters: pool is {wish.pool_name!r}, but the {source.kind} {source.id} is in pool {pool.name!r}"
            )
        return pool
    return parts.pools.named(wish.pool_name)


def _pool_of_source(parts: PluginContext, source: Source) -> Pool:
    if source.kind == "snapshot":
        return parts.pool_of_snapshot(source.id)
    if ids.is_ephemeral(source.id):
        raise errors.VolumeNotFound(source.id)
    return parts.pool_of_volume(source.id)


def _source_object(pool: Pool, source: Source | None) -> Volume | Snapshot | None:
    if source is None:
        return None
    return pool.snapshots.get(source.id) if source.kind == "snapshot" else pool.volumes.get(source.id)


def _filesystem_for(wish: CreateRequest, source: Volume | Snapshot | None, existing: Volume | None) -> str:
    """A copy has its source's filesystem; as a block device it shows whatever the source holds.

    If the request names none, an existing volume keeps its own, because the default may have changed.
    """
    if source is not None and source.kind is not wish.create.kind:
        raise InvalidRequest(f"parameters: kind is {wish.create.kind}, but the source's is {source.kind}")
    if wish.create.kind is VolumeKind.DIRECTORY or wish.asked.is_block:
        return ""
    if source is not None and source.filesystem:
        if wish.fs_type and wish.fs_type != source.filesystem:
            raise InvalidRequest(
                f"volume_capabilities: the filesystem type is {wish.fs_type}, but the source's is {source.filesystem}"
            )
        return source.filesystem
    if existing is not None and existing.filesystem and not wish.fs_type:
        return existing.filesystem
    return wish.fs_type or default_filesystem(wish.create.required_bytes or wish.create.limit_bytes)
