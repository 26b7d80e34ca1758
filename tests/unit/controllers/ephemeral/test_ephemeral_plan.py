"""Which claims a pod's ephemeral volumes need, and what is in them."""

from typing import Any

import msgspec
import pytest

from moorage.controllers.ephemeral import ClaimIsForeign, Ephemeral, MakeClaim, Refuse, claim_from, plan_pod
from moorage.kube.errors import AlreadyExists
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


class Late:
    """An API that has a claim of the name, and caches that do not have it yet."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.told: list[Any] = []
        self.pods = self.claims = self

    def get(self, key: str) -> Pod | None:
        return pod() if key == "default/pod" else None

    async def request(self, method: str, path: str) -> bytes:
        return msgspec.json.encode(pod())

    async def create(self, *_: object) -> PersistentVolumeClaim:
        raise AlreadyExists(409, "AlreadyExists", "pod-scratch")

    async def find(self, *_: object) -> PersistentVolumeClaim:
        return claim(self.owner)

    def warning(self, _: Pod, reason: str, message: str) -> None:
        self.told.append((reason, message))


async def test_our_own_claim_that_is_not_cached_yet_is_no_error() -> None:
    late: Any = Late("p")
    await Ephemeral(late, late, late, late).sync("default/pod")
    assert late.told == []


async def test_a_claim_of_another_owner_that_is_not_cached_yet_is_reported_too() -> None:
    late: Any = Late("older")
    with pytest.raises(ClaimIsForeign):
        await Ephemeral(late, late, late, late).sync("default/pod")
    said = "ephemeral volume scratch: PVC default/pod-scratch was not created for pod default/pod (pod is not owner)"
    assert late.told == [("FailedBinding", said)]
