"""Claims become volumes, and released volumes go: the provisioner against a scripted driver."""

import asyncio

import pytest

from moorage.kube.api.discovery import is_served as is_kind_served
from moorage.kube.objects import (
    PersistentVolume,
    PersistentVolumeClaim,
    ReferenceGrant,
    Secret,
    StorageClass,
    VolumeAttributesClass,
)
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

FINALIZER = "external-provisioner.volume.kubernetes.io/finalizer"
SELECTED = "volume.kubernetes.io/selected-node"
FINAL_CODES = [
    "UNKNOWN",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "DATA_LOSS",
    "UNAUTHENTICATED",
]
OPEN_CODES = ["CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED"]


async def test_a_claim_is_bound_and_its_volume_goes_when_it_is_deleted(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")
    [volume] = await lab.volumes()
    assert volume.name == f"pvc-{claim.uid}"
    assert volume.spec.csi.volume_attributes["made"] == "yes"
    assert volume.finalizers[0] == FINALIZER
    assert volume.annotations["pv.kubernetes.io/provisioned-by"] == lab.driver.name

    async def told():
        return await lab.events("ProvisioningSucceeded")

    [event] = await lab.until(told)
    assert event.involved_object.name == "data"

    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await lab.gone()
    assert lab.driver.count("CreateVolume") == lab.driver.count("DeleteVolume") == 1


@pytest.mark.parametrize("code", FINAL_CODES + OPEN_CODES)
async def test_any_failure_of_create_is_told_and_tried_again(lab, code):
    lab.driver.fail("CreateVolume", code, times=2)
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    requests = lab.driver.requests("CreateVolume")
    assert len(requests) == 3
    assert {request.SerializeToString(deterministic=True) for request in requests} == {
        requests[0].SerializeToString(deterministic=True)
    }
    [event] = await lab.until(lambda: lab.events("ProvisioningFailed"))
    assert code in event.message
    assert event.message.endswith("retried with growing pauses of 0.05s to 0.4s")
    assert event.type == "Warning"
    await lab.nothing_left()


async def test_an_infeasible_request_is_not_repeated_until_its_class_is_replaced(lab):
    lab.driver.fail("CreateVolume", "INVALID_ARGUMENT")
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")

    async def told():
        return await lab.events("ProvisioningFailed")

    [event] = await lab.until(told)
    assert "cannot be met" in event.message
    await asyncio.sleep(0.5)  # longer than several retries would take
    assert lab.driver.count("CreateVolume") == 1
    await lab.client.delete(StorageClass, "fast")
    await lab.make_class()
    await lab.bound("data")


async def test_no_room_at_the_selected_node_asks_the_scheduler_again(make_lab):
    async with make_lab(Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))) as lab:
        await lab.make_node("node-1", keys=("zone",), zone="a")
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        lab.driver.fail("CreateVolume", "RESOURCE_EXHAUSTED")
        lab.start(Role.PROVISIONER)
        await lab.make_claim("data")
        await lab.client.patch(
            PersistentVolumeClaim, "data", {"metadata": {"annotations": {SELECTED: "node-1"}}}, "default"
        )

        async def is_unselected():
            claim = await lab.claim("data")
            return lab.driver.count("CreateVolume") == 1 and SELECTED not in claim.annotations

        await lab.until(is_unselected)
        await lab.client.patch(
            PersistentVolumeClaim, "data", {"metadata": {"annotations": {SELECTED: "node-1"}}}, "default"
        )
        await lab.bound("data")
        [volume] = await lab.volumes()
        [term] = volume.spec.node_affinity.required.node_selector_terms
        assert [(r.key, r.values) for r in term.match_expressions] == [("zone", ["a"])]


async def test_late_binding_sends_all_places_with_the_selected_one_first(make_lab):
    async with make_lab(Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))) as lab:
        for number, zone in enumerate("abc"):
            await lab.make_node(f"node-{number}", keys=("zone",), zone=zone)
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        lab.start(Role.PROVISIONER)
        await lab.make_claim("data")
        await lab.client.patch(
            PersistentVolumeClaim, "data", {"metadata": {"annotations": {SELECTED: "node-1"}}}, "default"
        )
        await lab.bound("data")
        [request] = lab.driver.requests("CreateVolume")
        required = request.accessibility_requirements
        assert [t.segments["zone"] for t in required.requisite] == ["a", "b", "c"]
        assert [t.segments["zone"] for t in required.preferred] == ["b", "c", "a"]


async def test_a_claim_deleted_while_its_volume_is_made_leaves_nothing(lab):
    gate = lab.driver.hold("CreateVolume")
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")

    async def is_asked():
        return lab.driver.count("CreateVolume") == 1

    await lab.until(is_asked)
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    gate.set()

    async def is_deleted():
        return lab.driver.count("DeleteVolume") == 1

    await lab.until(is_deleted)
    await lab.gone()
    assert await lab.claim("data") is None


@pytest.mark.parametrize("code", OPEN_CODES)
async def test_a_lost_answer_for_a_deleted_claim_is_driven_to_its_end(lab, code):
    lab.driver.fail("CreateVolume", code, times=3, is_done=True)
    gate = lab.driver.hold("CreateVolume")
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")

    async def is_asked():
        return lab.driver.count("CreateVolume") == 1

    await lab.until(is_asked)
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await lab.client.delete(StorageClass, "fast")
    gate.set()

    async def is_deleted():
        return lab.driver.count("DeleteVolume") >= 1

    await lab.until(is_deleted)
    await lab.gone()
    assert await lab.claim("data") is None


async def test_a_crash_between_volume_and_object_leaks_nothing_though_the_claim_goes_meanwhile(lab):
    gate = lab.driver.hold("CreateVolume")
    first = lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")

    async def is_asked():
        return lab.driver.count("CreateVolume") == 1

    await lab.until(is_asked)
    await lab.kill(first)
    gate.set()  # the driver finishes what the dead process asked for

    async def is_made():
        return lab.driver.backend.volumes

    await lab.until(is_made)
    await lab.client.delete(PersistentVolumeClaim, "data", "default")

    async def is_gone():
        return await lab.claim("data") is None

    await lab.until(is_gone)
    lab.start(Role.PROVISIONER, host="host-2")

    async def is_deleted():
        return lab.driver.count("DeleteVolume") >= 1

    await lab.until(is_deleted)
    await lab.gone()
    assert await lab.claim("data") is None


async def test_a_volume_that_is_too_small_is_deleted_again(lab):
    lab.driver.makes_small_by = 1
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")

    async def is_deleted():
        return lab.driver.count("DeleteVolume") >= 1

    await lab.until(is_deleted)
    lab.driver.makes_small_by = 0
    await lab.bound("data")
    await lab.nothing_left()
    events = await lab.until(lambda: lab.events("ProvisioningFailed"))
    assert any("fewer than" in event.message for event in events)


async def test_secrets_and_metadata_reach_the_driver_and_the_volume_names_them(lab):
    lab.start(Role.PROVISIONER, extra_create_metadata=True)
    await lab.client.create(
        Secret, {"metadata": {"name": "key-data", "namespace": "default"}, "data": {"token": "c2VjcmV0"}}, "default"
    )
    prefix = "csi.storage.k8s.io"
    await lab.make_class(
        parameters={
            f"{prefix}/provisioner-secret-name": "key-${pvc.name}",
            f"{prefix}/provisioner-secret-namespace": "${pvc.namespace}",
            f"{prefix}/node-stage-secret-name": "stage",
            f"{prefix}/node-stage-secret-namespace": "default",
            f"{prefix}/fstype": "xfs",
            "speed": "high",
        }
    )
    await lab.make_claim("data")
    claim = await lab.bound("data")
    [request] = lab.driver.requests("CreateVolume")
    assert dict(request.secrets) == {"token": "secret"}
    assert dict(request.parameters) == {
        "speed": "high",
        f"{prefix}/pvc/name": "data",
        f"{prefix}/pvc/namespace": "default",
        f"{prefix}/pv/name": f"pvc-{claim.uid}",
    }
    assert request.volume_capabilities[0].mount.fs_type == "xfs"
    [volume] = await lab.volumes()
    assert volume.spec.csi.fs_type == "xfs"
    assert volume.spec.csi.node_stage_secret_ref.name == "stage"
    assert volume.annotations["volume.kubernetes.io/provisioner-deletion-secret-name"] == "key-data"
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await lab.gone()
    [deletion] = lab.driver.requests("DeleteVolume")
    assert dict(deletion.secrets) == {"token": "secret"}


DELETION_SECRET = "volume.kubernetes.io/provisioner-deletion-secret"


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        (None, {"token": "secret"}),  # none written: as the class says for the claim that was
        ("", {}),  # written and empty: made without a secret, whatever the class says by now
        ("absent", {}),  # cannot be read: the driver says whether it needed it
    ],
)
async def test_the_secret_for_a_deletion_is_the_one_written_down(lab, name, sent):
    body = {"metadata": {"name": "key-data", "namespace": "default"}, "data": {"token": "c2VjcmV0"}}
    await lab.client.create(Secret, body, "default")
    prefix = "csi.storage.k8s.io/provisioner-secret"
    await lab.make_class(parameters={f"{prefix}-name": "key-${pvc.name}", f"{prefix}-namespace": "${pvc.namespace}"})
    written = {f"{DELETION_SECRET}-name": name, f"{DELETION_SECRET}-namespace": name} if name is not None else {}
    reference = {"kind": "PersistentVolumeClaim", "namespace": "default", "name": "data", "uid": "gone"}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "persistentVolumeReclaimPolicy": "Delete",
        "csi": {"driver": lab.driver.name, "volumeHandle": "h1"},
        "claimRef": reference,
    }
    await lab.client.create(PersistentVolume, {"metadata": {"name": "v1", "annotations": written}, "spec": spec})
    lab.start(Role.PROVISIONER)
    await lab.gone()
    [request] = lab.driver.requests("DeleteVolume")
    assert dict(request.secrets) == sent


async def test_a_clone_protects_its_source_until_the_source_is_deleted(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("origin")
    await lab.bound("origin")
    await lab.make_claim("copy", dataSource={"kind": "PersistentVolumeClaim", "name": "origin"})
    await lab.bound("copy")
    request = lab.driver.requests("CreateVolume")[1]
    origin = await lab.claim("origin")
    volume = await lab.client.get(PersistentVolume, origin.spec.volume_name)
    assert request.volume_content_source.volume.volume_id == volume.spec.csi.volume_handle
    assert "provisioner.storage.kubernetes.io/cloning-protection" in origin.finalizers
    await lab.client.delete(PersistentVolumeClaim, "origin", "default")

    async def is_gone():
        return await lab.claim("origin") is None

    await lab.until(is_gone)


async def test_clones_of_one_source_at_once_do_not_fail_over_its_finalizer(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("origin")
    await lab.bound("origin")
    copies = [f"copy-{number}" for number in range(20)]
    source = {"kind": "PersistentVolumeClaim", "name": "origin"}
    await asyncio.gather(*(lab.make_claim(name, dataSource=source) for name in copies))
    for name in copies:
        await lab.bound(name)
    assert await lab.events("ProvisioningFailed") == []


async def test_a_populated_claim_is_left_to_its_populator(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    reference = {"apiGroup": "example.com", "kind": "Tape", "name": "t"}
    await lab.make_claim("data", dataSourceRef=reference)

    async def told():
        return await lab.events("Provisioning")

    [event] = await lab.until(told)
    assert "populator" in event.message
    assert lab.driver.count("CreateVolume") == 0


async def test_a_volume_attributes_class_is_sent_at_creation(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    body = {"metadata": {"name": "gold"}, "driverName": lab.driver.name, "parameters": {"iops": "9"}}
    await lab.client.create(VolumeAttributesClass, body)
    await lab.make_claim("data", volumeAttributesClassName="gold")
    await lab.bound("data")
    [request] = lab.driver.requests("CreateVolume")
    assert dict(request.mutable_parameters) == {"iops": "9"}
    [volume] = await lab.volumes()
    assert volume.spec.volume_attributes_class_name == "gold"


@pytest.mark.parametrize("code", [*FINAL_CODES, *OPEN_CODES, "INVALID_ARGUMENT"])
async def test_any_failure_of_delete_is_told_and_tried_again(lab, code):
    lab.driver.fail("DeleteVolume", code, times=2)
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    await lab.client.delete(PersistentVolumeClaim, "data", "default")
    await lab.gone()
    assert lab.driver.count("DeleteVolume") == 3
    [event] = await lab.until(lambda: lab.events("VolumeFailedDelete"))
    assert code in event.message


async def test_the_finalizer_follows_the_reclaim_policy(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")

    async def has_finalizer():
        return FINALIZER in (await lab.client.get(PersistentVolume, claim.spec.volume_name)).finalizers

    async def has_none():
        return not await has_finalizer()

    for policy, what in (("Retain", has_none), ("Delete", has_finalizer), ("Retain", has_none)):
        patch = {"spec": {"persistentVolumeReclaimPolicy": policy}}
        await lab.client.patch(PersistentVolume, claim.spec.volume_name, patch)
        await lab.until(what)
    await lab.client.delete(PersistentVolumeClaim, "data", "default")

    async def is_released():
        return (await lab.client.get(PersistentVolume, claim.spec.volume_name)).status.phase == "Released"

    await lab.until(is_released)
    assert lab.driver.count("DeleteVolume") == 0
    assert len(lab.driver.backend.volumes) == 1


async def test_an_attached_volume_is_not_deleted_and_its_user_is_told_why(lab, monkeypatch):
    monkeypatch.setattr("moorage.sidecars.provisioner.deletion._PATIENCE_S", 0.1)
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")
    await lab.attach("va", claim.spec.volume_name)
    await lab.client.delete(PersistentVolumeClaim, "data", "default")

    async def is_released():
        return (await lab.client.get(PersistentVolume, claim.spec.volume_name)).status.phase == "Released"

    await lab.until(is_released)

    async def told():
        return await lab.events("VolumeFailedDelete")

    [event] = await lab.until(told)
    assert "is still attached to node-1; it is deleted once it is detached" in event.message
    assert lab.driver.count("DeleteVolume") == 0
    await lab.client.delete(type(await lab.attachment("va")), "va")
    await lab.gone()


async def test_two_instances_at_once_make_each_volume_once(lab):
    lab.start(Role.PROVISIONER, host="a")
    lab.start(Role.PROVISIONER, host="b")
    await lab.make_class()
    for number in range(20):
        await lab.make_claim(f"c{number}")
    for number in range(20):
        await lab.bound(f"c{number}")
    await lab.nothing_left()
    assert len(await lab.volumes()) == 20
    for number in range(20):
        await lab.client.delete(PersistentVolumeClaim, f"c{number}", "default")
    await lab.gone()


async def test_a_claim_that_waits_for_class_and_nodes_goes_on_as_soon_as_they_come(make_lab):
    async with make_lab(Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))) as lab:
        slow = {"retry_interval_start_s": 100.0, "retry_interval_max_s": 100.0}  # only a change can help in time
        lab.start(Role.PROVISIONER, **slow)
        await lab.make_class()
        await lab.make_claim("data")

        async def told():
            return await lab.events("ProvisioningFailed")

        [event] = await lab.until(told)
        assert "no available topology" in event.message
        await lab.make_node("node-1", keys=("zone",), zone="a")
        await lab.bound("data")


GRANTS_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "referencegrants.gateway.networking.k8s.io"},
    "spec": {
        "group": "gateway.networking.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "referencegrants", "singular": "referencegrant", "kind": "ReferenceGrant"},
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


async def test_a_source_in_another_namespace_needs_a_grant(lab):
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await lab.client.request("POST", path, GRANTS_CRD)

    async def is_served():
        return await is_kind_served(lab.client, ReferenceGrant)

    await lab.until(is_served)
    await lab.client.request("POST", "/api/v1/namespaces", {"metadata": {"name": "golden"}})
    gate = "CrossNamespaceVolumeDataSource=true"
    lab.start(Role.PROVISIONER, feature_gates=gate)
    await lab.make_class()
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    body = {"metadata": {"name": "image", "namespace": "golden"}, "spec": spec}
    await lab.client.create(PersistentVolumeClaim, body, "golden")

    async def has_source():
        source = await lab.client.get(PersistentVolumeClaim, "image", "golden")
        return source if source.status.phase == "Bound" else None

    await lab.until(has_source)
    reference = {"kind": "PersistentVolumeClaim", "name": "image", "namespace": "golden"}
    await lab.make_claim("copy", dataSourceRef=reference)

    async def refused():
        return [e for e in await lab.events("ProvisioningFailed") if "no ReferenceGrant in golden" in e.message]

    await lab.until(refused)

    async def grant(name, namespace, target):
        where = {"group": "", "kind": "PersistentVolumeClaim", "namespace": namespace}
        what = {"group": "", "kind": "PersistentVolumeClaim", "name": target}
        body = {"metadata": {"name": name, "namespace": "golden"}, "spec": {"from": [where], "to": [what]}}
        await lab.client.create(ReferenceGrant, body, "golden")

    await grant("others", "kube-system", "image")
    await grant("another", "default", "other-image")
    seen = len(await refused())
    assert seen == 1
    assert lab.driver.count("CreateVolume") == 1
    await grant("ours", "default", "image")
    await lab.bound("copy")
    request = lab.driver.requests("CreateVolume")[-1]
    assert request.volume_content_source.volume.volume_id in lab.driver.backend.volumes


async def test_another_namespace_is_refused_while_the_gate_is_off(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    reference = {"kind": "PersistentVolumeClaim", "name": "image", "namespace": "golden"}
    await lab.make_claim("copy", dataSourceRef=reference)

    async def refused():
        found = await lab.events("ProvisioningFailed")
        return [event for event in found if "gate CrossNamespaceVolumeDataSource is off" in event.message]

    await lab.until(refused)
    assert lab.driver.count("CreateVolume") == 0
