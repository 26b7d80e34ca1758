"""Every reason of the health table, brought about for real and taken away again, on every surface that tells it."""

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.plugin_caller import MIB, Caller, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.host import libc, loop, mountinfo, mounts
from moorage.plugin.context import PluginContext
from moorage.plugin.io_limits import IoCgroups
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings
from moorage.storage.health import REASONS

pytestmark = pytest.mark.root

CONTROLLER = frozenset(
    {"ControllerGetVolumeHealth", "ControllerListVolumeHealth", "ListVolumes", "ControllerGetVolume"}
)
NODE = frozenset({"NodeGetVolumeHealth", "NodeGetVolumeStats"})
POOL = frozenset({"NodeGetStorageHealth"})


@dataclass
class World:
    """A plugin on a filesystem of its own, with one volume."""

    caller: Caller
    parts: PluginContext
    base: Path
    scratch: Path
    volume: str = ""
    target: Path = Path()

    @property
    def pool(self) -> Path:
        return self.base / "pool"

    @property
    def data(self) -> Path:
        return self.pool / "volumes" / self.volume / "data"

    @property
    def device(self) -> loop.LoopDevice:
        return loop.at(loop.number_of(mountinfo.mount_at(self.target).source))

    async def again(self) -> None:
        """Take the volume down and bring it up, as for the next pod."""
        await self.caller.down(self.volume)
        await self.caller.up(self.volume, mounted())


Maker = Callable[[World], AsyncIterator[None]]
Trouble = Callable[[World], "contextlib.AbstractAsyncContextManager[None]"]


@dataclass(frozen=True)
class Story:
    """How a reason comes about, who tells it, and what the others say instead (an error's code, or nothing)."""

    make: Trouble
    told_by: frozenset[str]
    errors: dict[str, str] = field(default_factory=dict)
    pool: str = "ext4"
    filesystem: str = "ext4"
    kind: str = "image"
    published: bool = True


STORIES: dict[str, Story] = {}


def brings(reason: str, told_by: frozenset[str], **more: object) -> Callable[[Maker], Trouble]:
    """Register a way to bring a reason about; what follows its `yield` takes it away."""

    def register(make: Maker) -> Trouble:
        trouble = contextlib.asynccontextmanager(make)
        STORIES[reason] = Story(trouble, told_by, **more)
        return trouble

    return register


@contextlib.contextmanager
def dead_mount(target: Path):
    """A FUSE mount whose server is gone: every call on it is answered with ENOTCONN."""
    kind = "40000" if target.is_dir() else "100000"
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc.mount("dead", str(target), "fuse", 0, f"fd={fd},rootmode={kind},user_id=0,group_id=0")
    os.close(fd)
    try:
        yield
    finally:
        mounts.unmount(target, lazy=True)


# --- what the pool sees ------------------------------------------------------------------------


@brings("DataMissing", CONTROLLER | NODE)
async def the_image_is_away(world):
    away = world.data.with_name("away")
    world.data.rename(away)
    yield
    away.rename(world.data)


@brings("ImageTruncated", CONTROLLER | NODE)
async def the_image_is_cut_short(world):
    size = world.data.stat().st_size
    os.truncate(world.data, size - MIB)
    yield
    os.truncate(world.data, size)


@brings("DataUnreadable", CONTROLLER | NODE)
async def the_image_does_not_answer(world):
    with dead_mount(world.data):
        yield


@brings(
    "RecordDamaged",
    CONTROLLER - {"ListVolumes", "ControllerGetVolume"} | NODE,
    errors={"ControllerGetVolume": "INTERNAL"},
)
async def the_record_is_garbage(world):
    record = world.data.with_name("volume.json")
    text = record.read_text()
    record.write_text(text[: len(text) // 2])
    yield
    record.write_text(text)


@brings(
    "PoolGone",
    frozenset({"ControllerGetVolumeHealth"}) | NODE | POOL,
    errors=dict.fromkeys(CONTROLLER - {"ControllerGetVolumeHealth"}, "UNAVAILABLE"),
)
async def the_pool_is_gone(world):
    away = world.pool.with_name("away")
    world.pool.rename(away)
    yield
    away.rename(world.pool)


@brings(
    "PoolUnreadable",
    frozenset({"ControllerGetVolumeHealth"}) | NODE | POOL,
    errors=dict.fromkeys(CONTROLLER - {"ControllerGetVolumeHealth"}, "INTERNAL"),
)
async def the_pools_volumes_do_not_answer(world):
    with dead_mount(world.pool / "volumes"):
        yield


@brings("PoolNearlyFull", CONTROLLER | NODE | POOL)
async def the_pool_is_filled_into_its_reserve(world):
    room = mounts.space_of(world.base)
    reserve = int(room.total_bytes * world.parts.settings.reserve_fraction)
    filler = world.base / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.available_bytes - reserve + 8 * MIB)
    yield
    filler.unlink()


@brings("PoolReadOnly", CONTROLLER | {"NodeGetVolumeHealth"} | POOL, published=False)
async def the_pool_is_remounted_read_only(world):
    """Not with a volume in use: its file is open for writing, and the kernel refuses the remount."""
    mounts.remount(world.base, "ext4", ["ro"])
    yield
    mounts.remount(world.base, "ext4", ["rw"])


@brings("CannotReclaim", POOL)
async def something_is_mounted_in_a_deleted_volume(world):
    doomed = (await world.caller.create("doomed", parameters={"kind": "directory"})).volume_id
    place = world.pool / "volumes" / doomed / "data" / "mounted"
    place.mkdir()
    mounts.bind(world.scratch, place)
    leftovers = world.parts.pools.named().context.layout.leftovers
    world.parts.pools.named().context.layout.move(
        str(world.pool / "volumes" / doomed), str(world.pool / "trash" / f"{1:020d}-volume-{doomed}")
    )
    world.parts.pools.named().sweep()
    (left,) = leftovers.stuck
    yield
    mounts.unmount(Path(left, "data", "mounted"))
    assert leftovers.remove(left)


@brings("SizeNotEnforced", CONTROLLER | NODE, pool="btrfs", kind="directory")
async def the_quota_is_switched_off(world):
    """Quotas alone bring no limit back; the next expansion sets it again."""
    subprocess.run(["btrfs", "quota", "disable", str(world.base)], check=True, capture_output=True)
    yield
    await world.caller.expand(world.volume, 80 * MIB)


# --- what the node sees ------------------------------------------------------------------------


@brings("BackingFileDeleted", NODE)
async def the_image_below_the_device_is_deleted(world):
    spare = world.data.with_name("spare")
    os.link(world.data, spare)
    world.data.unlink()
    yield
    os.rename(spare, world.data)


@brings("RemountedReadOnly", NODE)
async def the_filesystem_stops_after_an_error(world):
    Path(f"/sys/fs/ext4/{world.device.path.name}/trigger_fs_error").write_text("1")
    yield
    await world.again()


@brings("FilesystemErrors", NODE)
async def the_kernel_counts_an_error(world):
    Path(f"/sys/fs/ext4/{world.device.path.name}/trigger_fs_error").write_text("1")
    yield
    await world.again()


@brings("MountCorrupted", NODE, filesystem="xfs")
async def the_filesystem_is_shut_down(world):
    subprocess.run(["xfs_io", "-x", "-c", "shutdown", str(world.target)], check=True, capture_output=True)
    yield
    await world.again()


@brings("MountDead", NODE)
async def the_mount_at_the_target_dies(world):
    with dead_mount(world.target):
        yield


@brings("DirectIOLost", NODE)
async def the_device_caches_twice(world):
    number = world.device.number
    assert loop.set_direct_io(number, False) is False
    yield
    loop.set_direct_io(number, True)


@brings("IoLimitsNotApplied", NODE)
async def the_machine_has_no_controller_for_io(world):
    """As after a restart on a kernel without one: the volume's limits are in its record."""
    world.parts.pools.named().volumes.modify(world.volume, {"readIOPS": "100"})
    had = dict(vars(world.parts.cgroups))
    vars(world.parts.cgroups).update(vars(IoCgroups(world.scratch)))
    yield
    vars(world.parts.cgroups).update(had)
    world.parts.pools.named().volumes.modify(world.volume, {"readIOPS": "0"})


# --- the test ----------------------------------------------------------------------------------


@pytest.fixture
async def world(make_filesystem, tmp_path, story):
    base = make_filesystem(story.pool, 1024 * MIB)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (base / "pool").mkdir()
    settings = PluginSettings(
        f"unix://{tmp_path}/csi.sock", "node-1", {"default": base / "pool"}, reserve_fraction=0.3, overcommit=10.0
    )
    async with serve(settings) as parts, CsiClient(settings.endpoint, timeout_s=60) as client:
        made = World(Caller(client, tmp_path), parts, base, scratch)
        size = 320 * MIB if story.filesystem == "xfs" else 64 * MIB
        capability = mounted() if story.kind == "directory" else mounted(story.filesystem)
        made.volume = (await made.caller.create("v", capability, size, parameters={"kind": story.kind})).volume_id
        if story.published:
            made.target = await made.caller.up(made.volume)
        yield made
        await made.caller.leave()


async def told(world: World) -> dict[str, "set[str] | str"]:
    """The reasons by the call that gives them, or the code of its refusal."""
    return {name: await _asked(world, name) for name in sorted(CONTROLLER | NODE | POOL)}


async def _asked(world: World, name: str) -> "set[str] | str":
    client, volume, path = world.caller.client, world.volume, str(world.target)
    if name == "NodeGetVolumeStats" and not world.target.name:
        return set()
    requests = {
        "ControllerGetVolumeHealth": pb.ControllerGetVolumeHealthRequest(volume_id=volume),
        "ControllerListVolumeHealth": pb.ControllerListVolumeHealthRequest(),
        "ListVolumes": pb.ListVolumesRequest(),
        "ControllerGetVolume": pb.ControllerGetVolumeRequest(volume_id=volume),
        "NodeGetVolumeHealth": pb.NodeGetVolumeHealthRequest(
            volume_id=volume, volume_publish_path=path if world.target.name else ""
        ),
        "NodeGetVolumeStats": pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=path),
        "NodeGetStorageHealth": pb.NodeGetStorageHealthRequest(),
    }
    try:
        answer = await client.call(name, requests[name])
    except CsiError as error:
        return error.code
    match name:
        case "NodeGetStorageHealth":
            return {each.reason for each in answer.backend_health}
        case "ControllerListVolumeHealth":
            return reasons_in(*answer.entries)
        case "ListVolumes":
            return conditions_in(*(entry.status.volume_condition for entry in answer.entries))
        case "ControllerGetVolume":
            return conditions_in(answer.status.volume_condition)
        case "NodeGetVolumeStats":
            return conditions_in(answer.volume_condition)
        case _:
            return reasons_in(answer.volume_health)


def reasons_in(*volumes: pb.VolumeHealth) -> set[str]:
    found = {each.reason: each for volume in volumes for each in volume.health_statuses}
    for reason, entry in found.items():
        assert pb.VolumeHealthErrorType.Name(entry.status) == REASONS[reason].value
        assert entry.message
    return set(found)


def conditions_in(*conditions: pb.VolumeCondition) -> set[str]:
    for condition in conditions:
        assert condition.message
    said = "; ".join(condition.message for condition in conditions if condition.abnormal)
    return {reason for reason in REASONS if f"{reason}: " in said}


def pytest_generate_tests(metafunc):
    if "story" in metafunc.fixturenames:
        metafunc.parametrize(("reason", "story"), STORIES.items(), ids=STORIES)


async def test_a_reason_comes_with_its_cause_and_goes_with_it(world, reason, story):
    healthy = {name: set() for name in CONTROLLER | NODE | POOL}
    assert await told(world) == healthy
    seen_by = "NodeGetVolumeHealth" if "NodeGetVolumeHealth" in story.told_by else "NodeGetStorageHealth"
    async with story.make(world):
        async with asyncio.timeout(20):  # the kernel may take a moment to remount
            while reason not in (found := await told(world))[seen_by]:
                await asyncio.sleep(0.05)
        for name, answer in found.items():
            if name in story.told_by:
                assert reason in answer, (name, found)
            elif name in story.errors:
                assert answer == story.errors[name], (name, found)
            else:
                assert reason not in answer, (name, found)
    assert await told(world) == healthy


def test_every_reason_has_its_story_and_its_line_in_the_page():
    assert set(STORIES) == set(REASONS)
    page = Path(__file__).parents[3] / "docs" / "reference" / "csi-support.md"
    section = page.read_text().split("## Health")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (`.*?) \| ([A-Z_]+) \| (.*?) \|$", section, re.MULTILINE)
    written = {reason: (status, where) for names, status, where in lines for reason in re.findall(r"`(\w+)`", names)}
    expected = {}
    for reason, story in STORIES.items():
        where = "node" if story.told_by <= NODE | POOL else "controller, node"
        expected[reason] = (REASONS[reason].value, where)
    assert written == expected


def test_no_reason_is_given_past_the_table():
    """Only the table's own function makes an entry, so a reason that is not in it fails at once."""
    root = Path(__file__).parents[3] / "src" / "moorage"
    makers = [
        file.name
        for part in ("storage", "plugin", "host", "csi")
        for file in (root / part).glob("*.py")
        if re.search(r"(?<!class )(?<!\w)HealthEntry\(", file.read_text().replace("VolumeHealthEntry(", ""))
    ]
    assert makers == ["health.py"]
