"""An informer through everything that happens to it: lists, streams, cuts, 410, restores, scopes and bad objects."""

import asyncio

import pytest

from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.objects.core import ConfigMap

MAPS = "/api/v1/namespaces/ns/configmaps"


class Notes:
    """What a handler was told, and the state that follows from it."""

    def __init__(self, informer):
        self.told = []
        self.state = {}
        informer.subscribe(self)

    def __call__(self, old, new):
        self.told.append((old.version if old else None, new.version if new else None))
        if new is None:
            del self.state[old.key]
        else:
            assert (old is None) == (new.key not in self.state), "an update follows an addition"
            self.state[new.key] = new.version


class Following:
    """An informer that runs, with notes."""

    def __init__(self, api, **scope):
        self.client = api.client()
        self.informer = Informer(self.client, ConfigMap, **scope)
        self.notes = Notes(self.informer)

    async def __aenter__(self):
        self._task = asyncio.create_task(self.informer.run())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()


async def until(condition, timeout_s=120):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def versions_in(api):
    return {f"ns/{path.split('/')[-1]}": int(obj["metadata"]["resourceVersion"]) for path, obj in api.objects.items()}


@pytest.mark.parametrize("streams", [True, False])
def test_it_is_synced_when_every_handler_knows_the_list(virtual, fake, streams):
    async def story():
        async with fake() as api:
            api.streams_lists = streams
            for number in range(5):
                api.put(f"{MAPS}/a{number}")
            async with Following(api) as one:
                seen_at_sync = []
                waiting = asyncio.create_task(one.informer.wait_synced())
                waiting.add_done_callback(lambda _: seen_at_sync.append(len(one.notes.state)))
                await waiting
                await asyncio.sleep(0)
                assert seen_at_sync == [5]
                assert one.informer.seen_version == api.version
                api.put(f"{MAPS}/a0", data={"x": "y"})
                api.remove(f"{MAPS}/a1")
                api.put(f"{MAPS}/a9")
                await until(lambda: one.notes.state == versions_in(api))
                assert one.informer.relists == 1
                assert len(api.requests("GET", watch=False)) == (0 if streams else 1)

    virtual(story)


def test_an_empty_kind_is_synced_too(virtual, fake):
    async def story():
        async with fake() as api, Following(api) as one:
            await one.informer.wait_synced()
            assert len(one.informer) == 0

    virtual(story)


def test_a_server_without_streamed_lists_costs_no_waiting(virtual, fake):
    async def story():
        async with fake() as api:
            api.streams_lists = False
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with Following(api) as one:
                await one.informer.wait_synced()
                assert loop.time() - began < 0.1

    virtual(story)


@pytest.mark.parametrize("status", [400, 422, 500, 504])
def test_any_refusal_of_a_streamed_list_falls_back_at_once(virtual, fake, status):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            api.refuse_stream_with = status
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with Following(api) as one:
                await one.informer.wait_synced()
                assert loop.time() - began < 0.1
                assert one.notes.state == versions_in(api)

    virtual(story)


def test_a_bookmark_from_the_past_means_that_the_server_was_restored(virtual, fake):
    async def story():
        async with fake() as api:
            api.version = 5000
            api.put(f"{MAPS}/a")
            async with Following(api) as one:
                await one.informer.wait_synced()
                api.version = 100
                api.objects.clear()
                api.put(f"{MAPS}/b")
                api.bookmark()
                await until(lambda: one.notes.state == versions_in(api))
                assert one.informer.relists == 2

    virtual(story)


def test_a_server_that_ignores_the_wish_for_a_streamed_list_is_listed(virtual, fake):
    async def story():
        async with fake() as api:
            api.ignores_initial = True
            api.put(f"{MAPS}/a")
            async with Following(api) as one:
                await one.informer.wait_synced()
                assert one.notes.state == versions_in(api)
                assert len(api.requests("GET", watch=False)) == 1

    virtual(story)


def test_a_cut_is_resumed_without_a_list_and_without_a_gap(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            async with Following(api) as one:
                await one.informer.wait_synced()
                for number in range(10):
                    api.cut_watches()
                    api.put(f"{MAPS}/b{number}")
                    api.put(f"{MAPS}/a", data={"n": str(number)})
                    await until(lambda: one.notes.state == versions_in(api))
                assert one.informer.relists == 1
                assert len(one.notes.told) == len(set(one.notes.told)) == 21

    virtual(story)


def test_a_bookmark_moves_the_point_of_resumption(virtual, fake):
    async def story():
        async with fake() as api, Following(api) as one:
            await one.informer.wait_synced()
            api.version += 50  # other kinds changed
            api.bookmark()
            await until(lambda: one.informer.seen_version == api.version)
            api.compact()
            api.cut_watches()
            api.put(f"{MAPS}/a")
            await until(lambda: one.notes.state == versions_in(api))
            assert one.informer.relists == 1
            assert one.notes.told == [(None, api.version)]

    virtual(story)


def test_lost_history_is_listed_again_with_the_right_deletions(virtual, fake):
    async def story():
        async with fake() as api:
            for name in ("stays", "goes", "changes"):
                api.put(f"{MAPS}/{name}")
            api.put(f"{MAPS}/reborn", uid="first")
            async with Following(api) as one:
                await one.informer.wait_synced()
                one.notes.told.clear()
                before = dict(one.notes.state)
                api.cut_watches()
                api.watchers.clear()
                api.remove(f"{MAPS}/goes")
                api.put(f"{MAPS}/changes", data={"x": "y"})
                api.remove(f"{MAPS}/reborn")
                api.put(f"{MAPS}/reborn", uid="second")
                api.compact()
                await until(lambda: one.informer.relists == 2)
                assert one.notes.state == versions_in(api)
                assert sorted(one.notes.told, key=str) == sorted(
                    [
                        (before["ns/goes"], None),
                        (before["ns/changes"], one.notes.state["ns/changes"]),
                        (before["ns/reborn"], None),
                        (None, one.notes.state["ns/reborn"]),
                    ],
                    key=str,
                )

    virtual(story)


def test_a_410_in_the_middle_of_a_watch_is_listed_again(virtual, fake):
    async def story():
        async with fake() as api, Following(api) as one:
            await one.informer.wait_synced()
            api.objects.clear()
            api.put(f"{MAPS}/a")
            api.compact()
            api.say({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}})
            await until(lambda: one.informer.relists == 2)
            assert one.notes.state == versions_in(api)

    virtual(story)


def test_a_server_that_always_answers_410_is_not_hammered(virtual, fake, fault):
    async def story():
        async with fake() as api:
            api.faults.extend(fault(410, watches=True) for _ in range(10_000))
            async with Following(api) as one:
                await asyncio.sleep(60)
                assert len(api.seen) < 60
                assert not one.informer.is_synced or len(api.faults)

    virtual(story)


def test_a_server_that_ends_every_watch_at_once_is_not_hammered(virtual, fake):
    async def story():
        async with fake() as api, Following(api) as one:
            await one.informer.wait_synced()
            api.faults.clear()
            ended = len(api.seen)
            for _ in range(600):
                api.cut_watches()
                await asyncio.sleep(0.1)
            assert len(api.seen) - ended < 60

    virtual(story)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 502, 503, 504])
def test_refusals_and_failures_are_waited_out(virtual, fake, fault, status):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            api.faults.extend(fault(status, watches=True) for _ in range(2))
            api.faults.extend(fault(status, watches=False) for _ in range(7))
            async with Following(api) as one:
                await one.informer.wait_synced()
                assert one.notes.state == versions_in(api)

    virtual(story)


def test_a_server_that_restarts_is_resumed(virtual, fake):
    async def story():
        api = await fake().start()
        api.put(f"{MAPS}/a")
        async with Following(api) as one:
            await one.informer.wait_synced()
            await api.stop()
            await asyncio.sleep(30)
            api.put(f"{MAPS}/b")
            await api.start()
            await until(lambda: one.notes.state == versions_in(api))
            assert one.informer.relists == 1
            await api.stop()

    virtual(story)


def test_a_server_restored_from_an_older_copy_is_believed(virtual, fake):
    async def story():
        async with fake() as api:
            api.version = 5000
            for name in ("a", "b"):
                api.put(f"{MAPS}/{name}")
            async with Following(api) as one:
                await one.informer.wait_synced()
                api.version = 100
                api.objects.clear()
                api.put(f"{MAPS}/a")
                api.put(f"{MAPS}/c")
                api.oldest = 10**9
                api.cut_watches()
                await until(lambda: one.notes.state == versions_in(api))
                assert one.informer.seen_version == 102

    virtual(story)


def test_what_was_written_is_remembered_and_never_taken_back(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            async with Following(api) as one:
                await one.informer.wait_synced()
                mine = await one.client.patch(ConfigMap, "a", {"data": {"x": "1"}}, "ns")
                one.informer.remember(mine)
                assert one.informer.get("ns/a").data == {"x": "1"}
                await until(lambda: one.informer.seen_version == api.version)
                assert len(one.notes.told) == 2  # the stream's copy of it told nobody anything new
                api.remove(f"{MAPS}/a")
                await until(lambda: not one.notes.state)
                one.informer.remember(mine)  # an answer that comes late does not raise the dead
                assert one.informer.get("ns/a") is None

    virtual(story)


def test_only_what_is_in_scope_is_remembered(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            here = Informer(client, ConfigMap, namespace="ns", labels="app=x")
            made = [
                await client.create(ConfigMap, {"metadata": {"name": name, "namespace": where, "labels": labels}})
                for name, where, labels in [
                    ("in", "ns", {"app": "x"}),
                    ("out", "ns", {}),
                    ("far", "other", {"app": "x"}),
                ]
            ]
            for obj in made:
                here.remember(obj)
            assert [obj.name for obj in here] == ["in"]
            by_field = Informer(client, ConfigMap, fields="metadata.name=in")
            by_field.remember(made[1])
            assert len(by_field) == 0

    virtual(story)


def test_an_object_that_leaves_the_selection_is_dropped(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a", metadata={"labels": {"app": "x"}})
            async with Following(api, labels="app=x") as one:
                await one.informer.wait_synced()
                left = await one.client.patch(ConfigMap, "a", {"metadata": {"labels": {"app": None}}}, "ns")
                one.informer.remember(left)
                gone = {
                    **api.objects[f"{MAPS}/a"],
                    "metadata": {**api.objects[f"{MAPS}/a"]["metadata"], "labels": {"app": "x"}},
                }
                api.say({"type": "DELETED", "object": gone})
                await until(lambda: not one.notes.state)
                assert all(query["labelSelector"] == "app=x" for _, _, query in api.seen if "watch" in query)

    virtual(story)


def test_a_handler_that_fails_does_not_keep_the_others_from_hearing(virtual, fake, caplog):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            client = api.client()
            informer = Informer(client, ConfigMap)

            def breaks(old, new):
                raise ZeroDivisionError

            informer.subscribe(breaks)
            notes = Notes(informer)
            task = asyncio.create_task(informer.run())
            await informer.wait_synced()
            api.put(f"{MAPS}/b")
            await until(lambda: notes.state == versions_in(api))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    virtual(story)
    assert "handler failed" in caplog.text


def test_an_unreadable_object_neither_stops_the_stream_nor_stays(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            async with Following(api) as one:
                await one.informer.wait_synced()
                api.put(f"{MAPS}/a", data=["not a map"])
                api.put(f"{MAPS}/b")
                await until(lambda: "ns/b" in one.notes.state)
                api.remove(f"{MAPS}/a")
                await until(lambda: set(one.notes.state) == {"ns/b"})
                assert one.informer.relists == 1

    virtual(story)


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"type":"ERROR","object":3}', b'{"type":"BOOKMARK","object":[]}', b"\xff\xfe"]
)
def test_a_broken_line_is_survived(virtual, fake, line):
    async def story():
        async with fake() as api, Following(api) as one:
            await one.informer.wait_synced()
            api.say(line)
            api.put(f"{MAPS}/a")
            await until(lambda: one.notes.state == versions_in(api))

    virtual(story)


def test_a_line_of_several_megabytes_is_read(virtual, fake):
    async def story():
        async with fake() as api, Following(api) as one:
            await one.informer.wait_synced()
            api.put(f"{MAPS}/big", data={"x": "y" * 3_000_000})
            await until(lambda: "ns/big" in one.notes.state)
            assert len(one.informer.get("ns/big").data["x"]) == 3_000_000

    virtual(story)


def test_indexes_follow_the_objects(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a", data={"owner": "x"})
            async with Following(api) as one:
                one.informer.index("owner", lambda obj: [obj.data["owner"]] if "owner" in obj.data else [])
                await one.informer.wait_synced()
                assert [obj.name for obj in one.informer.at("owner", "x")] == ["a"]
                api.put(f"{MAPS}/a", data={"owner": "y"})
                api.put(f"{MAPS}/b", data={"owner": "y"})
                await until(lambda: len(one.informer.at("owner", "y")) == 2)
                assert one.informer.at("owner", "x") == []
                api.remove(f"{MAPS}/a")
                await until(lambda: [obj.name for obj in one.informer.at("owner", "y")] == ["b"])

    virtual(story)


def test_resync_tells_everything_again_and_is_no_change(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            async with Following(api, resync_s=60) as one:
                await one.informer.wait_synced()
                changes = one.informer.changes
                await asyncio.sleep(130)
                version = one.notes.state["ns/a"]
                assert one.notes.told[1:] == [(version, version)] * 2
                assert one.informer.changes == changes

    virtual(story)


def test_informers_are_shared_by_scope_and_end_without_a_trace(virtual, fake):
    async def story():
        async with fake() as api:
            api.put(f"{MAPS}/a")
            async with api.client() as client, Informers(client) as informers:
                one = informers.of(ConfigMap)
                assert informers.of(ConfigMap) is one
                assert informers.of(ConfigMap, labels="a=b") is not one
                await informers.wait_synced()
                assert informers.is_synced
                assert informers.changes == 2
                assert informers.is_quiet(0.0)
                assert not informers.is_quiet(3600)
            await until(lambda: all(transport.is_closing() for transport in api.transports))

    virtual(story)
