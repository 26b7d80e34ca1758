"""The shared manifests, started as they are from the image: attached volumes live, and the nodes have no account."""

import pytest
from account_rights import check_rights
from volume_life import Life

pytestmark = pytest.mark.root

ACCOUNT = "system:serviceaccount:moorage-shared:moorage-controller"
RARELY_USED = {
    ("list", "snapshot.storage.k8s.io", "volumesnapshots", ""): "every five minutes, to find forgotten finalizers",
}


def test_volumes_are_attached_and_live_on_what_the_manifests_start(stage):
    objects = stage.deploy("shared", "moorage-shared")
    stage.deploy("snapshot-classes/shared")
    workloads = {o["kind"]: o for o in objects if o["kind"] in ("DaemonSet", "StatefulSet")}
    support = stage.deploy("snapshot-support/controller")
    (snapshots,) = [o for o in support if o["kind"] == "Deployment"]
    pods = [stage.pod_of(workload) for workload in (workloads["DaemonSet"], workloads["StatefulSet"], snapshots)]
    for pod in pods:
        pod.wait_ready()

    life = Life(stage, "shared.csi.moorage.dev", "moorage-shared", "moorage-shared-directory", "moorage-shared")
    life.write()
    assert stage.get("volumeattachments")["items"], "volumes of the shared scope are attached"
    for step in (life.snapshot, life.copy, life.grow, life.modify, life.group, life.refuse, life.remove):
        step()

    stage.gone("volumeattachments")
    assert not [path for part in ("volumes", "snapshots") for path in (stage.layout.pool / part).iterdir()]
    assert stage.refused == []
    check_rights(objects, ACCOUNT, stage.requests[ACCOUNT], RARELY_USED)
    assert "system:serviceaccount:moorage-shared:moorage-node" not in stage.requests
    for pod in pods:
        pod.stop()
