"""What survives when the driver is killed: between two calls, and in the middle of one.

Owns: the kill and the restart, and the comparison of before and after. Runs only with `--restart-command`.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from moorage.conformance.bench import Bench, settled
from moorage.conformance.checks.basics import CREATE, NODE, SNAPSHOT, unplaced
from moorage.conformance.checks.lists import LIST, LIST_SNAPSHOTS, listed
from moorage.conformance.checks.volumes import validation
from moorage.conformance.listing import snapshot_entries
from moorage.conformance.model import CheckSkipped, DriverCrashed, Stage, check, fail, require
from moorage.conformance.place import STAGES, place
from moorage.conformance.process import CannotRestart
from moorage.csi.errors import CsiError

RESTART = "run:restart"
_KILL_AFTER_S = (0.002, 0.015)


async def restarted(bench: Bench) -> None:
    """Kill the driver and start it again."""
    control = bench.session.control
    if control is None:
        raise CheckSkipped("give --restart-command")
    await control.kill()
    try:
        await control.start()
        await bench.session.client.wait_ready(bench.config.timeout_s)
    except (CannotRestart, CsiError, TimeoutError) as error:
        fail(f"the driver did not come back after it was killed: {error}", "it answers Probe again")


async def killed_during(bench: Bench, call: Callable[[], Awaitable[Any]], *moments_s: float) -> None:
    """Kill the driver a little after each start of the call, then make the call to its end."""
    for after_s in moments_s or _KILL_AFTER_S:
        task = asyncio.ensure_future(call())
        await asyncio.wait({task}, timeout=after_s)
        await restarted(bench)
        for outcome in await asyncio.gather(task, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, CsiError | DriverCrashed):
                raise outcome
    await settled(call)


@check(
    "Restart.keeps-volumes",
    "After SIGKILL and a restart a volume is there as it was: same answer to its request, listed, deletable.",
    CREATE,
    RESTART,
    stage=Stage.ALONE,
)
async def keeps_volumes(bench: Bench) -> None:
    request = bench.create_request()
    with bench.given("CreateVolume.works"):
        volume = await bench.make(request)
    await restarted(bench)
    if bench.has(LIST):
        require(volume.volume_id in await listed(bench), "the volume is not listed any more")
    answer = await bench.client.ValidateVolumeCapabilities(validation(bench, volume))
    require(answer.HasField("confirmed"), f"the volume is not confirmed any more: {answer.message}")
    again = (await bench.client.CreateVolume(request)).volume
    require(again.volume_id == volume.volume_id, f"{volume.volume_id!r} became {again.volume_id!r} for the same name")
    require(again.volume_context == volume.volume_context, "volume_context differs from that before")
    with bench.given("DeleteVolume.works"):
        await bench.delete(volume.volume_id)
    await restarted(bench)
    if bench.has(LIST):
        require(volume.volume_id not in await listed(bench), "a deleted volume is listed again")


@check(
    "Restart.keeps-snapshots",
    "After SIGKILL and a restart a snapshot is there as it was, and can be restored.",
    CREATE,
    SNAPSHOT,
    RESTART,
    stage=Stage.ALONE,
)
async def keeps_snapshots(bench: Bench) -> None:
    volume = await bench.create()
    request = bench.snapshot_request(volume.volume_id)
    with bench.given("CreateSnapshot.works"):
        snapshot = await bench.make_snapshot(request)
    await restarted(bench)
    again = (await bench.client.CreateSnapshot(request)).snapshot
    require(again.snapshot_id == snapshot.snapshot_id, "another snapshot_id for the same name")
    require(again.creation_time == snapshot.creation_time, "creation_time differs from that before")
    if bench.has(LIST_SNAPSHOTS):
        found = await snapshot_entries(bench.client, volume_id=volume.volume_id, secrets=bench.config.secrets)
        require(len(found) == 1, f"{len(found)} snapshots of the volume are listed", "one")
    await bench.restore(snapshot.snapshot_id)


@check(
    "Restart.keeps-data",
    "SIGKILL and a restart leave a published volume usable; it can be unpublished, and holds its data when staged again.",
    CREATE,
    NODE,
    RESTART,
    stage=Stage.ALONE,
)
async def keeps_data(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(1 << 20)
    await placed.write(content)
    await restarted(bench)
    await placed.verify()
    await placed.must_hold(content, "after a restart of the driver")
    await bench.client.NodePublishVolume(placed.publish_request())
    await placed.down()
    placed.must_be_gone()
    await placed.up()
    await placed.must_hold(content, "after a restart of the driver and staging again")


@check(
    "Restart.during-create",
    "A CreateVolume that SIGKILL interrupted can be repeated, makes one volume, and leaves nothing after its deletion.",
    CREATE,
    RESTART,
    stage=Stage.ALONE,
)
async def during_create(bench: Bench) -> None:
    request = bench.create_request()
    before = set(await listed(bench)) if bench.has(LIST) else set()
    await killed_during(bench, lambda: bench.client.CreateVolume(request))
    volume = await bench.make(request)
    if bench.has(LIST):
        new = [one for one in await listed(bench) if one not in before]
        require(new == [volume.volume_id], f"{len(new)} new volumes are listed", "one")
    with bench.given("DeleteVolume.works"):
        await killed_during(bench, lambda: bench.delete(volume.volume_id))
    if bench.has(LIST):
        left = [one for one in await listed(bench) if one not in before]
        require(not left, "the volume is still listed after its deletion")


@check(
    "Restart.during-publish",
    "NodeStageVolume, NodePublishVolume and their opposites that SIGKILL interrupted can be repeated and leave nothing.",
    CREATE,
    NODE,
    RESTART,
    stage=Stage.ALONE,
)
async def during_publish(bench: Bench) -> None:
    placed = unplaced(bench, await bench.create())
    with bench.given("ControllerPublishVolume.works"):
        await placed.attach()
    bench.on_end("NodeUnstageVolume.works", placed.unstage)
    if bench.has(STAGES):
        os.mkdir(placed.staging)
        await killed_during(bench, lambda: bench.client.NodeStageVolume(placed.stage_request()), 0.015)
    bench.on_end("NodeUnpublishVolume.works", placed.unpublish)
    await killed_during(bench, lambda: bench.client.NodePublishVolume(placed.publish_request()), 0.005)
    await placed.verify()
    content = os.urandom(65536)
    await placed.write(content)
    await killed_during(bench, placed.unpublish, 0.005)
    placed.must_be_gone()
    if bench.has(STAGES):
        await killed_during(bench, placed.unstage, 0.005)
        placed.must_be_unstaged()


@check(
    "Restart.during-snapshot",
    "A CreateSnapshot that SIGKILL interrupted can be repeated, and takes one snapshot.",
    CREATE,
    SNAPSHOT,
    RESTART,
    stage=Stage.ALONE,
)
async def during_snapshot(bench: Bench) -> None:
    volume = await bench.create()
    request = bench.snapshot_request(volume.volume_id)
    await killed_during(bench, lambda: bench.client.CreateSnapshot(request))
    await bench.make_snapshot(request)
    if bench.has(LIST_SNAPSHOTS):
        found = await snapshot_entries(bench.client, volume_id=volume.volume_id, secrets=bench.config.secrets)
        require(len(found) == 1, f"{len(found)} snapshots of the volume are listed", "one")
