"""A server in this process, and a small client that asserts status codes."""

import json

import aiohttp
import pytest

from moorage.testing import serve

MERGE = "application/merge-patch+json"


class Api:
    """Requests with a status that is expected, answered with decoded JSON."""

    def __init__(self, session, server):
        self.session = session
        self.server = server

    async def __call__(self, method, path, body=None, expect=None, kind="application/json", headers=None):
        data = body if isinstance(body, bytes | str) or body is None else json.dumps(body)
        sent = {"Content-Type": kind, **(headers or {})}
        async with self.session.request(method, path, data=data, headers=sent) as response:
            text = await response.text()
            answer = json.loads(text) if text else None
            if expect is not None:
                assert response.status == expect, answer
            return answer

    async def make(self, path, body):
        return await self("POST", path, body, expect=201)

    async def merge(self, path, body, expect=200):
        return await self("PATCH", path, body, expect=expect, kind=MERGE)

    async def apply(self, path, body, manager="me", force=False, expect=None):
        query = f"?fieldManager={manager}" + ("&force=true" if force else "")
        return await self("PATCH", path + query, body, expect=expect, kind="application/apply-patch+yaml")


@pytest.fixture
async def api(tmp_path):
    async with serve(tmp_path / "data") as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        async with aiohttp.ClientSession(server.insecure_url, headers=headers) as session:
            yield Api(session, server)


@pytest.fixture
def claim():
    def make(name, **spec):
        base = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        return {"metadata": {"name": name}, "spec": {**base, **spec}}

    return make


@pytest.fixture
def volume():
    def make(name, **spec):
        source = {"csi": {"driver": "csi.example.com", "volumeHandle": name}}
        base = {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, **source}
        return {"metadata": {"name": name}, "spec": {**base, **spec}}

    return make
