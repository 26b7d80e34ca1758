"""An API that refuses, loses answers, drops watches or restarts, and objects that make no sense, only delay things."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.integration.controllers.flaky import Flaky
from tests.integration.controllers.replay import Scenario, Stage, config_of, replay, scenarios

from moorage.apiserver.run import ApiServer, Config
from moorage.controllers.context import ControllerOptions
from moorage.kube.api.client import Client
from moorage.kube.names import MANAGED_ATTACH
from moorage.kube.objects import CSIDriver, Node, PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment

DRIVER = "csi.example.com"
SOME = [s for s in scenarios("attachdetach") if "error" not in s["name"]][::6]
_RETRIES_WITHIN_S = 5.0


class Patient(Stage):
    """A stage that also waits for what is tried again in a moment."""

    async def settle(self, timeout_s: float = 60.0, *, resync: bool = True) -> None:
        while True:
            await super().settle(timeout_s, resync=resync)
            waits = [work.next_due_s() for work in self.activity._watched if hasattr(work, "next_due_s")]
            if not any(due is not None and due < _RETRIES_WITHIN_S for due in waits):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("scenario", SOME, ids=lambda scenario: scenario["name"])
async def test_the_outcome_is_the_same_on_a_bad_day(stage: Stage, scenario: Scenario) -> None:
    patient = Patient(stage.server, stage.client, stage.options)
    async with Flaky(config_of(stage.server), seed=len(scenario["name"])) as flaky:
        patient.controllers_client = flaky
        differences = await replay(patient, scenario, ("attachdetach",), with_events=False)
        await patient.stop()
    assert not differences, "\n".join(differences)


async def add_node(client: Client, name: str) -> None:
    await client.create(Node, {"metadata": {"name": name, "annotations": {MANAGED_ATTACH: "true"}}})


async def add_bound(client: Client, name: str) -> None:
    spec: dict[str, Any] = {"accessModes": ["ReadWriteOnce"]}
    wanted = {**spec, "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "", "volumeName": name}
    claim = await client.create(PersistentVolumeClaim, {"metadata": {"name": name}, "spec": wanted}, "default")
    csi = {"driver": DRIVER, "volumeHandle": name}
    ref = {"namespace": "default", "name": name, "uid": claim.uid}
    offered = {**spec, "capacity": {"storage": "1Gi"}, "csi": csi, "claimRef": ref}
    await client.create(PersistentVolume, {"metadata": {"name": name}, "spec": offered})
    bound = {"status": {"phase": "Bound"}}
    await client.patch(PersistentVolumeClaim, name, bound, "default", subresource="status")


async def add_pod(client: Client, name: str, node: str, *claims: str) -> None:
    volumes = [{"name": f"v{n}", "persistentVolumeClaim": {"claimName": c}} for n, c in enumerate(claims)]
    spec = {"nodeName": node, "containers": [{"name": "main", "image": "app"}], "volumes": volumes}
    await client.create(Pod, {"metadata": {"name": name}, "spec": spec}, "default")


async def attached(client: Client) -> set[tuple[str | None, str]]:
    found = (await client.list(VolumeAttachment)).items
    return {(one.spec.source.persistent_volume_name, one.spec.node_name) for one in found}


async def test_it_goes_on_when_the_api_has_restarted(tmp_path: Path) -> None:
    server = ApiServer(Config(data_dir=tmp_path, insecure_port=0))
    await server.start()
    async with Client(config_of(server)) as client:
        stage = Stage(server, client, ControllerOptions())
        await stage.start(("attachdetach",))
        await add_node(client, "a")
        for name in ("before", "after"):
            await add_bound(client, name)
        await add_pod(client, "one", "a", "before")
        await stage.settle()
        await server.stop()
        port = int(server.insecure_url.rpartition(":")[2])
        stage.server = ApiServer(Config(data_dir=tmp_path, insecure_port=port))
        await stage.server.start()
        await add_pod(client, "two", "a", "after")
        await stage.settle(60)
        assert await attached(client) == {("before", "a"), ("after", "a")}
        await stage.stop()
        await stage.server.stop()


async def test_objects_that_make_no_sense_hold_nobody_up(stage: Stage) -> None:
    client = stage.client
    await stage.start(("attachdetach",))
    await add_node(client, "a")
    await client.create(Node, {"metadata": {"name": "plain"}})
    await add_bound(client, "good")
    await add_bound(client, "orphan")
    await client.patch(PersistentVolume, "orphan", {"spec": {"claimRef": {"uid": "someone-else"}}})
    strange = {"attacher": DRIVER, "nodeName": "nowhere", "source": {"persistentVolumeName": "nothing"}}
    await client.create(VolumeAttachment, {"metadata": {"name": "strange"}, "spec": strange})
    listed = [{"name": "kubernetes.io/csi/odd", "devicePath": ""}, {"name": "other/plugin/x", "devicePath": "/dev/x"}]
    await client.patch(Node, "a", {"status": {"volumesAttached": listed}}, subresource="status")
    await add_pod(client, "lost", "nowhere", "good")
    await add_pod(client, "unmanaged", "plain", "good")
    await add_pod(client, "mixed", "a", "missing", "orphan", "good")
    await stage.settle()
    assert await attached(client) == {("nothing", "nowhere"), ("good", "a")}
    name = next(one.name for one in (await client.list(VolumeAttachment)).items if one.spec.node_name == "a")
    await client.patch(VolumeAttachment, name, {"status": {"attached": True}}, subresource="status")
    await stage.settle()
    node = await client.get(Node, "a")
    names = [volume.name for volume in node.status.volumes_attached]
    assert f"kubernetes.io/csi/{DRIVER}^good" in names
    assert "other/plugin/x" in names  # the volumes of other plugins stay listed


async def test_a_start_in_the_middle_of_a_move_keeps_to_one_node(stage: Stage) -> None:
    client = stage.client
    await stage.start(("attachdetach",))
    for node in ("a", "b"):
        await add_node(client, node)
    await add_bound(client, "data")
    await add_pod(client, "first", "a", "data")
    await stage.settle()
    await stage.stop()
    name = (await client.list(VolumeAttachment)).items[0].name
    held = {"metadata": {"finalizers": ["external-attacher/csi-example-com"]}}
    await client.patch(VolumeAttachment, name, held)
    await client.patch(VolumeAttachment, name, {"status": {"attached": True}}, subresource="status")
    await client.delete(Pod, "first", "default", grace_s=0)
    await add_pod(client, "second", "b", "data")
    await stage.start(("attachdetach",))
    await stage.settle()
    assert await attached(client) == {("data", "a")}  # on its way out, but the driver is not done
    await client.patch(VolumeAttachment, name, {"metadata": {"finalizers": None}})
    await stage.settle()
    assert await attached(client) == {("data", "b")}


async def test_an_attachment_that_somebody_deletes_is_made_again_after_a_while(stage: Stage) -> None:
    client = stage.client
    stage = Patient(stage.server, client, ControllerOptions(attach_verify_s=0.3))
    await stage.start(("attachdetach",))
    await add_node(client, "a")
    await add_bound(client, "data")
    await add_pod(client, "one", "a", "data")
    await stage.settle()
    first = (await client.list(VolumeAttachment)).items[0]
    await client.patch(VolumeAttachment, first.name, {"status": {"attached": True}}, subresource="status")
    await stage.settle()
    await client.delete(VolumeAttachment, first.name)
    await stage.settle()
    second = (await client.list(VolumeAttachment)).items[0]
    assert second.name == first.name
    assert second.uid != first.uid
    assert (await client.get(Node, "a")).status.volumes_attached == []
    await stage.stop()


async def test_pods_that_were_on_a_node_before_it_was_managed_are_seen_to_later(stage: Stage) -> None:
    client = stage.client
    stage = Patient(stage.server, client, ControllerOptions(attach_verify_s=0.3))
    await stage.start(("attachdetach",))
    await client.create(Node, {"metadata": {"name": "a"}})
    await add_bound(client, "data")
    await add_pod(client, "one", "a", "data")
    await stage.settle()
    assert await attached(client) == set()
    await client.patch(Node, "a", {"metadata": {"annotations": {MANAGED_ATTACH: "true"}}})
    await stage.settle()
    assert await attached(client) == {("data", "a")}
    await stage.stop()


async def test_a_driver_that_needs_no_attaching_any_more_is_let_go_later(stage: Stage) -> None:
    client = stage.client
    stage = Patient(stage.server, client, ControllerOptions(attach_verify_s=0.3))
    await stage.start(("attachdetach",))
    await add_node(client, "a")
    await add_bound(client, "data")
    await add_pod(client, "one", "a", "data")
    await stage.settle()
    name = (await client.list(VolumeAttachment)).items[0].name
    await client.patch(VolumeAttachment, name, {"status": {"attached": True}}, subresource="status")
    await stage.settle()
    await client.create(CSIDriver, {"metadata": {"name": DRIVER}, "spec": {"attachRequired": False}})
    await stage.settle()
    assert await attached(client) == set()
    await client.delete(CSIDriver, DRIVER)
    await stage.settle()
    assert await attached(client) == {("data", "a")}
    await stage.stop()
