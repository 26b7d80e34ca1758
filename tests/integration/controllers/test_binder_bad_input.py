"""Objects that contradict themselves or point nowhere stop nobody else, and cost nobody a volume."""

from typing import Any

import pytest
from tests.integration.controllers.replay import Stage

from moorage.kube.api.client import Client
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim

SPEC = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
NOBODY = "00000000-0000-0000-0000-000000000000"


async def make_volume(client: Client, name: str, **spec: Any) -> None:
    csi = {"driver": "csi.example.com", "volumeHandle": name}
    body = {"metadata": {"name": name}, "spec": {**SPEC, "capacity": {"storage": "1Gi"}, "csi": csi, **spec}}
    await client.create(PersistentVolume, body)


async def make_claim(client: Client, name: str, notes: dict[str, str] | None = None, **spec: Any) -> None:
    resources = {"requests": {"storage": "1Gi"}}
    body = {"metadata": {"name": name, "annotations": notes or {}}, "spec": {**SPEC, "resources": resources, **spec}}
    await client.create(PersistentVolumeClaim, body, "default")


async def phase_of(client: Client, name: str) -> str:
    return (await client.get(PersistentVolumeClaim, name, "default")).status.phase


@pytest.mark.parametrize(
    "reference",
    [{"uid": NOBODY}, {"uid": NOBODY, "name": "claim"}, {"uid": NOBODY, "namespace": "default"}],
    ids=["neither", "no namespace", "no name"],
)
async def test_a_reference_that_names_no_claim_releases_nothing(stage: Stage, reference: dict[str, str]) -> None:
    await stage.start(("binder", "protection"))
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    await make_volume(stage.client, "odd", persistentVolumeReclaimPolicy="Delete", claimRef={**kind, **reference})
    await make_volume(stage.client, "plain")
    await make_claim(stage.client, "claim")
    await stage.settle()
    assert (await stage.client.get(PersistentVolume, "odd")).status.phase == "Pending"
    assert await phase_of(stage.client, "claim") == "Bound"


async def test_marks_of_a_binding_that_never_was_lose_only_their_own_claim(stage: Stage) -> None:
    await stage.start(("binder", "protection"))
    await make_volume(stage.client, "volume")
    await make_claim(stage.client, "liar", {"pv.kubernetes.io/bind-completed": "yes"})
    await make_claim(stage.client, "dreamer", {"pv.kubernetes.io/bind-completed": "yes"}, volumeName="nowhere")
    await make_claim(stage.client, "honest")
    await stage.settle()
    phases = [await phase_of(stage.client, name) for name in ("liar", "dreamer", "honest")]
    assert phases == ["Lost", "Lost", "Bound"]


async def test_hands_in_the_middle_of_a_binding_are_put_right(stage: Stage) -> None:
    await stage.start(("binder", "protection"))
    await make_volume(stage.client, "volume")
    await make_claim(stage.client, "claim")
    await stage.settle()
    notes = {"pv.kubernetes.io/bind-completed": None, "pv.kubernetes.io/bound-by-controller": None}
    await stage.client.patch(PersistentVolumeClaim, "claim", {"metadata": {"annotations": notes}}, "default")
    await stage.client.patch(PersistentVolume, "volume", {"status": {"phase": "Available"}}, subresource="status")
    await stage.client.patch(
        PersistentVolumeClaim, "claim", {"status": {"phase": "Pending"}}, "default", subresource="status"
    )
    await stage.settle()
    claim = await stage.client.get(PersistentVolumeClaim, "claim", "default")
    assert claim.status.phase == "Bound"
    assert "pv.kubernetes.io/bind-completed" in claim.annotations
    assert (await stage.client.get(PersistentVolume, "volume")).status.phase == "Bound"


async def test_a_volume_that_comes_free_serves_all_who_wait_one_after_the_other(stage: Stage) -> None:
    """No periodic look is needed: each volume wakes a claim that it suits."""
    await stage.start(("binder",))
    names = [f"claim-{number}" for number in range(8)]
    for name in names:
        await make_claim(stage.client, name)
    await stage.settle()
    for number in range(8):
        await make_volume(stage.client, f"volume-{number}", capacity={"storage": f"{1 + number % 3}Gi"})
    await stage.settle(resync=False)
    assert {await phase_of(stage.client, name) for name in names} == {"Bound"}
