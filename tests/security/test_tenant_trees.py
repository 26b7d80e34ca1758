"""A tenant makes directory trees that lead the plugin, which walks them as root, to other data, or that stop it.

The tenant writes to its own volume only: through its pod's mount, before, during and after the plugin's work.
"""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from typing import Any

import pytest
from tests.integration.conftest import filesystem, release_below
from tests.support.plugin_caller import Caller, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.host import dir_walk, libc, mounts
from moorage.host.dir_walk import MountInTheWay, opened
from moorage.host.safe_remove import remove_tree, temporary_directory
from moorage.node.volumes.mounters import ownership
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings
from moorage.storage import CreateSnapshot, CreateVolume, InUse, Pool, PoolConfig, Source, VolumeKind, directories
from moorage.storage.errors import Busy
from moorage.storage.transfer.archive import archived, tree_state
from moorage.storage.trees import copy_tree, tree_bytes

pytestmark = pytest.mark.root

MIB = 1 << 20
DIRECTORY = CreateVolume("v", required_bytes=MIB, kind=VolumeKind.DIRECTORY, in_use=InUse.LIVE)
SECRET = "another tenant's data"

# Exchanges a directory and a link to the host's files, thousands of times a second, as a pod would.
SWAPPING = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
print("ready", flush=True)
while True:
    libc.renameat2(-100, b"d", -100, b"swap", 2)
"""


def deep(top, depth, *, linked=False):
    """Directories in one another, by descriptors: the path is longer than any call takes."""
    at = os.open(top, os.O_RDONLY)
    first = os.open(top, os.O_RDONLY)
    for number in range(depth):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
        if linked:
            os.link(f"file{number % 4}", "same", src_dir_fd=first, dst_dir_fd=at)
    os.close(at)
    os.close(first)


@pytest.fixture(scope="module")
def ext4(tmp_path_factory):
    with filesystem(tmp_path_factory.mktemp("ext4"), "ext4", 8 << 30) as place:
        yield place


@pytest.fixture
def disk(ext4):
    """A directory on an ext4, whose pools can copy directories only file by file."""
    place = ext4 / os.urandom(6).hex()
    place.mkdir()
    yield place
    release_below(place)
    remove_tree(place)


@pytest.fixture
def host_files(tmp_path):
    """What stands for the directory of all pods: it must come out of no volume."""
    place = tmp_path / "pods"
    place.mkdir()
    (place / "secret").write_text(SECRET)
    return place


@contextlib.contextmanager
def swapped(directory, link_to):
    """A process of the tenant that exchanges `d`, which has a file `secret` of its own, with a link."""
    (directory / "d").mkdir()
    (directory / "d" / "secret").write_text("the tenant's own")
    for number in range(50):
        (directory / "d" / f"f{number}").touch()
    (directory / "swap").symlink_to(link_to)
    attacker = subprocess.Popen([sys.executable, "-c", SWAPPING, directory], stdout=subprocess.PIPE)
    try:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        yield
    finally:
        attacker.kill()
        attacker.communicate()


def texts_below(top):
    return {path.read_text() for path in top.rglob("*") if path.is_file() and not path.is_symlink()}


@pytest.fixture
def pool(disk):
    with Pool.open(PoolConfig("default", disk / "pool", background=False, trash_retention_s=0)) as opened_:
        yield opened_


# --- links -------------------------------------------------------------------------------------


def test_a_link_put_in_the_place_of_a_directory_leads_no_copy_to_the_hosts_files(pool, host_files):
    volume = pool.create_volume(DIRECTORY)
    with swapped(volume.data, host_files):
        for number in range(40):
            cut = pool.create_snapshot(CreateSnapshot(f"s{number}", volume.id))
            clone = pool.create_volume(
                CreateVolume(
                    f"c{number}",
                    required_bytes=MIB,
                    kind=VolumeKind.DIRECTORY,
                    in_use=InUse.LIVE,
                    source=Source("volume", volume.id),
                )
            )
            assert SECRET not in texts_below(cut.data) | texts_below(clone.data)


def test_a_link_put_in_the_place_of_a_directory_leads_no_measuring_and_no_archive_outside(tmp_path, host_files):
    (host_files / "large").write_bytes(bytes(8 * MIB))
    volume = tmp_path / "volume"
    volume.mkdir()
    with swapped(volume, host_files):
        for _ in range(40):
            assert tree_bytes(str(volume)) < MIB
            tree_state(str(volume))
            with contextlib.suppress(Exception):  # a tree that changes may be refused, but not read elsewhere
                assert SECRET.encode() not in b"".join(archived(str(volume)))


def test_a_link_put_in_the_place_of_a_directory_leads_no_removal_outside(tmp_path, host_files):
    for _ in range(20):
        volume = tmp_path / "volume"
        volume.mkdir()
        with swapped(volume, host_files), contextlib.suppress(Exception):
            remove_tree(volume)
        remove_tree(volume)
        assert not volume.exists()
    assert (host_files / "secret").read_text() == SECRET


def test_an_fs_group_reaches_no_file_of_the_host(tmp_path, host_files):
    shadow = host_files / "secret"
    shadow.chmod(0o600)
    before = os.lstat(shadow)
    volume = tmp_path / "volume"
    (volume / "sub").mkdir(parents=True)
    (volume / "link").symlink_to(shadow)
    (volume / "sub" / "dirlink").symlink_to(host_files)
    with swapped(volume, host_files):
        for _ in range(40):
            os.chown(volume, 0, 0)
            ownership.apply_group(volume, 4321)
    after = os.lstat(shadow)
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)
    assert os.lstat(volume / "link").st_gid == 4321


# --- mounts ------------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "file"])
def volume_with_mount(request, tmp_path, host_files):
    """A bind mount of the same filesystem, as a privileged pod with Bidirectional propagation may leave."""
    volume = tmp_path / "volume"
    (volume / "a").mkdir(parents=True)
    if request.param == "directory":
        (volume / "a" / "there").mkdir()
        mounts.bind(host_files, volume / "a" / "there")
    else:
        (volume / "a" / "there").touch()
        mounts.bind(host_files / "secret", volume / "a" / "there")
    yield volume
    mounts.unmount(volume / "a" / "there")
    remove_tree(volume)


@pytest.mark.parametrize("has_openat2", [True, False])
def test_no_walk_crosses_a_bind_mount_of_the_same_filesystem(
    volume_with_mount, tmp_path, host_files, monkeypatch, has_openat2
):
    if not has_openat2:  # an old kernel, or a seccomp profile without the call

        def missing(*_):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(libc, "openat2", missing)
    before = os.lstat(host_files / "secret")
    (tmp_path / "copy").mkdir()
    with pytest.raises(MountInTheWay, match="volume/a/there is a mount point"):
        copy_tree(str(volume_with_mount), str(tmp_path / "copy"))
    with pytest.raises(MountInTheWay):
        b"".join(archived(str(volume_with_mount)))
    with pytest.raises(MountInTheWay):
        remove_tree(volume_with_mount)
    ownership.apply_group(volume_with_mount, 4321)
    assert (volume_with_mount / "a").stat().st_gid == 4321
    after = os.lstat(host_files / "secret")
    assert (after.st_mode, after.st_gid, after.st_size) == (before.st_mode, before.st_gid, before.st_size)
    assert texts_below(tmp_path / "copy") == set()


def test_a_check_of_a_driver_removes_nothing_behind_a_mount_that_the_driver_left(host_files):
    with temporary_directory("moorage-check-") as scratch:
        (scratch / "target").mkdir()
        mounts.bind(host_files, scratch / "target")
    assert (host_files / "secret").read_text() == SECRET
    mounts.unmount(scratch / "target")
    remove_tree(scratch)


# --- depth and number --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1_100, 5_000])
async def test_nested_directories_stop_neither_the_upkeep_nor_the_next_start_of_a_plugin(
    disk,
    tmp_path,
    depth,
):
    place = disk / "pool"
    settings = PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", {"default": place}, trash_retention_s=0)
    with Pool.open(PoolConfig("default", place, background=False)) as pool:
        left = pool.create_volume(DIRECTORY)
        deep(left.data, depth)
        os.rename(left.data.parent, place / "tmp" / "reclaim-of-a-dead-process")
    async with serve(settings) as parts, CsiClient(settings.endpoint) as client:
        caller = Caller(client, tmp_path)
        volume = (await caller.create("v", parameters={"kind": "directory"})).volume_id
        deep(place / "volumes" / volume / "data", depth)
        await caller.delete(volume)
        async with asyncio.timeout(60):
            while os.listdir(place / "tmp") + os.listdir(place / "trash"):
                await asyncio.sleep(0.05)
        assert parts.pools.named().health.pool() == ()
        other = (await caller.create("w", parameters={"kind": "directory"})).volume_id
        await caller.delete(other)
        async with asyncio.timeout(30):  # the thread that reclaims is still there
            while os.listdir(place / "tmp") + os.listdir(place / "trash"):
                await asyncio.sleep(0.05)


def test_any_depth_is_copied_measured_and_removed_with_little_memory(tmp_path):
    depth = 2_000
    source, target = tmp_path / "source", tmp_path / "target"
    for top in (source, target):
        top.mkdir()
    for number in range(4):
        (source / f"file{number}").write_text("x")
    deep(source, depth, linked=True)
    tracemalloc.start()
    try:
        done = copy_tree(str(source), str(target))
        assert tree_bytes(str(target)) > 0
        remove_tree(target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        remove_tree(source)
    assert done.files == 4  # the links were kept, without a table of paths
    assert not target.exists()
    assert peak < 20 * MIB


def test_a_directory_with_many_names_is_read_with_little_memory(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    for number in range(5_000):
        os.mkdir(top / f"{number:050d}")
    tracemalloc.start()
    try:
        with opened(top) as fd:
            assert sum(1 for _ in dir_walk.tree_bytes(fd)) == 5_000
        remove_tree(top)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert not top.exists()


def test_what_cannot_be_removed_is_reported_and_left_and_the_pool_opens(disk, host_files):
    config = PoolConfig("default", disk / "pool", background=False)
    with Pool.open(config) as pool:
        volume = pool.create_volume(DIRECTORY)
        place = config.directory / "tmp" / "reclaim-x"
        os.rename(volume.data.parent, place)
    (place / "data" / "here").mkdir()
    mounts.bind(host_files, place / "data" / "here")
    try:
        with Pool.open(config) as pool:
            (entry,) = pool.health.pool()
            assert entry.reason == "CannotReclaim"
            assert str(place) in entry.message
            assert pool.health.of(pool.create_volume(CreateVolume("w", required_bytes=MIB)).id) == ()
    finally:
        mounts.unmount(place / "data" / "here")
    assert (host_files / "secret").read_text() == SECRET
    with Pool.open(config) as pool:
        assert pool.health.pool() == ()
    assert not place.exists()


def test_any_exception_leaves_the_thread_that_reclaims_alive(tmp_path, monkeypatch):
    with Pool.open(PoolConfig("default", tmp_path / "pool", overcommit=1000.0, trash_retention_s=0)) as pool:
        seen = threading.Event()

        def failing():
            seen.set()
            raise RecursionError("as a hostile tree once caused")

        with monkeypatch.context() as patched:
            patched.setattr(pool.trash, "sweep", failing)
            pool._wake.set()
            assert seen.wait(10)
        pool.delete_volume(pool.create_volume(CreateVolume("v", required_bytes=MIB)).id)
        deadline = time.monotonic() + 30
        while pool.trash.listed() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert pool.trash.listed() == []


def test_an_fs_group_walks_over_many_directories_with_little_memory(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    for number in range(1_500):
        os.mkdir(top / f"{number:0200d}")
    tracemalloc.start()
    try:
        assert ownership.apply_group(top, 4321) == 1_501
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB // 4
    assert os.stat(top / f"{0:0200d}").st_gid == 4321


def test_files_with_several_names_are_measured_once_and_without_a_table(tmp_path):
    (tmp_path / "a").write_bytes(bytes(MIB))
    for number in range(7):
        os.link(tmp_path / "a", tmp_path / f"b{number}")
    assert MIB <= tree_bytes(str(tmp_path)) < MIB + 64 * 1024


# --- names and contents ------------------------------------------------------------------------


async def test_names_that_are_no_text_break_no_answer(disk, tmp_path, host_files):
    """What cannot be copied or removed is named in errors and in the health of the pool, which are Unicode."""
    pools = {"default": disk / "pool"}
    settings = PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", pools, trash_retention_s=0)
    async with serve(settings) as parts, CsiClient(settings.endpoint, timeout_s=60) as client:
        caller = Caller(client, tmp_path)
        volume = (await caller.create("v", parameters={"kind": "directory"})).volume_id
        data = os.fsencode(disk / "pool" / "volumes" / volume / "data")
        for name in (b"\xff\xfe", b"new\nline", b"\x1b[2J", "\u202e".encode(), b"n" * 255):
            os.mkdir(data + b"/" + name)
            open(data + b"/" + name + b"/" + name, "w").close()
        cut = await caller.snapshot(volume)
        await client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=cut.snapshot_id))
        place = os.fsdecode(data + b"/\xff\xfe")
        mounts.bind(host_files, place)
        try:
            with pytest.raises(CsiError, match="is a mount point") as caught:
                await caller.snapshot(volume, "t")
            assert caught.value.code == "FAILED_PRECONDITION"
            await caller.delete(volume)
            async with asyncio.timeout(30):
                while not (found := parts.pools.named().health.pool()):
                    await asyncio.sleep(0.02)
            assert (found[0].reason, found[0].message.isprintable()) == ("CannotReclaim", True)
            assert "CannotReclaim" in str(await client.NodeGetStorageHealth(pb.NodeGetStorageHealthRequest()))
        finally:
            release_below(disk)
        assert (host_files / "secret").read_text() == SECRET


def test_a_file_of_nothing_but_holes_is_copied_as_it_is(pool):
    volume = pool.create_volume(DIRECTORY)
    with open(volume.data / "bomb", "wb") as file:
        file.truncate(8 << 40)
        file.seek(4 << 40)
        file.write(b"x")
    cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
    found = os.stat(cut.data / "bomb")
    assert (found.st_size, found.st_blocks * 512 < MIB) == (8 << 40, True)


# --- special files -----------------------------------------------------------------------------


def test_special_files_are_copied_as_they_are_and_never_opened(tmp_path):
    """A FIFO without a writer would block the plugin; a device may do anything when it is opened."""
    source, target = tmp_path / "source", tmp_path / "target"
    for top in (source, target):
        top.mkdir()
    os.mkfifo(source / "fifo")
    os.mknod(source / "tape", stat.S_IFCHR | 0o600, os.makedev(9, 0))
    os.mknod(source / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 250))
    os.symlink("/dev/zero", source / "link")
    worker = threading.Thread(target=copy_tree, args=(str(source), str(target)), daemon=True)
    worker.start()
    worker.join(10)
    assert not worker.is_alive()
    assert [stat.S_IFMT(os.lstat(target / name).st_mode) for name in ("fifo", "tape", "disk", "link")] == [
        stat.S_IFIFO,
        stat.S_IFCHR,
        stat.S_IFBLK,
        stat.S_IFLNK,
    ]
    assert b"".join(archived(str(source)))


@pytest.mark.parametrize("flag", ["+i", "+a"])
def test_immutable_files_and_directories_are_removed_too(disk, flag):
    top = disk / "top"
    (top / "d").mkdir(parents=True)
    (top / "d" / "file").touch()
    subprocess.run(["chattr", flag, top / "d" / "file", top / "d"], check=True)
    remove_tree(top)
    assert not top.exists()


# --- a pod that starts during a copy -----------------------------------------------------------


async def test_a_pod_does_not_start_while_its_volume_is_copied_at_rest(disk, tmp_path, monkeypatch):
    settings = PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", {"default": disk / "pool"})
    copying, go_on = threading.Event(), threading.Event()
    real = directories.copy

    def slow(*arguments):
        copying.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(directories, "copy", slow)
    async with serve(settings), CsiClient(settings.endpoint, timeout_s=60) as client:
        caller = Caller(client, tmp_path)
        volume = (await caller.create("v", parameters={"kind": "directory"})).volume_id
        cut = asyncio.create_task(caller.snapshot(volume))
        await asyncio.to_thread(copying.wait, 30)
        staged = asyncio.create_task(caller.stage(volume, mounted()))
        await asyncio.sleep(0.5)
        assert not staged.done()
        assert not os.path.ismount(caller.staging(volume))
        go_on.set()
        await cut
        await staged
        target = await caller.publish(volume, mounted())
        (target / "file").write_text("after the copy")
        await caller.leave()


def test_a_volume_is_not_copied_or_deleted_while_it_is_staged(pool, monkeypatch):
    monkeypatch.setattr("moorage.storage.layout._LOCK_WAIT_S", 0.1)
    volume = pool.create_volume(CreateVolume("v", required_bytes=MIB, kind=VolumeKind.DIRECTORY))
    with pool.volumes.locked(volume.id, shared=True), pool.volumes.locked(volume.id, shared=True):
        with pytest.raises(Busy):
            pool.create_snapshot(CreateSnapshot("s", volume.id))
        with pytest.raises(Busy):
            pool.delete_volume(volume.id)
    pool.create_snapshot(CreateSnapshot("s", volume.id))


async def test_no_copy_at_rest_has_half_of_what_a_pod_wrote(disk, tmp_path):
    """The pod writes one number into two files; snapshots race with its start and end."""
    settings = PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", {"default": disk / "pool"})
    async with serve(settings), CsiClient(settings.endpoint, timeout_s=60) as client:
        caller = Caller(client, tmp_path)
        volume = (await caller.create("v", parameters={"kind": "directory"})).volume_id
        taken: list[Any] = []
        stop = asyncio.Event()

        async def copy_all_the_time():
            while not stop.is_set():
                with contextlib.suppress(CsiError):  # in use, or being staged
                    taken.append((await caller.snapshot(volume, f"s{len(taken)}-{os.urandom(4).hex()}")).snapshot_id)

        copying = asyncio.create_task(copy_all_the_time())
        try:
            for number in range(12):
                target = await until_free(lambda: caller.up(volume))
                (target / "a").write_text(str(number))
                await asyncio.sleep(0)
                (target / "b").write_text(str(number))
                await until_free(lambda: caller.unpublish(volume))
                await until_free(lambda: caller.unstage(volume))
        finally:
            stop.set()
            await copying
        assert taken
        for ident in taken:
            data = disk / "pool" / "snapshots" / ident / "data"
            texts = [(data / name).read_text() if (data / name).exists() else "" for name in ("a", "b")]
            assert texts[0] == texts[1]


async def until_free(call):
    """Repeat a call that is refused because another one on the volume is running, as the kubelet does."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except CsiError as error:
                if error.code not in ("ABORTED", "UNAVAILABLE"):
                    raise
            await asyncio.sleep(0.01)
