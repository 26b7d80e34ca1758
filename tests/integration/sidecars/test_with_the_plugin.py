"""The real plugin behind the sidecars: a volume's life through provisioning, snapshot, clone and growth."""

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.kube.objects import (
    CSINode,
    CSIStorageCapacity,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
)
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings
from moorage.sidecars.roles import Role

DRIVER, KEY = "csi.moorage.dev", "topology.moorage.dev/node"
SELECTED = "volume.kubernetes.io/selected-node"


async def make_cluster(lab):
    node = await lab.client.create(Node, {"metadata": {"name": "node-1", "labels": {KEY: "node-1"}}})
    owner = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": node.uid}
    spec = {"drivers": [{"name": DRIVER, "nodeID": "node-1", "topologyKeys": [KEY]}]}
    await lab.client.create(CSINode, {"metadata": {"name": "node-1", "ownerReferences": [owner]}, "spec": spec})
    body = {"provisioner": DRIVER, "reclaimPolicy": "Delete", "allowVolumeExpansion": True}
    late = {"volumeBindingMode": "WaitForFirstConsumer"}
    await lab.client.create(StorageClass, {"metadata": {"name": "fast"}, **body, **late})
    body = {"metadata": {"name": "snaps"}, "driver": DRIVER, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeSnapshotClass, body)


async def test_a_volumes_life_on_one_node(make_lab, tmp_path):
    endpoint = f"unix://{tmp_path}/csi.sock"
    pool = tmp_path / "pool"
    pool.mkdir()
    settings = PluginSettings(endpoint=endpoint, node_id="node-1", pools={"default": pool})
    async with make_lab(names=("binder", "protection")) as lab, serve(settings), CsiClient(endpoint) as csi:
        await make_cluster(lab)
        roles = (Role.PROVISIONER, Role.RESIZER, Role.SNAPSHOTTER, Role.CAPACITY)
        lab.start(*roles, node="node-1", node_deployment=True, csi_address=endpoint, capacity_ownerref_level=-1)
        await lab.make_claim("data", "16Mi", annotations={SELECTED: "node-1"})
        claim = await lab.bound("data")
        volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
        [term] = volume.spec.node_affinity.required.node_selector_terms
        assert term.match_expressions[0].key == KEY

        copy = {"dataSource": {"kind": "PersistentVolumeClaim", "name": "data"}}
        await lab.make_claim("copy", "16Mi", annotations={SELECTED: "node-1"}, **copy)
        await lab.bound("copy")

        patch = {"spec": {"resources": {"requests": {"storage": "32Mi"}}}}
        await lab.client.patch(PersistentVolumeClaim, "data", patch, "default")

        async def is_larger():
            found = await lab.client.get(PersistentVolume, claim.spec.volume_name)
            return found.spec.capacity["storage"] == "32Mi"

        await lab.until(is_larger)

        async def has_capacity():
            return (await lab.client.list(CSIStorageCapacity)).items

        [room] = await lab.until(has_capacity)
        assert room.labels["csi.storage.k8s.io/managed-by"] == "external-provisioner-node-1"
        for name in ("data", "copy"):
            await lab.client.delete(PersistentVolumeClaim, name, "default")

        async def is_empty():
            return not await lab.volumes()

        await lab.until(is_empty)
        assert not (await csi.ListVolumes(pb.ListVolumesRequest())).entries


async def test_a_snapshot_is_taken_and_restored_through_the_snapshot_controller(make_lab, tmp_path):
    endpoint = f"unix://{tmp_path}/csi.sock"
    pool = tmp_path / "pool"
    pool.mkdir()
    settings = PluginSettings(endpoint=endpoint, node_id="node-1", pools={"default": pool})
    async with (
        make_lab(names=("binder", "protection", "snapshots")) as lab,
        serve(settings),
        CsiClient(endpoint) as csi,
    ):
        await make_cluster(lab)
        lab.start(Role.PROVISIONER, Role.SNAPSHOTTER, csi_address=endpoint)
        await lab.make_claim("data", "16Mi", annotations={SELECTED: "node-1"})
        await lab.bound("data")
        source = {"persistentVolumeClaimName": "data"}
        spec = {"volumeSnapshotClassName": "snaps", "source": source}
        await lab.client.create(
            VolumeSnapshot, {"metadata": {"name": "s", "namespace": "default"}, "spec": spec}, "default"
        )

        async def is_ready():
            found = await lab.client.get(VolumeSnapshot, "s", "default")
            return found.status is not None and found.status.ready_to_use

        await lab.until(is_ready)
        origin = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}
        await lab.make_claim("restored", "16Mi", annotations={SELECTED: "node-1"}, dataSource=origin)
        await lab.bound("restored")
        await lab.client.delete(VolumeSnapshot, "s", "default")
        for name in ("data", "restored"):
            await lab.client.delete(PersistentVolumeClaim, name, "default")

        async def is_empty():
            return not await lab.volumes() and await lab.client.find(VolumeSnapshot, "s", "default") is None

        await lab.until(is_empty)
        assert not (await csi.ListVolumes(pb.ListVolumesRequest())).entries

        async def has_no_snapshots():
            return not (await csi.ListSnapshots(pb.ListSnapshotsRequest())).entries

        await lab.until(has_no_snapshots)
