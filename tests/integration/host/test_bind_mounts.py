"""Bind mounts with options: they are never seen without them."""

import errno
import os

import pytest

from moorage.host import libc, mountinfo, mounts
from moorage.host.errors import HostError

pytestmark = pytest.mark.root


@pytest.fixture
def places(tmp_path):
    """A small filesystem with a file in it, and an empty directory."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    mounts.mount("none", source, "tmpfs", ["size=1m", "noexec"])
    (source / "file").write_text("kept")
    try:
        yield source, target
    finally:
        for one in reversed(mountinfo.mounts_below(tmp_path)):
            mounts.unmount(one.target)


@pytest.fixture(params=["one step", "two steps"])
def either(request, monkeypatch):
    """Kernels that can set options before a mount is seen, and those before 5.12."""
    if request.param == "two steps":
        monkeypatch.setattr(libc, "open_tree", _not_there)


@pytest.fixture(params=["path", "table"])
def asked(request, monkeypatch):
    """Kernels that tell of a path whether a mount is there, and those before 5.8."""
    if request.param == "table":
        monkeypatch.setattr(libc, "is_mount_root", lambda _path: None)


@pytest.mark.usefixtures("asked")
def test_whether_something_is_mounted_at_exactly_a_path(places):
    source, target = places
    file, link = target / "file", target / "link"
    assert mountinfo.is_mounted(source)
    assert not mountinfo.is_mounted(source / "file")
    assert not mountinfo.is_mounted(target)
    assert not mountinfo.is_mounted(target / "missing")
    assert not mountinfo.is_mounted(source / "file" / "below a file")
    file.touch()
    link.symlink_to(source)
    mounts.bind(source / "file", file)
    assert mountinfo.is_mounted(file)
    assert not mountinfo.is_mounted(link)
    assert mounts.unmount_all(file) == 1
    assert not mountinfo.is_mounted(file)


def _not_there(*_arguments, **_named):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def words(target):
    found = mountinfo.mount_at(target)
    assert found is not None
    return set(found.options)


def test_a_bind_without_options_has_those_of_its_source(places):
    source, target = places
    mounts.bind(source, target)
    assert {"rw", "noexec"} <= words(target)
    assert (target / "file").read_text() == "kept"


@pytest.mark.usefixtures("either")
def test_a_bind_has_the_options_that_are_named_and_no_others(places):
    source, target = places
    mounts.bind(source, target, ["ro", "nosuid,nodev", "noatime"])
    assert {"ro", "nosuid", "nodev", "noatime"} <= words(target)
    assert "noexec" not in words(target)
    assert "rw" in words(source), "the source is as it was"
    with pytest.raises(OSError, match="Read-only"):
        (target / "file").write_text("changed")


@pytest.mark.usefixtures("either")
def test_times_stay_as_they_are_unless_they_are_named(places):
    source, target = places
    mounts.bind(source, source, ["noatime"])
    mounts.bind(source, target, ["ro"])
    assert {"ro", "noatime"} <= words(target)


@pytest.mark.usefixtures("either")
def test_a_handle_on_the_target_is_enough(places):
    source, target = places
    handle = os.open(target, os.O_PATH)
    try:
        mounts.bind(source, f"/proc/self/fd/{handle}", ["ro"], shown=str(target))
    finally:
        os.close(handle)
    assert "ro" in words(target)


@pytest.mark.usefixtures("either")
def test_what_is_mounted_below_comes_along_if_asked_for(places):
    source, target = places
    (source / "below").mkdir()
    mounts.mount("none", source / "below", "tmpfs")
    mounts.bind(source, target, ["ro"], recursive=True)
    assert mountinfo.mount_at(target / "below") is not None
    assert "ro" in words(target)


@pytest.mark.parametrize("step", ["mount_setattr", "move_mount"])
def test_a_failure_in_the_middle_leaves_nothing(places, monkeypatch, step):
    source, target = places
    open_before = len(os.listdir("/proc/self/fd"))

    def refuse(*_arguments, **_named):
        assert mountinfo.mount_at(target) is None, "a kill now leaves nothing behind"
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(libc, step, refuse)
    with pytest.raises(HostError, match="not permitted"):
        mounts.bind(source, target, ["ro"])
    assert mountinfo.mount_at(target) is None
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_options_of_a_filesystem_are_refused(places):
    source, target = places
    with pytest.raises(HostError, match="size=2m"):
        mounts.bind(source, target, ["ro", "size=2m"])
    assert mountinfo.mount_at(target) is None
