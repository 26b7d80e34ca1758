"""The controller runtime: caches first, then handlers, then workers; and writes that the caches see at once."""

import asyncio
import contextlib
import itertools
from typing import Any

import msgspec
import pytest

from moorage.errors import MoorageError
from moorage.kube.api.client import PatchType
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.control.controller import Backoff, Controller, Resync, Watch, run
from moorage.kube.control.writer import Writer
from moorage.kube.errors import AlreadyExists, Conflict, NotFound
from moorage.kube.objects import ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment

NO_CLIENT: Any = None
MAPS = "/api/v1/namespaces/ns/configmaps"


def config_map(name: str, version: int = 1) -> ConfigMap:
    return msgspec.convert({"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)}}, ConfigMap)


def cache_of(*objects: ConfigMap) -> Informer[ConfigMap]:
    cache: Informer[ConfigMap] = Informer(NO_CLIENT, ConfigMap)
    cache._replace({obj.key: obj for obj in objects}, 1)
    return cache


@contextlib.asynccontextmanager
async def running(*arguments, **more):
    task = asyncio.create_task(run(*arguments, **more))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Notes:
    """A controller that writes down which keys it reconciled."""

    def __init__(self, **more):
        self.seen = []
        self.controller = Controller("notes", self.reconcile, **more)

    async def reconcile(self, key):
        self.seen.append(key)


def keys(old, new):
    return [(new or old).name]


def test_each_cached_object_and_each_change_is_reconciled(virtual):
    async def story():
        cache, notes = cache_of(config_map("a"), config_map("b")), Notes()
        async with running([notes.controller], [notes.controller.watch(cache, keys)]):
            await asyncio.sleep(1)
            assert notes.seen == ["a", "b"]
            cache._put(config_map("c", 5))
            cache._drop(config_map("a"), config_map("a"))
            await asyncio.sleep(1)
        assert notes.seen == ["a", "b", "c", "a"]

    virtual(story)


def test_nothing_is_reconciled_before_every_cache_is_complete(virtual):
    async def story():
        complete, watched, read = (
            cache_of(config_map("a")),
            Informer(NO_CLIENT, ConfigMap),
            Informer(NO_CLIENT, ConfigMap),
        )
        notes = Notes()
        watches = [notes.controller.watch(complete, keys), notes.controller.watch(watched, keys)]
        async with running([notes.controller], watches, reads=[read]):
            await asyncio.sleep(1)
            watched._replace({}, 1)
            await asyncio.sleep(1)
            assert notes.seen == []
            read._replace({}, 1)
            await asyncio.sleep(1)
            assert notes.seen == ["a"]

    virtual(story)


def test_a_second_run_replays_the_cache_and_a_stopped_one_hears_nothing(virtual):
    async def story():
        cache, notes = cache_of(config_map("a")), Notes()
        watches = [notes.controller.watch(cache, keys)]
        async with running([notes.controller], watches):
            await asyncio.sleep(1)
        cache._put(config_map("b", 5))
        assert notes.seen == ["a"]
        assert notes.controller.queue.is_idle
        assert cache._handlers == []
        async with running([notes.controller], watches):
            await asyncio.sleep(1)
        assert notes.seen == ["a", "a", "b"]

    virtual(story)


def test_what_runs_beside_begins_with_complete_caches_and_ends_with_the_rest(virtual):
    async def story():
        cache = Informer(NO_CLIENT, ConfigMap)
        seen: list[Any] = []

        async def beside():
            seen.append(len(cache))
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("ended")

        async with running([], [], reads=[cache], beside=[beside]):
            await asyncio.sleep(1)
            assert seen == []
            cache._replace({"ns/a": config_map("a")}, 1)
            await asyncio.sleep(1)
            assert seen == [1]
        assert seen == [1, "ended"]

    virtual(story)


def test_a_failure_beside_ends_the_run(virtual):
    async def story():
        async def beside():
            raise NotFound(404, "", "gone")

        with pytest.raises(ExceptionGroup):
            await run([], [], beside=[beside])

    virtual(story)


def test_a_watch_without_replay_hears_changes_only(virtual):
    async def story():
        cache, heard = cache_of(config_map("a")), []
        async with running([], [Watch(cache, lambda old, new: heard.append(new and new.name), replay=False)]):
            await asyncio.sleep(1)
            assert heard == []
            cache._put(config_map("b", 5))
            assert heard == ["b"]

    virtual(story)


def test_a_failed_key_comes_back_and_a_new_run_forgets_its_back_off(virtual):
    async def story():
        at = []

        async def reconcile(key):
            at.append(asyncio.get_running_loop().time())
            raise MoorageError("not now")

        controller = Controller("failing", reconcile, backoff=Backoff(start_s=1.0, max_s=4.0))
        watches = [controller.watch(cache_of(config_map("a")), keys)]
        async with running([controller], watches):
            await asyncio.sleep(12)
        waits = [round(later - before, 3) for before, later in itertools.pairwise(at)]
        assert waits == [1.0, 2.0, 4.0, 4.0]
        at.clear()
        async with running([controller], watches):
            await asyncio.sleep(1.5)
        assert round(at[1] - at[0], 3) == 1.0

    virtual(story)


def test_a_key_that_asks_for_it_is_called_again(virtual):
    async def story():
        seen = []

        async def reconcile(key):
            seen.append(key)
            return 5.0 if len(seen) < 3 else None

        controller = Controller("again", reconcile)
        async with running([controller], [controller.watch(cache_of(config_map("a")), keys)]):
            await asyncio.sleep(60)
        assert seen == ["a"] * 3

    virtual(story)


def test_a_resync_enqueues_again_and_again(virtual):
    async def story():
        notes = Notes()
        resync = Resync(10.0, lambda: notes.controller.queue.add("all"))
        async with running([notes.controller], [], [resync]):
            await asyncio.sleep(35)
        assert notes.seen == ["all"] * 3

    virtual(story)


def test_a_subscription_ends_with_its_block_also_inside_a_notification(virtual):
    async def story():
        cache, heard = cache_of(), []
        stack = contextlib.ExitStack()
        stack.enter_context(cache.subscription(lambda old, new: stack.close()))
        stack.enter_context(cache.subscription(lambda old, new: heard.append(new and new.name)))
        cache._put(config_map("a", 5))
        cache._put(config_map("b", 6))
        assert heard == ["a"]

    virtual(story)


# Caches.


def test_an_index_is_built_at_the_first_lookup_and_kept_current():
    def first_letter(obj):
        return [obj.name[0]]

    cache = cache_of(config_map("ab"), config_map("b"))
    assert [obj.name for obj in cache.by(first_letter, "a")] == ["ab"]
    cache._put(config_map("ac", 5))
    assert [obj.name for obj in cache.by(first_letter, "a")] == ["ab", "ac"]
    assert cache.by(first_letter, "z") == []


def test_caches_find_what_belongs_together():
    informers = Informers(NO_CLIENT)
    caches = Caches(informers)

    def put(kind, document):
        informers.of(kind)._put(msgspec.convert(document, kind))

    def meta(name, **more):
        return {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", **more}

    put(Pod, {"metadata": meta("pod", namespace="ns"), "spec": {"nodeName": "n", "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]}})  # fmt: skip
    put(PersistentVolumeClaim, {"metadata": meta("c", namespace="ns"), "spec": {"volumeName": "pv"}})
    bound_to, csi = {"namespace": "ns", "name": "c", "uid": "uid-c"}, {"driver": "d", "volumeHandle": "h"}
    put(PersistentVolume, {"metadata": meta("pv"), "spec": {"claimRef": bound_to, "csi": csi}})
    put(VolumeAttachment, {"metadata": meta("va"), "spec": {
        "attacher": "d", "nodeName": "n", "source": {"persistentVolumeName": "pv"}}})  # fmt: skip

    assert [pod.name for pod in caches.pods_using("ns/c")] == ["pod"]
    assert [pod.name for pod in caches.pods_on("n")] == ["pod"]
    found = [caches.claim_with_uid("uid-c"), caches.volume_with_handle("d", "h")]
    assert [each and each.name for each in found] == ["c", "pv"]
    assert caches.claim_with_uid("uid-x") is None
    assert [volume.name for volume in caches.volumes_of_claim("uid-c")] == ["pv"]
    assert caches.volume_with_handle("d", "x") is None
    assert [one.name for one in caches.attachments_of("pv")] == ["va"]
    assert [one.name for one in caches.attachments_on("n")] == ["va"]


# Writes.


@contextlib.asynccontextmanager
async def written_maps(api, **more):
    """A Writer, its informers and the client, over a server with one map."""
    async with api.client() as client, Informers(client) as informers:
        cache = informers.of(ConfigMap)
        await cache.wait_synced()
        api.watchers_are_silent = True
        yield Writer(client, informers, **more), cache, client


def writer_story(virtual, fake, body, **more):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a", data={"x": "1"})
            async with written_maps(api, **more) as (writer, cache, client):
                await body(api, writer, cache, client)

    virtual(story)


def test_a_patch_applies_to_the_version_that_was_read(virtual, fake):
    async def body(api, writer, cache, client):
        seen = cache.get("ns/a")
        changed = await writer.patch(seen, {"data": {"x": "2"}})
        assert cache.get("ns/a") == changed
        with pytest.raises(Conflict):
            await writer.patch(seen, {"data": {"x": "3"}})
        loose = await writer.patch(seen, {"data": {"x": "4"}}, guarded=False)
        assert loose.data["x"] == "4"
        assert await writer.patch(seen, None) is seen

    writer_story(virtual, fake, body)


def test_a_conflict_can_refresh_the_cache_first(virtual, fake):
    async def body(api, writer, cache, client):
        seen = cache.get("ns/a")
        other = await client.patch(ConfigMap, "a", {"data": {"x": "other"}}, "ns")
        with pytest.raises(Conflict):
            await writer.patch(seen, {"data": {"x": "2"}})
        assert cache.get("ns/a").version >= other.version

    writer_story(virtual, fake, body, refreshes=True)


def test_what_is_created_is_cached_and_deleting_twice_is_no_error(virtual, fake):
    async def body(api, writer, cache, client):
        made = await writer.create(ConfigMap, {"metadata": {"name": "b", "namespace": "ns"}}, "ns")
        assert cache.get("ns/b") == made
        with pytest.raises(AlreadyExists):
            await writer.create(ConfigMap, {"metadata": {"name": "b", "namespace": "ns"}}, "ns")
        await writer.delete(made)
        await writer.delete(made)
        assert await writer.fresh(ConfigMap, "b", "ns") is None

    writer_story(virtual, fake, body)


def test_finalizers_are_added_and_removed_once(virtual, fake):
    async def body(api, writer, cache, client):
        one = await writer.add_finalizers(cache.get("ns/a"), "x/one", "x/two")
        assert one.finalizers == ["x/one", "x/two"]
        assert await writer.add_finalizers(one, "x/one") is one
        two = await writer.remove_finalizers(one, "x/one", "x/absent")
        assert two is not None
        assert two.finalizers == ["x/two"]
        assert cache.get("ns/a") == two
        assert await writer.remove_finalizers(two, "x/one") is two
        api.remove(f"{MAPS}/a")
        assert await writer.remove_finalizers(two, "x/two") is None
        with pytest.raises(NotFound):
            await writer.add_finalizers(two, "x/three")

    writer_story(virtual, fake, body)


class Recorded:
    """A client that writes down patches and answers with a fixed object."""

    def __init__(self, answer):
        self.answer, self.sent = answer, []

    async def patch(self, kind, name, patch, namespace, *, how, subresource, version):
        self.sent.append((patch, how, version))
        return self.answer


async def test_a_strategic_or_json_patch_of_finalizers_leaves_the_others_alone():
    obj = msgspec.convert(
        {"metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "finalizers": ["x/other", "x/mine"]}}, ConfigMap
    )
    bare = msgspec.convert({"metadata": {"name": "a", "uid": "u", "resourceVersion": "7"}}, ConfigMap)
    client: Any = Recorded(obj)
    writer = Writer(client, Informers(client))
    await writer.add_finalizers(obj, "x/new", how=PatchType.STRATEGIC)
    await writer.remove_finalizers(obj, "x/mine", how=PatchType.STRATEGIC)
    await writer.add_finalizers(obj, "x/new", how=PatchType.JSON)
    await writer.add_finalizers(bare, "x/new", how=PatchType.JSON)
    await writer.remove_finalizers(obj, "x/other", "x/mine", how=PatchType.JSON)
    path = "/metadata/finalizers"
    assert [patch for patch, _, _ in client.sent] == [
        {"metadata": {"finalizers": ["x/new"], "uid": "u"}},
        {"metadata": {"$deleteFromPrimitiveList/finalizers": ["x/mine"], "uid": "u"}},
        [{"op": "add", "path": f"{path}/-", "value": "x/new"}],
        [{"op": "test", "path": path, "value": None}, {"op": "add", "path": path, "value": ["x/new"]}],
        [
            {"op": "test", "path": f"{path}/1", "value": "x/mine"},
            {"op": "remove", "path": f"{path}/1"},
            {"op": "test", "path": f"{path}/0", "value": "x/other"},
            {"op": "remove", "path": f"{path}/0"},
        ],
    ]
    assert {version for _, _, version in client.sent} == {""}


async def test_an_object_that_goes_with_its_last_finalizer_is_not_cached_again():
    document = {"name": "a", "resourceVersion": "7", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    before = msgspec.convert({"metadata": {**document, "finalizers": ["x/mine"]}}, ConfigMap)
    client: Any = Recorded(msgspec.convert({"metadata": {**document, "resourceVersion": "8"}}, ConfigMap))
    informers = Informers(client)
    cache = informers.of(ConfigMap)
    assert await Writer(client, informers).remove_finalizers(before, "x/mine") is None
    assert cache.get("a") is None


def test_an_update_reads_and_writes_the_whole_object(virtual, fake):
    async def body(api, writer, cache, client):
        def change(document):
            document["data"]["x"] = "2"
            return True

        written = await writer.update(ConfigMap, "a", "ns", change)
        assert cache.get("ns/a") == written
        assert written.data["x"] == "2"
        assert await writer.update(ConfigMap, "a", "ns", lambda document: False) is None

    writer_story(virtual, fake, body)


def test_a_write_starts_no_watch(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client, Informers(client) as informers:
            await Writer(client, informers).create(ConfigMap, {"metadata": {"name": "b", "namespace": "ns"}}, "ns")
            assert list(informers) == []

    virtual(story)
