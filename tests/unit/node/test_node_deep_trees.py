"""Trees that are deeper than anybody makes them, but a container may: they are walked through and removed, too."""

import contextlib
import os
import resource
import stat
import subprocess

import pytest

from moorage.errors import MoorageError
from moorage.host import libc, safe_remove
from moorage.host.safe_remove import remove_empty_tree, remove_tree
from moorage.node.volumes.mounters import ownership

DEPTH = 3000


@contextlib.contextmanager
def few_descriptors(more=100):
    """No more files can be opened than a few beyond those that are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def deep(tmp_path):
    """Makes directories in one another; each has a file and a link to the outside, unless they are to be empty."""
    (tmp_path / "outside").mkdir(mode=0o700)
    (tmp_path / "outside" / "precious").write_text("irreplaceable")

    def make(depth=DEPTH, is_empty=False):
        top = tmp_path / "top"
        top.mkdir()
        at = os.open(top, os.O_RDONLY)
        for _ in range(depth):
            if not is_empty:
                os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=at))
                os.symlink(tmp_path / "outside", "link", dir_fd=at)
            os.mkdir("d", 0o700, dir_fd=at)
            below = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)
        return top

    yield make
    subprocess.run(["rm", "-rf", str(tmp_path / "top"), str(tmp_path / "elsewhere")], check=True)


def is_untouched(tmp_path):
    outside = tmp_path / "outside"
    return (outside / "precious").read_text() == "irreplaceable" and stat.S_IMODE(outside.stat().st_mode) == 0o700


def test_empty_directories_of_any_depth_are_removed_and_what_is_in_them_is_named(deep):
    remove_empty_tree(deep(is_empty=True))
    top = deep(150)
    before = open_descriptors()
    with pytest.raises(MoorageError, match=r"/top/(d/)*(file|link) is left"):
        remove_empty_tree(top)
    assert open_descriptors() == before


def test_a_tree_of_any_depth_goes_to_the_group_and_in_the_end_away(deep, tmp_path):
    top = deep()
    before = open_descriptors()
    with few_descriptors():
        assert ownership.apply_group(top, os.getgid()) == 3 * DEPTH + 1
        assert ownership.apply_group(top, os.getgid()) == 3 * DEPTH + 1
    at = os.open(top, os.O_RDONLY)
    for _ in range(DEPTH):
        assert stat.S_IMODE(os.fstat(at).st_mode) & 0o2770 == 0o2770
        assert stat.S_IMODE(os.stat("file", dir_fd=at).st_mode) == 0o660
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with few_descriptors():
        remove_tree(top)
    assert not top.exists()
    assert open_descriptors() == before
    assert is_untouched(tmp_path)


@pytest.mark.parametrize(
    "walk",
    [remove_tree, lambda top: ownership.apply_group(top, os.getgid())],
    ids=["removed", "given to the group"],
)
def test_a_tree_that_is_moved_meanwhile_leads_nowhere_else(deep, tmp_path, monkeypatch, walk):
    """Its middle is moved to where other things are when the walk has come to its end: the way back ends there."""
    top = deep(200)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "precious").write_text("irreplaceable")
    (elsewhere / "precious").chmod(0o600)
    real, looks = libc.getdents, []

    def moving(fd):
        looks.append(fd)
        if len(looks) == 200:
            middle = top.joinpath(*["d"] * 50)
            middle.rename(elsewhere / "d")
        return real(fd)

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(libc, "getdents", moving)
        with pytest.raises(OSError, match="was moved while"):
            walk(top)
    assert open_descriptors() == before
    assert (elsewhere / "precious").read_text() == "irreplaceable"
    assert stat.S_IMODE((elsewhere / "precious").stat().st_mode) == 0o600
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    walk(top)  # what is left of it


def test_what_somebody_else_removes_meanwhile_is_no_failure(deep, monkeypatch):
    top = deep(3)
    real = os.stat

    def racing(name, **more):
        status = real(name, **more)
        if name == "file" and (top / "d" / "file").exists():
            subprocess.run(["rm", "-rf", *map(str, top.iterdir())], check=True)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(safe_remove.os, "stat", racing)
        remove_tree(top)
    assert not top.exists()
