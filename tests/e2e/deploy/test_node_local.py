"""The node-local manifests, started as they are from the image: volumes live, rights suffice, upgrades are quiet."""

import errno
import json
import os
import socket

import pytest
from account_rights import check_rights
from next_version import NEXT_VERSION
from volume_life import Life, claim, pod

import moorage
from moorage.host import loop, mountinfo

pytestmark = pytest.mark.root

NODE_ACCOUNT = "system:serviceaccount:moorage-system:moorage-node"
SNAPSHOT_ACCOUNT = "system:serviceaccount:moorage-snapshots:snapshot-controller"


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
        check_rights(objects, account, stage.requests[account])
    assert_only_root_reaches(stage.kubelet / "plugins/csi.moorage.dev/csi.sock")
    for running in (node, snapshots):
        running.stop()
        for container in running.containers.values():
            events = [json.loads(line) for line in container.log.read_text().splitlines()]
            assert events, container.name
            assert all(event.keys() >= {"time", "level", "logger", "event"} for event in events)


def assert_only_root_reaches(path) -> None:
    """Other pods have no path to the socket at all; a user of the node who had one is refused by the socket itself."""
    folder = os.open(path.parent, os.O_PATH)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(65532, 65532, 65532)
        os.setresuid(65532, 65532, 65532)
        try:
            socket.socket(socket.AF_UNIX).connect(f"/proc/self/fd/{folder}/{path.name}")
        except OSError as refused:
            os._exit(refused.errno)
        os._exit(0)
    os.close(folder)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EACCES
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def test_a_pod_reads_and_writes_while_plugin_and_sidecars_are_replaced(stage, rootfs, next_rootfs):
    objects = stage.deploy("node-local", "moorage-system")
    (workload,) = [o for o in objects if o["kind"] == "DaemonSet"]
    node = stage.pod_of(workload)
    node.wait_ready()
    # One descriptor of each volume is held open for the whole time.
    script = "exec 3>>/data/log 4>>/files/log; n=0; while :; do n=$((n+1)); echo $n >&3; echo $n >&4; sleep 0.02; done"
    stage.apply(
        claim("data", "moorage"),
        claim("files", "moorage-directory", accessModes=["ReadWriteMany"]),
        pod("writer", ["data", "files"], script),
    )
    stage.pod_runs("writer")

    for image, end in ((next_rootfs, "stop"), (rootfs, "stop"), (next_rootfs, "kill"), (rootfs, "kill")):
        before = written(stage)
        for container in node.containers.values():
            container.stop() if end == "stop" else container.kill()
        stage.wait(lambda before=before: written(stage) > before, "the pod to write on without a plugin")
        node.image = image
        node.start()
        node.wait_ready()
        version = NEXT_VERSION if image == next_rootfs else moorage.__version__
        found = [line for line in node.containers["sidecars"].log.read_text().splitlines() if "driver found" in line]
        assert f'"version": "{version}"' in found[-1]
        if (image, end) == (next_rootfs, "stop"):
            stage.apply(claim("late", "moorage"), pod("late", ["late"], "echo kept >/late/file; sync; echo done"))
            stage.log_has("late", "done")
            records = [path.read_text() for path in (stage.layout.pool / "volumes").glob("*/volume.json")]
            assert sum(NEXT_VERSION in record for record in records) == 1, (
                "the next version keeps records of its own kind"
            )

    # What another plugin made and mounted, the last one publishes again and takes away.
    stage.apply(pod("second", ["data", "late"], "head -n 1 /data/log; cat /late/file"))
    assert stage.log_has("second", "kept").split() == ["1", "kept"]
    for volume in ("data", "files"):
        found = numbers(stage, volume)
        assert found == list(range(1, len(found) + 1)), "nothing is lost and nothing is written twice"
    stage.kubectl("delete", "pods", "--all", "-n", "default")
    stage.kubectl("delete", "pvc", "--all", "-n", "default", "--wait=false")
    stage.gone("pvc", "pv")
    assert mountinfo.mounts_below(stage.kubelet / "pods") == []
    assert loop.attached(stage.layout.pool) == []
    node.stop()


def numbers(stage, volume) -> list[int]:
    text = stage.kubectl("exec", "writer", "--", "cat", f"/{volume}/log")
    return [int(line) for line in text.splitlines()]


def written(stage) -> int:
    return len(numbers(stage, "data"))
