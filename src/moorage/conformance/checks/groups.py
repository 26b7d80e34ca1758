"""Group snapshots as objects, and the proof that their members are of one instant.

Owns: the two volumes that are written in turn while the group is taken.
"""

import os
import struct
import threading

from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE, GROUP, NODE, make_group
from moorage.conformance.files import DATA_NAME
from moorage.conformance.listing import snapshot_entries
from moorage.conformance.model import CheckSkipped, NotMet, Stage, check, fail, require
from moorage.conformance.place import Placed, place
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

_ROUNDS = 3
_RECORD = struct.Struct(">Q")


async def _two(bench: Bench) -> list[str]:
    return [(await bench.create()).volume_id for _ in range(2)]


def _get(made: pb.VolumeGroupSnapshot, bench: Bench) -> pb.GetVolumeGroupSnapshotRequest:
    return pb.GetVolumeGroupSnapshotRequest(
        group_snapshot_id=made.group_snapshot_id,
        snapshot_ids=[snapshot.snapshot_id for snapshot in made.snapshots],
        secrets=bench.config.secrets,
    )


@check(
    "CreateVolumeGroupSnapshot.repeated",
    "CreateVolumeGroupSnapshot with the same name and sources answers the same group, in any order of the sources.",
    CREATE,
    GROUP,
)
async def repeated(bench: Bench) -> None:
    ids = await _two(bench)
    name = bench.name("group")
    with bench.given("CreateVolumeGroupSnapshot.works"):
        first = await make_group(bench, ids, name)
    again = await make_group(bench, ids[::-1], name)
    require(again.group_snapshot_id == first.group_snapshot_id, "two groups for one name")
    members = [sorted(snapshot.snapshot_id for snapshot in group.snapshots) for group in (first, again)]
    require(members[0] == members[1], "the members differ between two answers")


@check(
    "CreateVolumeGroupSnapshot.other-sources",
    "CreateVolumeGroupSnapshot with a name that is used and other sources is ALREADY_EXISTS.",
    CREATE,
    GROUP,
)
async def other_sources(bench: Bench) -> None:
    one, other, third = [(await bench.create()).volume_id for _ in range(3)]
    with bench.given("CreateVolumeGroupSnapshot.works"):
        made = await make_group(bench, [one, other], name := bench.name("group"))
    require(bool(made.snapshots), "the group has no members")
    await expect(make_group(bench, [one, third], name), "ALREADY_EXISTS")


@check(
    "CreateVolumeGroupSnapshot.whole-or-nothing",
    "If one source does not exist, CreateVolumeGroupSnapshot fails and leaves no snapshot of the others.",
    CREATE,
    GROUP,
)
async def whole_or_nothing(bench: Bench) -> None:
    volume = await bench.create()
    await expect(make_group(bench, [volume.volume_id, bench.unknown_id()]), "NOT_FOUND")
    if bench.has("controller:LIST_SNAPSHOTS"):
        left = await snapshot_entries(bench.client, volume_id=volume.volume_id, secrets=bench.config.secrets)
        require(not left, f"{len(left)} snapshots of the first source are left")


@check("GetVolumeGroupSnapshot.agrees", "GetVolumeGroupSnapshot answers the group as it was made.", CREATE, GROUP)
async def get(bench: Bench) -> None:
    with bench.given("CreateVolumeGroupSnapshot.works"):
        made = await make_group(bench, await _two(bench))
    found = (await bench.client.GetVolumeGroupSnapshot(_get(made, bench))).group_snapshot
    require(found.group_snapshot_id == made.group_snapshot_id, f"group_snapshot_id is {found.group_snapshot_id!r}")
    members = [sorted(snapshot.snapshot_id for snapshot in group.snapshots) for group in (made, found)]
    require(members[0] == members[1], f"members {members[1]}", f"{members[0]}")
    require(found.creation_time == made.creation_time, "creation_time differs from that of the creation")


@check(
    "DeleteVolumeGroupSnapshot.repeated",
    "DeleteVolumeGroupSnapshot removes the group with all its members, and succeeds again.",
    CREATE,
    GROUP,
)
async def delete(bench: Bench) -> None:
    volumes = await _two(bench)
    with bench.given("CreateVolumeGroupSnapshot.works"):
        made = await make_group(bench, volumes)
    request = pb.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=made.group_snapshot_id,
        snapshot_ids=[snapshot.snapshot_id for snapshot in made.snapshots],
        secrets=bench.config.secrets,
    )
    for _ in range(2):
        await bench.client.DeleteVolumeGroupSnapshot(request)
    await expect(bench.client.GetVolumeGroupSnapshot(_get(made, bench)), "NOT_FOUND")
    if bench.has("controller:LIST_SNAPSHOTS"):
        left = await snapshot_entries(bench.client, volume_id=volumes[0], secrets=bench.config.secrets)
        require(not left, "a member is still listed")


class _Writer(threading.Thread):
    """Writes 1 to the first volume, 1 to the second, 2 to the first, and so on, each to the disk before the next."""

    def __init__(self, first: str, second: str, is_block: bool) -> None:
        super().__init__(daemon=True, name="group writer")
        self._paths = [path if is_block else os.path.join(path, DATA_NAME) for path in (first, second)]
        self._flags = os.O_WRONLY | os.O_SYNC | os.O_CLOEXEC | (0 if is_block else os.O_CREAT)
        self.written = 0
        self.error = ""
        self._end = threading.Event()

    def run(self) -> None:
        descriptors = []
        try:
            descriptors = [os.open(path, self._flags, 0o600) for path in self._paths]
            while not self._end.is_set():
                for descriptor in descriptors:
                    os.pwrite(descriptor, _RECORD.pack(self.written + 1), 0)
                self.written += 1
        except OSError as error:
            self.error = error.strerror or str(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def end(self) -> None:
        self._end.set()
        self.join(30)


@check(
    "Data.group-is-one-instant",
    "The members of a group snapshot are of one instant: no write is in one of them that came after a missing one.",
    CREATE,
    GROUP,
    NODE,
)
async def one_instant(bench: Bench) -> None:
    first, second = await place(bench), await place(bench)
    writer = _Writer(first.target, second.target, bench.is_block)
    writer.start()
    try:
        groups = []
        for _ in range(_ROUNDS):
            before = writer.written
            await bench.in_time("writing through the targets", _wait_for, writer, before + 2)
            groups.append(await _group_in_use(bench, first, second))
    finally:
        await bench.in_time("ending the writer", writer.end)
    if writer.error:
        fail(f"writing through the targets failed: {writer.error}")
    for made in groups:
        members = {snapshot.source_volume_id: snapshot.snapshot_id for snapshot in made.snapshots}
        one = await _record(bench, members[first.volume.volume_id])
        other = await _record(bench, members[second.volume.volume_id])
        expected = "the first record is equal to the second or one ahead, because it is written first"
        require(other <= one <= other + 1, f"record {one} in the first member, {other} in the second", expected)


async def _group_in_use(bench: Bench, first: Placed, second: Placed) -> pb.VolumeGroupSnapshot:
    try:
        with bench.given("CreateVolumeGroupSnapshot.works"):
            return await make_group(bench, [first.volume.volume_id, second.volume.volume_id])
    except NotMet as unmet:
        if isinstance(unmet.cause, CsiError) and unmet.cause.code == "FAILED_PRECONDITION":
            raise CheckSkipped("the driver takes no group snapshot of volumes that are in use") from unmet
        raise


def _wait_for(writer: _Writer, count: int) -> None:
    while writer.written < count and writer.is_alive():
        writer.join(0.005)


async def _record(bench: Bench, snapshot_id: str) -> int:
    placed: Placed = await place(bench, await bench.restore(snapshot_id))
    found = await placed.read(_RECORD.size)
    return int(_RECORD.unpack(found)[0]) if len(found) == _RECORD.size else 0


@check(
    "DeleteSnapshot.group-member",
    "DeleteSnapshot of a snapshot that names a group is refused: only the whole group is deleted.",
    CREATE,
    GROUP,
    stage=Stage.QUICK,
)
async def member(bench: Bench) -> None:
    with bench.given("CreateVolumeGroupSnapshot.works"):
        made = await make_group(bench, await _two(bench))
    await expect(bench.delete_snapshot(made.snapshots[0].snapshot_id), "INVALID_ARGUMENT", "FAILED_PRECONDITION")
