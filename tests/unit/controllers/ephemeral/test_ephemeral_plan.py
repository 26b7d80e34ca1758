"""Which claims a pod's ephemeral volumes need, and what is in them."""

from typing import Any

import msgspec

from moorage.controllers.ephemeral import MakeClaim, Refuse, claim_from, plan_pod
from moorage.kube.objects import PersistentVolumeClaim, Pod


def pod(**meta: Any) -> Pod:
    volumes = [{"name": "scratch", "ephemeral": {}}, {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    document = {"metadata": {"name": "pod", "namespace": "default", "uid": "p", **meta}, "spec": {"volumes": volumes}}
    return msgspec.convert(document, Pod)


def claim(owner: str) -> PersistentVolumeClaim:
    owners = [{"kind": "Pod", "name": "pod", "uid": owner, "controller": True}]
    return msgspec.convert({"metadata": {"name": "pod-scratch", "ownerReferences": owners}}, PersistentVolumeClaim)


def test_a_missing_claim_is_made() -> None:
    assert plan_pod(pod(), lambda key: None) == [MakeClaim("scratch", "pod-scratch")]


def test_a_claim_that_is_there_is_left_alone() -> None:
    assert plan_pod(pod(), lambda key: claim("p")) == []


def test_a_claim_of_another_pod_of_the_name_is_refused() -> None:
    assert plan_pod(pod(), lambda key: claim("older")) == [Refuse("scratch", "pod-scratch")]


def test_a_pod_that_is_going_gets_nothing() -> None:
    assert plan_pod(pod(deletionTimestamp="2026-01-01T00:00:00Z"), lambda key: None) == []


def test_the_template_is_carried_over_whole() -> None:
    template = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "newField": {"x": 1}},
    }
    made = claim_from(pod(), {"name": "scratch", "ephemeral": {"volumeClaimTemplate": template}})
    assert made["spec"] == template["spec"]
    assert (made["metadata"]["labels"], made["metadata"]["annotations"]) == ({"a": "b"}, {"c": "d"})
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "p"}
    assert made["metadata"]["ownerReferences"] == [owner | {"controller": True, "blockOwnerDeletion": True}]
