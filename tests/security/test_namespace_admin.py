"""An administrator of a namespace writes inline volumes into pods, to get what only the operator may give.

The kubelet passes the attributes of such a volume on as they are.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.conftest import filesystem
from tests.support.plugin_caller import MIB, Caller, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.host import mountinfo, mounts
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings
from moorage.storage import CreateVolume, Pool, PoolConfig, VolumeKind

pytestmark = pytest.mark.root

INLINE = {"csi.storage.k8s.io/ephemeral": "true"}


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    """ext4, which enforces the size of no directory here, and btrfs, which does."""
    base = tmp_path_factory.mktemp("disks")
    with filesystem(base / "1", "ext4", 1 << 30) as ext4, filesystem(base / "2", "btrfs", 1 << 30) as btrfs:
        yield {"ext4": ext4, "btrfs": btrfs}


@pytest.fixture
def settings(disks, tmp_path):
    pools = {"default": disks["ext4"] / "pool", "enforcing": disks["btrfs"] / "pool"}
    return PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", pools, overcommit=1000.0)


async def publish(client, caller, attributes, name="csi-inline"):
    target = caller.target(name)
    await client.NodePublishVolume(
        pb.NodePublishVolumeRequest(
            volume_id=name,
            target_path=target,
            volume_capability=mounted(),
            volume_context={**INLINE, **attributes},
        )
    )
    return Path(target)


def volumes_of(settings):
    return [name for place in settings.pools.values() for name in os.listdir(place / "volumes")]


def fill(path, mebibytes):
    with open(path, "wb", buffering=0) as file:
        for _ in range(mebibytes):
            file.write(os.urandom(MIB))
            os.fsync(file.fileno())


REFUSED = {
    "thick": {"provisioning": "thick", "size": "1Gi"},
    "thin in words": {"provisioning": "thin"},
    "another pool": {"pool": "enforcing"},
    "the same pool in words": {"pool": "default"},
    "snapshots while in use": {"snapshotInUse": "live"},
    "trash": {"trashRetention": "999d"},
    "memory of the node": {"readAheadKiB": "1048576"},
    "directory": {"kind": "directory", "size": "1Mi"},
    "larger than allowed": {"size": "11Gi"},
    "far larger": {"size": "9" * 18 + "Ti"},
    "size of many digits": {"size": "9" * 4000},
    "size in other digits": {"size": "١٢٣Mi"},
    "no size": {"size": "0"},
    "empty size": {"size": ""},
    "filesystem that is an option": {"fsType": "--bind"},
    "other kind": {"kind": "../../etc"},
    "unknown": {"colour": "blue"},
}


@pytest.mark.parametrize("attributes", REFUSED.values(), ids=REFUSED.keys())
async def test_a_pod_chooses_no_more_than_the_operator_allows(settings, tmp_path, attributes):
    async with serve(settings), CsiClient(settings.endpoint) as client:
        caller = Caller(client, tmp_path)
        with pytest.raises(CsiError) as caught:
            await publish(client, caller, attributes)
        assert caught.value.code == "INVALID_ARGUMENT"
        assert len(caught.value.message) < 600
        assert volumes_of(settings) == []
        assert mountinfo.mount_at(caller.target("csi-inline")) is None


async def test_a_pod_gets_an_image_of_the_size_that_it_names(settings, tmp_path):
    async with serve(settings), CsiClient(settings.endpoint) as client:
        caller = Caller(client, tmp_path)
        target = await publish(client, caller, {"size": "64Mi", "fsType": "ext4"})
        found = os.statvfs(target)
        assert found.f_blocks * found.f_frsize <= 64 * MIB
        await caller.unpublish("csi-inline", target)
        assert volumes_of(settings) == []


async def test_directories_are_made_where_their_size_holds(settings, disks, tmp_path):
    settings = replace(
        settings, pools={"default": disks["btrfs"] / "pool"}, inline_attributes=frozenset({"size", "kind"})
    )
    async with serve(settings), CsiClient(settings.endpoint) as client:
        caller = Caller(client, tmp_path)
        target = await publish(client, caller, {"kind": "directory", "size": "8Mi"})
        with pytest.raises(OSError, match="quota"):
            fill(target / "f", 32)
        await caller.unpublish("csi-inline", target)


async def test_the_operator_may_allow_more_or_nothing(settings, tmp_path):
    allowed = replace(settings, inline_attributes=frozenset({"size", "provisioning"}), inline_max_bytes=20 * MIB)
    async with serve(allowed), CsiClient(settings.endpoint) as client:
        caller = Caller(client, tmp_path)
        target = await publish(client, caller, {"provisioning": "thick"})  # the size is the largest that there may be
        found = os.statvfs(target)
        assert found.f_blocks * found.f_frsize <= 20 * MIB
        await caller.unpublish("csi-inline", target)
        with pytest.raises(CsiError, match="fsType is not for inline volumes here"):
            await publish(client, caller, {"fsType": "ext4"})
    async with serve(replace(settings, inline_max_bytes=0)), CsiClient(settings.endpoint) as client:
        with pytest.raises(CsiError, match="inline volumes are not made here"):
            await publish(client, Caller(client, tmp_path), {})


async def test_a_pod_that_has_such_a_directory_from_before_keeps_it(settings, tmp_path):
    """An earlier version made it; what a running pod has mounted is not deleted."""
    client = CsiClient(settings.endpoint)
    caller = Caller(client, tmp_path)
    target = Path(caller.target("csi-inline"))
    with Pool.open(PoolConfig("default", settings.pools["default"], background=False)) as pool:
        volume = pool.create_volume(
            CreateVolume("csi-inline", required_bytes=MIB, kind=VolumeKind.DIRECTORY, ephemeral=str(target))
        )
    target.mkdir()
    mounts.bind(volume.data, target)
    try:
        allowed = replace(settings, inline_attributes=frozenset({"size", "kind"}))
        async with serve(allowed), client:
            with pytest.raises(CsiError, match="does not enforce"):
                await publish(client, caller, {"kind": "directory", "size": "1Mi"})
            assert volume.data.is_dir()
            await caller.unpublish("csi-inline", target)
            assert volumes_of(settings) == []
    finally:
        mounts.unmount_all(target)
