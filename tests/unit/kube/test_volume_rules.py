"""How the controllers read classes, owners and claims."""

from typing import Any

import msgspec
import pytest

from moorage.kube.names import (
    ALPHA_SELECTED_NODE,
    BETA_DEFAULT_CLASS,
    BETA_STORAGE_CLASS,
    BETA_STORAGE_PROVISIONER,
    DEFAULT_CLASS,
    SELECTED_NODE,
    STORAGE_PROVISIONER,
)
from moorage.kube.objects import CSIDriver, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass
from moorage.kube.quantity import BadQuantity
from moorage.kube.volumes import (
    VolumeName,
    attachment_name,
    claim_class,
    csi_volume_name,
    default_class,
    driver_and_handle,
    has_class,
    is_meant_for,
    is_owned_by,
    provisioner_of,
    requested_bytes,
    required_bytes,
    requires_attach,
    selected_node_of,
    volume_class,
)


def storage_class(name: str, made: str = "2026-01-01T00:00:00Z", **notes: str) -> StorageClass:
    meta = {"name": name, "annotations": notes, "creationTimestamp": made}
    return msgspec.convert({"metadata": meta, "provisioner": "p"}, StorageClass)


def claim(spec: dict[str, Any] | None = None, **meta: Any) -> PersistentVolumeClaim:
    document = {"metadata": {"name": "claim", "namespace": "default", "uid": "c", **meta}, "spec": spec or {}}
    return msgspec.convert(document, PersistentVolumeClaim)


@pytest.mark.parametrize(
    ("notes", "is_default"),
    [
        ({DEFAULT_CLASS: "true"}, True),
        ({BETA_DEFAULT_CLASS: "true"}, True),
        ({DEFAULT_CLASS: "false", BETA_DEFAULT_CLASS: "true"}, True),
        ({DEFAULT_CLASS: "false"}, False),
        ({DEFAULT_CLASS: "True"}, False),
        ({DEFAULT_CLASS: ""}, False),
        ({}, False),
    ],
)
def test_either_annotation_makes_a_class_the_default_if_it_says_true(notes: dict[str, str], is_default: bool) -> None:
    assert (default_class([storage_class("one", **notes)]) is not None) is is_default


def test_of_several_defaults_the_newest_counts_and_of_equally_new_ones_the_first_by_name() -> None:
    notes = {DEFAULT_CLASS: "true"}
    old = storage_class("0", "2026-01-01T00:00:00Z", **notes)
    late = [storage_class(name, "2026-01-02T00:00:00Z", **notes) for name in ("c", "b")]
    assert (default_class([old, *late]) or old).name == "b"


@pytest.mark.parametrize(
    ("spec", "notes", "named", "is_said"),
    [
        ({}, {}, "", False),
        ({"storageClassName": ""}, {}, "", True),
        ({"storageClassName": "fast"}, {}, "fast", True),
        ({"storageClassName": "fast"}, {BETA_STORAGE_CLASS: "old"}, "old", True),
        ({}, {BETA_STORAGE_CLASS: ""}, "", True),
        ({"storageClassName": "fast"}, {BETA_STORAGE_CLASS: ""}, "", True),
    ],
)
def test_the_class_of_a_claim(spec: dict[str, Any], notes: dict[str, str], named: str, is_said: bool) -> None:
    asked = claim(spec, annotations=notes)
    assert (claim_class(asked), has_class(asked)) == (named, is_said)


def test_the_old_annotation_is_the_class_of_a_volume_too() -> None:
    document = {"metadata": {"annotations": {BETA_STORAGE_CLASS: "old"}}, "spec": {"storageClassName": "fast"}}
    assert volume_class(msgspec.convert(document, PersistentVolume)) == "old"


@pytest.mark.parametrize(
    ("owner", "is_owned"),
    [
        ({"uid": "p", "controller": True}, True),
        ({"uid": "p", "controller": False}, False),
        ({"uid": "p"}, False),
        ({"uid": "older", "controller": True}, False),
    ],
)
def test_a_claim_is_a_pods_own_only_if_that_very_pod_controls_it(owner: dict[str, Any], is_owned: bool) -> None:
    pod = msgspec.convert({"metadata": {"name": "pod", "uid": "p"}}, Pod)
    assert is_owned_by(claim(ownerReferences=[{"kind": "Pod", "name": "pod", **owner}]), pod) is is_owned


@pytest.mark.parametrize(
    ("reference", "is_meant"),
    [
        (None, False),
        ({"namespace": "default", "name": "claim"}, True),
        ({"namespace": "default", "name": "claim", "uid": "c"}, True),
        ({"namespace": "default", "name": "claim", "uid": "older"}, False),
        ({"namespace": "team-b", "name": "claim", "uid": "c"}, False),
        ({"namespace": "default", "name": "other"}, False),
    ],
)
def test_a_volume_is_meant_for_a_claim_by_name_and_by_uid_where_it_has_one(
    reference: dict[str, str] | None, is_meant: bool
) -> None:
    volume = msgspec.convert({"spec": {"claimRef": reference}}, PersistentVolume)
    assert is_meant_for(volume, claim()) is is_meant


def test_names_are_those_of_kubernetes():
    name = csi_volume_name("csi.example.com", "s14-handle-claim")
    assert name == "kubernetes.io/csi/csi.example.com^s14-handle-claim"
    assert attachment_name("csi.example.com", "s14-handle-claim", "s14-node").startswith("csi-4e8ba285c616c6")
    assert driver_and_handle(name) == ("csi.example.com", "s14-handle-claim")
    assert driver_and_handle(csi_volume_name("csi.example.com", "a^b")) == ("csi.example.com", "a^b")


@pytest.mark.parametrize("text", ["", "kubernetes.io/csi/", "kubernetes.io/aws-ebs/vol-1", "kubernetes.io/csi/driver^"])
def test_names_of_other_plugins_are_not_ours(text):
    assert driver_and_handle(VolumeName(text)) is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(None, True), ({}, True), ({"attachRequired": True}, True), ({"attachRequired": False}, False)],
)
def test_a_driver_requires_attaching_unless_it_says_otherwise(spec, expected):
    driver = None if spec is None else msgspec.convert({"metadata": {"name": "d"}, "spec": spec}, CSIDriver)
    assert requires_attach(driver) is expected


@pytest.mark.parametrize(("text", "expected"), [("1Gi", 2**30), ("nonsense", 0), (None, 0)])
def test_an_unreadable_request_counts_as_nothing(text, expected):
    requests = {} if text is None else {"storage": text}
    assert requested_bytes(claim({"resources": {"requests": requests}})) == expected


def test_a_volume_is_not_created_for_an_unreadable_request():
    assert required_bytes(claim({"resources": {"requests": {"storage": "1Gi"}}})) == 2**30
    with pytest.raises(BadQuantity):
        required_bytes(claim({"resources": {"requests": {"storage": "nonsense"}}}))


@pytest.mark.parametrize(
    ("read", "current", "old"),
    [
        (provisioner_of, STORAGE_PROVISIONER, BETA_STORAGE_PROVISIONER),
        (selected_node_of, SELECTED_NODE, ALPHA_SELECTED_NODE),
    ],
)
def test_an_old_annotation_counts_where_the_current_one_is_missing_or_empty(read, current, old):
    assert read(claim()) == ""
    assert read(claim(annotations={old: "b"})) == "b"
    assert read(claim(annotations={current: "", old: "b"})) == "b"
    assert read(claim(annotations={current: "a", old: "b"})) == "a"
