"""A root directory that is full or cannot be written."""

import contextlib

import pytest

from moorage.host import mounts
from moorage.node.layout import PodUid
from moorage.node.volumes.world import Failure, State

pytestmark = pytest.mark.root
ONE = PodUid("uid-1")


@contextlib.contextmanager
def unwritable(bench, how):
    """The root directory on a disk that is full, or read-only, for as long as the block lasts."""
    filler = bench.layout.root / "filler"
    if how == "full":
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
    else:
        mounts.remount(bench.layout.root, "tmpfs", ["ro"])
    yield
    if how == "full":
        filler.unlink()
    else:
        mounts.remount(bench.layout.root, "tmpfs", ["rw"])


@pytest.fixture
def small(either):
    """The same with a disk of its own, on which a volume's data and directories take inodes as well as room."""
    either.layout.root.mkdir()
    mounts.mount("small", either.layout.root, "tmpfs", ["size=1m", "nr_inodes=200"])
    yield either
    mounts.unmount(either.layout.root, lazy=True)


@pytest.mark.parametrize(("how", "words"), [("full", "No space left"), ("read-only", "Read-only file system")])
async def test_a_driver_is_not_asked_for_what_could_not_be_written_down(small, how, words):
    with unwritable(small, how):
        outcome = await small.mount()
        assert words in outcome.message
        assert outcome.failure is Failure.TRANSIENT
        assert {name for name, _ in small.driver.calls} <= {"NodeGetCapabilities"}
    assert (await small.mount()).failure is None
    assert (await small.unmount()).failure is None
    assert (await small.unstage()).failure is None
    assert small.files() == []


@pytest.mark.parametrize("how", ["full", "read-only"])
async def test_a_pod_leaves_a_full_disk_at_once_and_a_read_only_one_as_soon_as_it_can(small, how):
    await small.mount()
    with unwritable(small, how):
        await small.mount()  # published again: nothing has to be written for that
        assert small.volume.state_of(ONE) is State.MOUNTED
        outcome = await small.unmount()
        if how == "read-only":
            assert outcome.failure is not None
            assert small.volume.state_of(ONE) is State.UNCERTAIN  # tried again, and the device stays until then
        else:
            assert outcome.failure is None
    if how == "read-only":
        assert (await small.unmount()).failure is None
    assert (await small.unstage()).failure is None
    assert [path for path in small.mounted() if path != str(small.layout.root)] == []
    assert small.files() == []
