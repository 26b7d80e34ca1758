"""Mounts that do not answer: one thread for each, however often it is looked at."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from moorage.host import hung_paths
from moorage.node.volumes.mounters import csi_filesystem
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import StepFailure


class Mount:
    """Something at a path; it hangs until it is told otherwise."""

    def __init__(self, monkeypatch):
        self.number, self.looks, self.answers = 7, 0, threading.Event()
        monkeypatch.setattr(csi_filesystem.mounts, "is_corrupted", self._look)
        monkeypatch.setattr(hung_paths.mountinfo, "mounts", lambda: [SimpleNamespace(target="/", mount_id=self.number)])
        monkeypatch.setattr(hung_paths, "_ANSWER_S", 0.02)

    def _look(self, _path):
        self.looks += 1
        return not self.answers.wait(60)


@pytest.fixture
async def mount(monkeypatch):
    made = Mount(monkeypatch)
    yield made
    made.answers.set()
    async with asyncio.timeout(10):
        while hung_paths._open:
            await asyncio.sleep(0.001)  # and nothing is remembered of a question that was answered


async def test_a_mount_that_hangs_is_asked_once_until_it_answers(mount, tmp_path):
    for _ in range(30):
        with pytest.raises(StepFailed, match="does not answer") as caught:
            await csi_filesystem.is_dead(tmp_path, "pod")
        assert caught.value.failure is StepFailure.TRANSIENT
    assert mount.looks == 1
    mount.answers.set()
    assert not await csi_filesystem.is_dead(tmp_path, "pod")


async def test_all_who_look_at_once_have_the_same_answer(mount, tmp_path, monkeypatch):
    monkeypatch.setattr(hung_paths, "_ANSWER_S", 60.0)
    looking = [asyncio.create_task(csi_filesystem.is_dead(tmp_path, "pod")) for _ in range(5)]
    await asyncio.sleep(0.01)
    looking.pop().cancel()  # one that goes takes nothing from the others
    mount.answers.set()
    assert await asyncio.gather(*looking) == [False] * 4
    assert mount.looks == 1


async def test_what_is_mounted_in_the_place_of_one_that_hung_is_asked_itself(mount, tmp_path, monkeypatch):
    with pytest.raises(StepFailed):
        await csi_filesystem.is_dead(tmp_path, "pod")
    mount.number = 8
    monkeypatch.setattr(csi_filesystem.mounts, "is_corrupted", lambda _path: True)
    assert await csi_filesystem.is_dead(tmp_path, "pod")


async def test_places_do_not_wait_for_each_other(mount, tmp_path, monkeypatch):
    with pytest.raises(StepFailed):
        await csi_filesystem.is_dead(tmp_path / "one", "pod")
    monkeypatch.setattr(csi_filesystem.mounts, "is_corrupted", lambda _path: False)
    assert not await csi_filesystem.is_dead(tmp_path / "two", "pod")
