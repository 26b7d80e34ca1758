"""Who is at the other end of a connection, and whether they are still there: real sockets, the kernel's own tables."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

import pytest

from moorage.node.serve import peers
from moorage.node.serve.peers import ends_of, holders_of, is_closed, roots_outside_of_pods, rows_between

NOBODY = 65534


class Accepted:
    """The server's end of a connection, asked as a transport is."""

    def __init__(self, end):
        self.end = end

    def get_extra_info(self, name):
        return {"socket": self.end, "peername": self.end.getpeername(), "sockname": self.end.getsockname()}[name]


def is_root(accepted):
    return roots_outside_of_pods([ends_of(accepted)]) == [True]


@contextlib.contextmanager
def connected(family=socket.AF_INET, client_family=None, host=None):
    """A client's socket, and what the server has of it."""
    host = host or ("::1" if family is socket.AF_INET6 else "127.0.0.1")
    with (
        socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as server,
        socket.socket(client_family or family) as client,
    ):
        name = "127.0.0.1" if client_family is socket.AF_INET else "::1" if host == "::" else host
        client.connect((name, server.getsockname()[1]))
        end, _ = server.accept()
        with end:
            yield client, Accepted(end)


@contextlib.contextmanager
def held_by(argv, client, **options):
    """A program that holds the client's socket, and nobody else."""
    process = subprocess.Popen(
        [*argv, "sh", "-c", "echo; read _"], stdin=-1, stdout=-1, pass_fds=[client.fileno()], **options
    )
    try:
        process.stdout.readline()
        client.close()
        yield process
    finally:
        process.communicate(b"\n")


@pytest.mark.root
@pytest.mark.parametrize(
    ("family", "client_family", "host"),
    [
        (socket.AF_INET, None, None),
        (socket.AF_INET6, None, None),
        (socket.AF_INET6, None, "::"),
        (socket.AF_INET6, socket.AF_INET, "::"),
    ],
)
def test_root_of_this_machine_is_known_over_either_protocol(family, client_family, host):
    with connected(family, client_family, host) as (_, accepted):
        assert is_root(accepted)


@pytest.mark.root
def test_a_client_that_has_closed_counts_for_nobody():
    """The kernel shows uid 0 for it, whoever it was."""
    with connected() as (client, accepted):
        client.close()
        (row,) = rows_between(*ends_of(accepted))
        assert (row.uid, row.inode) == (0, 0)
        assert not is_root(accepted)


@pytest.mark.root
def test_a_client_that_is_closing_its_side_counts_for_nobody():
    with connected() as (client, accepted):
        client.shutdown(socket.SHUT_WR)
        assert not is_root(accepted)


@pytest.mark.root
def test_root_in_another_mount_namespace_is_root_of_a_container():
    with connected() as (client, accepted), held_by(["unshare", "--mount"], client):
        assert not is_root(accepted)
    with connected() as (client, accepted), held_by([], client) as process:
        (row,) = rows_between(*ends_of(accepted))
        assert process.pid in holders_of({row.inode})[row.inode]
        assert is_root(accepted)


@pytest.mark.root
def test_a_socket_shared_with_a_container_is_in_the_containers_hands():
    with connected() as (client, accepted), client.dup(), held_by(["unshare", "--mount"], client):
        assert not is_root(accepted)


@pytest.mark.root
def test_one_look_tells_many_clients_apart():
    with (
        connected() as (ours, first), connected() as (theirs, second), connected() as (gone, third),
        held_by(["unshare", "--mount"], theirs), held_by([], ours),
    ):  # fmt: skip
        gone.close()
        ends = [ends_of(one) for one in (first, second, third, first)]
        assert roots_outside_of_pods(ends) == [True, False, False, True]


@pytest.mark.root
def test_a_socket_that_no_process_holds_is_nobodys():
    """It is under way in a message between processes: the kernel shows its owner, but who holds it cannot be known."""
    with connected() as (client, accepted):
        one, other = socket.socketpair()
        with one, other:
            socket.send_fds(one, [b"x"], [client.fileno()])
            client.close()
            (row,) = rows_between(*ends_of(accepted))
            assert (row.uid, row.inode != 0) == (0, True)
            assert not is_root(accepted)


@pytest.mark.root
def test_another_user_is_not_root():
    program = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(flush=True); input()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = [os.path.realpath(sys.executable), "-I", "-S", "-c", program, str(server.getsockname()[1])]
        client = subprocess.Popen(argv, stdin=-1, stdout=-1, user=NOBODY, group=NOBODY, extra_groups=[])
        client.stdout.readline()
        end, _ = server.accept()
        with end:
            assert not is_root(Accepted(end))
        client.communicate(b"\n")


def test_nobody_from_elsewhere_is_root_of_this_machine(monkeypatch):
    class Elsewhere:
        def get_extra_info(self, name):
            return ("192.0.2.7", 4711) if name == "peername" else ("192.0.2.1", 10250)

    monkeypatch.setattr(peers, "rows_between", lambda *_: [peers.SocketRow(1, 0, os.stat(0).st_ino)])
    assert not is_root(Elsewhere())


def test_a_close_is_seen_also_behind_data_that_nobody_reads():
    with connected() as (client, accepted):
        assert not is_closed(accepted)
        client.send(b"x")
        client.close()
        assert is_closed(accepted)
    with connected() as (client, accepted):
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.send(b"x" * 65536)
        assert not is_closed(accepted)  # it waits for us
        client.close()
        assert is_closed(accepted)


async def test_a_connection_that_was_lost_is_closed():
    accepted = asyncio.Queue()
    async with await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), "127.0.0.1", 0) as server:
        with socket.create_connection(server.sockets[0].getsockname()):
            writer = await accepted.get()
        writer.transport.abort()
        await asyncio.sleep(0)
        assert is_closed(writer.transport)
