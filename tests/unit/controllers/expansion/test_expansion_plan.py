"""Who is told about a claim that asks for more than it has."""

from typing import Any

import msgspec
import pytest

from moorage.controllers.expansion import SetResizer, TellWaiting, keys_for_claim, plan_expansion
from moorage.kube.names import PRE_RESIZE_CAPACITY, PROVISIONED_BY, STORAGE_RESIZER
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim


def claim(wanted: str, has: str, phase: str = "Bound", **notes: str) -> PersistentVolumeClaim:
    document = {
        "metadata": {"name": "claim", "namespace": "default", "uid": "c", "annotations": notes},
        "spec": {"volumeName": "volume", "resources": {"requests": {"storage": wanted}}},
        "status": {"phase": phase, "capacity": {"storage": has} if has else {}},
    }
    return msgspec.convert(document, PersistentVolumeClaim)


def volume(uid: str = "c", **notes: str) -> PersistentVolume:
    reference = {"namespace": "default", "name": "claim", "uid": uid}
    document = {"metadata": {"name": "volume", "annotations": notes}, "spec": {"claimRef": reference}}
    return msgspec.convert(document, PersistentVolume)


CASES: dict[str, Any] = {
    "it asks for more": (claim("2Gi", "1Gi"), volume(), ["tell"]),
    "it has what it asks for": (claim("1Gi", "1Gi"), volume(), []),
    "it has more, under another name": (claim("1Gi", "1024Mi"), volume(), []),
    "the node has still to act": (claim("1Gi", "1Gi"), volume(**{PRE_RESIZE_CAPACITY: "1Gi"}), ["tell"]),
    "it is not bound": (claim("2Gi", "1Gi", phase="Lost"), volume(), []),
    "the volume is not there": (claim("2Gi", "1Gi"), None, []),
    "the volume is another's": (claim("2Gi", "1Gi"), volume(uid="x"), []),
    "a driver took the plugin over": (
        claim("2Gi", "1Gi"),
        volume(**{PROVISIONED_BY: "kubernetes.io/aws-ebs"}),
        ["tell", "ebs.csi.aws.com"],
    ),
    "and is named already": (
        claim("2Gi", "1Gi", **{STORAGE_RESIZER: "ebs.csi.aws.com"}),
        volume(**{PROVISIONED_BY: "kubernetes.io/aws-ebs"}),
        ["tell"],
    ),
}


@pytest.mark.parametrize(("asking", "held", "expected"), CASES.values(), ids=CASES)
def test_what_is_done(asking: PersistentVolumeClaim, held: PersistentVolume | None, expected: list[str]) -> None:
    actions = plan_expansion(asking, held)
    assert ["tell" if isinstance(action, TellWaiting) else action.name for action in actions] == expected
    assert all(isinstance(action, TellWaiting | SetResizer) for action in actions)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (None, claim("1Gi", "1Gi"), True),
        (claim("1Gi", "1Gi"), claim("2Gi", "1Gi"), True),
        (claim("2Gi", "1Gi"), claim("2Gi", "2Gi"), True),
        (claim("1Gi", "", phase="Pending"), claim("1Gi", "1Gi"), True),
        (claim("1Gi", "1Gi"), claim("1Gi", "1Gi"), False),
        (claim("2Gi", "1Gi"), claim("1Gi", "1Gi"), False),
        (claim("1Gi", "1Gi"), None, False),
    ],
)
def test_which_changes_matter(
    old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None, expected: bool
) -> None:
    assert bool(keys_for_claim(old, new)) is expected


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ({}, "waiting for an external controller to expand this PVC"),
        (
            {PROVISIONED_BY: "kubernetes.io/aws-ebs"},
            "CSI migration enabled for kubernetes.io/aws-ebs; waiting for external resizer to expand the pvc",
        ),
    ],
)
def test_the_words_are_those_of_kubernetes(notes: dict[str, str], words: str) -> None:
    assert plan_expansion(claim("2Gi", "1Gi"), volume(**notes))[0] == TellWaiting(words)
