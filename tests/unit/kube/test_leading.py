"""Leader election: one leader at a time, among ourselves and with foreign candidates on the same Lease."""

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from moorage.errors import UsageError
from moorage.kube.control.election import ElectionConfig, Elector, LeadershipLost
from moorage.kube.names import sanitised
from moorage.kube.objects.meta import micro_timestamp_text

LEASE = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/lock"


def elector(client, identity, **more):
    return Elector(client, ElectionConfig("lock", "ns", identity, **more), clock=asyncio.get_running_loop().time)


def foreign(api, holder="foreign", duration=15, renewed=0.0, transitions=3):
    """A record as client-go writes it; its times are the other machine's business."""
    stamp = micro_timestamp_text(renewed)
    spec = {"holderIdentity": holder, "leaseDurationSeconds": duration, "acquireTime": stamp, "renewTime": stamp}
    api.put(LEASE, kind="Lease", spec={**spec, "leaseTransitions": transitions, "strategy": "Kept"})


async def forever():
    await asyncio.Event().wait()


async def end(*tasks):
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_the_first_candidate_makes_the_lease_and_leads(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            one = elector(client, "one", labels={"app": "x"})
            task = asyncio.create_task(one.lead(forever))
            await asyncio.sleep(1)
            assert one.is_leader
            lease = api.objects[LEASE]
            assert lease["metadata"]["labels"] == {"app": "x"}
            assert lease["spec"]["holderIdentity"] == "one"
            assert lease["spec"]["leaseDurationSeconds"] == 15
            assert lease["spec"]["leaseTransitions"] == 0
            assert REGISTRY.get_sample_value("leader_election_master_status", {"name": "lock"}) == 1
            await end(task)
            assert REGISTRY.get_sample_value("leader_election_master_status", {"name": "lock"}) == 0
            released = api.objects[LEASE]["spec"]
            assert (released["holderIdentity"], released["leaseDurationSeconds"]) == ("", 1)
            assert "PATCH" not in {method for method, _, _ in api.seen}  # the official roles do not grant it

    virtual(story)


@pytest.mark.parametrize("its_clock_s", [1.0, 1.7e9, 4e9])
def test_a_foreign_holder_that_keeps_renewing_never_loses_the_lease(virtual, fake, its_clock_s):
    async def story():
        async with fake() as api, api.client() as client:
            foreign(api)
            one = elector(client, "one")
            task = asyncio.create_task(one.lead(forever))
            for beat in range(60):
                await asyncio.sleep(10)
                assert not one.is_leader
                foreign(api, renewed=its_clock_s + beat)
            assert api.requests("PUT") == []
            await end(task)

    virtual(story)


def test_a_foreign_holder_that_stops_renewing_is_followed_when_its_lease_runs_out(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            foreign(api, duration=40, renewed=4e9)  # its clock is far ahead; ours alone counts
            one = elector(client, "one")
            task = asyncio.create_task(one.lead(forever))
            await asyncio.sleep(39.9)
            assert not one.is_leader
            await asyncio.sleep(0.5)
            assert one.is_leader
            spec = api.objects[LEASE]["spec"]
            assert (spec["leaseTransitions"], spec["strategy"]) == (4, "Kept")
            await end(task)

    virtual(story)


def test_a_released_lease_is_taken_at_the_next_look(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            foreign(api, holder="", duration=1)
            one = elector(client, "one")
            task = asyncio.create_task(one.lead(forever))
            await asyncio.sleep(0.1)
            assert one.is_leader
            assert api.objects[LEASE]["spec"]["leaseTransitions"] == 4
            await end(task)

    virtual(story)


def test_whoever_comes_back_under_the_same_name_need_not_wait(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            foreign(api, holder="one", renewed=1000.0)
            one = elector(client, "one")
            task = asyncio.create_task(one.lead(forever))
            await asyncio.sleep(0.1)
            spec = api.objects[LEASE]["spec"]
            assert one.is_leader
            assert (spec["leaseTransitions"], spec["acquireTime"]) == (3, micro_timestamp_text(1000.0))
            await end(task)

    virtual(story)


def test_renewing_costs_one_request(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            task = asyncio.create_task(elector(client, "one").lead(forever))
            await asyncio.sleep(1)
            api.seen.clear()
            await asyncio.sleep(50)
            assert len(api.seen) == len(api.requests("PUT")) == 10
            await end(task)

    virtual(story)


def test_a_lease_taken_by_another_is_given_up_at_once(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            one = elector(client, "one")
            task = asyncio.create_task(one.lead(forever))
            await asyncio.sleep(1)
            foreign(api)
            result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(result, LeadershipLost)
            assert "foreign" in str(result)
            assert api.objects[LEASE]["spec"]["holderIdentity"] == "foreign"  # not released: it is not ours

    virtual(story)


def test_a_leader_that_cannot_renew_stops_before_anyone_else_may_start(virtual, fake, fault):
    async def story():
        async with fake() as api, api.client() as client:
            loop = asyncio.get_running_loop()
            one = elector(client, "one")
            stopped = []

            async def work():
                try:
                    await forever()
                finally:
                    stopped.append(loop.time())

            began = loop.time()
            task = asyncio.create_task(one.lead(work))
            await asyncio.sleep(1)
            api.faults.extend(fault(503) for _ in range(10_000))
            result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(result, LeadershipLost)
            assert 5 < stopped[0] - began <= 15.01

    virtual(story)


def test_a_short_outage_is_survived(virtual, fake, fault):
    async def story():
        async with fake() as api, api.client() as client:
            one = elector(client, "one")
            task = asyncio.create_task(one.lead(forever))
            await asyncio.sleep(1)
            for _ in range(5):
                api.faults.extend([fault(503), fault(409), fault(drop=True, apply_first=True)])
                await asyncio.sleep(20)
                assert one.is_leader
                assert one.is_healthy()
            api.faults.clear()
            await end(task)

    virtual(story)


def test_of_many_candidates_exactly_one_leads_and_the_next_follows_quickly(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            leading, most, turns = set(), 0, []

            def work(name):
                async def run():
                    nonlocal most
                    leading.add(name)
                    most = max(most, len(leading))
                    turns.append(name)
                    try:
                        await forever()
                    finally:
                        leading.discard(name)

                return run

            tasks = {n: asyncio.create_task(elector(client, f"c{n}", retry_s=2).lead(work(n))) for n in range(5)}
            for _ in range(5):
                await asyncio.sleep(5)
                assert len(leading) == 1
                [present] = leading
                await end(tasks.pop(present))
            assert most == 1
            assert sorted(turns) == [0, 1, 2, 3, 4]

    virtual(story)


def test_work_that_ends_or_fails_releases_the_lease(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:

            async def fails():
                raise ZeroDivisionError

            async def ends():
                await asyncio.sleep(1)

            with pytest.raises(ZeroDivisionError):
                await elector(client, "one").lead(fails)
            assert api.objects[LEASE]["spec"]["holderIdentity"] == ""
            await elector(client, "two").lead(ends)
            assert api.objects[LEASE]["spec"]["holderIdentity"] == ""

    virtual(story)


def test_without_release_the_lease_stays_for_its_length(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            task = asyncio.create_task(elector(client, "one", release_on_exit=False).lead(forever))
            await asyncio.sleep(1)
            await end(task)
            assert api.objects[LEASE]["spec"]["holderIdentity"] == "one"

    virtual(story)


@pytest.mark.parametrize("times", [(10, 10, 5), (15, 0, 5), (15, 10, 0)])
def test_times_that_cannot_work_are_refused(times):
    with pytest.raises(UsageError, match="lock"):
        ElectionConfig("lock", "ns", "one", *times)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("csi.moorage.dev", "csi-moorage-dev"), ("a/b", "a-b"), ("odd.", "odd-X"), ("plain", "plain")],
)
def test_lease_names_are_made_as_the_official_sidecars_make_them(name, expected):
    assert sanitised(name) == expected
