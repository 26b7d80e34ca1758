"""Claims of generic ephemeral volumes are created for their pod, and only for it."""

from typing import Any

from tests.integration.controllers.replay import Stage

from moorage.kube.objects import Event, PersistentVolumeClaim, Pod

TEMPLATE = {
    "metadata": {"labels": {"app": "db"}, "annotations": {"note": "kept"}},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""},
}


def pod(name: str = "pod") -> dict[str, Any]:
    volume = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": TEMPLATE}}
    containers = [{"name": "main", "image": "app"}]
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"containers": containers, "volumes": [volume]}}


async def test_a_pod_gets_the_claim_of_its_template(stage: Stage) -> None:
    await stage.start(("ephemeral",))
    made = await stage.client.create(Pod, pod(), "default")
    await stage.settle()
    claim = await stage.client.get(PersistentVolumeClaim, "pod-scratch", "default")
    owner = claim.metadata.owner_references[0]
    assert (owner.uid, owner.controller, owner.block_owner_deletion) == (made.uid, True, True)
    assert (claim.labels, claim.annotations["note"]) == ({"app": "db"}, "kept")


async def test_a_deleted_claim_is_made_again_while_its_pod_is_there(stage: Stage) -> None:
    await stage.start(("ephemeral", "protection"))
    await stage.client.create(Pod, pod(), "default")
    await stage.settle()
    first = await stage.client.get(PersistentVolumeClaim, "pod-scratch", "default")
    await stage.client.delete(PersistentVolumeClaim, "pod-scratch", "default")
    await stage.settle()
    assert (await stage.client.get(PersistentVolumeClaim, "pod-scratch", "default")).uid != first.uid


async def test_a_claim_of_somebody_else_is_left_alone_and_told(stage: Stage) -> None:
    await stage.client.create(
        PersistentVolumeClaim, {"metadata": {"name": "pod-scratch"}, "spec": TEMPLATE["spec"]}, "default"
    )
    await stage.start(("ephemeral",))
    await stage.client.create(Pod, pod(), "default")
    await stage.settle()
    events = (await stage.client.list(Event, "default")).items
    assert [(e.type, e.reason, e.involved_object.name) for e in events] == [("Warning", "FailedBinding", "pod")]
    assert not (await stage.client.get(PersistentVolumeClaim, "pod-scratch", "default")).metadata.owner_references
