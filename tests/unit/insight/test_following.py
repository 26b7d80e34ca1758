"""Which objects are watched for a story, and how a change of one wakes the watcher."""

import asyncio

from moorage.insight.explain import Link, Story
from moorage.insight.watcher import Follower, watched
from moorage.kube.api.client import Client
from moorage.kube.api.config import from_values
from moorage.kube.objects import Event, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.testing import serve

CHAIN = [Link("pod/web", "Pending", "it waits"), Link("pvc/data", "Pending", "it waits"), Link("pv/v", "Bound", "")]


def _story(*chain):
    return Story("pod/web", "why", "cause", True, list(chain))


def test_every_object_of_the_chain_and_its_events_are_watched_where_they_are():
    found = watched(_story(*CHAIN, Link("class/fast", "", "")), "shop")
    assert (Pod, "shop", "metadata.name=web") in found
    assert (PersistentVolumeClaim, "shop", "metadata.name=data") in found
    assert (PersistentVolume, "", "metadata.name=v") in found
    assert (Event, "default", "involvedObject.name=v,involvedObject.kind=PersistentVolume") in found
    assert len(found) == 6
    (other, _) = sorted(watched(_story(Link("pvc/data (far)", "", "")), "shop"), key=lambda key: key[0].__name__)[::-1]
    assert other == (PersistentVolumeClaim, "far", "metadata.name=data")


async def test_a_change_of_an_object_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("moorage.insight.watcher._AT_MOST_S", 3600.0)  # nothing but a watch can end it
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    async with (
        serve(tmp_path / "api") as server,
        Client(from_values(server.insecure_url, server.token)) as client,
        asyncio.timeout(60),
    ):
        await client.create(PersistentVolumeClaim, {"metadata": {"name": "data"}, "spec": spec}, "default")
        story = _story(Link("pvc/data", "Pending", "it waits"))
        async with Follower(client, "default") as follower:
            await follower.next(story)  # the watch begins with what is there
            waiting = asyncio.create_task(follower.next(story))
            assert not (await asyncio.wait([waiting], timeout=0.1))[0]
            await client.patch(PersistentVolumeClaim, "data", {"metadata": {"labels": {"a": "b"}}}, "default")
            await waiting


async def test_where_no_watch_is_possible_looks_follow_sooner(monkeypatch):
    monkeypatch.setattr("moorage.insight.watcher._WITHOUT_WATCH_S", 0.01)
    async with (
        asyncio.timeout(60),
        Client(from_values("http://127.0.0.1:1", "t")) as client,
        Follower(client, "default") as follower,
    ):
        monkeypatch.setattr("moorage.insight.watcher._AT_MOST_S", 0.01)
        while not all(task.done() for task in follower._tasks.values()) or not follower._tasks:
            await follower.next(_story(*CHAIN))
        monkeypatch.setattr("moorage.insight.watcher._AT_MOST_S", 3600.0)  # what it would wait for a good watch
        await follower.next(_story(*CHAIN))
        assert len(follower._tasks) == 6
