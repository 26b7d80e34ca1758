"""`moorage controllers`: the names it knows, one leader at a time, and a clean end."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.integration.controllers.replay import Stage
from typer.testing import CliRunner

from moorage.cli.controllers import app
from moorage.controllers.run import CONTROLLERS, ControllerSettings, LeaseOptions, chosen, run
from moorage.errors import UsageError
from moorage.kube.api.client import Client
from moorage.kube.objects import Lease, PersistentVolume, PersistentVolumeClaim

SPEC = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}


async def make_pair(client: Client, name: str) -> None:
    csi = {"driver": "csi.example.com", "volumeHandle": name}
    volume = {"metadata": {"name": name}, "spec": {**SPEC, "capacity": {"storage": "1Gi"}, "csi": csi}}
    await client.create(PersistentVolume, volume)
    claim = {"metadata": {"name": name}, "spec": {**SPEC, "resources": {"requests": {"storage": "1Gi"}}}}
    await client.create(PersistentVolumeClaim, claim, "default")


async def until_bound(client: Client, name: str) -> None:
    async with asyncio.timeout(60):
        while (await client.get(PersistentVolumeClaim, name, "default")).status.phase != "Bound":
            await asyncio.sleep(0.02)


async def holder(client: Client) -> str:
    lease = await client.find(Lease, "moorage-controllers", "default")
    return (lease.spec.holder_identity or "") if lease is not None else ""


def test_a_name_that_is_none_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="no controller is called bindr; there are binder, "):
        chosen(["binder", "bindr"])


def test_controllers_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert list(chosen(["expansion", "binder"])) == ["binder", "expansion"]
    assert {"binder", "attachdetach", "protection", "scheduler", "snapshots", "ephemeral"} <= set(CONTROLLERS)


@pytest.mark.parametrize(("flags", "is_forced"), [([], True), (["--disable-force-detach-on-timeout"], False)])
def test_a_node_that_does_not_answer_is_overruled_unless_that_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], is_forced: bool
) -> None:
    asked: list[ControllerSettings] = []

    async def take_note(kubeconfig: str | None, qps: float, burst: int, settings: ControllerSettings) -> None:
        asked.append(settings)

    monkeypatch.setattr("moorage.cli.controllers._until_stopped", take_note)
    assert CliRunner().invoke(app, ["attachdetach", *flags]).exit_code == 0
    assert [settings.options.force_detach_on_timeout for settings in asked] == [is_forced]


async def test_one_leads_and_the_next_takes_over(stage: Stage) -> None:
    lease = LeaseOptions(enabled=True, namespace="default", lease_s=2.0, renew_s=1.5, retry_s=0.05)
    settings = ControllerSettings(("binder",), stage.options, lease)
    first = asyncio.create_task(run(stage.client, settings))
    await make_pair(stage.client, "one")
    await until_bound(stage.client, "one")
    leader = await holder(stage.client)
    second = asyncio.create_task(run(stage.client, settings))
    await make_pair(stage.client, "two")
    await until_bound(stage.client, "two")
    assert await holder(stage.client) == leader
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await make_pair(stage.client, "three")
    await until_bound(stage.client, "three")
    assert await holder(stage.client) not in ("", leader)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_the_command_works_until_it_is_asked_to_stop(stage: Stage, tmp_path: Path) -> None:
    arguments = ("-m", "moorage.cli.main", "controllers", "binder", "--kubeconfig", str(stage.server.kubeconfig))
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=log)
        try:
            await make_pair(stage.client, "pair")
            await until_bound(stage.client, "pair")
        finally:
            process.terminate()
            status = await asyncio.wait_for(process.wait(), 30)
    assert status == 0, (tmp_path / "log").read_text()
