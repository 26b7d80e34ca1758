"""Every example is applied with kubectl, and keeps the promise that it makes."""

import shutil
from pathlib import Path

import pytest

from moorage.cli.up import TO_TRY

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (Debian: kubernetes-client)"),
]


def apply(stack, name: str) -> None:
    stack.kubectl("apply", "-f", str(EXAMPLES / f"{name}.yaml"))


def test_examples_keep_their_promises(stack_at):
    stack = stack_at("s", "--pool-size", "4Gi")
    kubectl = stack.kubectl

    apply(stack, "claim-and-pod")
    stack.ready("writer")
    stack.log_of("writer", "written")

    readme = (EXAMPLES.parent / "README.md").read_text()
    for line in TO_TRY:
        assert f"  {line}\n" in readme
        for command in line.replace("examples/", f"{EXAMPLES}/").split(" && "):
            said = kubectl(*command.split()[1:], "--request-timeout=2s", check=False)  # a watch ends with that
            assert "node-1" in said or "writer" in said, command

    apply(stack, "snapshot")
    kubectl("wait", "--for=jsonpath={.status.readyToUse}=true", "volumesnapshot/data-moment", "--timeout=30s")
    apply(stack, "restore")
    apply(stack, "clone")
    for pod in ("restored-reader", "cloned-reader"):
        stack.ready(pod)
        assert "lines 1" in stack.log_of(pod, "lines")

    apply(stack, "grow")
    kubectl("wait", "--for=jsonpath={.status.capacity.storage}=512Mi", "pvc/data", "--timeout=60s")

    apply(stack, "block")
    stack.ready("raw-user")
    assert f"read moored size {64 << 20}" in stack.log_of("raw-user", "read")

    apply(stack, "ephemeral-generic")
    apply(stack, "ephemeral-inline")
    for pod in ("scratch", "inline"):
        stack.ready(pod)
        stack.log_of(pod, "scratched")
    kubectl("delete", "pod", "scratch", "inline")
    stack.wait(lambda: "scratch-scratch" not in stack.names("pvc"), "the ephemeral claim to go")

    apply(stack, "shared-directory")
    stack.log_of("shared-reader", "read hello")

    apply(stack, "group-snapshot")
    kubectl("wait", "--for=jsonpath={.status.readyToUse}=true", "volumegroupsnapshot/shop-moment", "--timeout=30s")
    owned = [s for s in stack.get("volumesnapshots")["items"] if s["metadata"].get("ownerReferences")]
    sources = {s["spec"]["source"].get("persistentVolumeClaimName") for s in owned} - {None}
    assert len(owned) == 2
    assert sources <= {"orders", "invoices"}

    apply(stack, "attributes-class")
    kubectl(
        "wait", "--for=jsonpath={.status.currentVolumeAttributesClassName}=sequential", "pvc/tuned", "--timeout=30s"
    )

    apply(stack, "static")
    kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/static", "--timeout=30s")
    assert stack.get("pvc", "static")["spec"]["volumeName"] == "static"

    recover_a_deleted_claim(stack)
    remove_everything(stack)


def recover_a_deleted_claim(stack) -> None:
    kubectl = stack.kubectl
    volume = stack.get("pvc", "data")["spec"]["volumeName"]
    kubectl("patch", "pv", volume, "-p", '{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}')
    kubectl("delete", "pod", "writer")
    kubectl("delete", "pvc", "data")
    kubectl("wait", "--for=jsonpath={.status.phase}=Released", f"pv/{volume}", "--timeout=30s")
    kubectl("patch", "pv", volume, "--type", "json", "-p", '[{"op":"remove","path":"/spec/claimRef"}]')
    kubectl("apply", "-f", "-", stdin=(EXAMPLES / "recover.yaml").read_text().replace("VOLUME-NAME", volume))
    kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/recovered", "--timeout=30s")
    kubectl("patch", "pv", volume, "-p", '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}')


def remove_everything(stack) -> None:
    stack.kubectl("delete", "pods", "--all")
    stack.kubectl("delete", "volumegroupsnapshots,volumesnapshots", "--all")
    stack.kubectl("delete", "pvc", "--all")
    stack.kubectl("delete", "pv", "static")
    stack.gone("pods", "pvc", "pv", "volumesnapshotcontents", "volumegroupsnapshotcontents", "volumeattachments")
    pool = stack.data_dir / "pool"
    stack.wait(lambda: not [*(pool / "volumes").iterdir(), *(pool / "snapshots").iterdir()], "the pool to be empty")
