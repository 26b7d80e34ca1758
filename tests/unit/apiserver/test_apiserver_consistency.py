"""A client that lists and then watches sees every change once, in order, whatever the others do."""

import asyncio
import json
import random

import pytest

MAPS = "/api/v1/namespaces/default/configmaps"


class Mirror:
    """What an informer keeps: a list, then the changes after it."""

    def __init__(self, api, selector=""):
        self.api = api
        self.selector = selector
        self.objects = {}
        self.versions = []

    async def follow(self, until):
        query = f"labelSelector={self.selector}&" if self.selector else ""
        listed = await self.api("GET", f"{MAPS}?{query}", expect=200)
        self.objects = {item["metadata"]["name"]: item for item in listed["items"]}
        version = listed["metadata"]["resourceVersion"]
        while not until(self):
            url = f"{MAPS}?{query}watch=1&resourceVersion={version}&timeoutSeconds=1&allowWatchBookmarks=true"
            async with self.api.session.get(url) as response:
                async for line in response.content:
                    version = self._take(json.loads(line))
                    if until(self):
                        return

    def _take(self, event):
        obj = event["object"]
        version, name = obj["metadata"]["resourceVersion"], obj["metadata"].get("name")
        assert event["type"] != "ERROR", event
        if event["type"] == "BOOKMARK":
            assert not self.versions or int(version) >= self.versions[-1]
            return version
        assert not self.versions or int(version) > self.versions[-1], "repeated or out of order"
        self.versions.append(int(version))
        if event["type"] == "DELETED":
            assert name in self.objects, "a deletion of something never seen"
            del self.objects[name]
        else:
            assert (event["type"] == "ADDED") == (name not in self.objects), "a change was missed"
            self.objects[name] = obj
        return version


async def churn(api, seed, count):
    dice = random.Random(seed)
    for _ in range(count):
        name = f"m{dice.randrange(6)}"
        match dice.randrange(4):
            case 0:
                await api("DELETE", f"{MAPS}/{name}")
            case 1:
                labels = {"team": dice.choice("ab")}
                await api(
                    "PATCH", f"{MAPS}/{name}", {"metadata": {"labels": labels}}, kind="application/merge-patch+json"
                )
            case _:
                body = {
                    "metadata": {"name": name, "labels": {"team": dice.choice("ab")}},
                    "data": {"n": str(dice.random())},
                }
                await api("POST", MAPS, body)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("selector", ["", "team%3Da"])
async def test_list_and_watch_agree_under_concurrent_writers(api, seed, selector):
    await api.make(MAPS, {"metadata": {"name": "kube-root-ca.crt.ready"}})
    mirrors = [Mirror(api, selector) for _ in range(4)]
    marker = {"metadata": {"name": "end", "labels": {"team": "a"}}}
    followers = [asyncio.create_task(mirror.follow(lambda m: "end" in m.objects)) for mirror in mirrors]
    await asyncio.gather(*(churn(api, seed * 10 + n, 40) for n in range(4)))
    await api.make(MAPS, marker)
    async with asyncio.timeout(60):
        await asyncio.gather(*followers)
    query = f"?labelSelector={selector}" if selector else ""
    final = {item["metadata"]["name"]: item for item in (await api("GET", MAPS + query))["items"]}
    for mirror in mirrors:
        assert mirror.objects == final


async def test_pages_show_one_snapshot_while_the_world_moves(api):
    for n in range(7):
        await api.make(MAPS, {"metadata": {"name": f"p{n}"}})
    before = [i["metadata"]["name"] for i in (await api("GET", MAPS))["items"]]
    page = await api("GET", f"{MAPS}?limit=3")
    assert page["metadata"]["remainingItemCount"] == len(before) - 3
    seen = [item["metadata"]["name"] for item in page["items"]]
    await api("DELETE", f"{MAPS}/p6", expect=200)
    await api.make(MAPS, {"metadata": {"name": "zz"}})
    while token := page["metadata"].get("continue"):
        page = await api("GET", f"{MAPS}?limit=3&continue={token}", expect=200)
        seen += [item["metadata"]["name"] for item in page["items"]]
    assert seen == before


async def test_a_lost_snapshot_is_gone_but_the_list_can_go_on(api):
    for n in range(4):
        await api.make(MAPS, {"metadata": {"name": f"p{n}"}})
    page = await api("GET", f"{MAPS}?limit=2")
    await api("DELETE", f"{MAPS}/p0", expect=200)
    api.server.store.table("configmaps").log.compact()
    gone = await api("GET", f"{MAPS}?limit=2&continue={page['metadata']['continue']}", expect=410)
    assert gone["reason"] == "Expired"
    rest = await api("GET", f"{MAPS}?limit=9&continue={gone['metadata']['continue']}", expect=200)
    assert "p3" in [item["metadata"]["name"] for item in rest["items"]]


async def test_a_watch_from_a_forgotten_revision_says_so_in_the_stream(api):
    listed = await api("GET", MAPS)
    await api.make(MAPS, {"metadata": {"name": "a"}})
    api.server.store.table("configmaps").log.compact()
    url = f"{MAPS}?watch=1&resourceVersion={listed['metadata']['resourceVersion']}"
    async with api.session.get(url) as response:
        assert response.status == 200
        event = json.loads(await response.content.readline())
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


async def test_a_streaming_list_ends_with_its_bookmark(api):
    await api.make(MAPS, {"metadata": {"name": "a"}})
    query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=1"
    url = f"{MAPS}?{query}"
    async with api.session.get(url) as response:
        events = [json.loads(line) for line in (await response.text()).splitlines()]
    marked = [e for e in events if (e["object"]["metadata"].get("annotations") or {}).get("k8s.io/initial-events-end")]
    assert marked
    before = events[: events.index(marked[0])]
    assert {e["type"] for e in before} == {"ADDED"}
    assert "a" in {e["object"]["metadata"]["name"] for e in before}


async def test_versions_that_are_not_there_yet_are_refused(api):
    refusal = await api("GET", f"{MAPS}?resourceVersion=999999999", expect=504)
    assert refusal["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"
    await api("GET", f"{MAPS}?resourceVersionMatch=Exact", expect=422)
    await api("GET", f"{MAPS}?resourceVersion=0&resourceVersionMatch=Exact", expect=422)


async def test_an_exact_revision_shows_the_past(api):
    await api.make(MAPS, {"metadata": {"name": "a"}, "data": {"v": "1"}})
    then = (await api("GET", MAPS))["metadata"]["resourceVersion"]
    await api.merge(f"{MAPS}/a", {"data": {"v": "2"}})
    past = await api("GET", f"{MAPS}?resourceVersion={then}&resourceVersionMatch=Exact", expect=200)
    assert [i["data"]["v"] for i in past["items"] if i["metadata"]["name"] == "a"] == ["1"]
