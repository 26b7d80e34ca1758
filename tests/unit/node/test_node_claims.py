"""Claims read for pods that start: never older than the pod, and few reads for many pods."""

import asyncio
import time

import pytest
from msgspec import convert

from moorage.kube.api.client import ObjectList
from moorage.kube.errors import Forbidden, Unavailable
from moorage.kube.objects.volumes import PersistentVolumeClaim
from moorage.node.volumes.claims import LiveClaims


def claim(name, volume="pv"):
    return convert(
        {"metadata": {"name": name, "namespace": "ns"}, "spec": {"volumeName": volume}}, PersistentVolumeClaim
    )


class Api:
    """Has claims; counts what it is asked, and answers lists only when it may."""

    def __init__(self, count):
        self.claims = {f"c{number}": claim(f"c{number}") for number in range(count)}
        self.finds, self.lists, self.refuses = 0, 0, None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def find(self, kind, name, namespace=""):
        self.finds += 1
        return self.claims.get(name)

    async def list(self, kind, namespace=""):
        assert namespace == "ns"
        self.lists += 1
        if self.refuses:
            raise self.refuses
        found = list(self.claims.values())
        await self.may_answer.wait()
        return ObjectList(found, "1")


class Heard:
    """What an informer knows of claims."""

    def __init__(self, count, is_by_name=False):
        self.count, self.is_by_name, self.read = count, is_by_name, {}

    def __len__(self):
        return self.count

    def read_at(self, key):
        return self.read.get(key, 0.0)

    def get(self, key):
        return claim(key.partition("/")[2], "heard")


def volume_of(found):
    return found.spec.volume_name if found is not None else None


@pytest.mark.parametrize(("under_way", "known"), [(8, 20), (20, 20 * 16 + 1)])
async def test_few_pods_and_few_of_very_many_claims_are_read_one_by_one(under_way, known):
    api = Api(20)
    live = LiveClaims(api, Heard(known), lambda: under_way)
    seen = time.monotonic()
    await asyncio.gather(*(live.read("ns", f"c{number}", seen) for number in range(8)))
    assert (api.finds, api.lists) == (8, 0)


async def test_pods_that_start_together_share_one_list():
    api = Api(200)
    live = LiveClaims(api, Heard(200), lambda: 200)
    seen = time.monotonic()
    found = await asyncio.gather(*(live.read("ns", f"c{number}", seen) for number in range(200)))
    assert [one.name for one in found] == [f"c{number}" for number in range(200)]
    assert (api.finds, api.lists) == (0, 1)
    assert await live.read("ns", "none", seen) is None


async def test_a_pod_seen_after_the_list_began_is_not_answered_from_it():
    api = Api(20)
    live = LiveClaims(api, Heard(20), lambda: 20)
    api.may_answer.clear()
    first = asyncio.create_task(live.read("ns", "c0", time.monotonic()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert api.lists == 1  # its answer is made, and on the way
    api.claims["c0"] = claim("c0", "pv-of-another")
    second = asyncio.create_task(live.read("ns", "c0", time.monotonic()))
    await asyncio.sleep(0)
    api.may_answer.set()
    assert volume_of(await first) == "pv"
    assert volume_of(await second) == "pv-of-another"
    assert api.lists == 2


async def test_an_old_list_is_not_used_although_it_is_younger_than_the_pod(monkeypatch):
    api = Api(20)
    live = LiveClaims(api, Heard(20), lambda: 20)
    seen = time.monotonic()
    assert volume_of(await live.read("ns", "c0", seen)) == "pv"
    api.claims["c0"] = claim("c0", "pv-of-another")
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 6)
    assert volume_of(await live.read("ns", "c0", seen)) == "pv-of-another"


async def test_a_pod_that_nobody_remembers_gets_a_read_of_its_own():
    api = Api(20)
    live = LiveClaims(api, Heard(20), lambda: 20)
    await live.read("ns", "c0", time.monotonic())
    assert volume_of(await live.read("ns", "c0", float("inf"))) == "pv"
    assert api.lists == 2


async def test_where_lists_are_refused_claims_are_read_one_by_one():
    api = Api(20)
    api.refuses = Forbidden(403, "Forbidden", "no lists for you")
    live = LiveClaims(api, Heard(20), lambda: 20)
    found = await asyncio.gather(*(live.read("ns", f"c{number}", time.monotonic()) for number in range(20)))
    assert len(found) == api.finds == 20


async def test_a_list_that_fails_fails_all_who_wait_for_it_and_is_made_anew():
    api = Api(20)
    api.refuses = Unavailable(503, "ServiceUnavailable", "later")
    live = LiveClaims(api, Heard(20), lambda: 20)
    seen = time.monotonic()
    failed = await asyncio.gather(*(live.read("ns", "c0", seen) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in failed)
    assert api.lists == 1
    api.refuses = None
    assert volume_of(await live.read("ns", "c0", seen)) == "pv"


async def test_who_waits_for_a_list_may_give_up_without_ending_it_for_others():
    api = Api(20)
    live = LiveClaims(api, Heard(20), lambda: 20)
    api.may_answer.clear()
    seen = time.monotonic()
    first, second = (asyncio.create_task(live.read("ns", "c0", seen)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    api.may_answer.set()
    assert volume_of(await second) == "pv"
    assert first.cancelled()


async def test_what_was_asked_for_by_name_after_the_pod_was_seen_is_not_asked_for_again():
    api, heard = Api(1), Heard(1, is_by_name=True)
    live = LiveClaims(api, heard, lambda: 200)
    seen = time.monotonic()
    heard.read["ns/c0"] = seen - 1
    assert volume_of(await live.read("ns", "c0", seen)) == "pv"
    assert (api.finds, api.lists) == (1, 0)
    heard.read["ns/c0"] = time.monotonic()
    assert volume_of(await live.read("ns", "c0", seen)) == "heard"
    assert api.finds == 1
