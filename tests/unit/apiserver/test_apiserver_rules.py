"""Defaults, validation and immutability of the storage kinds, as section and verse of Kubernetes have them."""

import pytest

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
STORAGE = "/apis/storage.k8s.io/v1"


def causes(refusal):
    return {cause["field"]: cause["reason"] for cause in refusal["details"]["causes"]}


async def test_a_claim_gets_its_defaults_and_its_protection(api, claim):
    made = await api.make(CLAIMS, {**claim("a"), "status": {"phase": "Bound"}})
    assert made["spec"]["volumeMode"] == "Filesystem"
    assert made["status"] == {"phase": "Pending"}
    assert made["metadata"]["finalizers"] == ["kubernetes.io/pvc-protection"]
    assert "storageClassName" not in made["spec"]


async def test_the_newest_default_class_is_given_to_claims_that_name_none(api, claim):
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    await api.make(
        f"{STORAGE}/storageclasses", {"metadata": {"name": "b", "annotations": annotations}, "provisioner": "x.y"}
    )
    await api.make(
        f"{STORAGE}/storageclasses", {"metadata": {"name": "a", "annotations": annotations}, "provisioner": "x.y"}
    )
    assert (await api.make(CLAIMS, claim("one")))["spec"]["storageClassName"] in ("a", "b")
    assert (await api.make(CLAIMS, claim("none", storageClassName="")))["spec"]["storageClassName"] == ""


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"accessModes": []}, "spec.accessModes", "FieldValueRequired"),
        ({"accessModes": ["Often"]}, "spec.accessModes", "FieldValueNotSupported"),
        ({"accessModes": ["ReadWriteOncePod", "ReadWriteOnce"]}, "spec.accessModes", "FieldValueForbidden"),
        ({"resources": {}}, "spec.resources[storage]", "FieldValueRequired"),
        ({"resources": {"requests": {"storage": "0"}}}, "spec.resources[storage]", "FieldValueInvalid"),
        ({"resources": {"requests": {"storage": "-1Gi"}}}, "spec.resources[storage]", "FieldValueInvalid"),
        ({"volumeMode": "Tape"}, "spec.volumeMode", "FieldValueNotSupported"),
        ({"dataSource": {"kind": "VolumeSnapshot", "name": "s"}}, "spec.dataSource", "FieldValueInvalid"),
    ],
)
async def test_a_claim_that_makes_no_sense_is_refused_field_by_field(api, claim, change, field, reason):
    refusal = await api("POST", CLAIMS, claim("a", **change), expect=422)
    assert refusal["reason"] == "Invalid"
    assert causes(refusal)[field] == reason


async def test_the_two_data_sources_mirror_each_other(api, claim):
    source = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}
    one = await api.make(CLAIMS, claim("a", dataSource=source))
    other = await api.make(CLAIMS, claim("b", dataSourceRef=source))
    assert one["spec"]["dataSourceRef"] == other["spec"]["dataSource"] == source


async def test_a_claim_binds_once_and_grows_only_when_bound(api, claim):
    growing = {"metadata": {"name": "fast"}, "provisioner": "x.y", "allowVolumeExpansion": True}
    await api.make(f"{STORAGE}/storageclasses", growing)
    await api.make(CLAIMS, claim("a", storageClassName="fast"))
    grown = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
    await api.merge(f"{CLAIMS}/a", grown, expect=422)
    await api.merge(f"{CLAIMS}/a", {"spec": {"volumeName": "pv"}})
    await api.merge(f"{CLAIMS}/a", {"spec": {"volumeName": "other"}}, expect=422)
    await api.merge(f"{CLAIMS}/a/status", {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}})
    assert (await api.merge(f"{CLAIMS}/a", grown))["spec"]["resources"]["requests"]["storage"] == "2Gi"
    await api.merge(f"{CLAIMS}/a", {"spec": {"resources": {"requests": {"storage": "1Gi"}}}}, expect=422)
    await api.merge(f"{CLAIMS}/a", {"spec": {"accessModes": ["ReadWriteMany"]}}, expect=422)
    await api.merge(f"{STORAGE}/storageclasses/fast", {"allowVolumeExpansion": False})
    larger = {"spec": {"resources": {"requests": {"storage": "3Gi"}}}}
    await api.merge(f"{CLAIMS}/a", larger, expect=403)


async def test_status_and_spec_are_kept_apart_but_metadata_goes_through_both(api, claim):
    await api.make(CLAIMS, claim("a"))
    both = {"metadata": {"annotations": {"x/y": "z"}}, "spec": {"volumeName": "pv"}, "status": {"phase": "Lost"}}
    through_status = await api.merge(f"{CLAIMS}/a/status", both)
    assert through_status["status"]["phase"] == "Lost"
    assert "volumeName" not in through_status["spec"]
    assert through_status["metadata"]["annotations"] == {"x/y": "z"}
    through_main = await api.merge(f"{CLAIMS}/a", {"status": {"phase": "Bound"}})
    assert through_main["status"]["phase"] == "Lost"


async def test_a_volume_starts_pending_and_its_source_is_fixed(api, volume):
    made = await api.make(VOLUMES, {**volume("v"), "status": {"phase": "Bound"}})
    assert made["status"]["phase"] == "Pending"
    assert made["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    first = made["status"]["lastPhaseTransitionTime"]
    bound = await api.merge(f"{VOLUMES}/v/status", {"status": {"phase": "Available"}})
    assert bound["status"]["lastPhaseTransitionTime"] >= first
    await api.merge(f"{VOLUMES}/v", {"spec": {"csi": {"volumeHandle": "other"}}}, expect=422)
    secret = {"name": "s", "namespace": "n"}
    await api.merge(f"{VOLUMES}/v", {"spec": {"csi": {"controllerExpandSecretRef": secret}}})
    await api.merge(f"{VOLUMES}/v", {"spec": {"capacity": {"storage": "5Gi"}, "storageClassName": "x"}})
    ref = {"namespace": "default", "name": "c", "uid": ""}
    pre_bound = await api.merge(f"{VOLUMES}/v", {"spec": {"claimRef": ref}})
    assert "uid" not in pre_bound["spec"]["claimRef"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"capacity": {}}, "spec.capacity"),
        ({"csi": None}, "spec"),
        ({"hostPath": {"path": "/x"}}, "spec.csi"),
        ({"csi": {"driver": "a" * 64, "volumeHandle": "h"}}, "spec.csi.driver"),
        ({"csi": {"driver": "d.example"}}, "spec.csi.volumeHandle"),
        ({"nodeAffinity": {}}, "spec.nodeAffinity.required"),
        ({"volumeAttributesClassName": ""}, "spec.volumeAttributesClassName"),
        ({"persistentVolumeReclaimPolicy": "Burn"}, "spec.persistentVolumeReclaimPolicy"),
    ],
)
async def test_a_volume_that_makes_no_sense_is_refused(api, volume, change, field):
    refusal = await api("POST", VOLUMES, volume("v", **change), expect=422)
    assert field in causes(refusal)


async def test_a_class_keeps_what_its_volumes_were_made_with(api):
    path = f"{STORAGE}/storageclasses"
    made = await api.make(path, {"metadata": {"name": "c"}, "provisioner": "x.y", "parameters": {"a": "b"}})
    assert (made["reclaimPolicy"], made["volumeBindingMode"]) == ("Delete", "Immediate")
    for change in ({"provisioner": "z"}, {"parameters": {"a": "c"}}, {"reclaimPolicy": "Retain"},
                   {"volumeBindingMode": "WaitForFirstConsumer"}):  # fmt: skip
        await api.merge(f"{path}/c", change, expect=422)
    assert (await api.merge(f"{path}/c", {"allowVolumeExpansion": True}))["allowVolumeExpansion"] is True


async def test_an_attachment_is_changed_only_through_its_status(api):
    path = f"{STORAGE}/volumeattachments"
    spec = {"attacher": "d.example", "nodeName": "n", "source": {"persistentVolumeName": "pv"}}
    made = await api.make(path, {"metadata": {"name": "a"}, "spec": spec, "status": {"attached": True}})
    assert made["status"] == {"attached": False}
    await api.merge(f"{path}/a", {"spec": {"nodeName": "m"}}, expect=422)
    unchanged = await api.merge(f"{path}/a", {"status": {"attached": True}})
    assert unchanged["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    attached = await api.merge(f"{path}/a/status", {"status": {"attached": True}, "metadata": {"labels": {"a": "b"}}})
    assert attached["status"]["attached"] is True
    assert "labels" not in attached["metadata"]
    unversioned = {key: value for key, value in attached.items() if key != "metadata"}
    refusal = await api("PUT", f"{path}/a", {**unversioned, "metadata": {"name": "a"}}, expect=422)
    assert "metadata.resourceVersion" in causes(refusal)


async def test_a_driver_counts_generations_and_keeps_its_mode(api):
    path = f"{STORAGE}/csidrivers"
    made = await api.make(path, {"metadata": {"name": "d.example"}, "spec": {}})
    assert made["spec"]["attachRequired"] is True
    assert made["spec"]["volumeLifecycleModes"] == ["Persistent"]
    changed = await api.merge(f"{path}/d.example", {"spec": {"storageCapacity": True}})
    assert changed["metadata"]["generation"] == made["metadata"]["generation"] + 1
    await api.merge(f"{path}/d.example", {"spec": {"attachRequired": False}}, expect=422)


async def test_drivers_on_a_node_come_and_go_but_do_not_change(api):
    path = f"{STORAGE}/csinodes"
    await api.make(path, {"metadata": {"name": "n"}, "spec": {"drivers": []}})
    driver = {"name": "d.example", "nodeID": "id", "topologyKeys": ["a.b/c"]}
    await api.merge(f"{path}/n", {"spec": {"drivers": [driver]}})
    await api.merge(f"{path}/n", {"spec": {"drivers": [{**driver, "allocatable": {"count": 3}}]}})
    await api.merge(f"{path}/n", {"spec": {"drivers": [{**driver, "nodeID": "other"}]}}, expect=422)
    empty = await api.merge(f"{path}/n", {"spec": {"drivers": []}})
    assert empty["spec"] == {"drivers": []}
