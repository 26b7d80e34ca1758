"""An API that refuses, forgets to answer, drops its watches, loses its history or restarts delays things, no more."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.controllers.flaky import Flaky
from tests.integration.controllers.replay import Scenario, Stage, config_of, replay, scenarios

from moorage.apiserver.run import ApiServer, Config
from moorage.controllers.context import ControllerOptions
from moorage.kube.api.client import Client, WatchEvent
from moorage.kube.objects import Event, PersistentVolume, PersistentVolumeClaim, StorageClass

CONTROLLERS = ("binder", "protection", "expansion")
EVERY_FIFTH = [*scenarios("binder")[::5], *scenarios("expansion")[::5]]
SPEC = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}


@pytest.mark.parametrize("scenario", EVERY_FIFTH, ids=lambda scenario: scenario["name"])
async def test_the_outcome_is_the_same_on_a_bad_day(stage: Stage, scenario: Scenario) -> None:
    controllers = tuple(name for name in CONTROLLERS if name != "expansion" or scenario["family"] == "expansion")
    stage.options = replace(stage.options, retry_max_s=0.1)  # so that what failed is soon tried again
    async with Flaky(config_of(stage.server), seed=len(scenario["name"])) as flaky:
        stage.controllers_client = flaky
        differences = await replay(stage, scenario, controllers, with_events=False)
        await stage.stop()
    assert not differences, "\n".join(differences)
    assert flaky.faults > 0


class LateClasses(Client):
    """A client that is told of new classes only when the gate is open."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate, self.was_asked = asyncio.Event(), asyncio.Event()

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        answer = await super().request(method, path, body, **options)
        if path.endswith("/storageclasses/fast"):
            self.was_asked.set()
        return answer

    async def watch(self, kind: Any, namespace: str = "", **options: Any) -> AsyncGenerator[WatchEvent[Any], None]:
        async for event in super().watch(kind, namespace, **options):
            if kind is StorageClass and event.type == "ADDED":
                await self.gate.wait()
            yield event


async def test_a_class_that_is_known_later_than_its_claim_is_not_called_missing(stage: Stage) -> None:
    """Applied from one file, the two are told by two watches, and the claim's may be the quicker one."""
    async with LateClasses(config_of(stage.server)) as late:
        stage.controllers_client = late
        await stage.start(("binder",))
        await stage.client.create(StorageClass, {"metadata": {"name": "fast"}, "provisioner": "csi.example.com"})
        spec = {**SPEC, "storageClassName": "fast", "resources": {"requests": {"storage": "1Gi"}}}
        await stage.client.create(PersistentVolumeClaim, {"metadata": {"name": "claim"}, "spec": spec}, "default")
        async with asyncio.timeout(30):
            await late.was_asked.wait()
        late.gate.set()
        await stage.settle()
        await stage.stop()
    assert {event.reason for event in (await stage.client.list(Event)).items} == {"ExternalProvisioning"}


async def make_pairs(client: Client, names: list[str]) -> None:
    for name in names:
        csi = {"driver": "csi.example.com", "volumeHandle": name}
        volume = {"metadata": {"name": name}, "spec": {**SPEC, "capacity": {"storage": "1Gi"}, "csi": csi}}
        await client.create(PersistentVolume, volume)
        claim = {"metadata": {"name": name}, "spec": {**SPEC, "resources": {"requests": {"storage": "1Gi"}}}}
        await client.create(PersistentVolumeClaim, claim, "default")


async def test_the_binder_goes_on_when_the_api_has_restarted(tmp_path: Path) -> None:
    server = ApiServer(Config(data_dir=tmp_path, insecure_port=0))
    await server.start()
    async with Client(config_of(server)) as client:
        stage = Stage(server, client, ControllerOptions())
        await stage.start(CONTROLLERS)
        await make_pairs(client, ["before"])
        await stage.settle()
        await server.stop()
        port = int(server.insecure_url.rpartition(":")[2])
        stage.server = ApiServer(Config(data_dir=tmp_path, insecure_port=port))
        await stage.server.start()
        await make_pairs(client, ["after"])
        await stage.settle(60)
        claims = await claims_of(client)
        assert {(claim.name, claim.status.phase) for claim in claims} == {("before", "Bound"), ("after", "Bound")}
        assert len({claim.spec.volume_name for claim in claims}) == 2
        await stage.stop()
        await stage.server.stop()


async def claims_of(client: Client) -> list[PersistentVolumeClaim]:
    return (await client.list(PersistentVolumeClaim)).items


async def test_two_binders_at_once_do_not_give_a_volume_twice(stage: Stage) -> None:
    """Nothing but resourceVersions keeps two leaders apart for a moment; that must be enough."""
    other = Stage(stage.server, stage.client, stage.options)
    await stage.start(("binder",))
    await other.start(("binder",))
    await make_pairs(stage.client, [f"pair-{number}" for number in range(20)])
    await stage.settle()
    await other.settle()
    await stage.settle()
    claims = await claims_of(stage.client)
    volumes = {volume.name: volume for volume in (await stage.client.list(PersistentVolume)).items}
    assert {claim.status.phase for claim in claims} == {"Bound"}
    for claim in claims:
        reference = volumes[claim.spec.volume_name].spec.claim_ref
        assert reference is not None
        assert reference.uid == claim.uid
    await other.stop()
