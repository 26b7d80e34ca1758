"""What an earlier run left: nothing mounted is forgotten or removed through a mount, and nothing stays for ever."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from moorage.errors import MoorageError
from moorage.host import libc, loop, mountinfo, mounts
from moorage.host.dir_walk import MountInTheWay
from moorage.host.safe_remove import remove_empty_tree, remove_tree
from moorage.kube.objects.pods import Pod
from moorage.node.layout import NodeLayout
from moorage.node.pods import manager as pods
from moorage.node.pods.cleanup import remove_pod_directory
from moorage.node.volumes import leftovers
from moorage.node.volumes.mounters import vol_data
from moorage.node.volumes.state import CsiSource

pytestmark = pytest.mark.root
DAMAGE = ["missing", "{", '{"driverName": "x"}']
SOURCE = CsiSource("d", "h", "pv")


@pytest.fixture
def layout(tmp_path):
    made = NodeLayout(tmp_path / "r")
    made.pods.mkdir(parents=True)
    yield made
    left = [one.target for one in mountinfo.mounts_below(tmp_path)]
    for target in reversed(left):
        mounts.unmount(target, lazy=True)
    assert left == []


@pytest.fixture
def precious(tmp_path):
    """Somebody's data: a file, a directory with nothing in it, and a link to both."""
    place = tmp_path / "precious"
    (place / "empty" / "deeper").mkdir(parents=True)
    (place / "data").write_text("irreplaceable")
    yield place
    assert (place / "data").read_text() == "irreplaceable"
    assert (place / "empty" / "deeper").is_dir()


def damage(directory: Path, what: str):
    directory.mkdir(parents=True, exist_ok=True)
    if what == "missing":
        vol_data.remove(directory)
    else:
        (directory / vol_data.NAME).write_text(what)


@pytest.mark.parametrize("what", DAMAGE, ids=["missing", "cut", "incomplete"])
def test_a_gone_pods_volume_with_lost_data_is_unmounted_and_its_directory_goes(layout, precious, what):
    directory = layout.csi_volume("uid-1", "pv")
    target = layout.publish_target("uid-1", "pv")
    target.mkdir(parents=True)
    mounts.bind(precious, target)
    damage(directory, what)
    remove_pod_directory(layout, "uid-1")
    assert not layout.pod("uid-1").exists()
    assert mountinfo.mounts_below(layout.root) == []


def test_a_volume_whose_data_is_there_is_not_unmounted_without_its_driver(layout, precious):
    target = layout.publish_target("uid-1", "pv")
    target.mkdir(parents=True)
    mounts.bind(precious, target)
    vol_data.write(layout.csi_volume("uid-1", "pv"), vol_data.for_pod(SOURCE, "n", "a"))
    with pytest.raises(MountInTheWay):
        remove_pod_directory(layout, "uid-1")
    assert (target / "data").exists()
    mounts.unmount(target)


@pytest.mark.parametrize("what", DAMAGE, ids=["missing", "cut", "incomplete"])
def test_a_gone_pods_block_volume_with_lost_data_leaves_nothing(layout, tmp_path, what):
    backing = tmp_path / "disk"
    backing.write_bytes(b"x" * (1 << 20))
    device = loop.attach(backing, direct_io=False)
    try:
        for place in (layout.block_map("pv", "uid-1"), layout.block_publish("pv", "uid-1")):
            place.parent.mkdir(parents=True)
            place.touch()
            mounts.bind(device.path, place)
        layout.block_staging("pv").mkdir(parents=True)
        damage(layout.block_data("pv"), what)
        link = layout.block_link("uid-1", "pv")
        link.parent.mkdir(parents=True)
        link.symlink_to(layout.block_map("pv", "uid-1"))
        remove_pod_directory(layout, "uid-1")
    finally:
        left = mountinfo.mounts_below(layout.root)
        for one in left:
            mounts.unmount(one.target)
        loop.detach(device)
    assert left == []
    assert not layout.pod("uid-1").exists()
    assert list(layout.block_devices.iterdir()) == [layout.block_devices / "staging"]
    assert backing.read_bytes() == b"x" * (1 << 20)


@pytest.mark.parametrize("what", DAMAGE, ids=["missing", "cut", "incomplete"])
def test_a_staged_volume_with_lost_data_goes_unless_somebody_has_or_wants_it(layout, precious, what):
    directory, target = layout.staging("d", "h"), layout.staging_target("d", "h")
    target.mkdir(parents=True)
    mounts.bind(precious, target)
    damage(directory, what)
    leftovers.release_staged(layout, [directory], known={directory})
    assert mountinfo.mount_at(target) is not None  # it is wanted, or its pod is known
    shown = layout.publish_target("uid-1", "pv")
    shown.mkdir(parents=True)
    mounts.bind(target, shown)
    leftovers.release_staged(layout, [directory], known=())
    assert mountinfo.mount_at(target) is not None  # a pod shows it
    mounts.unmount(shown)
    vol_data.write(directory, vol_data.for_device(SOURCE))
    leftovers.release_staged(layout, [directory], known=())
    assert mountinfo.mount_at(target) is not None  # it was staged again in the meantime
    damage(directory, what)
    leftovers.release_staged(layout, [directory], known=())
    assert mountinfo.mounts_below(layout.root) == []
    assert not directory.exists()


async def test_the_agent_takes_away_what_nobody_can_give_back(lab):
    layout = NodeLayout(lab.root)
    theirs = lab.base / "theirs"
    theirs.mkdir()
    (theirs / "data").write_text("kept")
    target = layout.staging_target("gone.dev", "h")
    target.mkdir(parents=True)
    mounts.bind(theirs, target)
    damage(layout.staging("gone.dev", "h"), "{")
    damage(layout.csi_volume("uid-gone", "pv"), "{")
    layout.publish_target("uid-gone", "pv").mkdir()
    mounts.bind(theirs, layout.publish_target("uid-gone", "pv"))
    await lab.start_agent()
    await lab.until(lambda: not layout.pod("uid-gone").exists(), what="the pod's directory gone")
    await lab.stop_agent()
    await lab.start_agent()  # now that no pod shows it
    await lab.until(lambda: not layout.staging("gone.dev", "h").exists(), what="staging directory gone")
    assert lab.mounted() == []
    assert (theirs / "data").read_text() == "kept"
    await lab.stop_agent()


async def test_what_a_driver_mounts_long_after_it_was_given_up_is_taken_away_while_the_agent_runs(lab, monkeypatch):
    monkeypatch.setattr(pods, "SWEEP_S", 0.2)
    async with lab.one_pod() as (driver, pod):
        layout, theirs = NodeLayout(lab.root), lab.base / "theirs"
        theirs.mkdir()
        (theirs / "data").write_text("kept")
        late = [layout.staging_target("scripted.dev", "late"), layout.publish_target("uid-gone", "pv")]
        for place in late:
            place.mkdir(parents=True)
            mounts.bind(theirs, place)
        await lab.until(lambda: not layout.pod("uid-gone").exists(), what="the pod's directory gone")
        await lab.until(lambda: not late[0].parent.exists(), what="the staged volume gone")
        assert (theirs / "data").read_text() == "kept"
        assert len(lab.mounted()) == 2  # what is wanted stays
        assert mountinfo.mount_at(lab.target(pod)) is not None
        assert driver.requests("NodeUnpublishVolume") == []
        await lab.end("p1")


# Removal.


def plant(kind, place: Path, precious: Path):
    """Something that leads to precious data."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        place.symlink_to(precious)
    elif kind == "link to a file":
        place.symlink_to(precious / "data")
    elif kind == "directory mount":
        place.mkdir()
        mounts.bind(precious, place)
    elif kind == "mount of empty directories":
        place.mkdir()
        mounts.bind(precious / "empty", place)
    else:
        place.touch()
        mounts.bind(precious / "data", place)


MOUNTS = ["directory mount", "mount of empty directories", "file mount"]
LINKS = ["link", "link to a file"]


@pytest.mark.parametrize("kind", MOUNTS)
@pytest.mark.parametrize("removal", [remove_tree, remove_empty_tree])
@pytest.mark.parametrize("depth", ["", "a", "a/b"])
def test_no_removal_reaches_through_a_mount_wherever_it_lies(tmp_path, layout, precious, kind, removal, depth):
    top = tmp_path / "top"
    place = top / depth if depth else top
    plant(kind, place, precious)
    with pytest.raises(MoorageError):
        removal(top)
    assert mountinfo.mount_at(place) is not None
    mounts.unmount(place)
    remove_tree(top)
    assert not top.exists()


@pytest.mark.parametrize("level", [0, 10, 60])
def test_no_way_back_from_the_depths_leads_into_a_mount_made_meanwhile(tmp_path, layout, monkeypatch, level):
    """Not even into one of the directory over itself: it is on top of the one that the walk came from."""
    top = tmp_path / "top"
    top.joinpath(*["d"] * 150).mkdir(parents=True)
    place = top.joinpath(*["d"] * level)
    list_directory, looks = libc.getdents, []

    def mounting(fd):
        looks.append(fd)
        if len(looks) == 150:
            mounts.bind(place, place)
        return list_directory(fd)

    with monkeypatch.context() as patch:
        patch.setattr(libc, "getdents", mounting)
        with pytest.raises(MountInTheWay):
            remove_tree(top)
    assert (place / "d").is_dir()  # nothing in it was touched any more
    mounts.unmount(place)
    remove_tree(top)
    assert not top.exists()


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("depth", ["", "a"])
def test_a_link_is_removed_or_refused_but_never_followed(tmp_path, precious, kind, depth):
    top = tmp_path / "top"
    plant(kind, top / depth if depth else top, precious)
    with pytest.raises(MoorageError, match="should be empty"):
        remove_empty_tree(top)
    remove_tree(top)
    assert not os.path.lexists(top)


@pytest.mark.parametrize("kind", MOUNTS + LINKS)
@pytest.mark.parametrize(
    "place",
    ["volumes/kubernetes.io~csi/pv/mount/x", "volumes/x", "volumeDevices/kubernetes.io~csi/pv", "volume-subpaths/v/c/0",
     "containers/main/0/x", "plugins/x"],
)  # fmt: skip
def test_an_orphans_directory_stays_until_what_leads_elsewhere_is_gone(layout, precious, kind, place):
    pod = layout.pod("uid-1")
    plant(kind, pod / place, precious)
    removable = kind in LINKS and place.startswith(("containers", "volumeDevices"))
    if removable:  # our own records, and the link of a block volume whose data is lost
        remove_pod_directory(layout, "uid-1")
        assert not pod.exists()
        return
    with pytest.raises((MoorageError, OSError)):
        remove_pod_directory(layout, "uid-1")
    assert os.path.lexists(pod / place)
    if kind in MOUNTS:
        mounts.unmount(pod / place)
    if (pod / place).is_dir() and not (pod / place).is_symlink():
        (pod / place).rmdir()
    else:
        (pod / place).unlink()
    remove_pod_directory(layout, "uid-1")
    assert not pod.exists()


# Volumes that the agent makes itself.


async def test_what_another_plugin_left_is_removed_only_if_it_is_empty(lab):
    layout = NodeLayout(lab.root)
    foreign = layout.plain_volume("uid-gone", "kubernetes.io/nfs", "share")
    foreign.mkdir(parents=True)
    (foreign / "file").write_text("whose is this")
    agent = await lab.start_agent()
    name = "kubernetes.io/nfs/uid-gone-share"
    await lab.until(lambda: agent.volumes.world.actual[name].backoffs, what="removal refused")
    assert (foreign / "file").read_text() == "whose is this"
    (foreign / "file").unlink()
    await lab.until(lambda: not layout.pod("uid-gone").exists(), what="the empty directory gone")
    await lab.stop_agent()


@pytest.mark.parametrize("medium", ["", "Memory"])
async def test_an_empty_dir_is_made_once_and_stays_as_its_pod_made_it(lab, medium):
    await lab.start_agent()
    volumes = [{"name": "data", "emptyDir": {"medium": medium}}]
    pod = await lab.pod(
        claim="", volumes=volumes, mounts=[{"name": "data", "mountPath": "/data"}], securityContext={"fsGroup": 4321}
    )
    await lab.phase("p1", "Running")
    place = NodeLayout(lab.root).plain_volume(pod.uid, "kubernetes.io/empty-dir", "data")
    assert stat.S_IMODE(place.stat().st_mode) == 0o2777
    assert place.stat().st_gid == 4321
    place.chmod(0o700)
    (place / "mine").write_text("x")
    os.chown(place / "mine", 7, 7)
    await lab.crash_agent()
    agent = await lab.start_agent()
    await lab.until(lambda: agent.volumes.is_mounted(pod), what="volume confirmed")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert (place / "mine").stat().st_gid == 7
    await lab.end("p1")
    assert await lab.client.find(Pod, "p1", "default") is None


async def test_an_empty_dir_cut_short_by_a_crash_is_made_whole(lab):
    agent = await lab.start_agent()
    volumes = [{"name": "data", "emptyDir": {}}]
    half = asyncio.Event()

    def cut(layout, uid):
        place = layout.plain_volume(uid, "kubernetes.io/empty-dir", ".data.new")
        place.mkdir(parents=True)
        half.set()

    made = agent.volumes._loop._executor._plain._make

    def crash_once(use, source, directory, payload):
        if not half.is_set():
            cut(agent.layout, use.pod.uid)
            raise OSError("cut short")
        return made(use, source, directory, payload)

    agent.volumes._loop._executor._plain._make = crash_once
    pod = await lab.pod(claim="", volumes=volumes, mounts=[{"name": "data", "mountPath": "/data"}])
    await lab.phase("p1", "Running")
    place = agent.layout.plain_volume(pod.uid, "kubernetes.io/empty-dir", "data")
    assert stat.S_IMODE(place.stat().st_mode) == 0o777
    assert not place.with_name(".data.new").exists()
    await lab.end("p1")
