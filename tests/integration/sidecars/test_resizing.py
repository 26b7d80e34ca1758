"""Volumes grow and change their class: the resizer against a scripted driver."""

from typing import Any

import pytest

from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod, Secret, VolumeAttributesClass
from moorage.kube.quantity import bytes_of
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

GI = 1 << 30


async def grown(lab, size, **settings):
    """A bound claim that now asks for more."""
    lab.start(Role.PROVISIONER, Role.RESIZER, **settings)
    await lab.make_class(allowVolumeExpansion=True)
    await lab.make_claim("data")
    await lab.bound("data")
    await ask(lab, size)


async def ask(lab, size):
    patch = {"spec": {"resources": {"requests": {"storage": size}}}}
    await lab.client.patch(PersistentVolumeClaim, "data", patch, "default")


async def asked_to_grow(lab, size):
    """A claim whose driver has been asked for more, and answers when the returned event is set."""
    go_on = lab.driver.hold("ControllerExpandVolume")
    await grown(lab, size)

    async def is_asked():
        return lab.driver.count("ControllerExpandVolume")

    await lab.until(is_asked)
    return go_on


async def has_size(lab, size):
    async def check():
        claim = await lab.claim("data")
        return claim if bytes_of(claim.status.capacity["storage"]) == size else None

    return await lab.until(check)


async def test_a_claim_that_asks_for_more_gets_it(lab):
    await grown(lab, "2Gi")
    claim = await has_size(lab, 2 * GI)
    assert [c for c in claim.status.conditions if c.type != "Unused"] == []
    assert claim.status.allocated_resource_statuses == {}
    assert claim.annotations["volume.kubernetes.io/node-expansion-not-required"] == "true"
    volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
    assert bytes_of(volume.spec.capacity["storage"]) == 2 * GI

    async def is_told():
        return await lab.events("VolumeResizeSuccessful")

    assert await lab.until(is_told)


async def test_the_node_finishes_what_it_must_and_the_old_size_is_forgotten(lab):
    lab.driver.node_expansion = True
    await grown(lab, "2Gi")

    async def is_pending():
        claim = await lab.claim("data")
        return claim if claim.status.allocated_resource_statuses.get("storage") == "NodeResizePending" else None

    claim = await lab.until(is_pending)
    assert "FileSystemResizePending" in {c.type for c in claim.status.conditions}
    volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
    assert volume.annotations["volume.alpha.kubernetes.io/pre-resize-capacity"] == "1Gi"
    status: dict[str, Any] = {"capacity": {"storage": "2Gi"}, "allocatedResourceStatuses": None, "conditions": []}
    await lab.client.patch(PersistentVolumeClaim, "data", {"status": status}, "default", subresource="status")

    async def is_clean():
        found = await lab.client.get(PersistentVolume, claim.spec.volume_name)
        return "volume.alpha.kubernetes.io/pre-resize-capacity" not in found.annotations

    await lab.until(is_clean)
    assert lab.driver.count("ControllerExpandVolume") == 1


@pytest.mark.parametrize("needs_node", [True, False])
async def test_somebody_elses_write_meanwhile_does_not_ask_the_driver_again(lab, needs_node):
    lab.driver.node_expansion = needs_node
    go_on = await asked_to_grow(lab, "2Gi")
    note = {"metadata": {"annotations": {"example.com/note": "written meanwhile"}}}
    await lab.client.patch(PersistentVolumeClaim, "data", note, "default")
    go_on.set()

    async def is_recorded():
        claim = await lab.claim("data")
        allocated = claim.status.allocated_resource_statuses.get("storage")
        return claim if allocated == ("NodeResizePending" if needs_node else None) else None

    claim = await lab.until(is_recorded)
    assert bytes_of(claim.status.capacity["storage"]) == (GI if needs_node else 2 * GI)
    assert claim.annotations["example.com/note"] == "written meanwhile"
    assert lab.driver.count("ControllerExpandVolume") == 1


async def test_an_expansion_begun_anew_meanwhile_is_not_said_to_be_done(lab):
    go_on = await asked_to_grow(lab, "2Gi")
    other = {"status": {"allocatedResources": {"storage": "3Gi"}}}
    await lab.client.patch(PersistentVolumeClaim, "data", other, "default", subresource="status")
    go_on.set()
    claim = await has_size(lab, 3 * GI)
    assert claim.status.allocated_resource_statuses == {}
    sizes = [r.capacity_range.required_bytes for r in lab.driver.requests("ControllerExpandVolume")]
    assert (sizes[0], sizes[-1]) == (2 * GI, 3 * GI)
    told = await lab.until(lambda: lab.events("VolumeResizeSuccessful"))
    assert [event.message for event in told] == ["Resize volume succeeded: 3Gi"]


@pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED"])
async def test_a_failed_expansion_is_told_and_tried_again(lab, code):
    lab.driver.fail("ControllerExpandVolume", code, times=2)
    await grown(lab, "2Gi")
    await has_size(lab, 2 * GI)
    assert lab.driver.count("ControllerExpandVolume") == 3
    events = await lab.until(lambda: lab.events("VolumeResizeFailed"))
    assert code in events[0].message


async def test_an_infeasible_size_can_be_taken_back(lab):
    lab.driver.chooser = lambda method, request: (
        _fault("OUT_OF_RANGE")
        if method == "ControllerExpandVolume" and request.capacity_range.required_bytes > 3 * GI
        else None
    )
    await grown(lab, "9Gi")

    async def is_infeasible():
        claim = await lab.claim("data")
        return claim.status.allocated_resource_statuses.get("storage") == "ControllerResizeInfeasible"

    await lab.until(is_infeasible)
    await ask(lab, "2Gi")
    await has_size(lab, 2 * GI)
    assert "storage" not in (await lab.claim("data")).status.allocated_resource_statuses


def _fault(code):
    from moorage.testing import Fault

    return Fault(code)


async def test_an_offline_only_driver_is_asked_again_when_no_pod_uses_the_volume(lab):
    body = {
        "metadata": {"name": "user", "namespace": "default"},
        "spec": {
            "containers": [{"name": "c", "image": "host"}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
        },
    }
    await lab.client.create(Pod, body, "default")
    lab.driver.fail("ControllerExpandVolume", "FAILED_PRECONDITION")
    await grown(lab, "2Gi")

    async def told():
        return [e for e in await lab.events("VolumeResizeFailed") if "offline" in e.message]

    await lab.until(told)
    assert lab.driver.count("ControllerExpandVolume") == 1
    await lab.client.delete(Pod, "user", "default", grace_s=0)
    await has_size(lab, 2 * GI)


async def test_a_driver_that_expands_on_the_node_only_is_not_called(make_lab):
    abilities = Abilities(rpcs=("CREATE_DELETE_VOLUME",), node=("EXPAND_VOLUME",))
    async with make_lab(abilities) as lab:
        await grown(lab, "2Gi")

        async def is_pending():
            claim = await lab.claim("data")
            return claim.status.allocated_resource_statuses.get("storage") == "NodeResizePending"

        await lab.until(is_pending)
        assert lab.driver.count("ControllerExpandVolume") == 0

        async def told():
            return await lab.events("Resizing") and await lab.events("FileSystemResizeRequired")

        await lab.until(told)


async def classes(lab, *names):
    for name in names:
        body = {"metadata": {"name": name}, "driverName": lab.driver.name, "parameters": {"tier": name}}
        await lab.client.create(VolumeAttributesClass, body)


async def choose(lab, name):
    patch = {"spec": {"volumeAttributesClassName": name}}
    await lab.client.patch(PersistentVolumeClaim, "data", patch, "default")


async def is_of(lab, name):
    async def check():
        claim = await lab.claim("data")
        done = claim.status.modify_volume_status is None
        return claim if done and claim.status.current_volume_attributes_class_name == name else None

    return await lab.until(check)


@pytest.mark.parametrize("code", ["", "INTERNAL", "UNAVAILABLE", "ABORTED", "INVALID_ARGUMENT"])
async def test_a_claim_changes_its_attributes_class(lab, code):
    if code:
        lab.driver.fail("ControllerModifyVolume", code)
    lab.start(Role.PROVISIONER, Role.RESIZER)
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")
    await classes(lab, "gold")
    await choose(lab, "gold")
    claim = await is_of(lab, "gold")
    assert [c for c in claim.status.conditions if c.type.startswith("Modify")] == []
    volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
    assert volume.spec.volume_attributes_class_name == "gold"
    assert lab.driver.backend.parameters[volume.spec.csi.volume_handle] == {"tier": "gold"}
    assert bool(await lab.events("VolumeModifyFailed")) == bool(code)


async def test_a_claim_that_waits_for_its_class_goes_on_when_the_class_comes(lab):
    lab.start(Role.PROVISIONER, Role.RESIZER)
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    await choose(lab, "late")

    async def is_waiting():
        claim = await lab.claim("data")
        status = claim.status.modify_volume_status
        return status is not None and status.status == "Pending"

    await lab.until(is_waiting)
    assert lab.driver.count("ControllerModifyVolume") == 0
    await classes(lab, "late")
    await is_of(lab, "late")


async def test_a_class_of_another_driver_is_refused_in_the_claim_until_it_names_another(lab):
    lab.start(Role.PROVISIONER, Role.RESIZER)
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    foreign = {"metadata": {"name": "foreign"}, "driverName": "other.example.org", "parameters": {"tier": "x"}}
    await lab.client.create(VolumeAttributesClass, foreign)
    await choose(lab, "foreign")

    async def is_refused():
        claim = await lab.claim("data")
        status = claim.status.modify_volume_status
        found = [c for c in claim.status.conditions if c.type == "ModifyVolumeError"]
        return (status.status, found[0].message) if status is not None and found else None

    assert await lab.until(is_refused) == ("Infeasible", "VolumeAttributesClass foreign is of driver other.example.org")
    assert lab.driver.requests("ControllerModifyVolume") == []
    await classes(lab, "gold")
    await choose(lab, "gold")
    claim = await is_of(lab, "gold")
    assert [c for c in claim.status.conditions if c.type.startswith("Modify")] == []


async def test_a_change_of_class_is_told_with_names_and_secrets_for_the_driver(lab):
    lab.start(Role.PROVISIONER, Role.RESIZER, extra_modify_metadata=True)
    for name, data in (("change", "bW9kaWZ5"), ("grow", "ZXhwYW5k")):
        body = {"metadata": {"name": name, "namespace": "default"}, "data": {"token": data}}
        await lab.client.create(Secret, body, "default")
    prefix = "csi.storage.k8s.io/controller"
    expand = {f"{prefix}-expand-secret-name": "grow", f"{prefix}-expand-secret-namespace": "default"}
    modify = {f"{prefix}-modify-secret-name": "change", f"{prefix}-modify-secret-namespace": "default"}
    await lab.make_class(parameters=expand | modify)
    await lab.make_claim("data")
    claim = await lab.bound("data")
    volume = await lab.client.get(PersistentVolume, claim.spec.volume_name)
    assert volume.annotations["volume.kubernetes.io/controller-modify-secret-name"] == "change"
    assert volume.spec.csi.controller_expand_secret_ref.name == "grow"
    await classes(lab, "gold", "silver")
    await choose(lab, "gold")
    await is_of(lab, "gold")
    patch = {"metadata": {"annotations": {"volume.kubernetes.io/controller-modify-secret-name": None}}}
    await lab.client.patch(PersistentVolume, volume.name, patch)
    await choose(lab, "silver")
    await is_of(lab, "silver")
    first, second = lab.driver.requests("ControllerModifyVolume")
    assert dict(first.mutable_parameters) == {
        "tier": "gold",
        "csi.storage.k8s.io/pvc/name": "data",
        "csi.storage.k8s.io/pvc/namespace": "default",
        "csi.storage.k8s.io/pv/name": volume.name,
    }
    assert (dict(first.secrets), dict(second.secrets)) == ({"token": "modify"}, {"token": "expand"})

    async def told():
        return await lab.events("VolumeModify") and len(await lab.events("VolumeModifySuccessful")) == 2

    await lab.until(told)


async def test_a_change_that_waits_can_be_taken_back(lab):
    lab.start(Role.PROVISIONER, Role.RESIZER)
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    await choose(lab, "absent")

    async def is_waiting():
        status = (await lab.claim("data")).status.modify_volume_status
        return status is not None and status.status == "Pending"

    await lab.until(is_waiting)
    await choose(lab, None)

    async def is_canceled():
        return (await lab.claim("data")).status.modify_volume_status is None

    await lab.until(is_canceled)

    async def told():
        return await lab.events("VolumeModifyCanceled")

    await lab.until(told)
    assert lab.driver.count("ControllerModifyVolume") == 0
