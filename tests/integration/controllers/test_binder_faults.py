"""An API that refuses, forgets to answer, drops its watches, loses its history or restarts delays things, no more."""

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay import Scenario, Stage, config_of, replay, scenarios

from moorage.apiserver.run import ApiServer, Config
from moorage.controllers.context import ControllerOptions
from moorage.kube.client import Client, WatchEvent
from moorage.kube.errors import Conflict, Gone, Unavailable
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim

CONTROLLERS = ("binder", "protection", "expansion")
EVERY_FIFTH = [*scenarios("binder")[::5], *scenarios("expansion")[::5]]
SPEC = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}


class Flaky(Client):
    """A client of an API that has a bad day."""

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(config)
        self._chance = random.Random(seed)
        self.faults = 0

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        luck = self._chance.random() * (0.3 if not self.faults else 1.0)  # the first write fails for certain
        if method == "GET" or luck > 0.3:
            return await super().request(method, path, body, **options)
        self.faults += 1
        if luck < 0.15:
            raise Conflict(409, "Conflict", "somebody else was quicker")
        if luck < 0.2:
            raise Unavailable(503, "ServiceUnavailable", "not now")
        await super().request(method, path, body, **options)
        raise Unavailable(503, "Unreachable", "the connection was lost before the answer came")

    async def watch(self, kind: Any, namespace: str = "", **options: Any) -> AsyncIterator[WatchEvent[Any]]:
        left = self._chance.randint(4, 20)
        async for event in super().watch(kind, namespace, **options):
            yield event
            left -= 1
            if left == 0:
                self.faults += 1
                if self._chance.random() < 0.3:
                    raise Gone(410, "Expired", "too old resource version")
                return


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
