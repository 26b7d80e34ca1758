"""ListVolumes and ListSnapshots: complete, paged, filtered, and right while other callers change what is listed.

Owns: what a caller that reads page by page may rely on. Other checks make volumes at the same time, so that nothing is
counted; each check looks for objects of its own.
"""

from collections.abc import Iterable

from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE, SNAPSHOT
from moorage.conformance.listing import snapshot_entries, volume_entries
from moorage.conformance.model import Stage, check, fail, require
from moorage.conformance.place import ATTACHES, place
from moorage.csi import csi_pb2 as pb

LIST = "controller:LIST_VOLUMES"
LIST_SNAPSHOTS = "controller:LIST_SNAPSHOTS"


async def listed(bench: Bench) -> dict[str, pb.ListVolumesResponse.Entry]:
    return {entry.volume.volume_id: entry for entry in await volume_entries(bench.client)}


def require_once(ids: Iterable[str], made: Iterable[str]) -> None:
    """Fail unless each of our objects is listed exactly once."""
    ids = list(ids)
    for one in made:
        require(one in ids, f"{one} is on no page")
        require(ids.count(one) == 1, f"{one} is listed {ids.count(one)} times")


@check(
    "ListVolumes.follows",
    "ListVolumes shows a volume from its creation to its deletion, as CreateVolume answered it.",
    CREATE,
    LIST,
)
async def follows(bench: Bench) -> None:
    volume = await bench.create()
    entry = (await listed(bench)).get(volume.volume_id)
    if entry is None:
        fail("a new volume is not listed")
    require(entry.volume.volume_context == volume.volume_context, "volume_context differs from that of CreateVolume")
    sizes = {entry.volume.capacity_bytes, volume.capacity_bytes} - {0}
    require(len(sizes) <= 1, f"capacity_bytes is {entry.volume.capacity_bytes}", f"{volume.capacity_bytes}")
    with bench.given("DeleteVolume.works"):
        await bench.delete(volume.volume_id)
    require(volume.volume_id not in await listed(bench), "a deleted volume is still listed")


@check("ListVolumes.ids", "Every entry of ListVolumes has a volume_id, and no two have the same.", LIST)
async def list_ids(bench: Bench) -> None:
    ids = [entry.volume.volume_id for entry in await volume_entries(bench.client)]
    require("" not in ids, "an entry has no volume_id")
    repeated = sorted({one for one in ids if ids.count(one) > 1})[:3] if len(set(ids)) != len(ids) else []
    require(not repeated, f"listed more than once: {', '.join(repeated)}")


@check("ListVolumes.pages", "Pages hold at most max_entries, and each volume is on exactly one of them.", CREATE, LIST)
async def pages(bench: Bench) -> None:
    made = [(await bench.create()).volume_id for _ in range(5)]
    for page_size in (1, 2, 3):
        if page_size == 1 and len(await listed(bench)) > 200:
            continue
        require_once([entry.volume.volume_id for entry in await volume_entries(bench.client, page_size)], made)


@check(
    "ListVolumes.pages-under-change",
    "Volumes that are there all the time are on exactly one page, while others are made and deleted between two pages.",
    CREATE,
    LIST,
)
async def pages_under_change(bench: Bench) -> None:
    made = [(await bench.create()).volume_id for _ in range(8)]
    seen: list[str] = []
    gone: set[str] = set()
    token = ""
    for number in range(500):
        page = await bench.client.ListVolumes(pb.ListVolumesRequest(max_entries=2, starting_token=token))
        ids = [entry.volume.volume_id for entry in page.entries]
        seen += ids
        token = page.next_token
        if not token:
            break
        # The volume that the token may stand for, and one before it, go away before the next page is read.
        for victim in [one for one in ids if one in made][-1:] if number % 2 == 0 else []:
            with bench.given("DeleteVolume.works"):
                await bench.delete(victim)
            gone.add(victim)
            await bench.create()
    require_once(seen, [one for one in made if one not in gone])


@check("ListVolumes.bad-token", "ListVolumes with a token that is not from the driver is ABORTED.", LIST)
async def bad_token(bench: Bench) -> None:
    request = pb.ListVolumesRequest(starting_token=bench.unknown_id("token"))
    await expect(bench.client.ListVolumes(request), "ABORTED")


@check("ListVolumes.negative-page", "ListVolumes with a negative max_entries is INVALID_ARGUMENT.", LIST)
async def negative_page(bench: Bench) -> None:
    await expect(bench.client.ListVolumes(pb.ListVolumesRequest(max_entries=-1)), "INVALID_ARGUMENT")


@check(
    "ListVolumes.published-nodes",
    "ListVolumes names the nodes that a volume is attached to, until it is detached.",
    CREATE,
    LIST,
    ATTACHES,
    "controller:LIST_VOLUMES_PUBLISHED_NODES",
)
async def published_nodes(bench: Bench) -> None:
    placed = await place(bench, publish=False) if bench.has("node:SERVICE") else None
    if placed is None:
        return
    nodes = list((await listed(bench))[placed.volume.volume_id].status.published_node_ids)
    require(bench.node.node_id in nodes, f"published_node_ids are {nodes}", bench.node.node_id)
    await placed.unstage()
    with bench.given("ControllerUnpublishVolume.works"):
        await placed.detach()
    nodes = list((await listed(bench))[placed.volume.volume_id].status.published_node_ids)
    require(bench.node.node_id not in nodes, f"after the detachment published_node_ids are {nodes}")


@check(
    "ListSnapshots.follows",
    "ListSnapshots shows a snapshot from its creation to its deletion.",
    SNAPSHOT,
    LIST_SNAPSHOTS,
)
async def snapshots_follow(bench: Bench) -> None:
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    found = {one.snapshot_id: one for one in await snapshot_entries(bench.client, secrets=bench.config.secrets)}
    require(snapshot.snapshot_id in found, "a new snapshot is not listed")
    same = found[snapshot.snapshot_id].creation_time == snapshot.creation_time
    require(same, "creation_time differs from that of CreateSnapshot")
    with bench.given("DeleteSnapshot.works"):
        await bench.delete_snapshot(snapshot.snapshot_id)
    left = [one.snapshot_id for one in await snapshot_entries(bench.client, secrets=bench.config.secrets)]
    require(snapshot.snapshot_id not in left, "a deleted snapshot is still listed")


@check(
    "ListSnapshots.filters",
    "A filter by id gives that snapshot, one by source all of that volume, and one that matches nothing an empty list.",
    SNAPSHOT,
    LIST_SNAPSHOTS,
)
async def filters(bench: Bench) -> None:
    volume, other = await bench.create(), await bench.create()
    made = {(await bench.snapshot(volume.volume_id)).snapshot_id for _ in range(2)}
    await bench.snapshot(other.volume_id)
    one = sorted(made)[0]
    cases: tuple[tuple[pb.ListSnapshotsRequest, set[str]], ...] = (
        (pb.ListSnapshotsRequest(snapshot_id=one), {one}),
        (pb.ListSnapshotsRequest(source_volume_id=volume.volume_id), made),
        (pb.ListSnapshotsRequest(snapshot_id=bench.unknown_id("snapshot")), set()),
        (pb.ListSnapshotsRequest(source_volume_id=bench.unknown_id()), set()),
    )
    for request, wanted in cases:
        request.secrets.update(bench.config.secrets)
        found = [entry.snapshot.snapshot_id for entry in (await bench.client.ListSnapshots(request)).entries]
        name = "snapshot_id" if request.snapshot_id else "source_volume_id"
        require(sorted(found) == sorted(wanted), f"the filter {name} gave {sorted(found)}", f"{sorted(wanted)}")


@check(
    "ListSnapshots.pages",
    "Pages hold at most max_entries, and each snapshot is on one of them; without max_entries a token gives all the rest.",
    SNAPSHOT,
    LIST_SNAPSHOTS,
)
async def snapshot_pages(bench: Bench) -> None:
    volume = await bench.create()
    made = [(await bench.snapshot(volume.volume_id)).snapshot_id for _ in range(4)]
    for page_size in (1, 3):
        found = await snapshot_entries(bench.client, page_size, volume.volume_id, bench.config.secrets)
        require_once([one.snapshot_id for one in found], made)
    request = pb.ListSnapshotsRequest(max_entries=2, source_volume_id=volume.volume_id, secrets=bench.config.secrets)
    first = await bench.client.ListSnapshots(request)
    require(bool(first.next_token), "2 of 4 entries came without a next_token")
    request.max_entries, request.starting_token = 0, first.next_token
    rest = await bench.client.ListSnapshots(request)
    require_once([entry.snapshot.snapshot_id for entry in (*first.entries, *rest.entries)], made)


@check("ListSnapshots.bad-token", "ListSnapshots with a token that is not from the driver is ABORTED.", LIST_SNAPSHOTS)
async def bad_snapshot_token(bench: Bench) -> None:
    request = pb.ListSnapshotsRequest(starting_token=bench.unknown_id("token"), secrets=bench.config.secrets)
    await expect(bench.client.ListSnapshots(request), "ABORTED")


@check(
    "GetSnapshot.agrees",
    "GetSnapshot answers the snapshot as CreateSnapshot did.",
    CREATE,
    SNAPSHOT,
    "controller:GET_SNAPSHOT",
    stage=Stage.QUICK,
)
async def get_snapshot(bench: Bench) -> None:
    snapshot = await bench.snapshot((await bench.create()).volume_id)
    request = pb.GetSnapshotRequest(snapshot_id=snapshot.snapshot_id, secrets=bench.config.secrets)
    found = (await bench.client.GetSnapshot(request)).snapshot
    require(found == snapshot, "GetSnapshot differs from CreateSnapshot")
