"""What is in use cannot vanish: who holds what, and what is done about its finalizer."""

from typing import Any

import msgspec
import pytest

from moorage.controllers.protection.plan import (
    AddGuard,
    AskForPods,
    RemoveGuard,
    SetUnused,
    attributes_classes_of,
    plan_claim,
    plan_guard,
)
from moorage.kube.names import CLAIM_PROTECTION, VOLUME_PROTECTION
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod

GONE = "2026-01-01T00:00:00Z"


def claim(*, leaving: bool = False, guarded: bool = True, phase: str = "Bound", unused: str = "", **meta: Any) -> Any:
    meta |= {"name": "claim", "namespace": "default", "uid": "c"}
    meta |= {"deletionTimestamp": GONE} if leaving else {}
    meta |= {"finalizers": ["other", CLAIM_PROTECTION] if guarded else ["other"]}
    conditions = [{"type": "Unused", "status": unused}] if unused else []
    status = {"phase": phase, "conditions": conditions}
    return msgspec.convert({"metadata": meta, "status": status}, PersistentVolumeClaim)


def pod(
    *, node: str = "node-1", phase: str = "Running", named: str = "claim", ephemeral: bool = False, **meta: Any
) -> Pod:
    meta = {"name": "pod", "namespace": "default", "uid": "p"} | meta
    source = {"ephemeral": {}} if ephemeral else {"persistentVolumeClaim": {"claimName": named}}
    spec = {"nodeName": node, "volumes": [{"name": "scratch", **source}]}
    return msgspec.convert({"metadata": meta, "spec": spec, "status": {"phase": phase}}, Pod)


OWNED = [{"kind": "Pod", "name": "cl", "uid": "p", "controller": True}]
SHUT_DOWN: dict[str, Any] = {"deletionTimestamp": GONE, "deletionGracePeriodSeconds": 0}

LEAVING = {
    "nobody uses it": ([], [RemoveGuard()]),
    "a pod on a node uses it": ([pod()], []),
    "a finished pod still holds it": ([pod(phase="Succeeded")], []),
    "a pod without a node does not": ([pod(node="")], [RemoveGuard()]),
    "a pod of another namespace does not": ([pod(namespace="team-b")], [RemoveGuard()]),
    "a pod with another claim does not": ([pod(named="other")], [RemoveGuard()]),
}


@pytest.mark.parametrize(("pods", "expected"), LEAVING.values(), ids=LEAVING)
def test_a_claim_that_is_to_go(pods: list[Pod], expected: list[object]) -> None:
    assert plan_claim(claim(leaving=True), pods, is_confirmed=True) == expected


def test_a_claim_is_not_let_go_on_hearsay() -> None:
    assert plan_claim(claim(leaving=True), [], is_confirmed=False) == [AskForPods()]


def test_a_claim_that_is_not_guarded_by_us_is_not_ours_to_let_go() -> None:
    assert plan_claim(claim(leaving=True, guarded=False), [], is_confirmed=True) == []


@pytest.mark.parametrize(
    ("holder", "owners", "is_held"),
    [
        (pod(name="cl", ephemeral=True), OWNED, True),
        (pod(name="cl", ephemeral=True), [], False),
        (pod(name="cl", ephemeral=True, **SHUT_DOWN), OWNED, False),
        (pod(name="cl", ephemeral=True, **(SHUT_DOWN | {"deletionGracePeriodSeconds": 30})), OWNED, True),
        (pod(name="cl", ephemeral=True, deletionGracePeriodSeconds=0), OWNED, True),
        (pod(name="cl", phase="Succeeded", ephemeral=True), OWNED, True),
    ],
    ids=["its pod", "not made for the pod", "kubelet is done", "kubelet is at it", "not being deleted", "finished"],
)
def test_the_claim_of_an_ephemeral_volume(holder: Pod, owners: list[dict[str, Any]], is_held: bool) -> None:
    leaving = msgspec.structs.replace(
        (made := claim(leaving=True, ownerReferences=owners)),
        metadata=msgspec.structs.replace(made.metadata, name="cl-scratch"),
    )
    assert plan_claim(leaving, [holder], is_confirmed=True) == ([] if is_held else [RemoveGuard()])


def test_a_pod_that_the_kubelet_is_done_with_still_holds_a_claim_that_it_names() -> None:
    assert plan_claim(claim(leaving=True), [pod(**SHUT_DOWN)], is_confirmed=True) == []


STAYING = {
    "bound and not used": (claim(), [], [SetUnused(True)]),
    "bound and used by a pod that has no node yet": (claim(unused="True"), [pod(node="")], [SetUnused(False)]),
    "used only by what has finished": (claim(unused="False"), [pod(phase="Failed")], [SetUnused(True)]),
    "said already": (claim(unused="True"), [], []),
    "not bound": (claim(phase="Pending"), [], []),
    "lost keeps what it said": (claim(phase="Lost", unused="True"), [pod()], []),
    "not guarded": (claim(guarded=False, unused="True"), [], [AddGuard()]),
}


@pytest.mark.parametrize(("kept", "pods", "expected"), STAYING.values(), ids=STAYING)
def test_a_claim_that_stays(kept: PersistentVolumeClaim, pods: list[Pod], expected: list[object]) -> None:
    assert plan_claim(kept, pods, is_confirmed=False) == expected


@pytest.mark.parametrize(
    ("meta", "is_used", "expected"),
    [
        ({}, False, [AddGuard()]),
        ({"finalizers": [VOLUME_PROTECTION]}, False, []),
        ({"finalizers": [VOLUME_PROTECTION], "deletionTimestamp": GONE}, True, []),
        ({"finalizers": [VOLUME_PROTECTION], "deletionTimestamp": GONE}, False, [RemoveGuard()]),
        ({"finalizers": ["other"], "deletionTimestamp": GONE}, False, []),
    ],
)
def test_a_volume(meta: dict[str, Any], is_used: bool, expected: list[object]) -> None:
    volume = msgspec.convert({"metadata": {"name": "v", **meta}}, PersistentVolume)
    assert plan_guard(volume, VOLUME_PROTECTION, is_used=is_used) == expected


def test_a_claim_uses_the_class_it_asks_for_the_one_it_has_and_the_one_it_is_getting() -> None:
    document = {
        "spec": {"volumeAttributesClassName": "asked"},
        "status": {
            "currentVolumeAttributesClassName": "had",
            "modifyVolumeStatus": {"targetVolumeAttributesClassName": "coming", "status": "InProgress"},
        },
    }
    assert attributes_classes_of(msgspec.convert(document, PersistentVolumeClaim)) == ["asked", "coming", "had"]
    assert attributes_classes_of(PersistentVolume()) == []
