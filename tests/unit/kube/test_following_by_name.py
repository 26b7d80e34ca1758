"""An informer of somebody who may read objects but not list them."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from moorage.kube.cache.by_name import ByNameInformer
from moorage.kube.objects.core import ConfigMap

MAPS = "/api/v1/namespaces/ns/configmaps"


@asynccontextmanager
async def following(api, wanted, **options):
    client = api.client()
    informer: Any = ByNameInformer(client, ConfigMap, wanted=lambda: wanted, **options)
    informer.told = []
    informer.subscribe(lambda old, new: informer.told.append((old.name if old else None, new.name if new else None)))
    task = asyncio.create_task(informer.run())
    try:
        await informer.wait_synced()
        yield informer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def until(condition, timeout_s=10_000):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.6)


def value(informer, key):
    found = informer.get(key)
    return found.data.get("v") if found else None


def test_who_may_list_is_told_by_a_watch(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a", data={"v": "1"})
            async with following(api, set()) as informer:
                assert value(informer, "ns/a") == "1"
                assert not informer.is_by_name
                api.put(f"{MAPS}/a", data={"v": "2"})
                await until(lambda: value(informer, "ns/a") == "2")
            assert f"{MAPS}/a" not in api.requests("GET"), "nothing was asked for by name"

    virtual(story)


def test_what_is_asked_for_arrives_and_stays_current(virtual, fake):
    async def story():
        async with fake() as api:
            api.may_list = False
            api.put(f"{MAPS}/a", data={"v": "1"})
            api.put(f"{MAPS}/b", data={"v": "1"})
            wanted = {"ns/a"}
            async with following(api, wanted) as informer:
                assert informer.is_by_name
                await until(lambda: value(informer, "ns/a") == "1")
                assert informer.told == [(None, "a")]
                assert f"{MAPS}/b" not in api.requests("GET"), "only what is wanted is read"
                api.put(f"{MAPS}/a", data={"v": "2"})
                await until(lambda: value(informer, "ns/a") == "2")
                assert informer.told[-1] == ("a", "a")
                wanted.add("ns/b")
                assert informer.get("ns/b") is None, "it has not been asked for before"
                await until(lambda: value(informer, "ns/b") == "1")

    virtual(story)


def test_what_is_missing_or_not_ready_is_looked_at_more_often(virtual, fake):
    async def story():
        async with fake() as api:
            api.may_list = False
            api.put(f"{MAPS}/ready", data={"v": "yes"})
            api.put(f"{MAPS}/slow", data={"v": "no"})
            keys = {"ns/ready", "ns/slow", "ns/missing"}
            async with following(api, keys, is_settled=lambda one: one.data["v"] == "yes") as informer:
                await asyncio.sleep(50)
                asked = [path.rsplit("/", 1)[1] for path in api.requests("GET")]
                assert asked.count("ready") == 1
                assert 4 <= asked.count("slow") < 12, "again soon, but ever less often"
                assert asked.count("missing") == asked.count("slow")
                api.put(f"{MAPS}/slow", data={"v": "yes"})
                api.put(f"{MAPS}/missing", data={"v": "yes"})
                await until(lambda: value(informer, "ns/slow") == value(informer, "ns/missing") == "yes", 20)

    virtual(story)


def test_what_is_deleted_or_not_wanted_any_more_is_told_and_left(virtual, fake):
    async def story():
        async with fake() as api:
            api.may_list = False
            for name in ("a", "b"):
                api.put(f"{MAPS}/{name}", data={"v": "1"})
            wanted = {"ns/a", "ns/b"}
            async with following(api, wanted) as informer:
                await until(lambda: len(informer) == 2)
                api.remove(f"{MAPS}/a")
                await until(lambda: ("a", None) in informer.told)
                wanted.discard("ns/b")
                await until(lambda: ("b", None) in informer.told)
                before = len(api.requests("GET"))
                wanted.clear()
                await asyncio.sleep(300)
                assert len(api.requests("GET")) <= before + 1, "nothing is wanted, nothing is asked for"

    virtual(story)


def test_a_refusal_of_one_object_is_waited_out(virtual, fake, fault):
    """The API server's rules know of a pod's claims a moment after the pod is there."""

    async def story():
        async with fake() as api:
            api.may_list = False
            api.put(f"{MAPS}/a", data={"v": "1"})
            api.faults.extend(fault(status=403, method="GET") for _ in range(3))
            async with following(api, {"ns/a"}) as informer:
                await until(lambda: value(informer, "ns/a") == "1", 60)
                assert informer.told == [(None, "a")]
                assert api.requests("GET").count(f"{MAPS}/a") == 4

    virtual(story)


@asynccontextmanager
async def one_lost(fake, wanted, **options):
    """Somebody who may not list, and has asked for `ns/lost`, which gets no answer."""
    async with fake() as api:
        api.may_list = False
        api.silent.add(f"{MAPS}/lost")
        api.put(f"{MAPS}/lost", data={"v": "1"})
        async with following(api, wanted, **options) as informer:
            await until(lambda: f"{MAPS}/lost" in api.requests("GET"))
            yield api, informer


def test_what_is_not_answered_holds_up_nothing_else_and_is_asked_for_again(virtual, fake):
    async def story():
        wanted = {"ns/lost"}
        async with one_lost(fake, wanted) as (api, informer):
            api.put(f"{MAPS}/a", data={"v": "1"})
            wanted.add("ns/a")
            await until(lambda: value(informer, "ns/a") == "1", 5)
            assert api.requests("GET").count(f"{MAPS}/lost") == 1, "it is still waited for"
            api.silent.clear()
            await until(lambda: value(informer, "ns/lost") == "1", 30)

    virtual(story)


def test_who_may_list_again_does_not_wait_for_what_is_not_answered(virtual, fake):
    async def story():
        async with one_lost(fake, {"ns/lost"}, list_again_s=5.0) as (api, informer):
            api.may_list = True
            await until(lambda: value(informer, "ns/lost") == "1", 8)

    virtual(story)


def test_rights_that_come_and_go_lose_nothing(virtual, fake):
    async def story():
        async with fake() as api:
            api.may_list = False
            api.put(f"{MAPS}/a", data={"v": "1"})
            async with following(api, {"ns/a"}, list_again_s=30.0) as informer:
                await until(lambda: value(informer, "ns/a") == "1")
                api.may_list = True
                await until(lambda: not informer.is_by_name)
                await until(lambda: api.watchers)
                api.put(f"{MAPS}/b", data={"v": "1"})
                await until(lambda: value(informer, "ns/b") == "1")
                api.may_list = False
                api.cut_watches()
                await until(lambda: informer.is_by_name)
                api.put(f"{MAPS}/a", data={"v": "2"})
                await until(lambda: value(informer, "ns/a") == "2")
                await until(lambda: informer.get("ns/b") is None)
                assert ("b", None) in informer.told, "nobody wants it, so it is followed by list and watch only"
                assert ("a", None) not in informer.told

    virtual(story)
