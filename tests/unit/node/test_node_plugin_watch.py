"""The registration directory: what counts as a plugin's socket, and that no change is missed."""

import asyncio
import errno
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from moorage.node.plugins import socket_watch as watching
from moorage.node.plugins.socket_watch import sockets_below, watch
from moorage.node.run import prepare_root


@pytest.fixture
def directory():
    made = Path(tempfile.mkdtemp(prefix="moorage-watch-", dir="/tmp"))  # a socket's path must be short
    yield made / "plugins_registry"
    shutil.rmtree(made)


def listen(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


async def names_until(stream, wanted):
    """Read answers until the sockets have these names, and return them."""
    async with asyncio.timeout(30):
        async for found in stream:
            if {Path(path).name for path in found} == wanted:
                return found
    raise AssertionError("the stream ended")


def test_a_plugin_is_a_socket_by_its_type_and_not_by_its_name(directory):
    listen(directory / "driver")  # no suffix
    listen(directory / "below" / "deeper" / "other.socket")
    listen(directory / ".hidden.sock")
    (directory / "file.sock").write_text("no socket")
    (directory / "link.sock").symlink_to(directory / "driver")
    found = sockets_below(directory)
    assert set(found) == {str(directory / "driver"), str(directory / "below" / "deeper" / "other.socket")}


def test_a_socket_made_anew_is_told_apart_from_the_one_before(directory):
    path = listen(directory / "a.sock")
    before = sockets_below(directory)[str(path)]
    path.chmod(0o777)  # a plugin may do that after it listens
    assert sockets_below(directory)[str(path)] == before
    path.unlink()
    listen(path)
    assert sockets_below(directory)[str(path)] != before


def test_a_directory_that_vanishes_during_the_scan_is_passed_over(directory, monkeypatch):
    listen(directory / "a.sock")
    listen(directory / "gone" / "b.sock")
    walk = os.walk

    def vanishing(top, **how):
        for folder, below, names in walk(top, **how):
            if folder.endswith("gone"):
                shutil.rmtree(folder)
            yield folder, below, names

    monkeypatch.setattr(os, "walk", vanishing)
    assert set(sockets_below(directory)) == {str(directory / "a.sock")}


@pytest.fixture
def unreadable(monkeypatch):
    """Directories in this set cannot be read, for want of descriptors."""
    places, scandir = set(), os.scandir

    def refusing(place):
        if str(place) in places:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    return places


def test_a_scan_that_fails_does_not_say_that_there_is_nothing(directory, unreadable):
    listen(directory / "a.sock")
    unreadable.add(str(directory))
    with pytest.raises(OSError, match="Too many open files"):
        sockets_below(directory)


def test_a_socket_that_cannot_be_looked_at_is_not_said_to_be_gone(directory, monkeypatch):
    listen(directory / "a.sock")

    def failing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "lstat", failing)
    with pytest.raises(OSError, match="Input/output error"):
        sockets_below(directory)


async def test_while_the_directory_cannot_be_read_its_sockets_count_as_before(directory, unreadable, caplog):
    listen(directory / "a.sock")
    listen(directory / "below" / "b.sock")
    stream = watch(directory, rescan_s=0.01)
    before = await names_until(stream, {"a.sock", "b.sock"})
    unreadable.add(str(directory))
    for _ in range(3):
        assert await anext(stream) == before
    assert "folder cannot be read" in caplog.text
    unreadable.clear()
    (directory / "a.sock").unlink()
    await names_until(stream, {"b.sock"})
    await stream.aclose()


async def test_a_folder_that_cannot_be_read_does_not_hide_what_happens_beside_it(directory, unreadable):
    listen(directory / "a.sock")
    listen(directory / "below" / "b.sock")
    stream = watch(directory, rescan_s=0.01)
    await names_until(stream, {"a.sock", "b.sock"})
    unreadable.add(str(directory / "below"))
    (directory / "a.sock").unlink()
    listen(directory / "c.sock")
    seen = await names_until(stream, {"b.sock", "c.sock"})
    assert {os.path.basename(path) for path in seen} == {"b.sock", "c.sock"}
    await stream.aclose()


async def test_a_registration_directory_that_cannot_be_made_anew_ends_nothing(directory, caplog):
    listen(directory / "sub" / "reg" / "a.sock")
    stream = watch(directory / "sub" / "reg", rescan_s=0.01)
    await names_until(stream, {"a.sock"})
    shutil.rmtree(directory / "sub")
    (directory / "sub").write_text("a file, where nothing can be made")
    await names_until(stream, set())
    assert "cannot be made" in caplog.text
    (directory / "sub").unlink()
    await names_until(stream, set())
    listen(directory / "sub" / "reg" / "b.sock")
    await names_until(stream, {"b.sock"})
    await stream.aclose()


async def test_without_inotify_the_directory_is_looked_through_and_that_is_said_once(directory, monkeypatch, caplog):
    def none_left():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(watching, "Inotify", none_left)
    stream = watch(directory, rescan_s=0.01)
    await names_until(stream, set())
    listen(directory / "new" / "a.sock")
    await names_until(stream, {"a.sock"})
    await anext(stream)
    assert caplog.text.count("looked through instead") == 1
    await stream.aclose()


async def test_new_directories_and_those_of_a_known_name_are_watched(directory):
    stream = watch(directory, rescan_s=3600)
    await names_until(stream, set())
    listen(directory / "new" / "a.sock")
    await names_until(stream, {"a.sock"})
    (directory / "new").rename(directory.parent / "away")
    (directory / "new").mkdir()
    for _ in ("moved away", "made anew"):  # both are told, so that nothing is left to be told
        await names_until(stream, set())
    listen(directory / "new" / "b.sock")  # the directory has the name of one that was watched
    await names_until(stream, {"b.sock"})
    shutil.rmtree(directory)
    await names_until(stream, set())
    listen(directory / "c.sock")  # the registration directory itself was removed and made anew
    found = await names_until(stream, {"c.sock"})
    assert found == sockets_below(directory)
    await stream.aclose()


async def test_what_no_event_tells_is_found_by_looking_again(directory, monkeypatch):
    monkeypatch.setattr(watching, "_watch_tree", lambda _inotify, place: place.mkdir(parents=True, exist_ok=True))
    stream = watch(directory, rescan_s=0.01)
    await names_until(stream, set())
    listen(directory / "a.sock")
    found = await names_until(stream, {"a.sock"})
    assert found == sockets_below(directory)
    await stream.aclose()


def test_the_registration_directory_may_be_entered_by_plugins_and_the_others_not(directory):
    root = directory.parent / "root"
    os.close(prepare_root(root))
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in root.iterdir()}
    assert modes["plugins_registry"] == 0o755
    assert modes["pods"] == modes["plugins"] == 0o750
