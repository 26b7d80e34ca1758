"""Containers that were being started when the agent went."""

import fcntl

import pytest

from moorage.node.runtime import RunningContainer, process_runtime
from moorage.node.runtime.process_runtime import ProcessRuntime


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0
        self.on_sleep = lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(process_runtime, "time", made)
    return made


def being_started(directory):
    """A container that has not come up yet, and the lock that its supervisor holds."""
    directory.mkdir()
    (directory / "spec.json").write_text("{}")
    lock = (directory / "spec.json").open()
    fcntl.flock(lock, fcntl.LOCK_SH)
    return RunningContainer("u", directory.name, 0, directory, directory / "0.log"), lock


def test_all_that_hang_are_waited_for_together(clock, tmp_path):
    found = [being_started(tmp_path / name) for name in ("a", "b", "c")]
    runner = ProcessRuntime(lambda _container: None)
    assert [runner.find(container) for container, _ in found] == [False, False, False]
    assert 30.0 <= clock.now - 1000.0 < 31.0, "the patience of one, not of three"
    for _, lock in found:
        lock.close()


def test_one_that_comes_up_meanwhile_is_taken_up(clock, tmp_path):
    container, lock = being_started(tmp_path / "a")

    def come_up():
        (tmp_path / "a" / "state.json").write_text('{"exit_code": 3}')
        lock.close()

    clock.on_sleep = come_up
    assert ProcessRuntime(lambda _container: None).find(container)
    assert container.exit_code == 3
