"""Staging and publishing: mounts, targets, read-only, repetition in every order, statistics.

Owns: what the kernel must show after each call of the Node service.
"""

import errno
import os
import random
from pathlib import Path

from moorage.conformance import files
from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE, NODE, unplaced
from moorage.conformance.model import check, fail, require
from moorage.conformance.place import STAGES, Placed, place
from moorage.csi import csi_pb2 as pb

STATS = "node:GET_VOLUME_STATS"
_MULTI = ("node:SINGLE_NODE_MULTI_WRITER", "controller:SINGLE_NODE_MULTI_WRITER")
_GROUP = "4242"
_STEPS = 14


@check(
    "NodeStageVolume.repeated", "NodeStageVolume of a staged volume succeeds and stacks no mount.", CREATE, NODE, STAGES
)
async def stage_repeated(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    for _ in range(2):
        await bench.client.NodeStageVolume(placed.stage_request())
    count = len(files.mounts_at(placed.staging))
    require(count <= 1, f"{count} mounts at {placed.staging}", "at most one")


@check(
    "NodePublishVolume.repeated", "NodePublishVolume of a published volume succeeds and stacks no mount.", CREATE, NODE
)
async def publish_repeated(bench: Bench) -> None:
    placed = await place(bench)
    for _ in range(2):
        await bench.client.NodePublishVolume(placed.publish_request())
    count = len(files.mounts_at(placed.target))
    require(count <= 1, f"{count} mounts at {placed.target}", "at most one")


@check("NodeUnpublishVolume.repeated", "NodeUnpublishVolume of a volume that is not published succeeds.", CREATE, NODE)
async def unpublish_repeated(bench: Bench) -> None:
    placed = await place(bench)
    with bench.given("NodeUnpublishVolume.works"):
        await placed.unpublish()
    await placed.unpublish()


@check("NodeUnstageVolume.repeated", "NodeUnstageVolume of a volume that is not staged succeeds.", CREATE, NODE, STAGES)
async def unstage_repeated(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    with bench.given("NodeUnstageVolume.works"):
        await placed.unstage()
    await placed.unstage()


@check(
    "NodePublishVolume.read-only",
    "A volume that is published read-only cannot be written, and its mount is read-only in mountinfo.",
    CREATE,
    NODE,
)
async def read_only(bench: Bench) -> None:
    placed = await place(bench)
    await placed.write(b"x" * 4096)
    with bench.given("NodeUnpublishVolume.works"):
        await placed.unpublish()
    placed.is_read_only = True
    with bench.given("NodePublishVolume.works"):
        await placed.publish()
    require(await placed.read(4096) == b"x" * 4096, "the data cannot be read")
    if not bench.is_block:
        mount = files.mount_at(placed.target)
        require(mount is not None and mount.is_read_only, "the mount is not read-only in mountinfo")
    try:
        await bench.in_time("writing to a read-only target", files.write, placed.target, bench.is_block, b"y")
    except OSError as error:
        good = error.errno in (errno.EROFS, errno.EPERM, errno.EACCES)
        require(good, f"a write failed with {error.strerror}", "read-only file system")
        return
    fail("a write to the read-only target succeeded")


@check(
    "NodePublishVolume.other-way",
    "NodePublishVolume at the same target in another way (read-only) is ALREADY_EXISTS.",
    CREATE,
    NODE,
)
async def other_way(bench: Bench) -> None:
    placed = await place(bench)
    await expect(bench.client.NodePublishVolume(placed.publish_request(readonly=True)), "ALREADY_EXISTS")


@check(
    "NodePublishVolume.single-writer",
    "A volume for a single writer is not published at a second target: FAILED_PRECONDITION.",
    CREATE,
    NODE,
    *_MULTI,
)
async def single_writer(bench: Bench) -> None:
    placed = await place(bench, mode="SINGLE_NODE_SINGLE_WRITER")
    other = placed.target + "-second"
    bench.on_end("NodeUnpublishVolume.works", lambda: placed.unpublish(other))
    await expect(bench.client.NodePublishVolume(placed.publish_request(other)), "FAILED_PRECONDITION")


@check(
    "NodePublishVolume.second-target",
    "A volume for several writers shows the same data at two targets, and unpublishing one leaves the other.",
    CREATE,
    NODE,
    *_MULTI,
)
async def second_target(bench: Bench) -> None:
    placed = await place(bench, mode="SINGLE_NODE_MULTI_WRITER")
    other = await placed.publish(placed.target + "-second")
    content = os.urandom(65536)
    await placed.write(content)
    found = await bench.in_time("reading the second target", files.read, other, bench.is_block, len(content))
    require(found == content, "the second target does not show what was written through the first")
    with bench.given("NodeUnpublishVolume.works"):
        await placed.unpublish(other)
    await placed.verify()
    await placed.must_hold(content, "after the other target was unpublished")


@check(
    "NodePublishVolume.needs-staging",
    "NodePublishVolume of a volume that must be staged, without staging_target_path, is FAILED_PRECONDITION.",
    CREATE,
    NODE,
    STAGES,
)
async def needs_staging(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    request = placed.publish_request()
    request.staging_target_path = ""
    bench.on_end("NodeUnpublishVolume.works", placed.unpublish)
    await expect(bench.client.NodePublishVolume(request), "FAILED_PRECONDITION", "INVALID_ARGUMENT")


@check("NodePublishVolume.long-path", "Paths of more than 128 bytes can be published at.", CREATE, NODE)
async def long_path(bench: Bench) -> None:
    await _published_at(bench, "x" * 150)


@check(
    "NodePublishVolume.odd-path",
    "Paths with blanks, backslashes and letters of any language can be published at, and unpublished.",
    CREATE,
    NODE,
)
async def odd_path(bench: Bench) -> None:
    await _published_at(bench, " ünï\\040 ")


async def _published_at(bench: Bench, end: str) -> None:
    placed = await place(bench, publish=False)
    target = placed.target + end
    await placed.publish(target)
    await placed.unpublish(target)
    placed.must_be_gone(target)


@check(
    "NodePublishVolume.fs-type",
    "The filesystem at the target is the one that the caller asked for.",
    CREATE,
    NODE,
    "run:mount",
    "run:fs-type",
)
async def fs_type(bench: Bench) -> None:
    placed = await place(bench)
    mount = files.mount_at(placed.target)
    found = mount.fstype if mount is not None else "nothing"
    require(found == bench.config.fs_type, f"{found} is mounted", bench.config.fs_type)


@check(
    "NodePublishVolume.mount-group",
    "New files of a volume that is published for a group belong to that group, and the group can write there.",
    CREATE,
    NODE,
    "node:VOLUME_MOUNT_GROUP",
    "run:mount",
)
async def mount_group(bench: Bench) -> None:
    capability = bench.capability()
    capability.mount.volume_mount_group = _GROUP
    volume = await bench.create(volume_capabilities=[capability])
    placed = unplaced(bench, volume)
    placed.group = _GROUP
    await placed.come_back()
    await placed.write(b"x")
    found = await bench.in_time("looking at the target", os.stat, os.path.join(placed.target, files.DATA_NAME))
    top = await bench.in_time("looking at the target", os.stat, placed.target)
    require(str(found.st_gid) == _GROUP, f"a new file belongs to group {found.st_gid}", _GROUP)
    require(bool(top.st_mode & 0o020), f"the mode of the target is {top.st_mode & 0o7777:o}", "group-writable")


@check(
    "NodeUnpublishVolume.only-its-target",
    "NodeUnpublishVolume of one volume leaves the targets of other volumes as they are.",
    CREATE,
    NODE,
)
async def only_its_target(bench: Bench) -> None:
    one, other = await place(bench), await place(bench)
    content = os.urandom(65536)
    await other.write(content)
    with bench.given("NodeUnpublishVolume.works"):
        await one.unpublish()
    await other.verify()
    await other.must_hold(content, "after another volume was unpublished")


@check(
    "Orders.every-step-repeated",
    "Steps up and down, each repeated at any time, succeed and leave exactly what the last one asked for.",
    CREATE,
    NODE,
)
async def orders(bench: Bench) -> None:
    placed = await place(bench, publish=False)
    choose = random.Random(bench.config.seed)
    is_staged, is_published = True, False
    content = os.urandom(4096)
    written = False
    for _ in range(_STEPS):
        steps = ["unpublish", "stage", *(["publish"] if is_staged else [])]
        steps += ["unstage"] if not is_published else []
        step = choose.choice(steps)
        await _do(placed, step)
        is_staged = {"stage": True, "unstage": False}.get(step, is_staged)
        is_published = {"publish": True, "unpublish": False}.get(step, is_published)
        if is_published:
            await placed.verify()
        else:
            placed.must_be_gone()
        if is_published and not written:
            await placed.write(content)
            written = True
        if is_published:
            await placed.must_hold(content, f"after {step}")


async def _do(placed: Placed, step: str) -> None:
    match step:
        case "stage":
            await placed.stage()
        case "unstage":
            await placed.unstage()
        case "publish":
            await placed.publish()
        case _:
            await placed.unpublish()


@check(
    "NodeUnpublishVolume.before-publish",
    "NodeUnpublishVolume and NodeUnstageVolume of a volume that was never on the node succeed.",
    CREATE,
    NODE,
)
async def before_publish(bench: Bench) -> None:
    placed = unplaced(bench, await bench.create())
    await placed.unpublish()
    if bench.has(STAGES):
        Path(placed.staging).mkdir()
        await placed.unstage()


@check(
    "NodeGetVolumeStats.figures",
    "NodeGetVolumeStats gives a total that fits the volume, and used and available bytes that fit the total.",
    CREATE,
    NODE,
    STATS,
)
async def stats(bench: Bench) -> None:
    placed = await place(bench)
    usage = await _bytes(bench, placed)
    real = await placed.size()
    close = abs(usage.total - real) <= real // 10
    require(close, f"total is {usage.total}", f"about {real}, as the kernel says")
    require(usage.used + usage.available <= usage.total, f"used {usage.used} + available {usage.available}", "total")


@check(
    "NodeGetVolumeStats.follows",
    "NodeGetVolumeStats shows more used bytes after more was written.",
    CREATE,
    NODE,
    STATS,
    "run:mount",
)
async def stats_follow(bench: Bench) -> None:
    placed = await place(bench)
    before = await _bytes(bench, placed)
    await placed.write(os.urandom(8 << 20))
    await bench.in_time("writing to the disk", files.settle, placed.target)
    after = (await _bytes(bench, placed)).used
    is_shared = before.total > 2 * max(
        placed.volume.capacity_bytes, bench.config.size_bytes
    )  # others write and delete there, too
    if (before.used or after) and not is_shared:
        require(after > before.used, f"used is {after} after 8 MiB were written", f"more than {before.used}")


@check(
    "NodeGetVolumeStats.wrong-path",
    "NodeGetVolumeStats for a path at which the volume is not published is NOT_FOUND.",
    CREATE,
    NODE,
    STATS,
)
async def stats_elsewhere(bench: Bench) -> None:
    placed = await place(bench)
    request = pb.NodeGetVolumeStatsRequest(volume_id=placed.volume.volume_id, volume_path=placed.target + "-elsewhere")
    await expect(bench.client.NodeGetVolumeStats(request), "NOT_FOUND")


async def _bytes(bench: Bench, placed: Placed) -> pb.VolumeUsage:
    request = pb.NodeGetVolumeStatsRequest(volume_id=placed.volume.volume_id, volume_path=placed.target)
    answer = await bench.client.NodeGetVolumeStats(request)
    usage = next((one for one in answer.usage if one.unit == pb.VolumeUsage.BYTES), None)
    return usage if usage is not None else fail("no usage in BYTES")
