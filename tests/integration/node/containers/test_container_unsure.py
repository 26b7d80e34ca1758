"""Containers that cannot be looked at for want of descriptors, and a supervisor that does not listen."""

import asyncio
import contextlib
import os
import resource
import select
import signal

import pytest

from moorage.node.runtime import ContainerFailed, container_state, supervisor_client
from moorage.node.runtime import process_runtime as module

pytestmark = pytest.mark.root
ENDS_WHEN_TOLD = ["sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done"]


@contextlib.contextmanager
def descriptors(left=0):
    """Only so many more can be opened here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as lowest:
        most = lowest.fileno() + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_that_cannot_be_looked_at_is_not_taken_for_ended(bench):
    container, same, second = bench.container(), bench.container(), bench.runtime()
    await bench.runtime().start(container, bench.spec(*ENDS_WHEN_TOLD))
    await until(lambda: container.log.exists() and b"ready" in container.log.read_bytes())  # it can be told by now
    pid = bench.pid_of(container)
    with descriptors(1):
        assert second.find(same)
        assert same.is_running
        with pytest.raises(ContainerFailed, match="cannot be looked at now"):
            await second.exec(same, {}, ())
        second.stop(same)
    assert bench.lives(pid)
    await until(lambda: not same.is_running)
    assert same.exit_code == 3  # it was told when it could be


async def test_nothing_is_taken_up_that_cannot_even_be_read_of(bench):
    await bench.runtime().start(bench.container(), bench.spec("sleep", "1000"))
    second = bench.runtime()
    with descriptors(), pytest.raises(OSError, match="Too many open files"):
        second.find(bench.container())


async def test_who_leaves_does_not_look_again(bench, monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    await bench.runtime().start(bench.container(), bench.spec("sleep", "1000"))
    second, same = bench.runtime(), bench.container()
    with descriptors(1):
        second.find(same)
        assert same.is_running
        await second.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert same.pidfd < 0


async def test_one_that_is_started_while_no_descriptors_are_left_is_followed_later(bench, monkeypatch):
    runtime, container = bench.runtime(), bench.container()
    with contextlib.ExitStack() as short:
        heard = supervisor_client.ReplyPipe.line

        async def line(reply):
            answer = await heard(reply)
            short.enter_context(descriptors())
            return answer

        monkeypatch.setattr(supervisor_client.ReplyPipe, "line", line)
        await runtime.start(container, bench.spec("sleep", "1000"))
        assert container.is_running
    assert bench.lives(bench.pid_of(container))
    await until(lambda: container.pidfd >= 0)


async def test_how_one_has_ended_is_read_when_there_are_descriptors_again(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, bench.spec(*ENDS_WHEN_TOLD))
    await until(lambda: container.log.exists() and b"ready" in container.log.read_bytes())  # it can be told by now
    ended = select.poll()
    ended.register(container.pidfd, select.POLLIN)
    with descriptors():
        runtime.stop(container)
        await asyncio.to_thread(ended.poll, 10_000)
        for _ in range(3):
            await asyncio.sleep(0)
        assert container.is_running
    await until(lambda: not container.is_running)
    assert (container.exit_code, container.state.get("reason")) == (3, None)


async def test_a_start_is_given_up_without_descriptors_too(bench, monkeypatch):
    runtime, container, hanging = bench.runtime(), bench.container(), bench.hanging()
    await runtime.start(bench.container("before"), bench.spec("true"))  # its supervisor takes time to come up
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    starting = asyncio.create_task(runtime.start(container, bench.spec("sleep", "1000", cgroups=[str(hanging)])))
    await until((container.directory / "state.json").exists)
    pid = bench.pid_of(container)
    with descriptors():
        await until((container.directory / container_state.ABANDONED).exists)
    with pytest.raises(ContainerFailed, match="did not start"):
        await starting
    with bench.answering(hanging):
        await until(lambda: not bench.lives(pid))
    assert not container.log.exists()


async def test_messages_that_a_supervisor_never_takes_hold_up_no_later_ones(bench, monkeypatch):
    runtime, first = bench.runtime(), bench.container("first")
    await runtime.start(first, bench.spec("sleep", "1000"))
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 1.0)
    supervisor = runtime._supervisors.current.pid
    os.kill(supervisor, signal.SIGSTOP)
    sessions = []
    try:
        with open(os.devnull, "r+b") as null:
            request = {"argv": ["true"], "env": {"A": "x" * 30_000}}  # more than the socket takes of them
            sessions += [asyncio.create_task(runtime.exec(first, request, [null.fileno()] * 3)) for _ in range(12)]
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                with pytest.raises(ContainerFailed, match="did not start"):
                    await runtime.start(bench.container("x"), bench.spec("sleep", "1000"))
                await asyncio.wait(sessions)
                second = bench.container("y")
                monkeypatch.setattr(module, "_START_TIMEOUT_S", 30.0)
                await runtime.start(second, bench.spec("sleep", "1000"))
        assert second.is_running
        assert runtime._supervisors.current.pid != supervisor
        for session in sessions:
            session.result().close()
    finally:
        os.kill(supervisor, signal.SIGCONT)


async def test_who_is_late_to_give_up_leaves_the_next_supervisor_alone(bench, monkeypatch):
    runtime, starts = bench.runtime(), []
    await runtime.open()
    supervisor = runtime._supervisors.current.pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        for name, patience_s in (("early", 0.3), ("late", 1.0)):
            monkeypatch.setattr(module, "_START_TIMEOUT_S", patience_s)
            starts.append(asyncio.create_task(runtime.start(bench.container(name), bench.spec("sleep", "1000"))))
            await asyncio.sleep(0)
        early, late = starts
        with pytest.raises(ContainerFailed):
            await early
        await runtime.open()
        following = runtime._supervisors.current.pid
        with pytest.raises(ContainerFailed):
            await late
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert runtime._supervisors.current.pid == following != supervisor
