"""What the binder writes, and that it writes nothing twice."""

import msgspec
import pytest
from tests.unit.controllers.binder.binder_objects import RWX, claim, volume

from moorage.controllers.binder import writes
from moorage.kube.names import (
    BETA_STORAGE_PROVISIONER,
    BIND_COMPLETED,
    BOUND_BY_CONTROLLER,
    EXTERNAL_DELETION,
    IN_TREE_DELETION,
    MIGRATED_TO,
    PRE_RESIZE_CAPACITY,
    PROVISIONED_BY,
    STORAGE_PROVISIONER,
)

MINE = {"claim": "claim", "claim_uid": "uid-of-claim"}


def test_the_first_write_names_the_claim_in_full_and_marks_the_choice() -> None:
    patch = writes.volume_binding(volume(), claim())
    assert patch is not None
    assert patch["spec"]["claimRef"] == {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "namespace": "default",
        "name": "claim",
        "uid": "uid-of-claim",
        "resourceVersion": "7",
    }
    assert patch["metadata"]["annotations"] == {BOUND_BY_CONTROLLER: "yes"}


def test_a_reservation_gets_its_uid_but_not_the_mark() -> None:
    patch = writes.volume_binding(volume(claim="claim"), claim())
    assert patch is not None
    assert patch["spec"]["claimRef"]["uid"] == "uid-of-claim"
    assert "metadata" not in patch


def test_each_write_is_left_out_once_it_is_done() -> None:
    status = {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}}
    done = claim(volumeName="volume", notes={BIND_COMPLETED: "yes"}, phase="Bound", status=status)
    held = volume(phase="Bound", **MINE)
    assert writes.volume_binding(held, done) is None
    assert writes.volume_phase(held, "Bound") is None
    assert writes.claim_binding(done, held) is None
    assert writes.claim_status(done, "Bound", held) is None


def test_a_claim_that_named_its_volume_is_not_marked_as_chosen_for() -> None:
    assert writes.claim_binding(claim(volumeName="volume"), volume()) == {
        "metadata": {"annotations": {BIND_COMPLETED: "yes"}}
    }
    assert writes.claim_binding(claim(), volume()) == {
        "spec": {"volumeName": "volume"},
        "metadata": {"annotations": {BOUND_BY_CONTROLLER: "yes", BIND_COMPLETED: "yes"}},
    }


def test_the_fourth_write_shows_what_the_volume_has() -> None:
    held = volume(size="2Gi", accessModes=["ReadWriteOnce", RWX], volumeAttributesClassName="gold", **MINE)
    assert writes.claim_status(claim(), "Bound", held) == {
        "status": {
            "phase": "Bound",
            "accessModes": ["ReadWriteOnce", RWX],
            "capacity": {"storage": "2Gi"},
            "currentVolumeAttributesClassName": "gold",
        }
    }


def test_the_size_of_a_bound_claim_is_the_resizers() -> None:
    bound = claim(phase="Bound", status={"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}})
    assert writes.claim_status(bound, "Bound", volume(size="5Gi", **MINE)) is None


@pytest.mark.parametrize(("before", "shown"), [("1Gi", "1Gi"), ("nonsense", "5Gi")])
def test_a_volume_in_the_middle_of_growing_shows_its_old_size(before: str, shown: str) -> None:
    held = volume(size="5Gi", notes={PRE_RESIZE_CAPACITY: before}, **MINE)
    patch = writes.claim_status(claim(), "Bound", held)
    assert patch is not None
    assert patch["status"]["capacity"] == {"storage": shown}


def test_without_a_volume_a_claim_shows_none() -> None:
    status = {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "currentVolumeAttributesClassName": "x"}
    assert writes.claim_status(claim(phase="Bound", status=status), "Lost", None) == {
        "status": {
            "phase": "Lost",
            "accessModes": None,
            "capacity": None,
            "currentVolumeAttributesClassName": None,
        }
    }


def test_unbinding_takes_away_what_the_controller_gave_and_no_more() -> None:
    assert writes.unbinding(volume(notes={BOUND_BY_CONTROLLER: "yes"}, **MINE)) == {
        "metadata": {"annotations": {BOUND_BY_CONTROLLER: None}},
        "spec": {"claimRef": None},
    }
    assert writes.unbinding(volume(**MINE)) == {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}}
    assert writes.unbinding(volume(claim="claim")) is None
    assert writes.unbinding(volume()) is None


def test_an_in_tree_volume_is_guarded_while_it_is_to_be_deleted() -> None:
    in_tree = {"notes": {PROVISIONED_BY: "kubernetes.io/x"}, "finalizers": ["other", EXTERNAL_DELETION]}
    patch = writes.volume_upkeep(volume(persistentVolumeReclaimPolicy="Delete", **msgspec.to_builtins(in_tree)))
    assert patch == {"metadata": {"finalizers": ["other", IN_TREE_DELETION]}}
    kept = {"notes": {PROVISIONED_BY: "kubernetes.io/x"}, "finalizers": [IN_TREE_DELETION]}
    assert writes.volume_upkeep(volume(**msgspec.to_builtins(kept))) == {"metadata": {"finalizers": []}}


def test_a_migrated_volume_names_its_driver() -> None:
    notes = {PROVISIONED_BY: "kubernetes.io/aws-ebs"}
    patch = writes.volume_upkeep(volume(notes=notes, finalizers=[IN_TREE_DELETION]))
    assert patch == {"metadata": {"annotations": {MIGRATED_TO: "ebs.csi.aws.com"}, "finalizers": []}}
    assert (
        writes.volume_upkeep(volume(notes={PROVISIONED_BY: "csi.example.com"}, finalizers=[EXTERNAL_DELETION])) is None
    )


def test_an_in_tree_volume_that_is_going_gets_no_guard() -> None:
    """A finalizer can only leave a dying object; the API refuses one that is added."""
    notes = {PROVISIONED_BY: "kubernetes.io/x"}
    held = volume(notes=notes, persistentVolumeReclaimPolicy="Delete", is_deleting=True)
    assert writes.volume_upkeep(held) is None


def test_a_change_of_phase_clears_the_message_or_writes_the_new_one() -> None:
    assert writes.volume_phase(volume(phase="Failed"), "Available") == {
        "status": {"phase": "Available", "message": None}
    }
    assert writes.volume_phase(volume(), "Failed", "why") == {"status": {"phase": "Failed", "message": "why"}}


@pytest.mark.parametrize("before", ["Lost", "Bound"])
def test_the_attributes_class_is_shown_when_a_pending_claim_is_bound_and_is_the_resizers_after_that(
    before: str,
) -> None:
    held = volume(volumeAttributesClassName="gold", **MINE)
    status = {"accessModes": ["ReadWriteOnce"], "currentVolumeAttributesClassName": "tin"}
    patch = writes.claim_status(claim(phase=before, status=status), "Bound", held) or {"status": {}}
    assert "currentVolumeAttributesClassName" not in patch["status"]


def test_a_mark_is_there_whatever_it_says() -> None:
    marked = claim(notes={BOUND_BY_CONTROLLER: "", BIND_COMPLETED: "no"})
    assert writes.claim_binding(marked, volume()) == {"spec": {"volumeName": "volume"}}
    assert writes.unbinding(volume(notes={BOUND_BY_CONTROLLER: "no"}, **MINE)) == {
        "metadata": {"annotations": {BOUND_BY_CONTROLLER: None}},
        "spec": {"claimRef": None},
    }


def test_both_annotations_ask_the_provisioner() -> None:
    both = {STORAGE_PROVISIONER: "csi.example.com", BETA_STORAGE_PROVISIONER: "csi.example.com"}
    wanted = {"metadata": {"annotations": both}}
    assert writes.provisioner_request(claim(), "csi.example.com") == wanted
    assert (
        writes.provisioner_request(claim(notes={STORAGE_PROVISIONER: "csi.example.com"}), "csi.example.com") == wanted
    )
    assert writes.provisioner_request(claim(notes=both | {STORAGE_PROVISIONER: "x"}), "csi.example.com") == wanted
    assert writes.provisioner_request(claim(notes=both), "csi.example.com") is None


@pytest.mark.parametrize("key", [STORAGE_PROVISIONER, BETA_STORAGE_PROVISIONER])
def test_a_claim_that_asked_a_migrated_plugin_names_its_driver(key: str) -> None:
    notes = {key: "kubernetes.io/aws-ebs"}
    patch = {"metadata": {"annotations": {MIGRATED_TO: "ebs.csi.aws.com"}}}
    assert writes.claim_upkeep(claim(notes=notes)) == patch
    assert writes.claim_upkeep(claim(notes=notes | {MIGRATED_TO: "ebs.csi.aws.com"})) is None
    assert writes.claim_upkeep(claim(notes={key: "csi.example.com"})) is None
