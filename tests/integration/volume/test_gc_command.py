"""`moorage gc` on a real pool, with real loop devices and mounts, and a real API server."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from moorage.host import filesystems, loop, mounts
from moorage.kube.api import config
from moorage.kube.api.client import Client
from moorage.kube.objects import CSIDriver, PersistentVolume, VolumeAttachment
from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig
from moorage.storage.guests import FOR_EXPORT
from moorage.testing import serve

pytestmark = pytest.mark.root
MIB = 1 << 20
DRIVER = "csi.moorage.dev"


@pytest.fixture
def pool(xfs_pool_dir):
    with Pool.open(PoolConfig("p", xfs_pool_dir / "pool", background=False, owner=False)) as opened:
        yield opened


async def gc(*arguments):
    """Run the command to its end; returns the exit code, what it found by kind, and everything it said."""
    argv = [sys.executable, "-m", "moorage.cli.main", "gc", *map(str, arguments), "-o", "json"]
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
    done = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    answer = json.loads(done.stdout) if done.stdout else {}
    return done.returncode, answer, done.stderr


def kinds(answer, part="findings"):
    return sorted(found["kind"] for found in answer[part])


async def test_devices_mounts_temporary_files_and_trash_are_found_and_removed_only_with_yes(pool, tmp_path):
    left = pool.create_volume(CreateVolume("left", 8 * MIB))
    filesystems.mkfs(left.data, "ext4")
    used = pool.create_volume(CreateVolume("used", 8 * MIB))
    filesystems.mkfs(used.data, "ext4")
    stale, busy = loop.attach(left.data), loop.attach(used.data)
    (tmp_path / "m").mkdir()
    mounts.mount(busy.path, tmp_path / "m", "ext4")
    (pool.directory / "tmp" / "volume-dead").mkdir()
    pool.create_volume(CreateVolume("old", 8 * MIB, mutable={"trashRetention": "1s"}))
    pool.delete_volume(pool.volumes.page().items[1].id)
    pool.create_snapshot(CreateSnapshot("export-x", left.id, parameters={FOR_EXPORT: "true"}))
    past = time.time() - 90000
    os.utime(pool.directory / "tmp" / "volume-dead", (past, past))
    # The trash tells its age by its name.
    (entry,) = os.listdir(pool.directory / "trash")
    aged = f"{int(past * 1e9):020d}-{entry.partition('-')[2]}"
    os.rename(pool.directory / "trash" / entry, pool.directory / "trash" / aged)

    wanted = ["export-snapshot", "loop-device", "temporary", "trash"]
    code, answer, _ = await gc("--pool", pool.directory)
    assert (code, kinds(answer), answer["removed"]) == (0, wanted, [])
    held = {found["kind"]: found["held"] for found in answer["findings"]}
    assert "younger" in held["loop-device"]  # attached just now
    assert (held["temporary"], held["trash"]) == ("", "")

    code, answer, _ = await gc("--pool", pool.directory, "--yes")
    assert kinds(answer, "removed") == ["temporary", "trash"]
    assert loop.find(left.data) != []
    code, answer, _ = await gc("--pool", pool.directory, "--yes", "--grace", "0s")
    assert kinds(answer, "removed") == ["export-snapshot", "loop-device"]
    assert loop.wait_detached(stale)
    assert [device.number for device in loop.find(used.data)] == [busy.number]
    assert {volume.name for volume in pool.volumes.page().items} == {"left", "used"}
    assert pool.snapshots.page().items == ()
    code, answer, _ = await gc("--pool", pool.directory, "--yes", "--grace", "0s")
    assert answer["findings"] == []
    mounts.unmount(tmp_path / "m")


async def test_a_mount_of_a_deleted_volume_is_unmounted_unless_somebody_is_in_it(pool, tmp_path):
    volume = pool.create_volume(CreateVolume("v", 8 * MIB))
    filesystems.mkfs(volume.data, "ext4")
    device = loop.attach(volume.data)
    (tmp_path / "m").mkdir()
    mounts.mount(device.path, tmp_path / "m", "ext4")
    os.unlink(volume.data)  # behind everybody's back
    with open(tmp_path / "m" / "file", "w"):
        code, answer, _ = await gc("--pool", pool.directory, "--yes", "--grace", "0s")
        assert code == 1
        assert "busy" in answer["failed"][0]["error"]
        assert kinds(answer) == ["loop-device", "mount"]
        assert "mounted at" in next(found["held"] for found in answer["findings"] if found["kind"] == "loop-device")
    code, answer, _ = await gc("--pool", pool.directory, "--yes", "--grace", "0s")
    assert kinds(answer, "removed") == ["mount"]
    code, answer, _ = await gc("--pool", pool.directory, "--yes", "--grace", "0s")
    assert kinds(answer, "removed") == ["loop-device"]
    assert loop.wait_detached(device)


async def test_volumes_objects_and_attachments_without_each_other_are_found(pool, tmp_path):
    owned = pool.create_volume(CreateVolume("pvc-owned", 8 * MIB))
    lost = pool.create_volume(CreateVolume("pvc-lost", 8 * MIB))
    pool.create_volume(CreateVolume("by hand", 8 * MIB))
    async with serve(tmp_path / "api") as server, Client(config.load(str(server.kubeconfig))) as client:
        await client.create(PersistentVolume, _pv("pv-owned", owned.id))
        where = ("--pool", pool.directory, "--kubeconfig", server.kubeconfig, "--grace", "0s")
        _, answer, _ = await gc(*where)
        assert all("not installed" in found["held"] for found in answer["findings"])  # perhaps another cluster's

        await client.create(CSIDriver, {"metadata": {"name": DRIVER}, "spec": {"attachRequired": True}})
        await client.create(PersistentVolume, _pv("pv-lost", "nowhere"))
        spec = {"attacher": DRIVER, "nodeName": "gone", "source": {"persistentVolumeName": "pv-owned"}}
        await client.create(VolumeAttachment, {"metadata": {"name": "va"}, "spec": spec})
        _, answer, _ = await gc(*where)
        held = {(found["kind"], found["id"]): found["held"] for found in answer["findings"]}
        assert held[("volume", lost.id)] == ""
        assert "made by hand" in held[("volume", pool.volumes.page().items[0].id)]
        assert held[("attachment", "va")] == ""
        assert ("volume", owned.id) not in held

        code, answer, _ = await gc(*where, "--yes")
        assert ("volume", lost.id) in {(found["kind"], found["id"]) for found in answer["removed"]}
        assert code == 0
        assert await client.find(VolumeAttachment, "va") is None
        assert await client.find(PersistentVolume, "pv-owned") is not None
    assert {volume.name for volume in pool.volumes.page().items} == {"pvc-owned", "by hand"}
    assert pool.undelete("pvc-lost") == lost.id  # it was kept in the trash, should the cluster have been the wrong one


def _pv(name, handle):
    return {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "8Mi"},
            "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": DRIVER, "volumeHandle": handle},
        },
    }


async def test_bad_input_and_what_cannot_be_reached(pool, tmp_path):
    code, _, said = await gc("--pool", pool.directory, "--grace", "soon")
    assert (code, "duration" in said) == (2, True)
    code, _, said = await gc("--pool", tmp_path / "nowhere")
    assert (code, "no pool" in said) == (1, True)
    code, _, said = await gc("--no-cluster")
    assert (code, "nothing to look at" in said) == (2, True)
    nobody = tmp_path / "kubeconfig"
    nobody.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    code, _, said = await gc("--pool", pool.directory, "--kubeconfig", nobody)
    assert code == 1
    assert "Traceback" not in said
    assert json.loads(said)["error"]["code"] == "UNAVAILABLE"
