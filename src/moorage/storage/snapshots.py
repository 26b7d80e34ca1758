"""Snapshots and group snapshots: cut, look up, list.

Owns: `snapshots/` and `groups/`. A group is one directory with its members inside, so it appears and
goes with a single rename: all of it or nothing. A member's id names its group (`<group>.<n>`).
May not touch: volumes' directories; it reads them through `Volumes`.
Start reading at: `Snapshots.create`, `Snapshots.create_group`.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from moorage.host.extents import CopyProgress
from moorage.log import get_logger
from moorage.storage.context import PoolContext
from moorage.storage.copies import Copier, Cut, Job
from moorage.storage.errors import (
    DamagedRecord,
    GroupNotFound,
    InvalidValue,
    NameTaken,
    SnapshotNotFound,
)
from moorage.storage.failpoints import reached
from moorage.storage.ids import GroupId, group_of, id_from, is_id, member_id
from moorage.storage.layout import fsync_path, write_file
from moorage.storage.model import CreateSnapshot, Group, InUse, Page, Snapshot, Volume, VolumeKind
from moorage.storage.records import GroupRecord, R, SnapshotRecord, decoded, encoded

log = get_logger(__name__)

RECORD = "snapshot.json"
GROUP_RECORD = "group.json"
MEMBERS = "members"
DATA = "data"


class VolumeSource(Protocol):
    """What snapshots need to know of volumes."""

    def get(self, ident: str) -> Volume: ...

    def copied(self, ident: str, in_use: InUse | None) -> contextlib.AbstractContextManager[Volume]: ...

    def is_half_formatted(self, ident: str) -> bool: ...


class Snapshots:
    """The snapshots and groups of one pool."""

    def __init__(self, context: PoolContext, copier: Copier) -> None:
        self._context = context
        self._layout = context.layout
        self._copier = copier

    # --- looking ---------------------------------------------------------------------------

    def directory(self, ident: str) -> str | None:
        """Where a snapshot with this id lies or would lie; None for what cannot be an id."""
        member = group_of(ident)
        if member is not None:
            return os.path.join(self._layout.groups, member[0], MEMBERS, str(member[1]))
        return os.path.join(self._layout.snapshots, ident) if is_id(ident) else None

    def find(self, ident: str) -> Snapshot | None:
        directory = self.directory(ident)
        if directory is None:
            return None
        record = self._read(directory, RECORD, SnapshotRecord, ident)
        return None if record is None else record.public(self._context.config.name, Path(directory, DATA))

    def get(self, ident: str) -> Snapshot:
        found = self.find(ident)
        if found is None:
            raise SnapshotNotFound(ident, self._context.config.name)
        return found

    def find_group(self, ident: str) -> Group | None:
        if not is_id(ident):
            return None
        directory = os.path.join(self._layout.groups, ident)
        record = self._read(directory, GROUP_RECORD, GroupRecord, ident)
        if record is None:
            return None
        members = tuple(self.get(member_id(GroupId(ident), n)) for n in range(len(record.volume_ids)))
        return record.public(self._context.config.name, members)

    def get_group(self, ident: str) -> Group:
        found = self.find_group(ident)
        if found is None:
            raise GroupNotFound(ident, self._context.config.name)
        return found

    def ids(self, after: str = "") -> list[str]:
        """All snapshots in order of id, the members of groups among them."""
        with self._layout.translated("list snapshots"):
            found = [name for name in os.listdir(self._layout.snapshots) if is_id(name)]
            for group in os.listdir(self._layout.groups):
                if is_id(group):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        members = os.listdir(os.path.join(self._layout.groups, group, MEMBERS))
                        found.extend(f"{group}.{member}" for member in members)
        return sorted(ident for ident in found if ident > after)

    def page(self, after: str = "", limit: int = 0, volume_id: str = "") -> Page[Snapshot]:
        """Snapshots in order of id, of one volume or of all."""
        found: list[Snapshot] = []
        for ident in self.ids(after):
            snapshot = None
            with contextlib.suppress(DamagedRecord):
                snapshot = self.find(ident)
            if snapshot is None or (volume_id and snapshot.volume_id != volume_id):
                continue
            if limit and len(found) == limit:
                return Page(tuple(found), found[-1].id)
            found.append(snapshot)
        return Page(tuple(found))

    def _read(self, directory: str, name: str, kind: type[R], ident: str) -> R | None:
        raw = self._layout.record(directory, name)
        return None if raw is None else decoded(raw, kind, os.path.join(directory, name), ident)

    # --- one snapshot ----------------------------------------------------------------------

    def create(self, request: CreateSnapshot, volumes: VolumeSource, progress: CopyProgress | None = None) -> Snapshot:
        """A snapshot with this name, cut now or before."""
        ident = id_from(request.name)
        with (
            self._context.names.held(f"snapshot {ident}"),
            self._layout.translated(f"snapshot {ident} of volume {request.volume_id}"),
        ):
            self._layout.check_present()
            existing = self.find(ident)
            if existing is not None:
                self._layout.sync(self._layout.snapshots)
                return _same_source(existing, request)
            with volumes.copied(request.volume_id, request.in_use) as volume:
                made = self._cut_one(ident, request, volume, volumes, progress)
        self._context.changed_by_guest()
        log.info("snapshot cut", snapshot=ident, volume=made.volume_id, path=made.copy_path)
        return made

    def _cut_one(
        self,
        ident: str,
        request: CreateSnapshot,
        volume: Volume,
        volumes: VolumeSource,
        progress: CopyProgress | None,
    ) -> Snapshot:
        held = self._context.data_bytes(volume.data, volume.kind)
        with (
            self._context.ledger.reserved(held, f"snapshot {request.name}"),
            self._layout.building("snapshot") as built,
        ):
            reached("snapshot.started")
            job = _job(volume, built, request.in_use, volumes.is_half_formatted(volume.id))
            cuts, _ = self._copier.cut([job], progress)
            reached("snapshot.data")
            record = _record(ident, request.name, volume, cuts[0], self._context.now_ns(), request.parameters)
            write_file(os.path.join(built, RECORD), encoded(record))
            reached("snapshot.record")
            is_ours = self._layout.publish(built, self._layout.snapshots, ident)
        if not is_ours:
            self._context.ledger.changed(promised=-held)
            return _same_source(self.get(ident), request)
        self._context.ledger.changed(promised=record.data_bytes - held)
        directory = os.path.join(self._layout.snapshots, ident)
        return record.public(self._context.config.name, Path(directory, DATA))

    # --- groups ----------------------------------------------------------------------------

    def create_group(
        self,
        name: str,
        volume_ids: Sequence[str],
        parameters: Mapping[str, str],
        in_use: InUse | None,
        volumes: VolumeSource,
    ) -> Group:
        """Snapshots of all these volumes from one moment, or none at all."""
        ident = GroupId(id_from(name))
        wanted = sorted(set(volume_ids))
        if not wanted:
            raise InvalidValue("source_volume_ids", "a group needs at least one volume")
        if len(wanted) != len(volume_ids):
            raise InvalidValue("source_volume_ids", "a volume is named twice")
        with (
            self._context.names.held(f"group {ident}"),
            self._layout.translated(f"group snapshot {ident}"),
        ):
            self._layout.check_present()
            existing = self.find_group(ident)
            if existing is not None:
                self._layout.sync(self._layout.groups)
                return _same_group(existing, wanted, parameters)
            # Locks are taken in order of id, so two groups with common members cannot block each other.
            with contextlib.ExitStack() as locks:
                members = [locks.enter_context(volumes.copied(volume, in_use)) for volume in wanted]
                self._cut_group(ident, name, members, parameters, in_use, volumes)
            made = _same_group(self.get_group(ident), wanted, parameters)
        self._context.changed_by_guest()
        log.info("group snapshot cut", group=ident, members=len(wanted), held_ms=made.held_ms)
        return made

    def _cut_group(
        self,
        ident: GroupId,
        name: str,
        members: Sequence[Volume],
        parameters: Mapping[str, str],
        in_use: InUse | None,
        volumes: VolumeSource,
    ) -> None:
        held = sum(self._context.data_bytes(volume.data, volume.kind) for volume in members)
        with (
            self._context.ledger.reserved(held, f"group snapshot {name}"),
            self._layout.building("group") as built,
        ):
            reached("group.started")
            inside = os.path.join(built, MEMBERS)
            os.mkdir(inside, 0o700)
            jobs = []
            for index, volume in enumerate(members):
                place = os.path.join(inside, str(index))
                os.mkdir(place, 0o700)
                jobs.append(_job(volume, place, in_use, volumes.is_half_formatted(volume.id)))
            cuts, held_ms = self._copier.cut(jobs)
            now = self._context.now_ns()
            for index, (volume, cut) in enumerate(zip(members, cuts, strict=True)):
                sid = member_id(ident, index)
                place = os.path.join(inside, str(index))
                record = _record(sid, sid, volume, cut, now, parameters, group_id=ident)
                write_file(os.path.join(place, RECORD), encoded(record))
                fsync_path(place)
                reached("group.member")
            fsync_path(inside)
            ids = [str(volume.id) for volume in members]
            group = GroupRecord(ident, name, ids, now, held_ms, dict(parameters))
            write_file(os.path.join(built, GROUP_RECORD), encoded(group))
            reached("group.record")
            is_ours = self._layout.publish(built, self._layout.groups, ident)
        kept = sum(cut.data_bytes for cut in cuts) if is_ours else 0
        self._context.ledger.changed(promised=kept - held)

    def check_members(self, ident: str, snapshot_ids: Sequence[str]) -> None:
        """Refuse member ids that are not this group's; none at all says nothing."""
        group = self.get_group(ident)
        if snapshot_ids and set(snapshot_ids) != {snapshot.id for snapshot in group.snapshots}:
            raise InvalidValue("snapshot_ids", f"they are not the members of group snapshot {ident}")

    def records(self) -> Iterator[Snapshot]:
        """Every readable snapshot, one at a time."""
        for ident in self.ids():
            with contextlib.suppress(DamagedRecord):
                found = self.find(ident)
                if found is not None:
                    yield found


def _job(volume: Volume, place: str, in_use: InUse | None, is_blank: bool) -> Job:
    return Job(volume.id, volume.kind, volume.data, os.path.join(place, DATA), in_use or volume.in_use, is_blank)


def _record(
    ident: str,
    name: str,
    volume: Volume,
    cut: Cut,
    now_ns: int,
    parameters: Mapping[str, str],
    group_id: str = "",
) -> SnapshotRecord:
    is_image = volume.kind is VolumeKind.IMAGE
    return SnapshotRecord(
        id=ident,
        name=name,
        volume_id=volume.id,
        kind=volume.kind,
        size_bytes=cut.size_bytes if is_image else volume.size_bytes,
        data_bytes=cut.data_bytes,
        created_ns=now_ns,
        filesystem=volume.filesystem,
        copy_path=cut.path,
        group_id=group_id,
        parameters=dict(parameters),
    )


def _same_source(existing: Snapshot, request: CreateSnapshot) -> Snapshot:
    if existing.volume_id != request.volume_id:
        raise NameTaken("snapshot", request.name, f"it is of volume {existing.volume_id}")
    return existing


def _same_group(existing: Group, wanted: Sequence[str], parameters: Mapping[str, str]) -> Group:
    if sorted(existing.volume_ids) != list(wanted):
        raise NameTaken("group snapshot", existing.name, f"it is of {', '.join(existing.volume_ids)}")
    if dict(existing.parameters) != dict(parameters):
        raise NameTaken("group snapshot", existing.name, "its parameters differ")
    return existing
