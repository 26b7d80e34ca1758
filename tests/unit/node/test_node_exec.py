"""Commands over a WebSocket: streams, terminals, slow clients, and what is left when something fails."""

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer

from moorage.node.runtime import ContainerFailed, RunningContainer, terminal
from moorage.node.serve import exec as execution
from moorage.node.serve.exec import PROTOCOLS, ExecOptions, serve_exec
from moorage.testing import until

NOBODY = 65534
CONTAINER = RunningContainer("u", "main", 0, Path("/nowhere"), Path("/nowhere.log"))


class Reply:
    """What the process that starts programs says of one of them."""

    def __init__(self, process):
        self._process, self._has_begun = process, False

    async def line(self):
        if not self._has_begun:
            self._has_begun = True
            return {"pid": self._process.pid}
        return {"exit_code": await self._process.wait()}

    def close(self):
        return


class Runtime:
    """Runs programs on this machine, outside of any container."""

    def __init__(self):
        self.error = None
        self.processes = []

    async def open_terminal(self, container, owner):
        return await terminal.open_terminal(int(container.state.get("pid") or 0), container.pidfd, owner)

    async def exec(self, _container, request, streams):
        if self.error:
            raise ContainerFailed(self.error)
        stdin, stdout, stderr = streams
        process = await asyncio.create_subprocess_exec(
            *request["argv"], stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, user=request.get("uid")
        )
        self.processes.append(process)
        return Reply(process)

    async def all_over(self):
        async with asyncio.timeout(60):
            for process in self.processes:
                await process.wait()


def shell(text, **options):
    return ExecOptions(("sh", "-c", text), **options)


@pytest.fixture(autouse=True)
def only_root_makes_mounts(monkeypatch):
    if os.geteuid():
        monkeypatch.setattr(execution, "read_only", contextlib.nullcontext)


@pytest.fixture
async def run():
    """`run(options)` gives a WebSocket to a program; `run.runtime` starts it, as `run.spec` says."""
    runtime, wanted, spec = Runtime(), [], {}

    async def handle(request):
        return await serve_exec(request, runtime, CONTAINER, spec, wanted[-1])

    app = web.Application()
    app.router.add_route("*", "/exec", handle)
    async with TestClient(TestServer(app)) as client:

        def start(options, protocols=PROTOCOLS):
            wanted.append(options)
            return client.ws_connect("/exec", protocols=protocols)

        start.runtime, start.client, start.wanted, start.spec = runtime, client, wanted, spec
        yield start
        await runtime.all_over()


async def all_of(socket):
    """Everything said on each channel until the server closes."""
    received = {1: b"", 2: b"", 3: b""}
    async with asyncio.timeout(60):
        async for message in socket:
            assert message.type is WSMsgType.BINARY
            received[message.data[0]] += message.data[1:]
    return received[1], received[2], json.loads(received[3]) if received[3] else None


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_both_protocols_carry_streams_and_the_exit_code(run, protocol):
    async with run(shell("echo out; echo err >&2; exit 7"), protocols=(protocol,)) as socket:
        assert socket.protocol == protocol
        out, err, status = await all_of(socket)
    assert (out, err) == (b"out\n", b"err\n")
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]


async def test_the_newest_protocol_that_both_know_is_used(run):
    async with run(shell("true"), protocols=("v1.other", "v4.channel.k8s.io", "v5.channel.k8s.io")) as socket:
        assert socket.protocol == "v5.channel.k8s.io"
        assert (await all_of(socket))[2]["status"] == "Success"


async def test_nothing_is_said_before_the_program_says_something(run):
    """kubectl before 1.34 drops what comes before it has made its streams, and complains of it."""
    async with run(shell("read line; exit 3", stdin=True)) as socket:
        await socket.send_bytes(b"\x00over\n")
        first = await socket.receive_bytes(timeout=60)
    assert first[0] == 3
    assert json.loads(first[1:])["reason"] == "NonZeroExitCode"


async def test_input_ends_when_the_client_says_so(run):
    async with run(shell("cat; echo over", stdin=True)) as socket:
        for _ in range(50):
            await socket.send_bytes(b"\x00" + b"x" * 20_000)
        await socket.send_bytes(b"\xff\x00")
        out, _, status = await all_of(socket)
    assert out == b"x" * 1_000_000 + b"over\n"
    assert status["status"] == "Success"


async def test_a_program_without_any_stream_still_has_an_exit_code(run):
    async with run(shell("exit 3", stdout=False, stderr=False)) as socket:
        out, err, status = await all_of(socket)
    assert (out, err) == (b"", b"")
    assert status["details"]["causes"][0]["message"] == "3"


async def test_a_terminal_has_the_clients_size_and_stays_open_when_no_more_is_typed(run):
    options = shell("read line; stty size; echo $line; test -t 1 && echo a terminal", stdin=True, tty=True)
    async with run(options) as socket:
        await socket.send_bytes(b'\x04{"Width":99,"Height":33}')
        await socket.send_bytes(b"\x04nonsense")
        await socket.send_bytes(b"\x00typed\n")
        await socket.send_bytes(b"\xff\x00")
        out, err, status = await all_of(socket)
    assert out.replace(b"\r", b"").endswith(b"33 99\ntyped\na terminal\n")
    assert err == b""
    assert status["status"] == "Success"


async def test_a_process_left_behind_does_not_hold_the_client_up(run, monkeypatch):
    monkeypatch.setattr(execution, "_QUIET_S", 0.05)
    async with run(shell("sleep 600 & echo $!")) as socket:
        out, _, status = await all_of(socket)
    os.kill(int(out), 9)
    assert status["status"] == "Success"


class SlowSocket:
    """A client that takes one message, and the next when it is told to."""

    def __init__(self):
        self.taken, self.go_on = b"", asyncio.Event()

    async def send_bytes(self, data):
        if len(data) > 1:
            await self.go_on.wait()
        self.taken += data[1:]

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.Event().wait()


async def test_a_client_that_reads_slowly_gets_everything(monkeypatch):
    monkeypatch.setattr(execution, "_QUIET_S", 0.01)
    socket, runtime = SlowSocket(), Runtime()
    program = f"{sys.executable} -c \"print('x' * 60_000, end='')\""  # as much as a pipe holds: it ends at once
    session = asyncio.create_task(execution._Session(socket, shell(program)).run(runtime, CONTAINER, {}))
    done, _ = await asyncio.wait({session}, timeout=1.0)  # many times as long as a quiet program is waited for
    assert not done
    socket.go_on.set()
    assert await asyncio.wait_for(session, 60) == 0
    assert socket.taken == b"x" * 60_000
    await runtime.all_over()


async def test_a_command_that_cannot_be_run_leaves_no_open_files(run):
    async with run(shell("true")) as socket:
        await all_of(socket)
    before = open_files()
    run.runtime.error = "no such program"
    for options in (shell("true", stdin=True), shell("true", stdin=True, tty=True)):
        async with run(options) as socket:
            _, _, status = await all_of(socket)
        assert (status["reason"], status["message"]) == ("InternalError", "no such program")
    assert open_files() <= before


async def test_a_client_that_leaves_takes_the_streams_with_it(run):
    async with run(shell("cat; echo", stdin=True)) as socket:
        await socket.send_bytes(b"\x00x")
        while (await socket.receive_bytes())[1:] != b"x":
            continue
        before = open_files()
    await run.runtime.all_over()  # the end of its input ends the program
    assert await until(lambda: open_files() < before, what="streams closed")


async def fill(socket):
    """Type until the program's input, and everything on the way to it, is full."""
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.5):
                await socket.send_bytes(b"\x00" + b"x" * 30_000)


async def test_a_client_that_vanishes_while_nothing_of_its_input_is_read_takes_the_streams_with_it(run, monkeypatch):
    monkeypatch.setattr(execution, "_LOOK_S", 0.05)
    before = open_files()
    socket = await run(shell("read _; echo; sleep 600 & wait", stdin=True))
    await socket.send_bytes(b"\x00\n")
    while (await socket.receive_bytes())[1:] != b"\n":
        continue
    await fill(socket)
    assert open_files() > before
    socket._response.connection.transport.abort()
    try:
        await until(lambda: open_files() <= before, 10, what="streams closed")
    finally:
        os.killpg(run.runtime.processes[0].pid, 9)


async def test_input_that_a_program_lets_wait_is_not_lost(run, monkeypatch):
    monkeypatch.setattr(execution, "_LOOK_S", 0.05)
    async with run(shell("sleep 1; wc -c", stdin=True)) as socket:
        for _ in range(100):
            await socket.send_bytes(b"\x00" + b"x" * 32_768)
        await socket.send_bytes(b"\xff\x00")
        out, _, status = await all_of(socket)
    assert (int(out), status["status"]) == (3_276_800, "Success")


async def test_a_message_may_be_long_but_not_of_any_length(run, monkeypatch):
    async with run(shell("wc -c", stdin=True)) as socket:
        await socket.send_bytes(b"\x00" + b"x" * (31 << 20))  # as the Python client sends what it is given
        await socket.send_bytes(b"\xff\x00")
        out, _, status = await all_of(socket)
    assert (int(out), status["status"]) == (31 << 20, "Success")

    monkeypatch.setattr(execution, "_LARGEST_MESSAGE", 1 << 20)
    before = open_files()
    async with run(shell("cat", stdin=True)) as socket:
        await socket.send_bytes(b"\x00" + b"x" * (1 << 20))
        _, _, status = await all_of(socket)
        assert (status["status"], status["code"]) == ("Failure", 413)
        assert "more than 1 MiB" in status["message"]
        assert socket.close_code == WSCloseCode.MESSAGE_TOO_BIG
    await run.runtime.all_over()  # the program has lost its streams
    await until(lambda: open_files() <= before, what="streams closed")


@pytest.mark.root
async def test_a_program_of_another_user_may_open_its_streams_by_name(run):
    run.spec["uid"] = NOBODY
    program = "echo out > /dev/stdout; echo err > /dev/stderr; cat < /dev/stdin"
    async with run(shell(program, stdin=True)) as socket:
        await socket.send_bytes(b"\x00typed\n")
        await socket.send_bytes(b"\xff\x00")
        assert (await all_of(socket))[:2] == (b"out\ntyped\n", b"err\n")
    async with run(shell("stat -L -c %u /dev/stdin", stderr=False)) as socket:  # nothing is typed: the machine's own
        assert (await all_of(socket))[0] == b"0\n"
    async with run(shell("echo out > /dev/stdout; tty", tty=True)) as socket:
        assert (await all_of(socket))[0].startswith(b"out\r\n/dev/pts/")


@pytest.mark.root
@pytest.mark.parametrize("change", ["chmod 666", "chown 0:0", "touch -a"])  # to what they are, but for the time
async def test_a_program_cannot_take_the_machines_dev_null_from_everybody_else(run, change):
    program = f"LC_ALL=C {change} /proc/self/fd/0; test -w /dev/stdin && wc -c && echo nothing > /proc/self/fd/0"
    async with run(shell(program)) as socket:
        out, err, status = await all_of(socket)
    assert b"Read-only file system" in err
    assert (out, status["status"]) == (b"0\n", "Success")  # it can be read and written to as ever


async def test_an_older_kubectl_is_told_which_one_it_takes(run):
    run.wanted.append(shell("true"))
    headers = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1", "X-Stream-Protocol-Version": "v4.channel.k8s.io"}
    async with run.client.post("/exec", headers=headers) as answer:
        assert answer.status == 400
        body = await answer.json()
        # A plain text with a colon is read as YAML by kubectl, and shown as an empty error.
        assert (body["kind"], body["status"], body["reason"], body["code"]) == ("Status", "Failure", "BadRequest", 400)
        assert "kubectl 1.31 or later" in body["message"]
    async with run.client.get("/exec") as answer:
        assert answer.status == 400


async def test_a_place_that_does_not_answer_gives_a_terminal_of_the_host_and_leaks_nothing(monkeypatch):
    before, late = open_files(), threading.Event()

    opened = []

    def slow(root, _owner):
        late.wait(60)
        os.close(root)
        opened.append(pty.openpty())
        return opened[-1]

    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(terminal, "_open_inside", slow)
    pidfd = os.pidfd_open(os.getpid())
    master, slave = await terminal.open_terminal(os.getpid(), pidfd, 0)
    os.write(master, b"typed\n")
    assert os.read(slave, 100) == b"typed\n"
    asking = asyncio.create_task(terminal.open_terminal(os.getpid(), pidfd, 0))
    await asyncio.sleep(0)
    asking.cancel()  # the client went away
    await asyncio.gather(asking, return_exceptions=True)
    for fd in (master, slave, pidfd):
        os.close(fd)
    late.set()
    await until(lambda: len(opened) == 2 and open_files() == before, what="both late ones closed")


async def test_no_terminal_comes_from_somebody_who_has_the_containers_number_by_now():
    ended = subprocess.Popen(["true"])
    pidfd, before = os.pidfd_open(ended.pid), open_files()
    ended.wait()
    with pytest.raises(ProcessLookupError):
        terminal._root_of(os.getpid(), pidfd)
    assert open_files() == before
    os.close(pidfd)


async def test_what_is_no_terminal_is_not_taken_for_one(tmp_path):
    """A container may have made anything of its files; a link is not followed, a file is not written to."""
    (tmp_path / "dev" / "pts").mkdir(parents=True)
    ptmx = tmp_path / "dev" / "pts" / "ptmx"
    before = open_files()
    a_link, a_file, a_pipe = (
        lambda: ptmx.symlink_to("/dev/ptmx"),
        lambda: ptmx.write_text("mine"),
        lambda: os.mkfifo(ptmx),
    )
    for make, words in ((a_link, "symbolic links"), (a_file, "ioctl"), (a_pipe, "ioctl")):
        make()
        with pytest.raises(OSError, match=words):
            terminal._open_inside(os.open(tmp_path, os.O_PATH), 0)
        ptmx.unlink()
    assert open_files() == before
