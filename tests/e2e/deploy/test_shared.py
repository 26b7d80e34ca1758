"""The shared manifests, started as they are from the image: attached volumes live, though a leading controller dies."""

import pytest
from account_rights import check_rights
from volume_life import Life

pytestmark = pytest.mark.root

ACCOUNT = "system:serviceaccount:moorage-shared:moorage-controller"
PROVISIONER = "shared-csi-moorage-dev"


def holders(stage) -> dict[str, str]:
    """Who holds each lease of the controllers."""
    leases = stage.get("leases", "-n", "moorage-shared")["items"]
    return {lease["metadata"]["name"]: lease["spec"].get("holderIdentity", "") for lease in leases}


def test_volumes_are_attached_and_live_on_what_the_manifests_start(stage):
    objects = stage.deploy("shared", "moorage-shared")
    stage.deploy("snapshot-classes/shared")
    workloads = {o["kind"]: o for o in objects if o["kind"] in ("DaemonSet", "StatefulSet")}
    support = stage.deploy("snapshot-support/controller")
    (snapshots,) = [o for o in support if o["kind"] == "Deployment"]
    assert workloads["StatefulSet"]["spec"]["replicas"] == 2
    controllers = [stage.pod_of(workloads["StatefulSet"], replica=str(number)) for number in range(2)]
    others = [stage.pod_of(workload) for workload in (workloads["DaemonSet"], snapshots)]
    for pod in [*controllers, *others]:
        pod.wait_ready()

    life = Life(stage, "shared.csi.moorage.dev", "moorage-shared", "moorage-shared-directory", "moorage-shared")
    life.write()
    assert stage.get("volumeattachments")["items"], "volumes of the shared scope are attached"
    life.snapshot()
    (leader,) = [pod for pod in controllers if held_by(pod, holders(stage)[PROVISIONER])]
    (follower,) = [pod for pod in controllers if pod is not leader]
    for container in leader.containers.values():
        container.kill()
    # Nobody released its leases: they run out, and the other takes them.
    for step in (life.copy, life.grow, life.modify, life.group, life.refuse, life.refuse_snapshot):
        step()
    assert held_by(follower, holders(stage)[PROVISIONER])
    leader.start()
    leader.wait_ready()  # to stand by
    life.remove()
    # What happens every five minutes, now.
    follower.containers["sidecars"].stop()
    follower.containers["sidecars"].start("--snapshot-orphan-sweep-interval=100ms")
    leader.containers["sidecars"].stop()
    listed = ("list", "snapshot.storage.k8s.io", "volumesnapshots", "", "", "")
    stage.wait(lambda: listed in stage.requests[ACCOUNT], "forgotten finalizers to be looked for")

    stage.gone("volumeattachments")
    assert not [path for part in ("volumes", "snapshots") for path in (stage.layout.pool / part).iterdir()]
    assert stage.refused == []
    check_rights(objects, ACCOUNT, stage.requests[ACCOUNT])
    assert "system:serviceaccount:moorage-shared:moorage-node" not in stage.requests
    for pod in [*controllers, *others]:
        pod.stop()


def held_by(pod, identity: str) -> bool:
    """Holders are told by host and process; the pods of this test have the host's name and their own processes."""
    return identity.endswith(f"-{pod.containers['sidecars'].process.pid}")
