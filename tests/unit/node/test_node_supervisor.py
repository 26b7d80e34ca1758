"""The process whose children containers are: what goes wrong with one of them hurts no other."""

import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import moorage
from moorage.node.runtime import supervisor as module
from moorage.node.runtime.supervisor import ContainerSupervisor
from moorage.node.runtime.supervisor_io import pipes


class Container:
    def __init__(self, pid):
        self.pid, self.pidfd, self.state = pid, -1, {}


@pytest.fixture
def attending():
    """A supervisor that serves nobody yet."""
    made = ContainerSupervisor.__new__(ContainerSupervisor)
    made._poll, made._handlers, made._containers, made._control = select.epoll(), {}, set(), None
    yield made
    made._poll.close()


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_container_that_cannot_be_attended_to_is_ended_alone(attending, sleeper):
    with subprocess.Popen(["sleep", "1000"]) as other:
        container = Container(sleeper.pid)
        attending._containers.add(container)
        fd = module.os.dup(sleeper.stdout.fileno())

        def fails():
            raise KeyError("a bug")

        attending._follow(container, fd, fails)
        attending._handlers[fd]()
        assert sleeper.wait(30) == -9
        assert "a bug" in container.state["message"]
        assert fd not in attending._handlers  # else it would be told of for ever
        assert attending._containers == {container}  # its end is still to be recorded
        assert other.poll() is None
        other.kill()


def test_one_whose_end_cannot_be_taken_in_is_forgotten(attending, sleeper):
    container = Container(sleeper.pid)
    container.pidfd = module.os.pidfd_open(sleeper.pid)
    attending._containers.add(container)

    def fails():
        raise KeyError("a bug")

    attending._follow(container, container.pidfd, fails)
    sleeper.kill()
    select.select([container.pidfd], [], [])
    attending._handlers[container.pidfd]()
    assert attending._containers == set()  # with no other left, the supervisor can end
    assert not module.os.path.exists(f"/proc/{sleeper.pid}")  # nor a zombie, for which the agent would wait


def test_a_request_whose_files_could_not_be_received_ends_nothing(attending):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        attending._control = theirs
        ours.send(b'{"op": "run", "spec": "/nowhere"}')
        attending._asked()
        assert attending._control is theirs
        attending._asked()  # and nothing more is there


def test_the_end_of_the_agent_ends_one_without_containers(attending):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    attending._control = theirs
    attending._watch(theirs.fileno(), attending._asked)
    ours.close()
    attending.run()
    assert attending._handlers == {}


def test_pipes_are_made_all_or_none(monkeypatch):
    made, real = [], module.os.pipe

    def pipe():
        if len(made) == 2:
            raise OSError(24, "Too many open files")
        made.append(real())
        return made[-1]

    monkeypatch.setattr(module.os, "pipe", pipe)
    with pytest.raises(OSError, match="Too many"):
        pipes(4)
    for fd in (*made[0], *made[1]):
        with pytest.raises(OSError, match="Bad file descriptor"):
            module.os.fstat(fd)


def test_the_supervisor_loads_the_standard_library_and_small_modules_of_host():
    source = Path(moorage.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r}); import moorage.node.runtime.supervisor; print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in ran.stdout.split() if name.startswith("moorage.")}
    outside = {name for name in ours if not name.startswith("moorage.node")}
    assert outside == {
        "moorage.errors",
        "moorage.host",
        *(f"moorage.host.{name}" for name in ("boot", "errors", "libc")),
    }
    assert not {name for name in ours if name.startswith("moorage.node.") and ".runtime" not in name}
