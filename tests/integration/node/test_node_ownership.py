"""Files of a volume and the pod's group: what changes, what does not, when it is left alone, who hears of it."""

import errno
import itertools
import os
import stat
from types import SimpleNamespace

import pytest

from moorage.host import libc, mounts
from moorage.node.volumes.mounters import ownership

pytestmark = pytest.mark.root
GID = 4321


@pytest.fixture
def tree(tmp_path):
    """A directory with a file of each kind."""
    root = tmp_path / "volume"
    (root / "d").mkdir(parents=True)
    root.chmod(0o700)
    (root / "d").chmod(0o700)
    for name, mode in (("plain", 0o600), ("program", 0o4700), ("open", 0o6770), ("read", 0o400)):
        path = root / "d" / name
        path.write_text("x")
        os.chown(path, 7, 7)
        path.chmod(mode)
    os.mkfifo(root / "pipe", 0o600)
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o600)
    (root / "link").symlink_to(outside)
    return root


def mode_of(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_everything_goes_to_the_group_and_nothing_else_changes(tree):
    assert ownership.apply_group(tree, GID) == 8
    for path in (tree, *tree.rglob("*")):
        assert path.lstat().st_gid == GID, path
    assert mode_of(tree) == mode_of(tree / "d") == 0o2770
    assert mode_of(tree / "d" / "plain") == 0o660
    assert mode_of(tree / "d" / "program") == 0o4760  # still runs as its owner
    assert mode_of(tree / "d" / "open") == 0o6770  # although a change of group takes these bits away
    assert mode_of(tree / "d" / "read") == 0o660
    assert mode_of(tree / "pipe") == 0o660
    assert (tree / "d" / "plain").stat().st_uid == 7
    outside = tree.parent / "outside"
    assert (mode_of(outside), outside.stat().st_gid) == (0o600, os.getgid())


def test_readers_get_no_right_to_write(tree):
    ownership.apply_group(tree, GID, read_only=True)
    assert mode_of(tree) == 0o2750
    assert mode_of(tree / "d" / "read") == 0o440
    assert ownership.has_group(tree, GID, read_only=True)
    assert not ownership.has_group(tree, GID)


@pytest.mark.parametrize(
    ("gid", "mode", "is_right"),
    [
        (GID, 0o2770, True),
        (GID, 0o2777, True),
        (GID + 1, 0o2770, False),
        (GID, 0o0770, False),
        (GID, 0o2750, False),
        (GID, 0o2760, False),
    ],
)
def test_only_the_top_decides_whether_a_walk_is_needed(tree, gid, mode, is_right):
    os.chown(tree, -1, gid)
    tree.chmod(mode)
    looked_at = ownership.apply_group(tree, GID, only_on_root_mismatch=True)
    assert looked_at == (0 if is_right else 8)
    assert ((tree / "d").stat().st_gid == GID) is not is_right
    assert ownership.apply_group(tree, GID) == 8  # without that policy it is always made


def test_the_top_is_last_so_that_a_walk_cut_short_is_made_again(tree, monkeypatch):
    chown = os.chown

    def cut(path, *args, **more):
        if os.readlink(path).endswith("/read"):
            raise OSError(5, "Input/output error")
        return chown(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ownership.os, "chown", cut)
        with pytest.raises(OSError, match=rf"Input/output.*'{tree}/d/read'"):
            ownership.apply_group(tree, GID, only_on_root_mismatch=True)
    assert tree.stat().st_gid != GID
    assert ownership.apply_group(tree, GID, only_on_root_mismatch=True) == 8


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(ownership, "log", SimpleNamespace(warning=lambda text, **fields: lines.append(fields)))
    return lines


def test_a_read_only_filesystem_is_left_as_it_is_and_told_of_once(tmp_path, told):
    mounts.mount("none", tmp_path, "tmpfs", ["mode=0755"])
    try:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "file").touch()
        mounts.remount(tmp_path, "tmpfs", ["ro"])
        assert ownership.apply_group(tmp_path, GID) == 3
        assert tmp_path.stat().st_gid == (tmp_path / "d" / "file").stat().st_gid == os.getgid()
    finally:
        mounts.unmount(tmp_path)
    (line,) = told
    assert line["entries"] == 3
    assert line["first"] == f"{tmp_path}/d/file: Read-only file system"


def test_a_file_that_may_not_be_changed_does_not_keep_the_others_from_the_group(tree, monkeypatch, told):
    chown = os.chown

    def refused_for_one(path, *args):
        if os.readlink(path).endswith("/plain"):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)  # it is immutable
        return chown(path, *args)

    monkeypatch.setattr(ownership.os, "chown", refused_for_one)
    assert ownership.apply_group(tree, GID) == 8
    assert {path.name for path in tree.rglob("*") if path.lstat().st_gid != GID} == {"plain"}
    assert mode_of(tree / "d" / "plain") == 0o660  # its own group may be one of the pod's
    assert [(line["entries"], line["first"]) for line in told] == [(1, f"{tree}/d/plain: Operation not permitted")]


@pytest.mark.parametrize("name", ["volume", "d"])
def test_a_directory_that_may_not_be_looked_into_is_passed_over(tree, monkeypatch, told, name):
    open_file, open_below = os.open, libc.openat2

    def refused_for_one(path):
        if str(path).endswith(name):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)  # a server that maps root to another user

    def opened(path, *args, **more):
        refused_for_one(path)
        return open_file(path, *args, **more)

    def opened_below(directory, path, *args):
        refused_for_one(path)
        return open_below(directory, path, *args)

    monkeypatch.setattr(ownership.os, "open", opened)
    monkeypatch.setattr(libc, "openat2", opened_below)
    ownership.apply_group(tree, GID)
    assert (tree / "d" / "plain").stat().st_gid == 7
    assert ((tree / "pipe").stat().st_gid == GID) is (name == "d")
    assert [line["entries"] for line in told] == [1]


@pytest.mark.parametrize("before", ["group", "mode"])
def test_a_link_put_in_the_place_of_a_file_after_the_look_at_it_is_not_followed(tree, monkeypatch, before):
    outside, place = tree.parent / "outside", tree / "d" / "plain"
    if before == "mode":
        os.chown(place, -1, GID)  # then nothing but its mode is wrong
    look = os.stat

    def swapped(path, **more):
        status = look(path, **more)
        if path == "plain":
            place.unlink()
            place.symlink_to(outside)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(ownership.os, "stat", swapped)
        ownership.apply_group(tree, GID)
    assert (mode_of(outside), outside.stat().st_gid) == (0o600, os.getgid())
    assert place.lstat().st_gid == GID  # the link itself


def test_a_link_put_in_the_place_of_a_directory_is_not_followed(tree, monkeypatch):
    outside = tree.parent / "elsewhere"
    outside.mkdir(mode=0o700)
    (outside / "file").write_text("x")
    (outside / "file").chmod(0o600)
    open_file = os.open

    def swapped(path, *args, **more):
        if path == "d" and not (tree / "d").is_symlink():
            (tree / "d").rename(tree / "aside")
            (tree / "d").symlink_to(outside)
        return open_file(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ownership.os, "open", swapped)
        ownership.apply_group(tree, GID)
    assert (mode_of(outside), mode_of(outside / "file")) == (0o700, 0o600)
    assert outside.stat().st_gid == (outside / "file").stat().st_gid == os.getgid()
    assert tree.stat().st_gid == GID


def test_what_is_right_already_is_looked_at_once_and_not_opened(tree, monkeypatch):
    ownership.apply_group(tree, GID)
    opened, open_file, open_below = [], os.open, libc.openat2

    def counted(path, *args, **more):
        opened.append(path)
        return open_file(path, *args, **more)

    def counted_below(directory, path, *args):
        opened.append(path)
        return open_below(directory, path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ownership.os, "open", counted)
        patch.setattr(libc, "openat2", counted_below)
        assert ownership.apply_group(tree, GID) == 8
    assert opened == [tree, "d"]


def test_a_long_walk_is_heard_of_after_half_a_minute_and_then_every_minute(tree, monkeypatch):
    for number in range(40):
        (tree / f"f{number:02}").touch()
    now = [0.0]

    def tick():
        now[0] += 2.5
        return now[0]

    monkeypatch.setattr(ownership.time, "monotonic", tick)
    heard = []
    ownership.apply_group(tree, GID, progress=lambda count: heard.append((now[0], count)))
    times = [at for at, _ in heard]
    assert 30.0 <= times[0] <= 37.5
    assert all(60.0 <= later - sooner <= 67.5 for sooner, later in itertools.pairwise(times))
    assert [count for _, count in heard] == sorted({count for _, count in heard})
    assert len(heard) >= 2
