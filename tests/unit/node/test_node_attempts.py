"""Attempts at containers, read back from what they left on disk and in their control group."""

import errno
import json
import os

import pytest

from moorage.host.boot import boot_id
from moorage.node.pods.attempts import attempts_of
from moorage.node.runtime import DRAINED, RunningContainer, container_state
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.node.runtime.container_state import read_state


@pytest.fixture
def left(tmp_path):
    """Write down an attempt as agent and supervisor leave it."""

    def leave(number, spec=None, **state):
        directory = tmp_path / "containers" / "a" / str(number)
        directory.mkdir(parents=True)
        (directory / "spec.json").write_text(json.dumps(spec or {}))
        return RunningContainer("u", "a", number, directory, tmp_path / "log", state)

    return leave


def groups(tmp_path, kills=0):
    group = tmp_path / "cgroup" / "kubepods" / "n1" / "podu" / "a"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text(f"oom_kill {kills}\n")
    return ContainerCgroups("n1", [(1, tmp_path / "cgroup")])


def test_the_newest_attempt_counts_and_the_one_before_is_its_history(tmp_path, left):
    every = [
        left(3, {"streak": 3}, started=1.0, finished=2.0, exit_code=9),
        left(4, {"streak": 4}, started=3.0, finished=4.0, exit_code=2),
        left(5, {"streak": 5}, started=5.0, finished=6.0, exit_code=143, signal=15),
    ]
    found = attempts_of({"a": every, "none": []}, groups(tmp_path))
    assert list(found) == ["a"]
    newest = found["a"]
    assert (newest.number, newest.streak, newest.exit_code, newest.signal) == (5, 5, 143, 15)
    assert (newest.started, newest.finished, newest.id) == (5.0, 6.0, "u-a-5")
    assert (newest.previous.number, newest.previous.exit_code, newest.previous.previous) == (4, 2, None)


def test_a_running_attempt_has_no_exit(tmp_path, left):
    running = left(1, {"streak": 1}, started=5.0)
    running.pidfd = 999
    found = attempts_of({"a": [running]}, groups(tmp_path))["a"]
    assert (found.is_running, found.exit_code) == (True, None)


@pytest.mark.parametrize(
    ("kills", "at_second_start", "reasons"),
    [
        (0, 0, ("", "")),
        (1, 1, ("OOMKilled", "")),  # the first one was killed for want of memory, the second by somebody
        (1, 0, ("", "OOMKilled")),
        (2, 1, ("OOMKilled", "OOMKilled")),
    ],
)
def test_each_kill_for_want_of_memory_belongs_to_one_attempt(tmp_path, left, kills, at_second_start, reasons):
    every = [
        left(0, {}, started=1.0, finished=2.0, exit_code=137),
        left(1, {"oom_kills": at_second_start}, started=3.0, finished=4.0, exit_code=137),
    ]
    found = attempts_of({"a": every}, groups(tmp_path, kills))["a"]
    assert (found.previous.reason, found.reason) == reasons


def test_an_end_that_says_why_is_not_put_down_to_memory(tmp_path, left):
    unknown = left(0, {}, exit_code=137, reason="ContainerStatusUnknown")
    found = attempts_of({"a": [unknown]}, groups(tmp_path, kills=7))["a"]
    assert found.reason == "ContainerStatusUnknown"


def test_a_container_that_outlived_a_child_without_memory_ended_for_want_of_it_all_the_same(tmp_path, left):
    found = attempts_of({"a": [left(0, {}, exit_code=3, finished=2.0)]}, groups(tmp_path, kills=1))["a"]
    assert (found.exit_code, found.reason) == (3, "OOMKilled")


def test_a_kill_for_want_of_memory_is_remembered_when_its_group_is_gone(tmp_path, left):
    """As after a reboot: groups are made anew, and count from nothing."""
    killed = left(0, {}, started=1.0, finished=2.0, exit_code=137)
    attempts_of({"a": [killed]}, groups(tmp_path, kills=1))

    found = RunningContainer("u", "a", 0, killed.directory, killed.log, read_state(killed.directory))
    nothing = ContainerCgroups("n1", [(1, tmp_path / "made-anew")])
    newest = attempts_of({"a": [found]}, nothing)["a"]
    assert (newest.reason, newest.exit_code, newest.finished) == ("OOMKilled", 137, 2.0)


def test_a_kill_is_told_of_also_where_it_cannot_be_written_down(tmp_path, left, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(container_state, "write", full)
    killed = left(0, {}, started=1.0, finished=2.0, exit_code=137)
    assert attempts_of({"a": [killed]}, groups(tmp_path, kills=1))["a"].reason == "OOMKilled"


@pytest.mark.parametrize(("spec", "is_of_this"), [({}, True), ({"boot": boot_id()}, True), ({"boot": "other"}, False)])
def test_an_attempt_tells_whether_the_machine_was_started_since(tmp_path, left, spec, is_of_this):
    found = attempts_of({"a": [left(0, spec, exit_code=0, finished=2.0)]}, groups(tmp_path, kills=0))["a"]
    assert found.is_of_this_boot == is_of_this


def test_an_attempt_tells_whether_a_stopped_agent_has_ended_it(tmp_path, left):
    container, cgroups = left(0, {}, exit_code=0, finished=2.0), groups(tmp_path, kills=0)
    assert not attempts_of({"a": [container]}, cgroups)["a"].is_drained
    (container.directory / DRAINED).touch()
    assert attempts_of({"a": [container]}, cgroups)["a"].is_drained
