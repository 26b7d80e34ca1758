"""A shared pool on a distributed filesystem: GlusterFS, replica 3, on one machine.

Three bricks and a FUSE client are started from volume files written here, without the management
daemon, so nothing outside of the test's directory is touched. Needs Debian's glusterfs-server.
"""

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import time

import pytest

from moorage.host import mountinfo, mounts
from moorage.storage import (
    AttachedElsewhere,
    Busy,
    CreateSnapshot,
    CreateVolume,
    Fenced,
    Kind,
    Pool,
    PoolConfig,
    Scope,
    Source,
)

MIB = 1 << 20
BRICKS = 3
ONE = "SINGLE_NODE_WRITER"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        shutil.which("glusterfsd") is None or not os.path.exists("/dev/fuse"),
        reason="GlusterFS is not installed (Debian: glusterfs-server), or there is no /dev/fuse",
    ),
]

BRICK = """
volume posix{n}
  type storage/posix
  option directory {directory}
end-volume
volume locks{n}
  type features/locks
  subvolumes posix{n}
end-volume
volume brick{n}
  type performance/io-threads
  subvolumes locks{n}
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.address-family inet
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.brick{n}.allow *
  subvolumes brick{n}
end-volume
"""
CLIENT = """
volume client{n}
  type protocol/client
  option transport-type tcp
  option transport.address-family inet
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume brick{n}
  option ping-timeout 5
end-volume
"""
REPLICATE = """
volume replicate
  type cluster/replicate
  option afr-pending-xattr client0,client1,client2
  option quorum-type auto
  subvolumes client0 client1 client2
end-volume
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(is_so, what):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(program, volfile, log, *more):
    argv = [program, "-N", "-f", str(volfile), "-l", str(log), *more]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop(process):
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def gluster(tmp_path_factory):
    """A mounted replica-3 filesystem, and its brick processes."""
    base = tmp_path_factory.mktemp("gluster")
    target = base / "mnt"
    target.mkdir()
    with contextlib.ExitStack() as stack:
        bricks, ports = [], [free_port() for _ in range(BRICKS)]
        for n, port in enumerate(ports):
            (base / f"brick{n}").mkdir()
            volfile = base / f"brick{n}.vol"
            volfile.write_text(BRICK.format(n=n, directory=base / f"brick{n}", port=port))
            bricks.append(start("glusterfsd", volfile, base / f"brick{n}.log"))
            stack.callback(stop, bricks[-1])
        for port in ports:
            wait_for(lambda port=port: listens(port), f"a brick on port {port}")
        clients = "".join(CLIENT.format(n=n, port=port) for n, port in enumerate(ports))
        (base / "client.vol").write_text(clients + REPLICATE)
        client = start("glusterfs", base / "client.vol", base / "client.log", str(target))
        stack.callback(stop, client)
        wait_for(lambda: mountinfo.mount_at(target) is not None, "the mount")
        stack.callback(mounts.unmount, target, lazy=True)
        wait_for(lambda: os.access(target, os.W_OK) and _is_writable(target), "a writable mount")
        yield target, bricks


def _is_writable(target):
    with contextlib.suppress(OSError):
        (target / "probe").write_text("x")
        return True
    return False


def opened(directory, owner=False):
    config = PoolConfig("shared", directory, scope=Scope.SHARED, owner=owner, overcommit=100.0, background=False)
    return Pool.open(config)


def _controller(directory, volume, node, rounds, log):
    with opened(directory) as pool:
        for _ in range(rounds):
            with contextlib.suppress(AttachedElsewhere, Busy):
                held = pool.attach(volume, node, ONE)
                os.write(log, f"{held.token} {node}\n".encode())
                pool.detach(volume, node)


def test_a_pool_lives_on_it_while_a_brick_dies(gluster, tmp_path):
    target, bricks = gluster
    with opened(target / "pool", owner=True) as pool:
        for n in range(3):
            pool.register_node(f"n{n}")
        volume = pool.create_volume(CreateVolume("v", 4 * MIB, filesystem=""))
        with open(volume.data, "r+b") as data:
            data.write(b"kept")
        tree = pool.create_volume(CreateVolume("d", MIB, kind=Kind.DIRECTORY))
        (tree.data / "f").write_text("x")
        cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
        assert cut.data.read_bytes()[:4] == b"kept"

        processes = multiprocessing.get_context("fork")
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        hammers = [
            processes.Process(target=_controller, args=(pool.directory, volume.id, f"n{n}", 25, log)) for n in range(3)
        ]
        for hammer in hammers:
            hammer.start()
        wait_for(lambda: (tmp_path / "log").stat().st_size > 0, "the first attachment")
        stop(bricks[1])  # two of three are a quorum
        for hammer in hammers:
            hammer.join(timeout=180)
            assert hammer.exitcode == 0
        os.close(log)

        owners: dict[str, set[str]] = {}
        for line in (tmp_path / "log").read_text().splitlines():
            token, node = line.split()
            owners.setdefault(token, set()).add(node)
        assert all(len(nodes) == 1 for nodes in owners.values())
        last = pool.attach(volume.id, "n0", ONE)
        assert last.token > max(map(int, owners))
        with pytest.raises(Fenced):
            pool.verify_attachment(volume.id, "n1", max(map(int, owners)))
        pool.detach(volume.id)

        restored = pool.create_volume(CreateVolume("r", 4 * MIB, filesystem="", source=Source.snapshot(cut.id)))
        assert restored.data.read_bytes()[:4] == b"kept"
        assert pool.expand_volume(volume.id, 8 * MIB).size_bytes == 8 * MIB
        assert pool.delete_volume(tree.id)
        assert pool.damaged() == []
