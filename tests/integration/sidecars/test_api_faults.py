"""An API server that is slow, refuses, breaks off and restarts: the sidecars wait it out and converge."""

import asyncio
import random
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from moorage.kube.api.config import from_values
from moorage.kube.objects import (
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.quantity import bytes_of
from moorage.sidecars.roles import Role


class FaultyProxy:
    """Passes requests on to the API server, except those that it spoils."""

    def __init__(self, url, rng):
        self._url = url
        self._rng = rng
        self.share = 0.0
        self.spoilt: Counter[str] = Counter()

    async def __aenter__(self):
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{tail:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request):
        faults = ["429", "500", "lost", "lost after", "slow", *(["409"] if request.method in ("PATCH", "PUT") else [])]
        fault = self._rng.choice(faults) if self._rng.random() < self.share else ""
        if fault:
            self.spoilt[fault] += 1
        if fault == "slow":
            await asyncio.sleep(0.2)
        if fault in ("429", "500", "409"):
            reason = {"429": "TooManyRequests", "500": "InternalError", "409": "Conflict"}[fault]
            status = {"kind": "Status", "code": int(fault), "reason": reason, "message": "spoilt"}
            return web.json_response(status, status=int(fault))
        if fault == "lost":
            request.transport.close()
            return web.Response()
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        async with self._session.request(
            request.method, self._url + request.path_qs, data=body, headers=headers, timeout=aiohttp.ClientTimeout()
        ) as answer:
            if fault == "lost after":
                request.transport.close()
                return web.Response()
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


@pytest.mark.parametrize("seed", range(2))
async def test_spoilt_requests_only_cost_time(lab, seed, monkeypatch):
    async with FaultyProxy(lab.server.insecure_url, random.Random(seed)) as proxy:
        monkeypatch.setattr(lab, "api", lambda: from_values(proxy.url, lab.server.token), raising=False)
        await lab.make_class()
        proxy.share = 0.15
        lab.start(Role.PROVISIONER)
        names = [f"c{number}" for number in range(15)]
        for name in names:
            await lab.make_claim(name)
        for name in names:
            await lab.bound(name)
        for name in names[:8]:
            await lab.client.delete(PersistentVolumeClaim, name, "default")

        async def is_exact():
            claims = {volume.spec.claim_ref.name for volume in await lab.volumes()}
            return claims == set(names[8:]) and len(lab.driver.backend.volumes) == 7

        await lab.until(is_exact)
        assert proxy.spoilt.total() > 3
        proxy.share = 0.0
        await lab.kill(lab.tasks[0])


GI = 1 << 30
SNAPSHOT = "snapshot.storage.kubernetes.io"
NAMES = [f"c{number}" for number in range(6)]


async def begin(lab):
    """Claims that are bound, with everything that the roles need to do something about them."""
    await lab.make_class(allowVolumeExpansion=True)
    await lab.make_node("node-1", "id-1")
    body = {"metadata": {"name": "gold"}, "driverName": lab.driver.name, "parameters": {"tier": "gold"}}
    await lab.client.create(VolumeAttributesClass, body)
    body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
    await lab.client.create(VolumeSnapshotClass, body)
    for name in NAMES:
        await lab.make_claim(name)
    return {name: (await lab.bound(name)).spec.volume_name for name in NAMES}


async def ask(lab, volumes):
    """Attach, grow, change and snapshot every volume."""
    for number, (name, volume) in enumerate(volumes.items()):
        await lab.attach(f"a-{name}", volume)
        spec = {"resources": {"requests": {"storage": "2Gi"}}, "volumeAttributesClassName": "gold"}
        await lab.client.patch(PersistentVolumeClaim, name, {"spec": spec}, "default")
        handle = (await lab.client.get(PersistentVolume, volume)).spec.csi.volume_handle
        reference = {"name": "s", "namespace": "default", "uid": f"0ec7e21e-0000-4000-8000-{number:012d}"}
        spec = {
            "volumeSnapshotRef": reference,
            "deletionPolicy": "Delete",
            "driver": lab.driver.name,
            "volumeSnapshotClassName": "snaps",
            "source": {"volumeHandle": handle},
        }
        finalizers = [f"{SNAPSHOT}/volumesnapshotcontent-bound-protection"]
        body = {"metadata": {"name": f"s-{name}", "finalizers": finalizers}, "spec": spec}
        await lab.client.create(VolumeSnapshotContent, body)


async def is_as_asked(lab):
    for name in NAMES:
        claim, attachment = await lab.claim(name), await lab.attachment(f"a-{name}")
        content = await lab.client.get(VolumeSnapshotContent, f"s-{name}")
        is_large = bytes_of(claim.status.capacity["storage"]) == 2 * GI
        is_gold = claim.status.current_volume_attributes_class_name == "gold"
        is_taken = content.status is not None and content.status.ready_to_use
        is_unmarked = f"{SNAPSHOT}/volumesnapshot-being-created" not in content.annotations
        if not (is_large and is_gold and is_taken and is_unmarked and attachment.status.attached):
            return False
    return True


async def undo(lab):
    for name in NAMES:
        await lab.client.delete(VolumeAttachment, f"a-{name}")
        patch = {"metadata": {"annotations": {f"{SNAPSHOT}/volumesnapshot-being-deleted": "yes"}}}
        await lab.client.patch(VolumeSnapshotContent, f"s-{name}", patch)
        await lab.client.delete(VolumeSnapshotContent, f"s-{name}")
        await lab.client.delete(PersistentVolumeClaim, name, "default")


async def is_undone(lab):
    left = (await lab.client.list(VolumeAttachment)).items + (await lab.client.list(VolumeSnapshotContent)).items
    backend = lab.driver.backend
    return not left and not await lab.volumes() and not backend.volumes and not backend.snapshots


ROLES = (Role.PROVISIONER, Role.ATTACHER, Role.RESIZER, Role.SNAPSHOTTER)


@pytest.mark.parametrize("seed", range(2))
async def test_no_role_is_led_astray_by_spoilt_requests(lab, seed, monkeypatch):
    async with FaultyProxy(lab.server.insecure_url, random.Random(seed)) as proxy:
        monkeypatch.setattr(lab, "api", lambda: from_values(proxy.url, lab.server.token), raising=False)
        lab.start(*ROLES)
        volumes = await begin(lab)
        proxy.share = 0.15
        await ask(lab, volumes)
        await lab.until(lambda: is_as_asked(lab), 60.0)
        assert all(len(nodes) == 1 for nodes in lab.driver.backend.published.values())
        assert len(lab.driver.backend.snapshots) == len(NAMES)
        await undo(lab)
        await lab.until(lambda: is_undone(lab), 60.0)
        assert {"409", "429", "500"} <= set(proxy.spoilt)
        proxy.share = 0.0
        await lab.kill(lab.tasks[0])


async def test_no_role_is_led_astray_by_an_api_server_that_restarts(make_lab):
    async with make_lab(in_memory=False) as lab:
        lab.start(*ROLES)
        volumes = await begin(lab)
        gates = [lab.driver.hold(m) for m in ("ControllerPublishVolume", "ControllerExpandVolume", "CreateSnapshot")]
        await ask(lab, volumes)

        async def all_begun():
            return lab.driver.count("CreateSnapshot") and lab.driver.count("ControllerPublishVolume")

        await lab.until(all_begun)
        await lab.restart_api()  # in the middle of the driver's calls
        for gate in gates:
            gate.set()
        await lab.until(lambda: is_as_asked(lab), 60.0)
        await undo(lab)
        await lab.restart_api()
        await lab.until(lambda: is_undone(lab), 60.0)
        assert lab.driver.backend.snapshots == {}
