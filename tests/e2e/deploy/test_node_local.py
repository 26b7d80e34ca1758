"""The node-local manifests, started as they are from the image: volumes live, rights suffice, upgrades are quiet."""

import pytest
from account_rights import check_rights
from volume_life import Life

pytestmark = pytest.mark.root

NODE_ACCOUNT = "system:serviceaccount:moorage-system:moorage-node"
SNAPSHOT_ACCOUNT = "system:serviceaccount:moorage-snapshots:snapshot-controller"
SNAPSHOTS, GROUPS = "snapshot.storage.k8s.io", "groupsnapshot.storage.k8s.io"
CONFLICT = "an object is read anew after somebody else changed it"
# Rights that not every run needs, and why they are there.
RARELY_USED = {
    NODE_ACCOUNT: {
        ("list", SNAPSHOTS, "volumesnapshots", ""): "every five minutes, to find forgotten finalizers",
    },
    SNAPSHOT_ACCOUNT: {
        ("get", "", "persistentvolumeclaims", ""): CONFLICT,
        ("get", SNAPSHOTS, "volumesnapshots", ""): CONFLICT,
        ("get", GROUPS, "volumegroupsnapshots", ""): CONFLICT,
        ("get", GROUPS, "volumegroupsnapshotcontents", ""): CONFLICT,
        ("patch", "", "events", ""): "an event that happens again is counted",
    },
}


def test_volumes_live_on_what_the_manifests_start_with_the_least_rights(stage):
    objects = stage.deploy("node-local", "moorage-system") + stage.deploy("snapshot-support/controller")
    stage.deploy("snapshot-classes/node-local")
    workloads = {o["kind"]: o for o in objects if o["kind"] in ("DaemonSet", "Deployment")}
    node, snapshots = stage.pod_of(workloads["DaemonSet"]), stage.pod_of(workloads["Deployment"])
    node.wait_ready()

    Life(stage, "csi.moorage.dev", "moorage", "moorage-directory", "moorage").run()

    def capacities() -> set[str]:
        found = stage.get("csistoragecapacities", "-n", "moorage-system")["items"]
        return {each["storageClassName"] for each in found}

    stage.wait(lambda: capacities() == {"moorage", "moorage-thick", "moorage-directory"}, "capacity of all classes")
    assert not [path for part in ("volumes", "snapshots") for path in (stage.layout.pool / part).iterdir()]
    assert stage.refused == []
    for account in (NODE_ACCOUNT, SNAPSHOT_ACCOUNT):
        check_rights(objects, account, stage.requests[account], RARELY_USED[account])
    for pod in (node, snapshots):
        pod.stop()
