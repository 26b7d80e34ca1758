"""What is to be done about a content: one table, for contents of single snapshots and of groups."""

from typing import Any

import msgspec
import pytest

from moorage.kube.names import GROUP_HANDLE
from moorage.kube.objects import VolumeGroupSnapshotContent, VolumeSnapshotContent
from moorage.sidecars.snapshotter.decide import ContentStep, next_step
from moorage.sidecars.snapshotter.flavour import GROUP, SINGLE

DELETE, CREATE, CHECK, TIDY, NOTHING = (
    ContentStep.DELETE,
    ContentStep.CREATE,
    ContentStep.CHECK,
    ContentStep.TIDY,
    ContentStep.NOTHING,
)
FAILED, READY = {"readyToUse": False, "error": {"message": "busy"}}, {"readyToUse": True}


def content(flavour: Any, *, existing: bool = False, uid: str = "u", **state: Any) -> Any:
    single = flavour is SINGLE
    source: dict[str, Any] = {"volumeHandle": "v"} if single else {"volumeHandles": ["v", "w"]}
    if existing:
        source = {"snapshotHandle": "s"} if single else {"groupSnapshotHandles": {"volumeGroupSnapshotHandle": "g"}}
    notes = {flavour.being_created: "yes"} if state.get("marked") else {}
    notes |= {flavour.being_deleted: "yes"} if state.get("released") else {}
    metadata = {"name": "c", "annotations": notes | state.get("notes", {})}
    if state.get("deleting"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    reference = "volumeSnapshotRef" if single else "volumeGroupSnapshotRef"
    document = {
        "metadata": metadata,
        "spec": {reference: {"uid": uid}, "source": source},
        "status": state.get("status"),
    }
    return msgspec.convert(document, VolumeSnapshotContent if single else VolumeGroupSnapshotContent)


@pytest.mark.parametrize("flavour", [SINGLE, GROUP], ids=["single", "group"])
@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({}, CREATE),
        ({"marked": True}, CREATE),
        ({"status": FAILED}, CREATE),
        ({"status": READY}, NOTHING),
        ({"status": READY, "marked": True}, TIDY),
        ({"existing": True}, CHECK),
        ({"existing": True, "status": READY}, NOTHING),
        ({"deleting": True}, NOTHING),
        ({"deleting": True, "released": True}, DELETE),
        ({"deleting": True, "released": True, "marked": True}, CREATE),  # its outcome is open: a snapshot may appear
        ({"deleting": True, "released": True, "marked": True, "status": READY}, TIDY),
        ({"deleting": True, "existing": True}, NOTHING),
        ({"deleting": True, "existing": True, "uid": ""}, DELETE),
        ({"deleting": True, "status": READY}, NOTHING),
    ],
)
def test_the_step_follows_from_marks_source_and_status(flavour: Any, state: dict[str, Any], step: ContentStep) -> None:
    assert next_step(content(flavour, **state), flavour) is step


def test_a_member_of_a_group_is_never_taken_alone() -> None:
    member = content(SINGLE, notes={GROUP_HANDLE: "g"})
    assert next_step(member, SINGLE) is CHECK
    named = content(SINGLE, status={"volumeGroupSnapshotHandle": "g", "readyToUse": False})
    assert next_step(named, SINGLE) is CHECK
