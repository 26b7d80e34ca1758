"""An API server that is slow, refuses, breaks off and restarts: the sidecars wait it out and converge."""

import random

import aiohttp
import pytest
from aiohttp import web

from moorage.kube.config import from_values
from moorage.kube.objects import PersistentVolumeClaim
from moorage.sidecars.roles import Role


class FaultyProxy:
    """Passes requests on to the API server, except those that it spoils."""

    def __init__(self, url, rng):
        self._url = url
        self._rng = rng
        self.share = 0.0
        self.spoilt = 0

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
        fault = self._rng.choice(["429", "500", "lost", "lost after"]) if self._rng.random() < self.share else ""
        if fault:
            self.spoilt += 1
        if fault in ("429", "500"):
            return web.json_response({"kind": "Status", "code": int(fault), "message": "spoilt"}, status=int(fault))
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
        assert proxy.spoilt > 3
        proxy.share = 0.0
        await lab.kill(lab.tasks[0])
