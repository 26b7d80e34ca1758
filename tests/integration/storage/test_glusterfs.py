"""A shared pool on a distributed filesystem: GlusterFS, replica 3, on one machine.

Three bricks and two FUSE clients, one for each node, are started from volume files written here. No
management daemon runs, which would want a fixed port and directories of the machine: nothing outside
of the test's directory is touched. Needs Debian's glusterfs-server, which `scripts/prepare` installs.
"""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.plugin_caller import Caller
from tests.support.plugin_caller import mounted as mounted_as
from tests.support.plugin_process import PluginProcess

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from moorage.host.errors import HostError
from moorage.plugin.services.values import TOKEN_KEY
from moorage.storage import (
    AttachedElsewhere,
    AttachmentsUnreadable,
    Busy,
    CreateSnapshot,
    CreateVolume,
    Fenced,
    Pool,
    PoolConfig,
    PoolScope,
    Source,
    VolumeKind,
)

MIB = 1 << 20
BRICKS = 3
ONE = "SINGLE_NODE_WRITER"

pytestmark = pytest.mark.root

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
    return subprocess.Popen(argv, cwd=log.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop(process):
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Gluster:
    """The same replicated filesystem mounted twice, by clients that know nothing of each other."""

    mounts: list[Path]
    bricks: list["subprocess.Popen[bytes] | None"]
    start_brick: Callable[[int], None]


@pytest.fixture
def gluster(tmp_path, cannot_run):
    if shutil.which("glusterfsd") is None:
        cannot_run("GlusterFS is not installed (Debian: glusterfs-server)")
    if not os.path.exists("/dev/fuse"):
        cannot_run("there is no /dev/fuse")
    base = tmp_path / "gluster"
    base.mkdir()
    ports = [free_port() for _ in range(BRICKS)]
    with contextlib.ExitStack() as stack:

        def start_brick(n):
            found.bricks[n] = start("glusterfsd", base / f"brick{n}.vol", base / f"brick{n}.log")
            stack.callback(stop, found.bricks[n])
            wait_for(lambda: listens(ports[n]), f"a brick on port {ports[n]}")

        found = Gluster([base / "mount-a", base / "mount-b"], [None] * BRICKS, start_brick)
        for n, port in enumerate(ports):
            (base / f"brick{n}").mkdir()
            (base / f"brick{n}.vol").write_text(BRICK.format(n=n, directory=base / f"brick{n}", port=port))
            start_brick(n)
        clients = "".join(CLIENT.format(n=n, port=port) for n, port in enumerate(ports))
        (base / "client.vol").write_text(clients + REPLICATE)
        for target in found.mounts:
            target.mkdir()
            client = start("glusterfs", base / "client.vol", base / f"{target.name}.log", str(target))
            stack.callback(stop, client)
            wait_for(lambda target=target: mountinfo.mount_at(target) is not None, "the mount")
            stack.callback(mounts.unmount, target, lazy=True)
            wait_for(lambda target=target: _is_writable(target), "a writable mount")
        yield found


def _is_writable(target):
    with contextlib.suppress(OSError):
        (target / "probe").write_text("x")
        return True
    return False


def opened(directory, owner=False):
    config = PoolConfig("shared", directory, scope=PoolScope.SHARED, owner=owner, overcommit=100.0, background=False)
    return Pool.open(config)


def _controller(directory, volume, node, rounds, log):
    with opened(directory) as pool:
        for _ in range(rounds):
            with contextlib.suppress(AttachedElsewhere, Busy), a_brick_may_die():
                held = pool.attachments.attach(volume, node, ONE)
                os.write(log, f"{held.token} {node}\n".encode())
                pool.attachments.detach(volume, node)


@contextlib.contextmanager
def a_brick_may_die():
    """A change that was under way when a brick died may fail and be made nevertheless; callers try again."""
    with contextlib.suppress(AttachmentsUnreadable):
        try:
            yield
        except HostError as failed:
            if failed.errno not in (errno.ESTALE, errno.EBADFD):
                raise


def test_a_pool_lives_on_it_while_a_brick_dies(gluster, tmp_path):
    here, there = gluster.mounts
    with opened(here / "pool", owner=True) as pool, opened(there / "pool") as other:
        for n in range(4):
            pool.attachments.register_node(f"n{n}")
        volume = pool.create_volume(CreateVolume("v", 4 * MIB, filesystem=""))
        with open(volume.data, "r+b") as data:
            data.write(b"kept")
        tree = pool.create_volume(CreateVolume("d", MIB, kind=VolumeKind.DIRECTORY))
        (tree.data / "f").write_text("x")
        cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
        assert other.snapshots.get(cut.id).data.read_bytes()[:4] == b"kept"

        owners = hammered(gluster.mounts, volume.id, tmp_path / "both", lambda: None)
        pool.attachments.detach(volume.id)
        later = hammered(gluster.mounts, volume.id, tmp_path / "dying", gluster.bricks[1].kill)
        assert min(later) > max(owners)
        owners |= later
        assert all(len(nodes) == 1 for nodes in owners.values()), "two nodes were given one token"
        gluster.start_brick(1)  # what its death left half-done can be healed now
        wait_for(lambda: _is_detached(other, volume.id), "a detach that the brick's death disturbed")
        last = other.attachments.attach(volume.id, "n0", ONE)
        assert last.token > max(owners)
        with pytest.raises(Fenced):
            pool.attachments.verify(volume.id, "n1", max(owners))
        with pytest.raises(AttachedElsewhere):
            pool.attachments.attach(volume.id, "n1", ONE)
        pool.attachments.detach(volume.id)

        restored = other.create_volume(CreateVolume("r", 4 * MIB, filesystem="", source=Source.snapshot(cut.id)))
        assert pool.volumes.get(restored.id).data.read_bytes()[:4] == b"kept"
        assert pool.expand_volume(volume.id, 8 * MIB).size_bytes == 8 * MIB
        assert pool.delete_volume(tree.id)
        assert pool.health.damaged() == []


def _racer(directory, volumes, node, gates, answers):
    """Want each volume at the same moment as the other client does."""
    with opened(directory) as pool:
        for volume in volumes:
            gates.wait(timeout=120)
            try:
                answers.put((volume, node, pool.attachments.attach(volume, node, ONE).token))
            except AttachedElsewhere:
                answers.put((volume, node, 0))
            except MoorageError as failed:  # told, so that the other racer need not wait at the gate
                answers.put((volume, node, str(failed)))


def test_each_volume_goes_to_one_of_two_clients_that_race_while_a_brick_is_dead(gluster):
    """A brick that gave up what another client looks up (symbolic links, directories) would leave no quorum."""
    here, there = gluster.mounts
    processes = multiprocessing.get_context("fork")
    gates, answers = processes.Barrier(2), processes.Queue()
    with opened(here / "pool", owner=True) as pool, opened(there / "pool") as other:
        for node in ("n0", "n1"):
            pool.attachments.register_node(node)
        volumes = [pool.create_volume(CreateVolume(f"v{n}", MIB, filesystem="")).id for n in range(60)]
        gluster.bricks[2].kill()
        gluster.bricks[2].wait()
        racers = [
            processes.Process(target=_racer, args=(place / "pool", volumes, node, gates, answers))
            for place, node in ((here, "n0"), (there, "n1"))
        ]
        for racer in racers:
            racer.start()
        told = [answers.get(timeout=120) for _ in range(2 * len(volumes))]
        for racer in racers:
            racer.join(timeout=60)
            assert racer.exitcode == 0
        assert [answer for answer in told if isinstance(answer[2], str)] == []
        for volume in volumes:
            (winner,) = [(node, token) for raced, node, token in told if raced == volume and token]
            for view in (pool, other):
                assert [(held.node_id, held.token) for held in view.attachments.of_volume(volume)] == [winner]
            assert other.attachments.detach(volume)


def _is_detached(pool, volume):
    with a_brick_may_die():
        pool.attachments.detach(volume)
        return pool.attachments.of_volume(volume) == []
    return False


def hammered(places, volume, log_path, happen):
    """Controllers attach and detach one volume at once, and something happens; who had which token."""
    processes = multiprocessing.get_context("fork")
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    hammers = [
        processes.Process(target=_controller, args=(places[n % len(places)] / "pool", volume, f"n{n}", 25, log))
        for n in range(4)
    ]
    for hammer in hammers:
        hammer.start()
    wait_for(lambda: log_path.stat().st_size > 0, "the first attachment")
    happen()
    for hammer in hammers:
        hammer.join(timeout=180)
        assert hammer.exitcode == 0
    os.close(log)
    owners: dict[int, set[str]] = {}
    for line in log_path.read_text().splitlines():
        token, node = line.split()
        owners.setdefault(int(token), set()).add(node)
    return owners


async def test_a_volume_moves_between_two_nodes_of_it_while_a_brick_dies_under_a_writer(gluster, tmp_path):
    """Each node's plugin has a mount of its own, as on two machines."""
    async with contextlib.AsyncExitStack() as stack:
        callers = []
        for name, place in zip(("node-a", "node-b"), gluster.mounts, strict=True):
            base = tmp_path / name
            base.mkdir()
            process = PluginProcess(
                {"default": place / "pool"}, directory=base, node_id=name, flags=["--scope=shared", "--overcommit=100"]
            )
            await stack.enter_async_context(process)
            callers.append(Caller(process.client, base))
            stack.push_async_callback(callers[-1].leave)
        a, b = callers
        volume = (await a.create("v", mounted_as("ext4"), 32 * MIB)).volume_id
        old = await attached(a, volume, "node-a")
        await a.stage(volume, context=old)
        target = await a.publish(volume, context=old)
        written = await asyncio.to_thread(write_while, target, lambda: gluster.bricks[2].kill())
        with pytest.raises(CsiError, match="node-a"):
            await attached(b, volume, "node-b")
        await a.down(volume)
        await detached(a, volume, "node-a")

        new = await attached(b, volume, "node-b")
        assert int(new[TOKEN_KEY]) > int(old[TOKEN_KEY])
        with pytest.raises(CsiError, match="node-a") as refused:
            await a.stage(volume, context=old)
        assert refused.value.code == "FAILED_PRECONDITION"
        await b.stage(volume, context=new)
        seen = await b.publish(volume, context=new)
        assert (seen / "log").read_text() == written
        await b.down(volume)
        await detached(b, volume)
        await b.delete(volume)


def write_while(target, happen):
    """Append numbers, each synced; something happens in the middle. Returns what was acknowledged."""
    with open(target / "log", "ab", buffering=0) as log:
        for number in range(60):
            if number == 30:
                happen()
            log.write(b"%d\n" % number)
            os.fsync(log.fileno())
    return "".join(f"{number}\n" for number in range(60))


async def attached(caller, volume, node):
    request = pb.ControllerPublishVolumeRequest(volume_id=volume, node_id=node, volume_capability=mounted_as())
    return dict((await caller.client.ControllerPublishVolume(request)).publish_context)


async def detached(caller, volume, node=""):
    await caller.client.ControllerUnpublishVolume(pb.ControllerUnpublishVolumeRequest(volume_id=volume, node_id=node))
