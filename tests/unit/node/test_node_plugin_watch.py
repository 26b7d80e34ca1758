"""The registration directory: what counts as a plugin's socket, and that no change is missed."""

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from moorage.node.plugins import watch as watching
from moorage.node.plugins.watch import sockets_below, watch
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

    def vanishing(top):
        for folder, below, names in walk(top):
            if folder.endswith("gone"):
                shutil.rmtree(folder)
            yield folder, below, names

    monkeypatch.setattr(os, "walk", vanishing)
    assert set(sockets_below(directory)) == {str(directory / "a.sock")}


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
