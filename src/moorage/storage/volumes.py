"""Volumes: create, look up, list, grow, modify, delete.

Owns: `volumes/` and the records in it.
May not touch: snapshots' and groups' directories; sources of copies are handed in.
Start reading at: `Volumes.create`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moorage.host.extents import CopyProgress, copy_sparse
from moorage.log import get_logger
from moorage.storage import attachments, directories, tunables
from moorage.storage.compatible import compatible
from moorage.storage.context import PoolContext
from moorage.storage.copies import Copier, Job
from moorage.storage.errors import (
    DamagedRecord,
    InvalidValue,
    SizeOutOfRange,
    VolumeInUse,
    VolumeNotFound,
)
from moorage.storage.failpoints import reached
from moorage.storage.ids import EPHEMERAL, ephemeral_id_from, id_from, is_volume_id
from moorage.storage.layout import read_record, replace_file, write_file
from moorage.storage.model import CopyPath, CreateVolume, InUse, Page, Snapshot, Volume, VolumeKind
from moorage.storage.records import SourceRecord, VolumeRecord, decoded, encoded
from moorage.storage.sizes import check_range, plan_size, rounded_up
from moorage.storage.usage import observe

log = get_logger(__name__)

RECORD = "volume.json"
DATA = "data"
HALF_FORMATTED = "formatting"


@dataclass(frozen=True, slots=True)
class CopySource:
    """What a new volume is copied from, looked up."""

    ident: str
    kind: VolumeKind
    size_bytes: int
    filesystem: str
    data: Path
    changes: bool
    is_blank: bool = False


class Volumes:
    """The volumes of one pool."""

    def __init__(self, context: PoolContext, copier: Copier, snapshot: Callable[[str], Snapshot]) -> None:
        self._context = context
        self._layout = context.layout
        self._copier = copier
        self._snapshot = snapshot

    # --- looking ---------------------------------------------------------------------------

    def directory(self, ident: str) -> str:
        return os.path.join(self._layout.volumes, ident)

    def find(self, ident: str) -> Volume | None:
        """The volume, or None; a damaged record is an error, not an absence."""
        if not is_volume_id(ident):
            return None
        directory = self.directory(ident)
        raw = self._layout.record(directory, RECORD)
        if raw is None:
            return None
        record = decoded(raw, VolumeRecord, os.path.join(directory, RECORD), ident)
        return record.public(self._context.config.name, Path(directory, DATA))

    def get(self, ident: str) -> Volume:
        found = self.find(ident)
        if found is None:
            raise VolumeNotFound(ident, self._context.config.name)
        return found

    def ids(self, after: str = "") -> list[str]:
        """All ids in order, after one of them."""
        with self._layout.translated("list volumes"), os.scandir(self._layout.volumes) as entries:
            return sorted(entry.name for entry in entries if entry.name > after and is_volume_id(entry.name))

    def page(self, after: str = "", limit: int = 0) -> Page[Volume]:
        """Volumes in order of id; damaged ones are left out here and told by health."""
        found: list[Volume] = []
        for ident in self.ids(after):
            if limit and len(found) == limit:
                return Page(tuple(found), found[-1].id)
            with contextlib.suppress(DamagedRecord):
                volume = self.find(ident)
                if volume is not None:
                    found.append(volume)
        return Page(tuple(found))

    def ephemerals(self) -> list[Volume]:
        """The volumes that live with a pod; found by their ids, without reading the others."""
        found = []
        for ident in self.ids():
            if ident.startswith(EPHEMERAL):
                with contextlib.suppress(DamagedRecord):
                    volume = self.find(ident)
                    if volume is not None:
                        found.append(volume)
        return found

    # --- creating --------------------------------------------------------------------------

    def create(self, request: CreateVolume, progress: CopyProgress | None = None) -> Volume:
        """A volume with this name, made now or before; one of several callers makes it."""
        ident = ephemeral_id_from(request.name) if request.ephemeral else id_from(request.name)
        wanted = tunables.validated(request.mutable)
        with self._context.names.held(f"volume {ident}"), self._layout.translated(f"create volume {ident}"):
            self._layout.check_present()
            existing = self.find(ident)
            if existing is not None:
                self._layout.sync(self._layout.volumes)  # its maker may have died before it did
                return compatible(existing, request)
            origin = self._origin(request)
            size = plan_size(request, origin.size_bytes if origin else 0)
            with self._context.ledger.reserved(size, f"volume {request.name}"):
                if request.thick:
                    self._context.make_room(size)
                made = self._build(ident, request, wanted, size, origin, progress)
            if made is None:  # another process was first
                self._context.ledger.changed(promised=-size)
                return compatible(self.get(ident), request)
        self._context.changed_by_guest()
        log.info("volume created", volume=ident, pool=made.pool, kind=made.kind, size=size, copy=made.copy_path)
        return made

    def _origin(self, request: CreateVolume) -> CopySource | None:
        source = request.source
        if source is None:
            return None
        if source.kind == "snapshot":
            cut = self._snapshot(source.id)
            origin = CopySource(cut.id, cut.kind, cut.size_bytes, cut.filesystem, cut.data, changes=False)
        elif source.kind == "volume":
            volume = self.get(source.id)
            origin = CopySource(
                volume.id,
                volume.kind,
                volume.size_bytes,
                volume.filesystem,
                volume.data,
                changes=True,
                is_blank=self.is_half_formatted(volume.id),
            )
        else:
            raise InvalidValue("source", f"{source.kind!r} is neither a snapshot nor a volume")
        if origin.kind is not request.kind:
            raise InvalidValue(
                "kind", f"the source {origin.ident} is of kind {origin.kind}, the volume would be {request.kind}"
            )
        if origin.kind is VolumeKind.IMAGE and request.filesystem and origin.filesystem != request.filesystem:
            raise InvalidValue(
                "filesystem",
                f"the source {origin.ident} holds {origin.filesystem or 'a raw block device'}, "
                f"not {request.filesystem}",
            )
        return origin

    def _build(
        self,
        ident: str,
        request: CreateVolume,
        wanted: dict[str, str],
        size: int,
        origin: CopySource | None,
        progress: CopyProgress | None,
    ) -> Volume | None:
        with self._layout.building("volume") as built:
            reached("create.started")
            data = os.path.join(built, DATA)
            path = CopyPath.NONE if origin is None else self._copied(origin, request, data, progress)
            enforced = self._sized(data, ident, request, size, is_new=origin is None)
            reached("create.data")
            source = None if request.source is None else SourceRecord(request.source.kind, request.source.id)
            record = VolumeRecord(
                id=ident,
                name=request.name,
                kind=request.kind,
                size_bytes=size,
                created_ns=self._context.now_ns(),
                filesystem=request.filesystem if request.kind is VolumeKind.IMAGE else "",
                thick=request.thick,
                source=source,
                copy_path=path,
                in_use=request.in_use,
                parameters=dict(request.parameters),
                mutable=wanted,
                ephemeral=request.ephemeral,
                claim=request.claim,
                size_enforced=enforced,
            )
            attachments.prepare(self._context, built)
            write_file(os.path.join(built, RECORD), encoded(record))
            reached("create.record")
            if not self._layout.publish(built, self._layout.volumes, ident):
                return None
        return record.public(self._context.config.name, Path(self.directory(ident), DATA))

    def _copied(self, origin: CopySource, request: CreateVolume, data: str, progress: CopyProgress | None) -> CopyPath:
        job = Job(origin.ident, origin.kind, origin.data, data, request.in_use, origin.is_blank)
        if not origin.changes:
            return self._copier.copy_at_rest(job, progress).path
        with self.copied(origin.ident, request.in_use):
            cuts, _ = self._copier.cut([job], progress)
        return cuts[0].path

    def _sized(self, data: str, ident: str, request: CreateVolume, size: int, is_new: bool) -> bool:
        """Give the data its size, on disk; says whether the kernel holds it to that."""
        if request.kind is VolumeKind.DIRECTORY:
            if is_new:
                directories.make(data, self._context.is_btrfs)
            return directories.limit(data, ident, size, self._context.is_btrfs)
        if request.thick and not is_new:
            _unshare(data)
        fd = os.open(data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_sized = not is_new and os.fstat(fd).st_size == size  # a copy, which is on disk already
            if not is_sized:
                os.ftruncate(fd, size)
            if request.thick:
                os.posix_fallocate(fd, 0, size)
            if request.thick or not (is_sized or (is_new and not self._context.is_btrfs)):
                os.fsync(fd)
        finally:
            os.close(fd)
        return True

    # --- changing --------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, ident: str, *, shared: bool = False) -> Iterator[Volume]:
        """Hold one volume against other threads and processes.

        Staging and publishing hold the shared lock, and so does a copy of files in use (see `copied`). Everything else
        excludes them: no pod starts to use a volume that is being copied at rest, changed or deleted.
        """
        if not is_volume_id(ident):
            raise VolumeNotFound(ident, self._context.config.name)
        missing = VolumeNotFound(ident, self._context.config.name)
        with self._layout.locked(self.directory(ident), lambda: missing, shared=shared):
            yield self.get(ident)

    @contextlib.contextmanager
    def copied(self, ident: str, in_use: InUse | None) -> Iterator[Volume]:
        """Hold a volume while it is copied.

        If the caller wants a directory copied file by file while it changes, pods may start and stop meanwhile.
        """
        volume = self.get(ident)
        is_live = volume.kind is VolumeKind.DIRECTORY and (in_use or volume.in_use) is InUse.LIVE
        with self.locked(ident, shared=is_live and not self._context.is_btrfs) as held:
            yield held

    def expand(self, ident: str, required: int, limit: int = 0) -> Volume:
        """Make a volume at least this large; being so already is fine, and nothing shrinks."""
        check_range(required, limit)
        with self._layout.translated(f"expand volume {ident}"), self.locked(ident) as volume:
            size = rounded_up(required)
            if size <= volume.size_bytes:
                if limit and volume.size_bytes > limit:
                    raise SizeOutOfRange(
                        f"volume {ident} has {volume.size_bytes} bytes, more than limit_bytes {limit}; "
                        "volumes do not shrink"
                    )
                return volume
            if limit and size > limit:
                raise SizeOutOfRange(f"limit_bytes {limit} leaves no size in whole MiB from {required} on")
            with self._context.ledger.reserved(size - volume.size_bytes, f"volume {ident}"):
                if volume.thick:
                    self._context.make_room(size - volume.size_bytes)
                enforced = self._grow_data(volume, size)
                reached("expand.grown")
                grown = self._replace(volume, size_bytes=size, size_enforced=enforced)
        self._context.changed_by_guest()
        log.info("volume expanded", volume=ident, size=size, before=volume.size_bytes)
        return grown

    def _grow_data(self, volume: Volume, size: int) -> bool:
        """Let the data have this size; says whether the kernel holds it to that."""
        if volume.kind is VolumeKind.DIRECTORY:
            return directories.limit(os.fspath(volume.data), volume.id, size, self._context.is_btrfs)
        fd = os.open(volume.data, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            before = os.fstat(fd).st_size
            try:
                if volume.thick:
                    os.posix_fallocate(fd, volume.size_bytes, size - volume.size_bytes)
                if os.fstat(fd).st_size < size:
                    os.ftruncate(fd, size)
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, before)
                raise
        finally:
            os.close(fd)
        return True

    def modify(self, ident: str, changes: Mapping[str, str]) -> Volume:
        """Change some mutable parameters: all of the given ones, or none."""
        wanted = tunables.validated(changes)
        with self._layout.translated(f"modify volume {ident}"), self.locked(ident) as volume:
            merged = {**volume.mutable, **wanted}
            if merged == volume.mutable:
                return volume
            changed = self._replace(volume, mutable=merged)
        log.info("volume modified", volume=ident, **wanted)
        return changed

    def _replace(self, volume: Volume, **changes: object) -> Volume:
        path = os.path.join(self.directory(volume.id), RECORD)
        record = decoded(read_record(self.directory(volume.id), RECORD), VolumeRecord, path, volume.id)
        changed = msgspec.structs.replace(record, **changes)
        replace_file(path, encoded(changed))
        return changed.public(volume.pool, volume.data)

    def check_unused(self, ident: str) -> None:
        """Refuse when the kernel still uses the data on this machine. The record is not asked: a volume
        with a damaged one may be mounted all the same."""
        data = Path(self.directory(ident), DATA)
        use = observe(data, VolumeKind.DIRECTORY if data.is_dir() else VolumeKind.IMAGE)
        if use:
            raise VolumeInUse(f"volume {ident} is still in use on this node: {use.holders}")

    # --- the first format ------------------------------------------------------------------

    def format_begin(self, ident: str) -> None:
        """Mark a volume before its first format. The caller holds its lock, shared or not."""
        with self._layout.translated(f"format volume {ident}"):
            self.get(ident)
            write_file(os.path.join(self.directory(ident), HALF_FORMATTED), b"")
            self._layout.sync(self.directory(ident))
            reached("format.marked")

    def format_end(self, ident: str) -> None:
        """Write the new filesystem to disk, then remove the mark."""
        with self._layout.translated(f"format volume {ident}"):
            volume = self.get(ident)
            for device in observe(volume.data, volume.kind).devices:
                fd = os.open(device.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            self._layout.sync(os.fspath(volume.data))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory(ident), HALF_FORMATTED))
            reached("format.unmarked")
            self._layout.sync(self.directory(ident))

    def is_half_formatted(self, ident: str) -> bool:
        return is_volume_id(ident) and os.path.exists(os.path.join(self.directory(ident), HALF_FORMATTED))


def _unshare(data: str) -> None:
    """Turn a clone into a file of its own: thick promises blocks that are not shared."""
    shared = data + ".shared"
    os.rename(data, shared)
    source = os.open(shared, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(data, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_sparse(source, target, share=False)
        finally:
            os.close(target)
    finally:
        os.close(source)
    os.unlink(shared)
