"""Create, read, change, watch and delete, over real HTTP."""

import json

import aiohttp
import pytest

from moorage.testing import serve


@pytest.fixture
async def api(tmp_path):
    async with serve(tmp_path / "data") as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        async with aiohttp.ClientSession(server.insecure_url, headers=headers) as session:
            yield session


async def call(api, method, path, body=None, content_type="application/json", expect=None):
    data = None if body is None else json.dumps(body)
    async with api.request(method, path, data=data, headers={"Content-Type": content_type}) as response:
        answer = await response.json(content_type=None)
        if expect is not None:
            assert response.status == expect, answer
        return answer


MAPS = "/api/v1/namespaces/default/configmaps"


async def test_an_object_lives_from_create_to_delete(api):
    made = await call(api, "POST", MAPS, {"metadata": {"name": "a"}, "data": {"k": "v"}}, expect=201)
    assert made["metadata"]["uid"]
    again = await call(api, "POST", MAPS, {"metadata": {"name": "a"}}, expect=409)
    assert again["reason"] == "AlreadyExists"
    patched = await call(api, "PATCH", f"{MAPS}/a", {"data": {"l": "w"}}, "application/merge-patch+json", 200)
    assert patched["data"] == {"k": "v", "l": "w"}
    assert int(patched["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    same = await call(api, "PATCH", f"{MAPS}/a", {"data": {"l": "w"}}, "application/merge-patch+json", 200)
    assert same["metadata"]["resourceVersion"] == patched["metadata"]["resourceVersion"]
    stale = await call(api, "PUT", f"{MAPS}/a", made, expect=409)
    assert stale["reason"] == "Conflict"
    await call(api, "DELETE", f"{MAPS}/a", expect=200)
    missing = await call(api, "GET", f"{MAPS}/a", expect=404)
    assert missing["message"] == 'configmaps "a" not found'


async def test_finalizers_keep_a_deleted_object_until_they_are_gone(api):
    await call(api, "POST", MAPS, {"metadata": {"name": "a", "finalizers": ["example.com/x"]}}, expect=201)
    kept = await call(api, "DELETE", f"{MAPS}/a", expect=200)
    assert kept["metadata"]["deletionTimestamp"]
    await call(api, "PATCH", f"{MAPS}/a", {"metadata": {"finalizers": None}}, "application/merge-patch+json", 200)
    await call(api, "GET", f"{MAPS}/a", expect=404)


async def test_a_watch_tells_what_happens_after_a_list(api):
    listed = await call(api, "GET", MAPS, expect=200)
    await call(api, "POST", MAPS, {"metadata": {"name": "b"}}, expect=201)
    await call(api, "DELETE", f"{MAPS}/b", expect=200)
    version = listed["metadata"]["resourceVersion"]
    async with api.get(
        f"{MAPS}?watch=1&fieldSelector=metadata.name=b&resourceVersion={version}&timeoutSeconds=1"
    ) as response:
        events = [json.loads(line) for line in (await response.text()).splitlines()]
    assert [event["type"] for event in events] == ["ADDED", "DELETED"]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)
    assert versions[0] < versions[1]
