"""Mounts that answer with errors: EIO and ESTALE of a server that lives, EIO of a filesystem that was shut down. EACCES
is none of them: a filesystem lives although root may not list it."""

import errno
import fcntl
import os
import stat
import struct
import threading

import pytest

from moorage.host import filesystems, libc, loop, mountinfo, mounts
from moorage.node.layout import NodeLayout
from moorage.node.pods.cleanup import find_containers
from moorage.node.volumes.observe import observe
from moorage.testing import LIE

pytestmark = pytest.mark.root
_IN, _OUT = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
_GETATTR = 3
_INIT, _SILENT = 26, frozenset({2, 36, 38, 42})  # FORGET, INTERRUPT, DESTROY and BATCH_FORGET want no answer
_XFS_GOING_DOWN = 0x8004587D


class Refusing:
    """A FUSE filesystem that answers every question with one error."""

    def __init__(self, number):
        self._number = number
        self._threads = []

    def mount(self, target):
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        libc.mount("refusing", str(target), "fuse", 0, f"fd={server},rootmode=40000,user_id=0,group_id=0")
        thread = threading.Thread(target=self._serve, args=(server,), name="refusing filesystem")
        thread.start()
        self._threads.append(thread)
        self._check(target)

    def _check(self, target):
        with pytest.raises(OSError, match=os.strerror(self._number)):
            os.stat(target)
        assert mounts.is_corrupted(target)

    def ended(self):
        """Every mount is gone: the kernel has ended the conversation."""
        for thread in self._threads:
            thread.join(30)
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, server):
        try:
            while True:
                request = os.read(server, 1 << 18)
                _, opcode, unique, *_ = _IN.unpack_from(request)
                if opcode == _INIT:
                    body = struct.pack("=IIIIHHIIHHIII24x", 7, 31, 4096, 0, 12, 10, 4096, 1, 0, 0, 0, 0, 0)[:64]
                    os.write(server, _OUT.pack(_OUT.size + len(body), 0, unique) + body)
                elif opcode not in _SILENT:
                    self._answer(server, opcode, unique)
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.ENOENT):  # unmounted
                raise
        finally:
            os.close(server)

    def _answer(self, server, opcode, unique):
        os.write(server, _OUT.pack(_OUT.size, -self._number, unique))


class KeepingRootOut(Refusing):
    """A filesystem whose top is a directory of somebody, mode 0700, on a server that takes root for nobody."""

    def __init__(self):
        super().__init__(errno.EACCES)

    def _check(self, target):
        assert stat.S_IMODE(os.stat(target).st_mode) == 0o700
        with pytest.raises(PermissionError):
            os.listdir(target)

    def _answer(self, server, opcode, unique):
        if opcode != _GETATTR:
            super()._answer(server, opcode, unique)
            return
        body = struct.pack("=QI4xQ52xIIII12x", 1, 0, 1, stat.S_IFDIR | 0o700, 2, 999, 999)
        os.write(server, _OUT.pack(_OUT.size + len(body), 0, unique) + body)


@pytest.fixture
def keeping_root_out():
    made = KeepingRootOut()
    yield made
    assert made.ended()


@pytest.fixture(params=[errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def refusing(request):
    made = Refusing(request.param)
    yield made
    assert made.ended()


def staging_of(lab):
    return next(lab.root.glob("plugins/kubernetes.io/csi/scripted.dev/*/globalmount"))


async def running(lab, driver, **pod):
    made = await lab.pod(**pod)
    await lab.phase("p1", "Running")
    (driver.data / "vol-c1" / "kept").write_text("data")
    return made


def replace(lab, pod, refusing):
    """Both of the volume's mounts die."""
    for place in (lab.target(pod), staging_of(lab)):
        mounts.unmount(place, lazy=True)
        refusing.mount(place)


async def end(lab, driver, *names):
    for name in names:
        await lab.delete(name)
        await lab.gone(name)
    await lab.until(lambda: not lab.mounted(), what="nothing mounted")
    assert (driver.data / "vol-c1" / "kept").read_text() == "data"
    await lab.stop_agent()


async def test_dead_mounts_go_with_their_pod_although_the_driver_does_nothing(lab, refusing):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        pod = await running(lab, driver)
        replace(lab, pod, refusing)
        driver.fail("NodeUnpublishVolume", LIE)
        driver.fail("NodeUnstageVolume", LIE)
        await end(lab, driver, "p1")
        assert len(driver.requests("NodeUnpublishVolume")) == len(driver.requests("NodeUnstageVolume")) == 1


async def test_dead_mounts_found_after_a_restart_are_made_anew(lab, refusing):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        pod = await running(lab, driver)
        await lab.crash_agent()
        replace(lab, pod, refusing)
        agent = await lab.start_agent()
        await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
        assert (lab.target(pod) / "kept").read_text() == "data"
        await end(lab, driver, "p1")


async def test_a_volume_that_root_may_not_list_is_alive_and_stays_where_it_is(lab, keeping_root_out):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        place = driver.data / "vol-c1"
        place.mkdir()
        keeping_root_out.mount(place)
        try:
            await lab.start_agent()
            pod = await lab.pod()
            await lab.phase("p1", "Running")
            places = (lab.target(pod), staging_of(lab))
            for one in places:  # a mark that goes with the mount
                libc.mount("none", str(one), "", mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_NOEXEC, "")
            await lab.crash_agent()
            agent = await lab.start_agent()
            await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
            assert ["noexec" in mountinfo.mount_at(one).options for one in places] == [True, True]
            await lab.end("p1")
        finally:
            mounts.unmount(place, lazy=True)


async def test_the_next_pod_gets_a_volume_whose_staged_mount_died(lab, refusing):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        await running(lab, driver)
        staging = staging_of(lab)
        mounts.unmount(staging, lazy=True)
        refusing.mount(staging)
        await lab.pod("p2", command="cat /data/kept", restartPolicy="Never")
        await lab.phase("p2", "Succeeded")
        assert not mounts.is_corrupted(staging)
        assert len(driver.requests("NodeStageVolume")) == 2
        await end(lab, driver, "p1", "p2")


async def test_a_container_started_again_gets_its_dead_volume_made_anew(lab, refusing):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        await lab.start_agent()
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "c1"}},
                   {"name": "h", "hostPath": {"path": str(lab.base)}}]  # fmt: skip
        places = [{"name": "data", "mountPath": "/data"}, {"name": "h", "mountPath": "/h"}]
        command = (
            "[ -e /h/go ] && exec cat /data/kept; touch /h/begun; while [ ! -e /h/go ]; do sleep 0.05; done; exit 1"
        )
        pod = await running(lab, driver, command=command, volumes=volumes, mounts=places, restartPolicy="OnFailure")
        await lab.until((lab.base / "begun").exists, what="the first attempt waits")
        replace(lab, pod, refusing)
        (lab.base / "go").touch()
        found = await lab.phase("p1", "Succeeded")
        assert found.status.container_statuses[0].restart_count == 1
        await end(lab, driver, "p1")


@pytest.fixture
def disk(lab):
    """An XFS filesystem on a loop device; mounted by the test, taken away here."""
    backing = lab.base / "disk.img"
    with backing.open("wb") as file:
        file.truncate(320 << 20)
    device = loop.attach(backing)
    filesystems.format_blank(device.path, "xfs")
    yield device
    loop.detach(device)
    backing.unlink()


@pytest.mark.parametrize("driver_helps", [True, False], ids=["driver unmounts", "driver lies"])
async def test_a_filesystem_that_was_shut_down_leaves_with_its_pod_and_keeps_its_data(lab, disk, driver_helps):
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        place = driver.data / "vol-c1"
        place.mkdir()
        mounts.mount(disk.path, place, "xfs")
        await lab.start_agent()
        pod = await running(lab, driver)
        descriptor = os.open(place / "kept", os.O_RDWR)
        os.fsync(descriptor)
        fcntl.ioctl(descriptor, _XFS_GOING_DOWN, struct.pack("=I", 1))  # with its log written, as on a lost disk
        os.close(descriptor)
        assert mounts.is_corrupted(lab.target(pod))
        if not driver_helps:
            driver.fail("NodeUnpublishVolume", LIE)
            driver.fail("NodeUnstageVolume", LIE)
        await lab.delete("p1")
        await lab.gone("p1")
        await lab.until(lambda: not lab.mounted(), what="nothing mounted")
        assert mountinfo.mount_at(place) is not None  # what the driver keeps for itself is not ours
        mounts.unmount(place)
        mounts.mount(disk.path, place, "xfs")
        assert (place / "kept").read_text() == "data"
        mounts.unmount(place)
        await lab.stop_agent()


def die_at(place):
    """A FUSE filesystem without a server: ENOTCONN."""
    place.mkdir(parents=True)
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc.mount("dead", str(place), "fuse", 0, f"fd={server},rootmode=40000,user_id=0,group_id=0")
    os.close(server)
    assert mounts.is_corrupted(place)


@pytest.mark.parametrize(
    "where",
    ["pods/dead", "pods/dead/volumes", "pods/dead/volumes/kubernetes.io~csi", "pods/dead/containers",
     "plugins/kubernetes.io/csi/dead.dev", "plugins/kubernetes.io/csi/dead.dev/0abc"],
)  # fmt: skip
async def test_a_dead_mount_around_volumes_keeps_no_agent_from_starting(lab, where):
    async with lab.one_pod() as (_, pod):
        await lab.crash_agent()
        place = lab.root / where
        die_at(place)
        try:
            agent = await lab.start_agent()
            await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
            agent.pods.sweep()
            await agent.volumes.sweep()
            assert mounts.is_corrupted(place)  # it is left alone
        finally:
            mounts.unmount(place, lazy=True)
        await lab.end("p1")


@pytest.mark.parametrize("find", [observe, find_containers])
def test_a_directory_of_our_own_disk_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, find):
    """What is forgotten would be detached while it is mounted."""
    layout = NodeLayout(tmp_path)
    layout.containers_of("u").mkdir(parents=True)
    layout.volumes_of("u").mkdir(parents=True)
    scan, listing = os.scandir, os.listdir

    def broken(real):
        def look(path):
            if "/u/" in str(path):
                raise OSError(errno.EIO, "Input/output error", str(path))
            return real(path)

        return look

    monkeypatch.setattr(os, "scandir", broken(scan))
    monkeypatch.setattr(os, "listdir", broken(listing))
    with pytest.raises(OSError, match="Input/output error"):
        find(layout)
