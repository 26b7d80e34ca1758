"""Claims of ephemeral volumes live with their pod, and what is owned follows its owner."""

from typing import Any

import pytest
from replay import Stage

from moorage.kube.errors import NotFound
from moorage.kube.objects import ConfigMap, Event, PersistentVolumeClaim, Pod

TEMPLATE = {
    "metadata": {"labels": {"app": "db"}, "annotations": {"note": "kept"}},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""},
}


def pod(name: str = "pod") -> dict[str, Any]:
    volume = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": TEMPLATE}}
    containers = [{"name": "main", "image": "app"}]
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"containers": containers, "volumes": [volume]}}


def owned(name: str, *owners: ConfigMap, blocks: bool = False) -> dict[str, Any]:
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": o.name, "uid": o.uid, "blockOwnerDeletion": blocks}
        for o in owners
    ]
    return {"metadata": {"name": name, "namespace": "default", "ownerReferences": references}}


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


async def test_the_claim_goes_with_its_pod(stage: Stage) -> None:
    await stage.start(("ephemeral", "protection", "garbage"))
    await stage.client.create(Pod, pod(), "default")
    await stage.settle()
    await stage.client.delete(Pod, "pod", "default", grace_s=0)
    await stage.settle()
    assert await stage.client.find(PersistentVolumeClaim, "pod-scratch", "default") is None


async def test_what_has_another_owner_stays_and_forgets_the_first(stage: Stage) -> None:
    await stage.start(("garbage",))
    first, second = [await stage.client.create(ConfigMap, owned(name), "default") for name in ("first", "second")]
    await stage.client.create(ConfigMap, owned("shared", first, second), "default")
    await stage.client.create(ConfigMap, owned("lone", first), "default")
    await stage.client.delete(ConfigMap, "first", "default", propagation="Background")
    await stage.settle()
    shared = await stage.client.get(ConfigMap, "shared", "default")
    assert [owner.uid for owner in shared.metadata.owner_references] == [second.uid]
    assert await stage.client.find(ConfigMap, "lone", "default") is None


async def test_a_foreground_deletion_ends_with_the_owner(stage: Stage) -> None:
    await stage.start(("garbage",))
    owner = await stage.client.create(ConfigMap, owned("owner"), "default")
    child = await stage.client.create(ConfigMap, owned("child", owner, blocks=True), "default")
    grandchild = owned("grandchild", child, blocks=True)
    grandchild["metadata"]["finalizers"] = ["example.com/hold"]
    await stage.client.create(ConfigMap, grandchild, "default")
    await stage.client.delete(ConfigMap, "owner", "default", propagation="Foreground")
    await stage.settle()
    assert (await stage.client.get(ConfigMap, "owner", "default")).is_deleting  # it waits for those below
    await stage.client.patch(ConfigMap, "grandchild", {"metadata": {"finalizers": None}}, "default")
    await stage.settle()
    for name in ("grandchild", "child", "owner"):
        assert await stage.client.find(ConfigMap, name, "default") is None


async def test_orphans_stay(stage: Stage) -> None:
    await stage.start(("garbage",))
    owner = await stage.client.create(ConfigMap, owned("owner"), "default")
    await stage.client.create(ConfigMap, owned("child", owner), "default")
    await stage.client.delete(ConfigMap, "owner", "default", propagation="Orphan")
    await stage.settle()
    with pytest.raises(NotFound):
        await stage.client.get(ConfigMap, "owner", "default")
    assert not (await stage.client.get(ConfigMap, "child", "default")).metadata.owner_references


async def test_an_owner_of_a_kind_that_is_not_served_is_believed(stage: Stage) -> None:
    await stage.start(("garbage",))
    reference = {
        "apiVersion": "example.com/v1",
        "kind": "Thing",
        "name": "x",
        "uid": "11111111-0000-0000-0000-000000000000",
    }
    body = {"metadata": {"name": "child", "namespace": "default", "ownerReferences": [reference]}}
    await stage.client.create(ConfigMap, body, "default")
    await stage.settle()
    assert await stage.client.find(ConfigMap, "child", "default") is not None
