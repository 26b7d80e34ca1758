"""What the binder does about a claim and about a volume: worlds in, actions out."""

from typing import Any

import pytest
from tests.unit.controllers.binder.binder_objects import Around, claim, storage_class, volume

from moorage.controllers.binder.plan import (
    AssignClass,
    BindClaim,
    ClaimAction,
    ConfirmClaim,
    LookAtClaim,
    RequestVolume,
    SetClaimPhase,
    SetVolumePhase,
    Tell,
    TellMissing,
    TryLater,
    Unbind,
    VolumeAction,
    plan_claim,
    plan_volume,
)
from moorage.kube.names import (
    BIND_COMPLETED,
    BOUND_BY_CONTROLLER,
    DEFAULT_CLASS,
    MIGRATED_TO,
    PROVISIONED_BY,
    SELECTED_NODE,
)
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim

DONE = {BIND_COMPLETED: "yes"}
MINE = {"claim": "claim", "claim_uid": "uid-of-claim"}
MADE = {PROVISIONED_BY: "csi.example.com"}
DEFAULT = storage_class("usual", annotations={DEFAULT_CLASS: "true"})


def told(actions: list[ClaimAction] | list[VolumeAction]) -> list[str]:
    """Actions in short: what they are and what they say."""
    short = []
    for action in actions:
        note = getattr(action, "note", None)
        match action:
            case BindClaim(found):
                short.append(f"bind {found.name}")
            case SetClaimPhase(phase) | SetVolumePhase(phase):
                short.append(phase + (f" {note.type} {note.reason}" if note else ""))
            case Tell(said):
                short.append(f"tell {said.about} {said.type} {said.reason}")
            case AssignClass(name) | RequestVolume(name) | TellMissing(name):
                short.append(f"{type(action).__name__} {name}")
            case LookAtClaim(key):
                short.append(f"look at {key}")
            case Unbind() | ConfirmClaim() | TryLater():
                short.append(type(action).__name__)
    return short


CLAIMS = {
    "a volume fits": (claim(), Around([volume()]), ["bind volume"]),
    "nothing fits and no class is wanted": (claim(), Around(), ["tell claim Normal FailedBinding", "Pending"]),
    "nothing fits and there is a default": (
        claim(storageClassName=None),
        Around(classes=[DEFAULT]),
        ["AssignClass usual"],
    ),
    "a volume without a class comes before the default": (
        claim(storageClassName=None),
        Around([volume()], [DEFAULT]),
        ["bind volume"],
    ),
    "the empty class is a class": (
        claim(),
        Around(classes=[DEFAULT]),
        ["tell claim Normal FailedBinding", "Pending"],
    ),
    "the newest default counts": (
        claim(storageClassName=None),
        Around(
            classes=[
                storage_class("b", annotations={DEFAULT_CLASS: "true"}, creationTimestamp="2026-01-02T00:00:00Z"),
                storage_class("a", annotations={DEFAULT_CLASS: "true"}, creationTimestamp="2026-01-02T00:00:00Z"),
                storage_class("0", annotations={DEFAULT_CLASS: "true"}, creationTimestamp="2026-01-01T00:00:00Z"),
            ]
        ),
        ["AssignClass a"],
    ),
    "a provisioner is asked": (
        claim(storageClassName="fast"),
        Around(classes=[storage_class("fast")]),
        ["RequestVolume csi.example.com"],
    ),
    "a migrated plugin's driver is asked": (
        claim(storageClassName="fast"),
        Around(classes=[storage_class("fast", "kubernetes.io/gce-pd")]),
        ["RequestVolume pd.csi.storage.gke.io"],
    ),
    "the class does not exist": (
        claim(storageClassName="fast"),
        Around(),
        ["TellMissing fast"],
    ),
    "the class provisions nothing": (
        claim(storageClassName="local"),
        Around(classes=[storage_class("local", "kubernetes.io/no-provisioner")]),
        ["tell claim Warning ProvisioningFailed"],
    ),
    "a consumer is awaited": (
        claim(storageClassName="late"),
        Around([volume(storageClassName="late")], [storage_class("late", late=True)]),
        ["tell claim Normal WaitForFirstConsumer", "Pending"],
    ),
    "a consumer is there but not on a node": (
        claim(storageClassName="late"),
        Around(classes=[storage_class("late", late=True)], pods=["pod"]),
        ["tell claim Normal WaitForPodScheduled", "Pending"],
    ),
    "a node was selected": (
        claim(storageClassName="late", notes={SELECTED_NODE: "node-1"}),
        Around([volume(storageClassName="late")], [storage_class("late", late=True)]),
        ["RequestVolume csi.example.com"],
    ),
    "the scheduler reserved a volume": (
        claim(storageClassName="late"),
        Around([volume(storageClassName="late", **MINE)], [storage_class("late", late=True)]),
        ["bind volume"],
    ),
    "the named volume does not exist": (claim(volumeName="volume"), Around(), ["Pending"]),
    "the named volume is free": (claim(volumeName="volume"), Around([volume()]), ["bind volume"]),
    "the named volume is too small": (
        claim(size="2Gi", volumeName="volume"),
        Around([volume()]),
        ["tell claim Warning VolumeMismatch", "Pending"],
    ),
    "volume and claim name each other": (
        claim(size="2Gi", volumeName="volume"),
        Around([volume(claim="claim")]),
        ["bind volume"],
    ),
    "the named volume is somebody else's": (
        claim(volumeName="volume"),
        Around([volume(claim="other")]),
        ["tell claim Warning FailedBinding", "Pending"],
    ),
    "somebody took the mark of completion away": (
        claim(volumeName="volume", notes={BOUND_BY_CONTROLLER: "yes"}),
        Around([volume(claim="other")]),
        ["tell claim Warning FailedBinding", "TryLater"],
    ),
    "bound, and the volume agrees": (
        claim(volumeName="volume", notes=DONE),
        Around([volume(**MINE)]),
        ["bind volume"],
    ),
    "bound, and the volume names nobody": (
        claim(volumeName="volume", notes=DONE),
        Around([volume()]),
        ["bind volume"],
    ),
    "bound, and the volume is gone": (claim(volumeName="volume", notes=DONE), Around(), ["Lost Warning ClaimLost"]),
    "bound to nothing": (claim(notes=DONE), Around([volume()]), ["Lost Warning ClaimLost"]),
    "bound, and the volume is another's": (
        claim(volumeName="volume", notes=DONE),
        Around([volume(claim="thief", claim_uid="uid-of-thief")]),
        ["Lost Warning ClaimMisbound"],
    ),
    "bound, and the volume is reserved again without a uid": (
        claim(volumeName="volume", notes=DONE),
        Around([volume(claim="claim")]),
        ["Lost Warning ClaimMisbound"],
    ),
}


@pytest.mark.parametrize(("asked", "around", "expected"), CLAIMS.values(), ids=CLAIMS)
def test_what_is_done_about_a_claim(asked: PersistentVolumeClaim, around: Around, expected: list[str]) -> None:
    assert told(plan_claim(asked, around)) == expected


BOUND = claim(volumeName="volume", notes=DONE)
ELSEWHERE = claim(volumeName="another", notes=DONE)
REBORN = claim(uid="another")

VOLUMES = {
    "nobody's": (volume(phase="Pending"), None, ["Available"]),
    "reserved": (volume(claim="claim"), claim(), ["Available"]),
    "its claim has not chosen yet": (volume(**MINE), claim(), ["look at default/claim"]),
    "its claim wants another mode": (
        volume(volumeMode="Block", **MINE),
        claim(),
        ["tell volume Warning VolumeMismatch", "tell claim Warning VolumeMismatch"],
    ),
    "its claim has it": (volume(**MINE), BOUND, ["Bound"]),
    "its claim has another": (volume(**MINE), ELSEWHERE, ["Unbind"]),
    "made for a claim that took another": (
        volume(notes=MADE, persistentVolumeReclaimPolicy="Delete", **MINE),
        ELSEWHERE,
        ["Released"],
    ),
    "made for a claim that took another, but to be kept": (volume(notes=MADE, **MINE), ELSEWHERE, ["Unbind"]),
    "its claim seems gone": (volume(phase="Bound", **MINE), None, ["ConfirmClaim"]),
    "its claim seems replaced": (volume(phase="Released", **MINE), REBORN, ["ConfirmClaim"]),
    "its claim is gone since long": (volume(phase="Released", **MINE), None, ["Released"]),
}


@pytest.mark.parametrize(("held", "holder", "expected"), VOLUMES.values(), ids=VOLUMES)
def test_what_is_done_about_a_volume(
    held: PersistentVolume, holder: PersistentVolumeClaim | None, expected: list[str]
) -> None:
    assert told(plan_volume(held, holder, is_confirmed=False)) == expected


CSI: dict[str, Any] = {"csi": {"driver": "csi.example.com", "volumeHandle": "h"}}
NFS: dict[str, Any] = {"nfs": {"server": "s", "path": "/p"}}
RELEASED = {
    "retain": (volume(phase="Bound", **MINE, **CSI), (), ["Released"]),
    "delete, by the driver's provisioner": (
        volume(phase="Bound", persistentVolumeReclaimPolicy="Delete", **MINE, **CSI),
        (),
        ["Released"],
    ),
    "delete, by nobody": (
        volume(phase="Bound", persistentVolumeReclaimPolicy="Delete", **MINE, **NFS),
        (),
        ["Released", "Failed Warning VolumeFailedDelete"],
    ),
    "delete, by a plugin that is no more": (
        volume(notes={PROVISIONED_BY: "kubernetes.io/x"}, persistentVolumeReclaimPolicy="Delete", **MINE, **CSI),
        (),
        ["Released", "Failed Warning VolumeFailedDelete"],
    ),
    "delete, migrated": (
        volume(notes={MIGRATED_TO: "csi.example.com"}, persistentVolumeReclaimPolicy="Delete", **MINE, **NFS),
        (),
        ["Released"],
    ),
    "delete, by the driver that took the plugin over": (
        volume(notes={PROVISIONED_BY: "kubernetes.io/aws-ebs"}, persistentVolumeReclaimPolicy="Delete", **MINE, **NFS),
        (),
        ["Released"],
    ),
    "recycle": (
        volume(persistentVolumeReclaimPolicy="Recycle", **MINE, **NFS),
        (),
        ["Released", "Failed Warning VolumeFailedRecycle"],
    ),
    "recycle while a pod has it": (
        volume(persistentVolumeReclaimPolicy="Recycle", **MINE, **NFS),
        ("default/pod",),
        ["Released", "tell volume Normal VolumeFailedRecycle"],
    ),
    "a policy nobody knows": (
        volume(persistentVolumeReclaimPolicy="Burn", **MINE),
        (),
        ["Released", "Failed Warning VolumeUnknownReclaimPolicy"],
    ),
    "failed stays failed": (volume(phase="Failed", **MINE, **CSI), (), []),
}


@pytest.mark.parametrize(("held", "pods", "expected"), RELEASED.values(), ids=RELEASED)
def test_what_becomes_of_a_volume_whose_claim_is_gone(
    held: PersistentVolume, pods: tuple[str, ...], expected: list[str]
) -> None:
    assert told(plan_volume(held, None, is_confirmed=True, pods=pods)) == expected
    assert told(plan_volume(held, REBORN, is_confirmed=True, pods=pods)) == expected


def test_nothing_is_released_on_hearsay() -> None:
    for policy in ("Retain", "Delete", "Recycle"):
        held = volume(phase="Bound", persistentVolumeReclaimPolicy=policy, **MINE)
        assert told(plan_volume(held, None, is_confirmed=False)) == ["ConfirmClaim"]
        assert told(plan_volume(held, REBORN, is_confirmed=False)) == ["ConfirmClaim"]


ABSENT = storage_class("absent", "kubernetes.io/no-provisioner")
WORDS = {
    "lost reference": (
        claim(notes=DONE),
        Around(),
        "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!",
    ),
    "lost volume": (
        claim(volumeName="volume", notes=DONE),
        Around(),
        "Bound claim has lost its PersistentVolume. Data on the volume is lost!",
    ),
    "misbound, without the name of a claim that may be in a namespace of others": (
        claim(volumeName="volume", notes=DONE),
        Around([volume(claim="thief", claim_uid="uid-of-thief")]),
        "Two claims are bound to the same volume, this one is bound incorrectly",
    ),
    "nothing there": (claim(), Around(), "no persistent volumes available for this claim and no storage class is set"),
    "no consumer": (
        claim(storageClassName="late"),
        Around(classes=[storage_class("late", late=True)]),
        "waiting for first consumer to be created before binding",
    ),
    "one consumer": (
        claim(storageClassName="late"),
        Around(classes=[storage_class("late", late=True)], pods=["a"]),
        "waiting for pod a to be scheduled",
    ),
    "two consumers": (
        claim(storageClassName="late"),
        Around(classes=[storage_class("late", late=True)], pods=["a", "b"]),
        "waiting for pods a,b to be scheduled",
    ),
    "taken": (
        claim(volumeName="volume"),
        Around([volume(claim="other")]),
        'volume "volume" already bound to a different claim.',
    ),
    "dying": (
        claim(volumeName="volume"),
        Around([volume(is_deleting=True)]),
        'Cannot bind to requested volume "volume": the volume is marked for deletion "volume"',
    ),
    "no class": (
        claim(storageClassName="fast"),
        Around(),
        'storageclass.storage.k8s.io "fast" not found',
    ),
    "no provisioner": (
        claim(storageClassName="absent"),
        Around(classes=[ABSENT]),
        "no volume plugin matched name: kubernetes.io/no-provisioner",
    ),
}


@pytest.mark.parametrize(("asked", "around", "words"), WORDS.values(), ids=WORDS)
def test_people_find_the_words_of_kubernetes(asked: PersistentVolumeClaim, around: Around, words: str) -> None:
    notes = [getattr(action, "note", None) for action in plan_claim(asked, around)]
    assert [note.message for note in notes if note is not None] == [words]
