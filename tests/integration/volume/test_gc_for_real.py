"""`moorage gc` that removes for real: objects of an API server, dead mounts, and attachments in a shared pool."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import uuid

import pytest

from moorage.host import filesystems, loop, mountinfo, mounts
from moorage.kube.api import config
from moorage.kube.api.client import Client
from moorage.kube.objects import CSIDriver, CSINode, Node, PersistentVolume, Pod, VolumeAttachment
from moorage.storage import CreateVolume, Pool, PoolConfig, PoolScope, VolumeKind
from moorage.testing import serve

pytestmark = pytest.mark.root
MIB = 1 << 20
DRIVER = "csi.moorage.dev"
NODE = "node-1"


@pytest.fixture
def pool(xfs_pool_dir):
    with Pool.open(PoolConfig("p", xfs_pool_dir / "pool", background=False, owner=False)) as opened:
        yield opened


@pytest.fixture
def shared(xfs_pool_dir):
    wanted = PoolConfig("shared", xfs_pool_dir / "shared", scope=PoolScope.SHARED, background=False, owner=False)
    with Pool.open(wanted) as opened:
        yield opened


@pytest.fixture
async def cluster(tmp_path):
    """An API server with the driver installed and one node; the client, and the flags that lead a command to it."""
    async with serve(tmp_path / "api") as server, Client(config.load(str(server.kubeconfig))) as client:
        await client.create(CSIDriver, {"metadata": {"name": DRIVER}, "spec": {"attachRequired": True}})
        await client.create(Node, {"metadata": {"name": NODE}})
        drivers = [{"name": DRIVER, "nodeID": NODE, "topologyKeys": []}]
        await client.create(CSINode, {"metadata": {"name": NODE}, "spec": {"drivers": drivers}})
        yield client, ("--kubeconfig", str(server.kubeconfig), "--node", NODE)


async def gc(*arguments):
    argv = [sys.executable, "-m", "moorage.cli.main", "gc", *map(str, arguments), "-o", "json"]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def ids(answer, part="removed"):
    return sorted((found["kind"], found["id"]) for found in answer[part])


def held(answer, ident):
    (found,) = [each for each in answer["findings"] if each["id"] == ident]
    return found["held"]


def pv_of(name, handle, node=NODE):
    terms = [{"matchExpressions": [{"key": "topology.moorage.dev/node", "operator": "In", "values": [node]}]}]
    return {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "8Mi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "csi": {"driver": DRIVER, "volumeHandle": handle},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    }


async def test_a_pv_without_volume_goes_and_every_other_stays(pool, cluster):
    client, where = cluster
    kept = pool.create_volume(CreateVolume("pvc-kept", 8 * MIB))
    trashed = pool.create_volume(CreateVolume("pvc-trashed", 8 * MIB, mutable={"trashRetention": "1h"}))
    pool.delete_volume(trashed.id)
    for name, handle, phase, node in (
        ("pv-lost", "nowhere-1", "Released", NODE),
        ("pv-bound", "nowhere-2", "Bound", NODE),
        ("pv-elsewhere", "nowhere-3", "Released", "node-2"),
        ("pv-trashed", trashed.id, "Released", NODE),
        ("pv-kept", kept.id, "Released", NODE),
    ):
        await client.create(PersistentVolume, pv_of(name, handle, node))
        await client.patch(PersistentVolume, name, {"status": {"phase": phase}}, subresource="status")
    flags = ("--pool", pool.directory, *where)

    _, answer = await gc(*flags, "--yes")  # the grace period is an hour
    assert answer["removed"] == []
    assert "younger than the grace period" in held(answer, "pv-lost")
    _, answer = await gc(*flags, "--grace", "0s")  # without --yes
    assert (answer["removed"], held(answer, "pv-lost")) == ([], "")
    assert await client.find(PersistentVolume, "pv-lost") is not None

    code, answer = await gc(*flags, "--grace", "0s", "--yes")
    assert (code, ids(answer)) == (0, [("pv", "pv-lost")])
    assert "a claim uses it" in held(answer, "pv-bound")
    assert "undelete" in held(answer, "pv-trashed")
    left = {pv.name for pv in (await client.list(PersistentVolume)).items if not pv.is_deleting}
    assert left == {"pv-bound", "pv-elsewhere", "pv-trashed", "pv-kept"}


async def test_stale_attachments_go_and_those_of_living_nodes_and_volumes_stay(pool, cluster):
    client, where = cluster
    volume = pool.create_volume(CreateVolume("pvc-v", 8 * MIB))
    await client.create(PersistentVolume, pv_of("pv", volume.id))
    for name, pv, node in (("no-node", "pv", "gone"), ("no-volume", "absent", NODE), ("fine", "pv", NODE)):
        spec = {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": pv}}
        await client.create(VolumeAttachment, {"metadata": {"name": name}, "spec": spec})
    _, answer = await gc(*where, "--yes")
    assert answer["removed"] == []
    _, answer = await gc(*where, "--grace", "0s")
    assert ids(answer, "findings") == [("attachment", "no-node"), ("attachment", "no-volume")]
    assert len((await client.list(VolumeAttachment)).items) == 3
    code, answer = await gc(*where, "--grace", "0s", "--yes")
    assert (code, ids(answer)) == (0, [("attachment", "no-node"), ("attachment", "no-volume")])
    assert [va.name for va in (await client.list(VolumeAttachment)).items] == ["fine"]


async def test_a_shared_pool_gives_back_what_a_node_had_that_is_gone(shared, cluster):
    client, where = cluster
    made = {}
    for name, node in (("a", "gone"), ("b", NODE), ("c", "by-hand-desk"), ("d", "gone"), ("e", "gone")):
        volume = made[name] = shared.create_volume(CreateVolume(f"pvc-{name}", 8 * MIB))
        await client.create(PersistentVolume, pv_of(f"pv-{name}", volume.id))
        shared.attachments.register_node(node)
        shared.attachments.attach(volume.id, node, "SINGLE_NODE_WRITER")
        if name != "e":
            _age(shared, volume.id)
    in_use = loop.attach(made["d"].data)
    attach = os.path.join(shared.context.layout.volumes, made["a"].id, "attach")
    os.symlink(
        "free", os.path.join(attach, f".{time.time_ns()}-draft")
    )  # of a process that died: it makes nothing younger
    flags = ("--pool", shared.directory, *where)

    def nodes(name):
        return [each.node_id for each in shared.attachments.of_volume(made[name].id)]

    try:
        _, answer = await gc(*flags)
        assert held(answer, f"{made['a'].id} gone") == ""
        assert nodes("a") == ["gone"]  # without --yes nothing is changed
        code, answer = await gc(*flags, "--yes")
        assert (code, ids(answer)) == (0, [("pool-attachment", f"{made['a'].id} gone")])
        assert "mounted by hand" in held(answer, f"{made['c'].id} by-hand-desk")
        assert "in use" in held(answer, f"{made['d'].id} gone")
        assert "younger" in held(answer, f"{made['e'].id} gone")
        assert [nodes(name) for name in "abcde"] == [[], [NODE], ["by-hand-desk"], ["gone"], ["gone"]]
        again = shared.attachments.attach(made["a"].id, NODE, "SINGLE_NODE_WRITER")  # the next node gets it
        assert again.node_id == NODE
    finally:
        loop.detach(in_use)
        loop.wait_detached(in_use)


def _age(pool, ident):
    past = time.time() - 7200
    base = os.path.join(pool.context.layout.volumes, ident, "attach")
    for name in os.listdir(base):
        os.utime(os.path.join(base, name), (past, past), follow_symlinks=False)


async def test_a_dead_mount_is_unmounted_when_it_is_old_enough(pool, tmp_path):
    volume = pool.create_volume(CreateVolume("v", 320 * MIB, filesystem="xfs"))
    filesystems.mkfs(volume.data, "xfs")
    device = loop.attach(volume.data)
    target = tmp_path / "around" / "m"
    target.mkdir(parents=True)
    mounts.mount(device.path, target, "xfs")
    try:
        _, answer = await gc("--pool", pool.directory, "--grace", "0s", "--yes")
        assert answer["findings"] == []  # it is alive, and mounted
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", str(target)], check=True)
        assert mounts.is_corrupted(target)

        _, answer = await gc("--pool", pool.directory, "--yes")
        assert "younger" in held(answer, str(target))
        _, answer = await gc("--pool", pool.directory, "--grace", "0s")
        assert "does not answer" in next(each["why"] for each in answer["findings"])
        assert mountinfo.mount_at(target) is not None
        code, answer = await gc("--pool", pool.directory, "--grace", "0s", "--yes")
        assert (code, ids(answer)) == (0, [("mount", str(target))])
        assert mountinfo.mount_at(target) is None
        code, answer = await gc("--pool", pool.directory, "--grace", "0s", "--yes")
        assert ids(answer) == [("loop-device", str(device.path))]
        assert loop.wait_detached(device)
    finally:
        mounts.unmount_all(target)
        for left in loop.find(volume.data):
            loop.detach(left)


@pytest.mark.parametrize("kind", ["image", "directory"])
async def test_the_mount_of_a_pod_that_is_gone_goes_and_a_living_pods_stays(pool, cluster, tmp_path, kind):
    client, where = cluster
    volume = pool.create_volume(CreateVolume("pvc-v", 8 * MIB, kind=VolumeKind(kind)))
    await client.create(PersistentVolume, pv_of("pv", volume.id))
    container = {"name": "c", "image": "host", "command": ["true"]}
    pod = await client.create(
        Pod, {"metadata": {"name": "alive"}, "spec": {"nodeName": NODE, "containers": [container]}}, "default"
    )
    gone, alive = (tmp_path / "pods" / each / "volumes" / "mount" for each in (str(uuid.uuid4()), pod.uid))
    with _mounted(volume, kind, gone, alive):
        flags = ("--pool", pool.directory, *where)
        _, answer = await gc(*flags, "--grace", "0s")
        assert ids(answer, "findings") == [("mount", str(gone))]
        with open(gone / "open", "w"):  # somebody is in there
            code, answer = await gc(*flags, "--grace", "0s", "--yes")
            assert (code, answer["removed"]) == (1, [])
            assert "busy" in answer["failed"][0]["error"]
        _, answer = await gc(*flags, "--yes")
        assert "younger" in held(answer, str(gone))
        code, answer = await gc(*flags, "--grace", "0s", "--yes")
        assert (code, ids(answer)) == (0, [("mount", str(gone))])
        assert mountinfo.mount_at(gone) is None
        assert mountinfo.mount_at(alive) is not None
        _, answer = await gc(*flags, "--grace", "0s", "--yes")
        assert answer["findings"] == []


@contextlib.contextmanager
def _mounted(volume, kind, *targets):
    device = None
    if kind == "image":
        filesystems.mkfs(volume.data, "ext4")
        device = loop.attach(volume.data)
    try:
        for target in targets:
            target.mkdir(parents=True)
            if device is not None:
                mounts.mount(device.path, target, "ext4")
            else:
                mounts.bind(volume.data, target)
        yield
    finally:
        for target in targets:
            mounts.unmount_all(target)
        if device is not None:
            loop.detach(device)
            loop.wait_detached(device)
