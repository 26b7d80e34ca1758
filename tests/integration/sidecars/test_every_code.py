"""Every gRPC code at every call site: what the objects, events and finalizers say, and that it is tried again.

One object for each code, all at once, each named after its code: the driver fails the first calls about an object
with the code in its name. CreateVolume and DeleteVolume have their own tests in test_provisioning.py.
"""

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import (
    CSIStorageCapacity,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.quantity import bytes_of
from moorage.sidecars.roles import Role
from moorage.testing import Abilities, Fault

CODES = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
OPEN = {"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED"}
INFEASIBLE = {"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND"}
GI = 1 << 30
FAILURES = 2

ATTACH_FINALIZER = "external-attacher/test-csi-moorage-dev"
SNAP = "snapshot.storage.kubernetes.io"
GROUP = "groupsnapshot.storage.kubernetes.io"
CREATING = {
    VolumeSnapshotContent: f"{SNAP}/volumesnapshot-being-created",
    VolumeGroupSnapshotContent: f"{GROUP}/volumegroupsnapshot-being-created",
}


def name_of(code):
    return code.lower().replace("_", "-")


def code_in(text):
    """The code that an object's handle or name was made from."""
    return next(code for code in sorted(CODES, key=len, reverse=True) if name_of(code) in text)


class Script:
    """Fails the first calls of one method about each object with the object's own code, from `begin` on."""

    def __init__(self, lab, method, handle_of):
        self.method, self._handle_of = method, handle_of
        self.failed: Counter[str] = Counter()
        self.is_on = True
        lab.driver.chooser = self

    def __call__(self, method, request):
        if method != self.method or not self.is_on:
            return None
        code = code_in(self._handle_of(request))
        if self.failed[code] == FAILURES:
            return None
        self.failed[code] += 1
        return Fault(code)


def calls_by_code(lab, method, handle_of):
    return Counter(code_in(handle_of(request)) for request in lab.driver.requests(method))


def thrice(*, codes=CODES):
    return dict.fromkeys(codes, FAILURES + 1)


async def messages(lab, *reasons):
    found = [event for reason in reasons for event in await lab.events(reason)]
    return {event.involved_object.name: event.message for event in found}


async def all_told(lab, *reasons):
    """The message about every object; events are sent in the background."""

    async def told():
        found = await messages(lab, *reasons)
        return found if len(found) == len(CODES) else None

    return await lab.until(told)


def ours(claim):
    """The claim's conditions without the one that says that no pod uses it."""
    return [condition.type for condition in claim.status.conditions if condition.type != "Unused"]


async def make_volumes(lab):
    for code in CODES:
        handle = f"h-{name_of(code)}"
        lab.driver.backend.volumes[handle] = pb.Volume(volume_id=handle, capacity_bytes=GI)
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "fast",
            "csi": {"driver": lab.driver.name, "volumeHandle": handle},
        }
        await lab.client.create(PersistentVolume, {"metadata": {"name": f"v-{name_of(code)}"}, "spec": spec})


async def make_claims(lab):
    await lab.make_class(allowVolumeExpansion=True)
    await make_volumes(lab)
    for code in CODES:
        await lab.make_claim(f"c-{name_of(code)}", volumeName=f"v-{name_of(code)}")
    for code in CODES:
        await lab.bound(f"c-{name_of(code)}")


async def now(lab, kind):
    """The version of the API from which on changes are followed."""
    return (await lab.client.list(kind)).resource_version


async def follow(lab, kind, since, is_done):
    """Every version of every object that was written after `since`, by code, until all are done; None is a deletion."""
    seen: dict[str, list[Any]] = {code: [] for code in CODES}
    try:
        async with asyncio.timeout(60.0), aclosing(lab.client.watch(kind, version=since)) as events:
            async for event in events:
                if event.type != "BOOKMARK":
                    seen[code_in(event.object.name)].append(event.object if event.type != "DELETED" else None)
                if all(history and is_done(history[-1]) for history in seen.values()):
                    return seen
    finally:
        lab.check()
    raise AssertionError("the watch ended before all were done")


async def test_attaching(lab):
    script = Script(lab, "ControllerPublishVolume", lambda request: request.volume_id)
    await make_volumes(lab)
    await lab.make_node("node-1", "id-1")
    for code in CODES:
        await lab.attach(f"a-{name_of(code)}", f"v-{name_of(code)}")
    since = await now(lab, VolumeAttachment)
    lab.start(Role.ATTACHER)
    seen = await follow(lab, VolumeAttachment, since, lambda found: found.status.attached)
    assert calls_by_code(lab, "ControllerPublishVolume", lambda r: r.volume_id) == thrice()
    for code, history in seen.items():
        errors = [found.status.attach_error for found in history if found.status.attach_error is not None]
        assert {error.error_code for error in errors} == {grpc.StatusCode[code].value[0]}
        assert all(code in error.message for error in errors)
        assert history[-1].status.attach_error is None
        assert history[-1].finalizers == [ATTACH_FINALIZER]
        volume = await lab.client.get(PersistentVolume, f"v-{name_of(code)}")
        assert ATTACH_FINALIZER in volume.finalizers
    assert script.failed == dict.fromkeys(CODES, FAILURES)


async def test_detaching(lab):
    script = Script(lab, "ControllerUnpublishVolume", lambda request: request.volume_id)
    await make_volumes(lab)
    await lab.make_node("node-1", "id-1")
    lab.start(Role.ATTACHER)
    since = await now(lab, VolumeAttachment)
    for code in CODES:
        await lab.attach(f"a-{name_of(code)}", f"v-{name_of(code)}")
    await follow(lab, VolumeAttachment, since, lambda found: found.status.attached)
    since = await now(lab, VolumeAttachment)
    for code in CODES:
        await lab.client.delete(VolumeAttachment, f"a-{name_of(code)}")
    seen = await follow(lab, VolumeAttachment, since, lambda found: found is None)
    assert calls_by_code(lab, "ControllerUnpublishVolume", lambda r: r.volume_id) == thrice()
    for code, history in seen.items():
        there = [found for found in history if found is not None]
        assert all(found.finalizers == [ATTACH_FINALIZER] for found in there)  # kept until the driver has let go
        errors = [found.status.detach_error for found in there if found.status.detach_error is not None]
        assert errors
        assert all(code in error.message for error in errors)
    assert set(map(frozenset, lab.driver.backend.published.values())) == {frozenset()}
    assert script.failed == dict.fromkeys(CODES, FAILURES)


async def test_expanding(lab):
    Script(lab, "ControllerExpandVolume", lambda request: request.volume_id)
    lab.start(Role.RESIZER)
    await make_claims(lab)
    since = await now(lab, PersistentVolumeClaim)
    for code in CODES:
        patch = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
        await lab.client.patch(PersistentVolumeClaim, f"c-{name_of(code)}", patch, "default")
    seen = await follow(
        lab,
        PersistentVolumeClaim,
        since,
        lambda claim: bytes_of(claim.status.capacity["storage"]) == 2 * GI,
    )
    assert calls_by_code(lab, "ControllerExpandVolume", lambda r: r.volume_id) == thrice()
    told = await all_told(lab, "VolumeResizeFailed")
    for code, history in seen.items():
        assert code in told[f"c-{name_of(code)}"]
        states = {claim.status.allocated_resource_statuses.get("storage", "") for claim in history}
        assert ("ControllerResizeInfeasible" in states) is (code in INFEASIBLE)
        conditions = {condition.type for claim in history for condition in claim.status.conditions}
        assert ("ControllerResizeError" in conditions) is (code not in OPEN)
        assert ours(history[-1]) == []
        assert history[-1].status.allocated_resource_statuses == {}
        volume = await lab.client.get(PersistentVolume, f"v-{name_of(code)}")
        assert bytes_of(volume.spec.capacity["storage"]) == 2 * GI
    await all_told(lab, "VolumeResizeSuccessful")


async def test_modifying(lab):
    Script(lab, "ControllerModifyVolume", lambda request: request.volume_id)
    lab.start(Role.RESIZER)
    await make_claims(lab)
    body = {"metadata": {"name": "gold"}, "driverName": lab.driver.name, "parameters": {"tier": "gold"}}
    await lab.client.create(VolumeAttributesClass, body)
    since = await now(lab, PersistentVolumeClaim)
    for code in CODES:
        patch = {"spec": {"volumeAttributesClassName": "gold"}}
        await lab.client.patch(PersistentVolumeClaim, f"c-{name_of(code)}", patch, "default")
    seen = await follow(
        lab,
        PersistentVolumeClaim,
        since,
        lambda claim: claim.status.current_volume_attributes_class_name == "gold",
    )
    assert calls_by_code(lab, "ControllerModifyVolume", lambda r: r.volume_id) == thrice()
    told = await all_told(lab, "VolumeModifyFailed")
    for code, history in seen.items():
        assert code in told[f"c-{name_of(code)}"]
        last = history[-1]
        assert last.status.modify_volume_status is None
        assert ours(last) == []
        states = {c.status.modify_volume_status.status for c in history if c.status.modify_volume_status is not None}
        assert ("Infeasible" in states) is (code == "INVALID_ARGUMENT")
        reasons = {c.reason for claim in history for c in claim.status.conditions if c.type == "ModifyVolumeError"}
        assert len(reasons) == 1
        volume = await lab.client.get(PersistentVolume, f"v-{name_of(code)}")
        assert volume.spec.volume_attributes_class_name == "gold"


async def make_contents(lab, source_of):
    """Returns the version from which on they can be followed."""
    since = await now(lab, VolumeSnapshotContent)
    body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeSnapshotClass, body)
    for number, code in enumerate(CODES):
        reference = {"name": "s", "namespace": "default", "uid": f"0ec7e21e-0000-4000-8000-{number:012d}"}
        spec = {
            "volumeSnapshotRef": reference,
            "deletionPolicy": "Delete",
            "driver": lab.driver.name,
            "volumeSnapshotClassName": "snaps",
            "source": source_of(code),
        }
        finalizer = f"{SNAP}/volumesnapshotcontent-bound-protection"
        body = {"metadata": {"name": f"s-{name_of(code)}", "finalizers": [finalizer]}, "spec": spec}
        await lab.client.create(VolumeSnapshotContent, body)
    return since


async def ready(lab, kind, since):
    return await follow(
        lab,
        kind,
        since,
        lambda found: (
            found.status is not None and found.status.ready_to_use and CREATING[kind] not in found.annotations
        ),
    )


async def test_making_snapshots(lab):
    Script(lab, "CreateSnapshot", lambda request: request.source_volume_id)
    await make_volumes(lab)
    lab.start(Role.SNAPSHOTTER)
    since = await make_contents(lab, lambda code: {"volumeHandle": f"h-{name_of(code)}"})
    seen = await ready(lab, VolumeSnapshotContent, since)
    assert calls_by_code(lab, "CreateSnapshot", lambda r: r.source_volume_id) == thrice()
    told = await all_told(lab, "SnapshotCreationFailed")
    for code, history in seen.items():
        assert code in told[f"s-{name_of(code)}"]
        failed = [found for found in history if found.status is not None and found.status.error is not None]
        assert failed
        assert all(code in found.status.error.message and not found.status.ready_to_use for found in failed)
        assert history[-1].status.error is None
        for found in failed if code in OPEN else []:  # kept: a snapshot may still appear
            assert CREATING[VolumeSnapshotContent] in found.annotations
    assert len(lab.driver.backend.snapshots) == len(CODES)


async def remove_contents(lab, kind, group, prefix):
    since = await now(lab, kind)
    for code in CODES:
        name = f"{prefix}-{name_of(code)}"
        what = "volumesnapshot" if group == SNAP else "volumegroupsnapshot"
        await lab.client.patch(kind, name, {"metadata": {"annotations": {f"{group}/{what}-being-deleted": "yes"}}})
        await lab.client.delete(kind, name)
    return await follow(lab, kind, since, lambda found: found is None)


async def test_deleting_snapshots(lab):
    for code in CODES:
        found = pb.Snapshot(snapshot_id=f"snap-{name_of(code)}", size_bytes=7, ready_to_use=True)
        lab.driver.backend.snapshots[found.snapshot_id] = found
    Script(lab, "DeleteSnapshot", lambda request: request.snapshot_id)
    lab.start(Role.SNAPSHOTTER)
    since = await make_contents(lab, lambda code: {"snapshotHandle": f"snap-{name_of(code)}"})
    await ready(lab, VolumeSnapshotContent, since)
    seen = await remove_contents(lab, VolumeSnapshotContent, SNAP, "s")
    assert calls_by_code(lab, "DeleteSnapshot", lambda r: r.snapshot_id) == thrice()
    assert lab.driver.backend.snapshots == {}
    told = await all_told(lab, "SnapshotDeleteError")
    for code, history in seen.items():
        assert code in told[f"s-{name_of(code)}"]
        assert all(found.finalizers for found in history if found is not None)


async def test_looking_up_snapshots(lab):
    for code in CODES:
        found = pb.Snapshot(snapshot_id=f"snap-{name_of(code)}", size_bytes=7, ready_to_use=True)
        lab.driver.backend.snapshots[found.snapshot_id] = found
    Script(lab, "ListSnapshots", lambda request: request.snapshot_id)
    lab.start(Role.SNAPSHOTTER)
    since = await make_contents(lab, lambda code: {"snapshotHandle": f"snap-{name_of(code)}"})
    seen = await ready(lab, VolumeSnapshotContent, since)
    assert calls_by_code(lab, "ListSnapshots", lambda r: r.snapshot_id) == thrice()
    told = await all_told(lab, "SnapshotContentCheckandUpdateFailed")
    for code, history in seen.items():
        assert code in told[f"s-{name_of(code)}"]
        assert history[-1].status.snapshot_handle == f"snap-{name_of(code)}"
        assert history[-1].status.error is None


async def make_groups(lab, source_of):
    """Returns the version from which on they can be followed."""
    since = await now(lab, VolumeGroupSnapshotContent)
    body = {"metadata": {"name": "groups"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeGroupSnapshotClass, body)
    for number, code in enumerate(CODES):
        reference = {"name": "g", "namespace": "default", "uid": f"0ec7e21e-0000-4000-8000-{number:012d}"}
        spec = {
            "volumeGroupSnapshotRef": reference,
            "deletionPolicy": "Delete",
            "driver": lab.driver.name,
            "volumeGroupSnapshotClassName": "groups",
            "source": source_of(code),
        }
        finalizer = f"{GROUP}/volumegroupsnapshotcontent-bound-protection"
        body = {"metadata": {"name": f"g-{name_of(code)}", "finalizers": [finalizer]}, "spec": spec}
        await lab.client.create(VolumeGroupSnapshotContent, body)
    return since


async def test_making_and_deleting_group_snapshots(lab):
    Script(lab, "CreateVolumeGroupSnapshot", lambda request: request.source_volume_ids[0])
    await make_volumes(lab)
    lab.start(Role.SNAPSHOTTER)
    since = await make_groups(lab, lambda code: {"volumeHandles": [f"h-{name_of(code)}"]})
    seen = await ready(lab, VolumeGroupSnapshotContent, since)
    assert calls_by_code(lab, "CreateVolumeGroupSnapshot", lambda r: r.source_volume_ids[0]) == thrice()
    told = await all_told(lab, "GroupSnapshotCreationFailed", "GroupSnapshotContentCheckandUpdateFailed")
    for code, history in seen.items():
        assert code in told[f"g-{name_of(code)}"]
        failed = [found for found in history if found.status is not None and found.status.error is not None]
        assert failed
        for found in failed if code in OPEN else []:
            assert CREATING[VolumeGroupSnapshotContent] in found.annotations
        assert len(history[-1].status.volume_snapshot_info_list) == 1
        assert history[-1].status.error is None

    Script(lab, "DeleteVolumeGroupSnapshot", lambda request: request.snapshot_ids[0])
    gone = await remove_contents(lab, VolumeGroupSnapshotContent, GROUP, "g")
    assert calls_by_code(lab, "DeleteVolumeGroupSnapshot", lambda r: r.snapshot_ids[0]) == thrice()
    told = await all_told(lab, "GroupSnapshotDeleteError")
    for code, history in gone.items():
        assert code in told[f"g-{name_of(code)}"]
        assert all(found.finalizers for found in history if found is not None)
    assert lab.driver.backend.groups == lab.driver.backend.snapshots == {}


async def test_looking_up_group_snapshots(lab):
    for code in CODES:
        member = pb.Snapshot(snapshot_id=f"m-{name_of(code)}", source_volume_id="h", ready_to_use=True)
        group = pb.VolumeGroupSnapshot(
            group_snapshot_id=f"group-{name_of(code)}", snapshots=[member], ready_to_use=True
        )
        lab.driver.backend.groups[group.group_snapshot_id] = group
    Script(lab, "GetVolumeGroupSnapshot", lambda request: request.group_snapshot_id)
    lab.start(Role.SNAPSHOTTER)

    def source_of(code):
        handles = {"volumeGroupSnapshotHandle": f"group-{name_of(code)}"}
        return {"groupSnapshotHandles": handles | {"volumeSnapshotHandles": [f"m-{name_of(code)}"]}}

    since = await make_groups(lab, source_of)
    seen = await ready(lab, VolumeGroupSnapshotContent, since)
    assert calls_by_code(lab, "GetVolumeGroupSnapshot", lambda r: r.group_snapshot_id) == thrice()
    told = await all_told(lab, "GroupSnapshotContentCheckandUpdateFailed")
    for code, history in seen.items():
        assert code in told[f"g-{name_of(code)}"]
        assert history[-1].status.volume_group_snapshot_handle == f"group-{name_of(code)}"


async def test_asking_for_capacity(make_lab):
    abilities = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))
    async with make_lab(abilities) as lab:
        Script(lab, "GetCapacity", lambda request: request.accessible_topology.segments["zone"])
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        for code in CODES:
            await lab.make_node(f"n-{name_of(code)}", keys=("zone",), zone=name_of(code))
        lab.start(Role.CAPACITY, kube_api_capacity_qps=0.0, capacity_ownerref_level=-1, capacity_threads=4)

        async def all_published():
            found = (await lab.client.list(CSIStorageCapacity, "default")).items
            return found if len(found) == len(CODES) else None

        found = await lab.until(all_published)
        assert {code_in(each.node_topology.match_labels["zone"]) for each in found} == set(CODES)
        assert {bytes_of(each.capacity) for each in found} == {lab.driver.capacity_bytes}
        calls = calls_by_code(lab, "GetCapacity", lambda r: r.accessible_topology.segments["zone"])
        assert all(calls[code] >= FAILURES + 1 for code in CODES)


async def test_comparing_attachments_with_the_drivers_list(lab):
    for code in CODES:
        lab.driver.fail("ListVolumes", code)
    await make_volumes(lab)
    await lab.make_node("node-1", "id-1")
    lab.start(Role.ATTACHER, reconcile_sync_s=0.02)
    await lab.attach("a", "v-internal")

    async def is_attached():
        return (await lab.attachment("a")).status.attached

    await lab.until(is_attached)
    lab.driver.backend.published["h-internal"].clear()

    async def is_back():
        return lab.driver.backend.published["h-internal"] == {"id-1"}

    await lab.until(is_back)
    assert lab.driver.count("ListVolumes") > len(CODES)
    assert lab.driver.count("ControllerPublishVolume") == 2


HEALTH_CALLS = {
    "ListVolumes": ("LIST_VOLUMES", "VOLUME_CONDITION"),
    "ControllerGetVolume": ("GET_VOLUME", "VOLUME_CONDITION"),
    "ControllerListVolumeHealth": ("LIST_VOLUME_HEALTH", "LIST_VOLUMES", "VOLUME_CONDITION"),
    "ControllerGetVolumeHealth": ("GET_VOLUME_HEALTH", "GET_VOLUME", "VOLUME_CONDITION"),
}


@pytest.mark.parametrize("method", sorted(HEALTH_CALLS))
async def test_asking_for_health(make_lab, method):
    """Not knowing is no news: no code is told as a sick volume; what is really wrong is told, and its end too."""
    async with make_lab(Abilities(rpcs=HEALTH_CALLS[method])) as lab:
        for code in CODES:
            lab.driver.fail(method, code)
        await make_claims(lab)
        lab.driver.backend.abnormal = {"h-internal": "disk on fire", "h-unknown": "smoke"}
        lab.start(Role.HEALTH, monitor_interval_s=0.02, list_volumes_interval_s=0.02)

        async def both_told():
            told = await messages(lab, "VolumeConditionAbnormal")
            return told if len(told) == 2 else None

        told = await lab.until(both_told)
        assert "disk on fire" in told["c-internal"]
        assert "smoke" in told["c-unknown"]
        assert await lab.events("VolumeConditionNormal") == []
        lab.driver.backend.abnormal.clear()

        async def both_well():
            return set(await messages(lab, "VolumeConditionNormal")) == {"c-internal", "c-unknown"}

        await lab.until(both_well)
        others = {"ListVolumes", *HEALTH_CALLS} - {method}
        assert sum(lab.driver.count(other) for other in others) == 0


@pytest.mark.parametrize(
    "method",
    [
        "Probe",
        "GetPluginInfo",
        "GetPluginCapabilities",
        "ControllerGetCapabilities",
        "GroupControllerGetCapabilities",
        "NodeGetCapabilities",
        "NodeGetInfo",
    ],
)
async def test_finding_out_about_the_driver(lab, method, monkeypatch):
    """A driver that cannot say what it is is asked again, and nothing is done for it before it has answered."""
    monkeypatch.setattr("moorage.sidecars.driver._PROBE_PAUSE_S", 0.0)
    # A process may serve only some of the services: that it does not know these calls is an answer.
    answers = {"NodeGetCapabilities", "ControllerGetCapabilities", "GroupControllerGetCapabilities"}
    codes = [code for code in CODES if code != "UNIMPLEMENTED" or method not in answers]
    for code in codes:
        lab.driver.fail(method, code)
    lab.driver.topology = {"zone": "a"}
    await lab.make_node("node-1", keys=("zone",), zone="a")
    await lab.make_class()
    await lab.make_claim("data", annotations={"volume.kubernetes.io/selected-node": "node-1"})
    lab.start(Role.PROVISIONER, node="node-1", node_deployment=True)
    await lab.bound("data")
    assert lab.driver.count(method) == len(codes) + 1
    assert lab.driver.count("CreateVolume") == 1
    called = [name for name, _ in lab.driver.calls]
    assert called.index("CreateVolume") > max(at for at, name in enumerate(called) if name == method)
