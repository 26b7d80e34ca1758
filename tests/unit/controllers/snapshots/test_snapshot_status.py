"""What snapshots take over from their contents, and what things are called."""

import pytest

from moorage.controllers.snapshots.flavour import GROUP, SINGLE, member_suffix
from moorage.controllers.snapshots.status import group_status, is_ready, snapshot_status
from moorage.kube.objects.meta import Meta
from moorage.kube.objects.snapshots import (
    ContentStatus,
    GroupContentStatus,
    GroupSnapshotStatus,
    SnapshotError,
    SnapshotStatus,
    VolumeGroupSnapshot,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.secrets import BadSecret

TAKEN_NS = 1_767_225_600_500_000_000
ERROR = SnapshotError(time="2026-01-01T00:00:00Z", message="no space")


def snapshot(status: SnapshotStatus | None = None) -> VolumeSnapshot:
    return VolumeSnapshot(metadata=Meta(name="snap"), status=status)


def content(status: ContentStatus | None = None) -> VolumeSnapshotContent:
    return VolumeSnapshotContent(metadata=Meta(name="content"), status=status)


BOUND = SnapshotStatus(bound_volume_snapshot_content_name="content", ready_to_use=False)
DONE = ContentStatus(snapshot_handle="s", creation_time=TAKEN_NS, restore_size=2**30, ready_to_use=True)


@pytest.mark.parametrize(
    ("have", "found", "changes"),
    [
        (None, None, {"boundVolumeSnapshotContentName": "content", "readyToUse": False}),
        (BOUND, None, {}),
        (BOUND, ContentStatus(ready_to_use=False), {}),
        (BOUND, DONE, {"creationTime": "2026-01-01T00:00:00Z", "readyToUse": True, "restoreSize": "1Gi"}),
        (BOUND, ContentStatus(error=ERROR), {"error": {"time": ERROR.time, "message": "no space"}}),
        (SnapshotStatus(bound_volume_snapshot_content_name="content", ready_to_use=False, error=ERROR), None, {}),
        (
            SnapshotStatus(bound_volume_snapshot_content_name="content", ready_to_use=False, error=ERROR),
            ContentStatus(ready_to_use=True),
            {"readyToUse": True, "error": None},
        ),
        (
            SnapshotStatus(
                bound_volume_snapshot_content_name="content",
                ready_to_use=True,
                creation_time="2025-01-01T00:00:00Z",
                restore_size="5Gi",
            ),
            DONE,
            {},  # the time and the size are written once
        ),
        (
            SnapshotStatus(bound_volume_snapshot_content_name="content", ready_to_use=True, restore_size="0"),
            ContentStatus(restore_size=2**20, ready_to_use=True),
            {"restoreSize": "1Mi"},  # but nothing is no size
        ),
        (
            SnapshotStatus(bound_volume_snapshot_content_name="content", ready_to_use=True, restore_size="rubbish"),
            ContentStatus(restore_size=2**20, ready_to_use=True),
            {"restoreSize": "1Mi"},
        ),
    ],
)
def test_what_a_snapshot_takes_over(have, found, changes):
    assert snapshot_status(snapshot(have), content(found), "") == changes


def test_the_group_is_named_once():
    assert snapshot_status(snapshot(BOUND), content(), "group") == {"volumeGroupSnapshotName": "group"}
    named = SnapshotStatus(
        bound_volume_snapshot_content_name="content", ready_to_use=False, volume_group_snapshot_name="group"
    )
    assert snapshot_status(snapshot(named), content(), "other") == {}


def test_a_snapshot_with_an_error_is_not_ready():
    assert is_ready(snapshot(SnapshotStatus(ready_to_use=True)))
    assert not is_ready(snapshot(SnapshotStatus(ready_to_use=True, error=ERROR)))
    assert not is_ready(snapshot())


def test_what_a_group_takes_over():
    group = VolumeGroupSnapshot(metadata=Meta(name="group"))
    found = GroupContentStatus(ready_to_use=True, creation_time="2026-01-01T00:00:00Z")
    held = VolumeGroupSnapshotContent(metadata=Meta(name="content"), status=found)
    assert group_status(group, held) == {
        "boundVolumeGroupSnapshotContentName": "content",
        "creationTime": "2026-01-01T00:00:00Z",
        "readyToUse": True,
    }
    bound = GroupSnapshotStatus(
        bound_volume_group_snapshot_content_name="content",
        creation_time="2026-01-01T00:00:00Z",
        ready_to_use=True,
    )
    assert group_status(VolumeGroupSnapshot(status=bound), held) == {}


def test_contents_are_named_by_snapshot_and_members_by_group_and_volume():
    assert SINGLE.content_name("uid-1") == "snapcontent-uid-1"
    assert GROUP.content_name("uid-2") == "groupsnapcontent-uid-2"
    suffix = member_suffix("uid-2", "handle")
    assert suffix == "b366ce46ed32d5c0538bef75e9b62e8ca2aecafeb65c6d4e53c7a42216298aff"
    assert suffix != member_suffix("uid-2", "other")


START = "csi.storage.k8s.io/snapshotter-secret-"
TAKEN = VolumeSnapshot(metadata=Meta(name="snap", namespace="team"))


@pytest.mark.parametrize(
    ("parameters", "secret"),
    [
        ({}, None),
        ({"other": "x"}, None),
        (
            {f"{START}name": "${volumesnapshot.name}-${volumesnapshotcontent.name}", f"{START}namespace": "vault"},
            ("snap-content", "vault"),
        ),
        ({f"{START}name": "key", f"{START}namespace": "${volumesnapshot.namespace}"}, ("key", "team")),
    ],
)
def test_the_secret_of_a_class(parameters, secret):
    annotations = dict(zip(SINGLE.secret_annotations, secret, strict=True)) if secret else {}
    assert SINGLE.secrets_for(parameters, TAKEN, "content") == annotations


@pytest.mark.parametrize(
    "parameters",
    [
        {f"{START}name": "key"},
        {f"{START}namespace": "vault"},
        {f"{START}name": "", f"{START}namespace": ""},
        {f"{START}name": "${pvc.name}", f"{START}namespace": "vault"},
        {f"{START}name": "key", f"{START}namespace": "${volumesnapshot.name}"},
    ],
)
def test_a_secret_that_cannot_be_meant(parameters):
    with pytest.raises(BadSecret):
        SINGLE.secrets_for(parameters, TAKEN, "content")
