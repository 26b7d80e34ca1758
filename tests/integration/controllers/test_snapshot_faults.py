"""On a bad day of the API, snapshots still come and go, and none is left behind."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.integration.controllers.flaky import Flaky
from tests.integration.controllers.replay import Stage, config_of

from moorage.kube import names
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)

DRIVER = "csi.example.com"


async def furnish(client: Client) -> None:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "",
        "volumeName": "pv",
    }
    claim = await client.create(PersistentVolumeClaim, {"metadata": {"name": "data"}, "spec": spec}, "default")
    volume = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "csi": {"driver": DRIVER, "volumeHandle": "h"},
        "claimRef": {"namespace": "default", "name": "data", "uid": claim.uid},
    }
    await client.create(PersistentVolume, {"metadata": {"name": "pv"}, "spec": volume})
    bound = {"status": {"phase": "Bound"}}
    await client.patch(PersistentVolumeClaim, "data", bound, "default", subresource="status")
    body = {"metadata": {"name": "fast"}, "driver": DRIVER, "deletionPolicy": "Delete"}
    await client.create(VolumeSnapshotClass, body)


async def snapshotter_works(client: Client) -> None:
    """One round of the sidecar: make what is to be made, let go what may go."""
    for content in (await client.list(VolumeSnapshotContent)).items:
        if content.is_deleting and content.annotations.get(names.SNAPSHOT_BEING_DELETED) == "yes":
            await client.patch(VolumeSnapshotContent, content.name, {"metadata": {"finalizers": None}})
        elif not content.is_deleting and content.status is None:
            status = {"snapshotHandle": f"s-{content.name}", "creationTime": 10**18, "readyToUse": True}
            await client.patch(VolumeSnapshotContent, content.name, {"status": status}, subresource="status")


async def until(client: Client, holds: Callable[[list[VolumeSnapshot]], bool]) -> None:
    async with asyncio.timeout(90):
        while not holds((await client.list(VolumeSnapshot, "default")).items):
            await snapshotter_works(client)
            await asyncio.sleep(0.02)


def all_ready(found: list[VolumeSnapshot]) -> bool:
    return all(one.status is not None and one.status.ready_to_use for one in found)


async def test_snapshots_come_and_go_on_a_bad_day(stage: Stage) -> None:
    client = stage.client
    async with Flaky(config_of(stage.server), seed=3) as flaky:
        stage.controllers_client = flaky
        await furnish(client)
        await stage.start(("snapshots",))
        for number in range(5):
            spec: dict[str, Any] = {
                "source": {"persistentVolumeClaimName": "data"},
                "volumeSnapshotClassName": "fast",
            }
            await client.create(VolumeSnapshot, {"metadata": {"name": f"snap-{number}"}, "spec": spec}, "default")
        await until(client, all_ready)
        assert len((await client.list(VolumeSnapshotContent)).items) == 5
        for number in range(5):
            await client.delete(VolumeSnapshot, f"snap-{number}", "default")
        await until(client, lambda found: not found)
        assert (await client.list(VolumeSnapshotContent)).items == []
        async with asyncio.timeout(60):
            while names.CLAIM_AS_SOURCE in (await client.get(PersistentVolumeClaim, "data", "default")).finalizers:
                await asyncio.sleep(0.05)
        await stage.stop()
    assert flaky.faults > 5
