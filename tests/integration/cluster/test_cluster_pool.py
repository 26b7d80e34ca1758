"""The pool that `moorage up` makes: a directory, or XFS in a file where the filesystem cannot reflink."""

import fcntl
import stat

import pytest

from moorage.cluster import pool
from moorage.cluster.layout import DataLayout
from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.errors import UsageError
from moorage.host import loop, mountinfo

pytestmark = pytest.mark.root
GIB = 1 << 30


@pytest.fixture
def layout(tmp_path):
    layout = DataLayout(tmp_path)
    layout.make()
    yield layout
    pool.release_pool(layout)


def test_a_pool_in_a_file_reflinks_and_keeps_its_content(layout, monkeypatch):
    monkeypatch.setattr(
        pool,
        "can_reflink",
        lambda directory, real=pool.can_reflink: bool(mountinfo.mount_at(directory)) and real(directory),
    )
    report = pool.ensure_pool(layout, None, GIB)
    assert report.can_reflink
    assert report.advice == ""
    (layout.pool / "kept").write_text("here")
    pool.release_pool(layout)
    assert not (layout.pool / "kept").exists()
    assert loop.find(layout.pool_image) == []

    pool.ensure_pool(layout, None, 0)
    assert (layout.pool / "kept").read_text() == "here"
    pool.ensure_pool(layout, None, 0)
    assert len([m for m in mountinfo.mounts() if m.target == str(layout.pool)]) == 1


def test_a_file_that_holds_something_else_is_never_formatted(layout, monkeypatch):
    layout.pool_image.write_bytes(b"\0" * 1024 + b"precious" * 1000 + b"\0" * (1 << 20))
    before = layout.pool_image.read_bytes()
    with pytest.raises(Exception, match=r"."):
        pool.ensure_pool(layout, None, GIB)
    assert layout.pool_image.read_bytes() == before
    assert loop.find(layout.pool_image) == []


def test_a_pool_that_is_too_small_is_refused(layout, monkeypatch):
    monkeypatch.setattr(pool, "can_reflink", lambda directory: False)
    with pytest.raises(pool.PoolNotCreated, match="at least 300 MiB"):
        pool.ensure_pool(layout, None, 1 << 20)


def test_a_plain_directory_comes_with_advice(layout, monkeypatch):
    monkeypatch.setattr(pool, "can_reflink", lambda directory: False)
    assert "--pool-size" in pool.ensure_pool(layout, None, 0).advice


def test_only_root_may_read_the_file_of_a_pool(layout, monkeypatch):
    monkeypatch.setattr(pool, "can_reflink", lambda directory: False)
    pool.ensure_pool(layout, None, GIB)
    assert stat.S_IMODE(layout.pool_image.stat().st_mode) == 0o600
    pool.release_pool(layout)
    layout.pool_image.chmod(0o644)  # as an earlier version made it
    pool.ensure_pool(layout, None, 0)
    assert stat.S_IMODE(layout.pool_image.stat().st_mode) == 0o600


async def test_a_second_cluster_leaves_the_pool_of_the_first_mounted(layout, monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "can_reflink", lambda directory: False)
    pool.ensure_pool(layout, None, GIB)
    with layout.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = Cluster(UpSettings(tmp_path))
        with pytest.raises(UsageError, match="another `moorage up`"):
            await second.start()
        await second.stop()
        assert mountinfo.mount_at(layout.pool) is not None
