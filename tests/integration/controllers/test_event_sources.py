"""Events name the component that Kubernetes' own would name: people and tools filter by it."""

from typing import Any

from tests.integration.controllers.replay import Stage

from moorage.kube.names import MANAGED_ATTACH
from moorage.kube.objects import (
    Event,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
    VolumeAttachment,
)

CLAIM: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}


def pod(name: str, source: dict[str, Any]) -> dict[str, Any]:
    volumes = [{"name": "data", **source}]
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "app"}], "volumes": volumes},
    }


async def test_each_event_names_its_component(stage: Stage) -> None:
    client = stage.client
    await client.create(Node, {"metadata": {"name": "a", "annotations": {MANAGED_ATTACH: "true"}}})
    grows = {"provisioner": "csi.example.com", "allowVolumeExpansion": True}
    await client.create(StorageClass, {"metadata": {"name": "fast"}, **grows})
    csi = {"driver": "csi.example.com", "volumeHandle": "h"}
    offered = {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "storageClassName": "fast", "csi": csi}
    await client.create(PersistentVolume, {"metadata": {"name": "volume"}, "spec": offered})
    await stage.start(("binder", "attachdetach", "expansion", "ephemeral", "scheduler"))
    await stage.settle()
    wanted = {"data": "fast", "alone": "", "made-data": ""}  # the last is in the way of an ephemeral volume
    for name, class_name in wanted.items():
        spec = {**CLAIM, "storageClassName": class_name}
        await client.create(PersistentVolumeClaim, {"metadata": {"name": name}, "spec": spec}, "default")
    await stage.settle()
    await client.create(Pod, pod("user", {"persistentVolumeClaim": {"claimName": "data"}}), "default")
    await client.create(Pod, pod("made", {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}), "default")
    larger = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
    await client.patch(PersistentVolumeClaim, "data", larger, "default")
    await stage.settle()
    attachment = (await client.list(VolumeAttachment)).items[0]
    await client.patch(VolumeAttachment, attachment.name, {"status": {"attached": True}}, subresource="status")
    await stage.settle()
    events = (await client.list(Event, "default")).items
    assert {(e.involved_object.name, e.reason, e.source.component) for e in events} == {
        ("alone", "FailedBinding", "persistentvolume-controller"),
        ("made-data", "FailedBinding", "persistentvolume-controller"),
        ("user", "Scheduled", "default-scheduler"),
        ("made", "FailedScheduling", "default-scheduler"),
        ("made", "FailedBinding", "ephemeral_volume"),
        ("data", "ExternalExpanding", "volume_expand"),
        ("user", "SuccessfulAttachVolume", "attachdetach-controller"),
    }
    refused = next(e for e in events if e.source.component == "ephemeral_volume")
    said = "PVC default/made-data was not created for pod default/made (pod is not owner)"
    assert refused.message == f"ephemeral volume data: {said}"
