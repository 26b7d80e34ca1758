"""Many calls at a time, calls that the caller gave up, and calls whose answer was lost.

Owns: what must be true after a race, whichever call came first. ABORTED is the right answer while another call runs.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from moorage.conformance import files
from moorage.conformance.bench import Bench, of_volume, settled
from moorage.conformance.checks.basics import CLONE, CREATE, NODE, SNAPSHOT, expand_request, grown_bytes, unplaced
from moorage.conformance.checks.lists import LIST, LIST_SNAPSHOTS, listed
from moorage.conformance.listing import snapshot_entries
from moorage.conformance.model import NotMet, check, fail, require
from moorage.conformance.place import STAGES, place
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

_MANY = 8
_GIVE_UP_AFTER_S = (0.0, 0.003, 0.02, 0.1, 0.4)


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Make calls at the same time and return the answers. Fails unless each is OK or ABORTED."""
    answers = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, CsiError):
            got = f"{answer.method} answered {answer.code}: {answer.message}, while the same call was running"
            require(answer.code == "ABORTED", got, "OK or ABORTED")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers.append(answer)
    return answers


async def given_up(call: Callable[[], Awaitable[Any]]) -> None:
    """Make a call several times and lose interest in it a little later each time, then once more to its end."""
    for after_s in _GIVE_UP_AFTER_S:
        task = asyncio.ensure_future(call())
        await asyncio.wait({task}, timeout=after_s)
        task.cancel()
        for outcome in await asyncio.gather(task, return_exceptions=True):
            if isinstance(outcome, Exception) and not (isinstance(outcome, CsiError) and outcome.code == "ABORTED"):
                raise outcome
    await settled(call)


@check("CreateVolume.concurrent", "CreateVolume of one name, several times at once, makes one volume.", CREATE)
async def create_one(bench: Bench) -> None:
    request = bench.create_request()
    answers = await together(bench.client.CreateVolume(request) for _ in range(_MANY))
    ids = {answer.volume.volume_id for answer in answers}
    final = (await settled(lambda: bench.client.CreateVolume(request))).volume
    for one in ids | {final.volume_id}:
        bench.on_end("DeleteVolume.works", lambda made=one: bench.delete(made))  # type: ignore[misc]
    require(ids <= {final.volume_id}, f"one name became {len(ids | {final.volume_id})} volumes")


@check("CreateVolume.many", "Volumes with different names can be made and deleted at the same time.", CREATE)
async def create_many(bench: Bench) -> None:
    with bench.given("CreateVolume.works"):
        pass
    made = await asyncio.gather(*(bench.make(bench.create_request()) for _ in range(_MANY)))
    require(len({volume.volume_id for volume in made}) == _MANY, "two of the volumes have the same volume_id")
    await asyncio.gather(*(bench.delete(volume.volume_id) for volume in made))


@check(
    "CreateVolume.given-up",
    "A CreateVolume whose answer was lost, and that is repeated, leaves one volume; after its deletion none.",
    CREATE,
)
async def create_given_up(bench: Bench) -> None:
    request = bench.create_request()
    before = set(await listed(bench)) if bench.has(LIST) else set()
    await given_up(lambda: bench.client.CreateVolume(request))
    volume = await bench.make(request)
    again = (await bench.client.CreateVolume(request)).volume
    require(again.volume_id == volume.volume_id, f"{volume.volume_id!r} and {again.volume_id!r} for one name")
    with bench.given("DeleteVolume.works"):
        await bench.delete(volume.volume_id)
    if bench.has(LIST):
        names = bench.session.owned
        strange = [one for one in await listed(bench) if one not in before and one not in names]
        if strange:
            for one in await _ours(bench, strange):
                fail(f"volume {one} is listed, and CreateVolume never answered it")


async def _ours(bench: Bench, strange: list[str]) -> list[str]:
    """Return those of unknown volumes that do not belong to a check that is still waiting for its answer."""
    await asyncio.sleep(1)
    still = await listed(bench)
    return [one for one in strange if one in still and one not in bench.session.owned]


@check(
    "CreateVolume.against-delete",
    "CreateVolume and DeleteVolume at the same time leave the volume whole or gone.",
    CREATE,
)
async def create_against_delete(bench: Bench) -> None:
    for _ in range(3):
        request = bench.create_request()
        volume = await bench.make(request)
        await together([bench.delete(volume.volume_id), bench.client.CreateVolume(request)])
        final = (await settled(lambda asked=request: bench.client.CreateVolume(asked))).volume  # type: ignore[misc]
        bench.on_end("DeleteVolume.works", lambda made=final.volume_id: bench.delete(made))  # type: ignore[misc]
        validation = pb.ValidateVolumeCapabilitiesRequest(
            volume_id=final.volume_id,
            volume_context=final.volume_context,
            volume_capabilities=[bench.capability()],
            secrets=bench.config.secrets,
        )
        await bench.client.ValidateVolumeCapabilities(validation)


@check("DeleteVolume.concurrent", "DeleteVolume of one volume, several times at once, removes it.", CREATE)
async def delete_concurrent(bench: Bench) -> None:
    volume = await bench.create()
    await together(bench.delete(volume.volume_id) for _ in range(4))
    await settled(lambda: bench.delete(volume.volume_id))
    if bench.has(LIST):
        require(volume.volume_id not in await listed(bench), "the volume is still listed")


@check(
    "CreateSnapshot.concurrent",
    "CreateSnapshot of one name, several times at once, takes one snapshot.",
    CREATE,
    SNAPSHOT,
)
async def snapshot_one(bench: Bench) -> None:
    volume = await bench.create()
    request = bench.snapshot_request(volume.volume_id)
    answers = await together(bench.client.CreateSnapshot(request) for _ in range(4))
    final = await settled(lambda: bench.make_snapshot(request))
    ids = {answer.snapshot.snapshot_id for answer in answers}
    for one in ids - {final.snapshot_id}:
        bench.on_end("DeleteSnapshot.works", lambda made=one: bench.delete_snapshot(made))  # type: ignore[misc]
    require(ids <= {final.snapshot_id}, f"one name became {len(ids | {final.snapshot_id})} snapshots")


@check(
    "CreateSnapshot.given-up",
    "A CreateSnapshot whose answer was lost, and that is repeated, leaves one snapshot.",
    CREATE,
    SNAPSHOT,
)
async def snapshot_given_up(bench: Bench) -> None:
    volume = await bench.create()
    request = bench.snapshot_request(volume.volume_id)
    await given_up(lambda: bench.client.CreateSnapshot(request))
    await bench.make_snapshot(request)
    if bench.has(LIST_SNAPSHOTS):
        found = await snapshot_entries(bench.client, volume_id=volume.volume_id, secrets=bench.config.secrets)
        require(len(found) == 1, f"{len(found)} snapshots of the volume are listed", "one")


@check("DeleteVolume.given-up", "A DeleteVolume whose answer was lost can be repeated.", CREATE)
async def delete_given_up(bench: Bench) -> None:
    volume = await bench.create()
    await given_up(lambda: bench.delete(volume.volume_id))


@check(
    "ControllerExpandVolume.given-up",
    "A ControllerExpandVolume whose answer was lost can be repeated.",
    CREATE,
    "controller:EXPAND_VOLUME",
)
async def expand_given_up(bench: Bench) -> None:
    volume = await bench.create()
    request = expand_request(bench, volume)
    await given_up(lambda: bench.client.ControllerExpandVolume(request))
    answer = await bench.client.ControllerExpandVolume(request)
    wanted = grown_bytes(bench, volume)
    require(answer.capacity_bytes >= wanted, f"capacity_bytes is {answer.capacity_bytes}", f"at least {wanted}")


@check(
    "NodePublishVolume.concurrent",
    "NodePublishVolume at one target, several times at once, leaves one mount, which one NodeUnpublishVolume removes.",
    CREATE,
    NODE,
)
async def publish_one(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    bench.on_end("NodeUnpublishVolume.works", placed.unpublish)
    await together(bench.client.NodePublishVolume(placed.publish_request()) for _ in range(4))
    await settled(lambda: bench.client.NodePublishVolume(placed.publish_request()))
    await placed.verify()
    count = len(files.mounts_at(placed.target))
    require(count <= 1, f"{count} mounts at {placed.target}", "one")
    with bench.given("NodeUnpublishVolume.works"):
        await placed.unpublish()
    placed.must_be_gone()


@check(
    "NodePublishVolume.given-up",
    "NodeStageVolume and NodePublishVolume whose answers were lost can be repeated, and undone.",
    CREATE,
    NODE,
)
async def publish_given_up(bench: Bench) -> None:
    placed = unplaced(bench, await bench.create())
    with bench.given("ControllerPublishVolume.works"):
        await placed.attach()
    bench.on_end("NodeUnstageVolume.works", placed.unstage)
    if bench.has(STAGES):
        os.mkdir(placed.staging)
        await given_up(lambda: bench.client.NodeStageVolume(placed.stage_request()))
    bench.on_end("NodeUnpublishVolume.works", placed.unpublish)
    await given_up(lambda: bench.client.NodePublishVolume(placed.publish_request()))
    await placed.verify()
    content = os.urandom(65536)
    await placed.write(content)
    await given_up(placed.unpublish)
    placed.must_be_gone()
    if bench.has(STAGES):
        await given_up(placed.unstage)
        placed.must_be_unstaged()


@check("NodePublishVolume.many", "Different volumes can be staged and published at the same time.", CREATE, NODE)
async def publish_many(bench: Bench) -> None:
    outcomes = await asyncio.gather(*(place(bench) for _ in range(4)), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, NotMet):
            cause = outcome.cause
            raise cause if outcome.owner not in bench.session.broken else outcome
        if isinstance(outcome, BaseException):
            raise outcome
    for number, placed in enumerate(outcomes):
        await placed.write(bytes([number]) * 4096)  # type: ignore[union-attr]
    for number, placed in enumerate(outcomes):
        await placed.must_hold(bytes([number]) * 4096, "after other volumes were written")  # type: ignore[union-attr]


@check(
    "CreateVolume.clone-concurrent",
    "Clones of one volume can be made at the same time; a driver that cannot answers ABORTED.",
    CREATE,
    CLONE,
)
async def clones(bench: Bench) -> None:
    origin = await bench.create()
    with bench.given("CreateVolume.clone"):
        pass
    source = of_volume(origin.volume_id)
    made = await together(bench.make(bench.create_request(volume_content_source=source)) for _ in range(3))
    require(len({volume.volume_id for volume in made}) == len(made), "two clones have the same volume_id")
