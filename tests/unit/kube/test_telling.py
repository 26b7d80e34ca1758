"""The events recorder: counting, combining, holding back floods; in order for an object and never in the way."""

import asyncio
from typing import Any

import pytest

from moorage.kube.control.events import Recorder
from moorage.kube.objects.meta import ObjectReference

EVENTS = "/api/v1/namespaces/ns/events"


def about(name="claim"):
    return ObjectReference(api_version="v1", kind="PersistentVolumeClaim", namespace="ns", name=name, uid=f"u-{name}")


def events_of(api, name="claim"):
    found = [
        obj for path, obj in api.objects.items() if path.startswith(EVENTS) and obj["involvedObject"]["name"] == name
    ]
    return sorted(found, key=lambda obj: int(obj["metadata"]["resourceVersion"]))


@pytest.fixture
def tell(virtual, fake):
    """Run a story with a server, a recorder and a clock that the story moves."""

    def run(body):
        async def story():
            clock = [1_700_000_000.0]
            async with (
                fake() as api,
                api.client() as client,
                Recorder(client, "test-controller", "host-1", clock=lambda: clock[0]) as recorder,
            ):
                await body(api, recorder, clock)

        virtual(story)

    return run


def test_an_event_says_who_what_and_about_what(tell):
    async def story(api, recorder, clock):
        recorder.warning(about(), "ProvisioningFailed", "no space")
        await recorder.flush()
        [event] = events_of(api)
        assert event["metadata"]["name"].startswith("claim.")
        assert event["involvedObject"]["uid"] == "u-claim"
        assert (event["type"], event["reason"], event["message"], event["count"]) == (
            "Warning",
            "ProvisioningFailed",
            "no space",
            1,
        )
        assert event["source"] == {"component": "test-controller", "host": "host-1"}
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2023-11-14T22:13:20Z"
        assert recorder.is_idle

    tell(story)


def test_the_same_event_is_counted(tell):
    async def story(api, recorder, clock):
        for _ in range(5):
            recorder.normal(about(), "Waiting", "for a node")
            clock[0] += 10
        await recorder.flush()
        [event] = events_of(api)
        assert event["count"] == 5
        assert event["firstTimestamp"] == "2023-11-14T22:13:20Z"
        assert event["lastTimestamp"] == "2023-11-14T22:14:00Z"
        assert len(api.requests("POST")) == 1
        assert len(api.requests("PATCH")) == 4

    tell(story)


def test_the_tenth_different_message_and_those_after_it_are_combined(tell):
    async def story(api, recorder, clock):
        for number in range(15):
            recorder.warning(about(), "Failed", f"attempt {number}")
        await recorder.flush()
        events = events_of(api)
        assert len(events) == 10
        assert [event["message"] for event in events[:9]] == [f"attempt {number}" for number in range(9)]
        assert events[9]["message"] == "(combined from similar events): attempt 14"
        assert events[9]["count"] == 6

    tell(story)


def test_after_ten_quiet_minutes_messages_stand_alone_again(tell):
    async def story(api, recorder, clock):
        for number in range(12):
            recorder.warning(about(), "Failed", f"attempt {number}")
        await recorder.flush()
        clock[0] += 601
        recorder.warning(about(), "Failed", "attempt 99")
        await recorder.flush()
        assert events_of(api)[-1]["message"] == "attempt 99"

    tell(story)


def test_a_flood_about_one_object_is_held_back_and_does_not_touch_others(tell):
    async def story(api, recorder, clock):
        for _ in range(100):
            recorder.normal(about(), "Same", "again")
        recorder.normal(about("other"), "Same", "again")
        await recorder.flush()
        assert len([p for p in api.requests() if p.startswith(EVENTS)]) == 26
        assert events_of(api)[0]["count"] == 25
        assert events_of(api, "other")[0]["count"] == 1
        clock[0] += 301
        recorder.normal(about(), "Same", "again")
        await recorder.flush()
        assert events_of(api)[0]["count"] == 101  # what was held back has been counted

    tell(story)


def test_an_event_that_expired_on_the_server_is_made_anew(tell):
    async def story(api, recorder, clock):
        recorder.normal(about(), "Same", "again")
        await recorder.flush()
        api.objects.clear()
        recorder.normal(about(), "Same", "again")
        await recorder.flush()
        [event] = events_of(api)
        assert event["count"] == 1

    tell(story)


def test_a_lost_answer_does_not_make_a_second_event(tell, fault):
    async def story(api, recorder, clock):
        api.faults.append(fault(drop=True, apply_first=True, method="POST"))
        recorder.normal(about(), "Once", "only")
        await recorder.flush()
        assert len(api.requests("POST")) == 2
        [event] = events_of(api)
        recorder.normal(about(), "Once", "only")
        await recorder.flush()
        assert events_of(api)[0]["count"] == 2
        assert event["count"] == 1

    tell(story)


def test_a_namespace_that_is_gone_and_an_event_that_is_refused_harm_nobody(tell, fault):
    async def story(api, recorder, clock):
        api.faults.extend(fault(status, method="POST") for status in (403, 404, 422))
        for number in range(4):
            recorder.normal(about(), "Reason", f"message {number}")
        await recorder.flush()
        assert [event["message"] for event in events_of(api)] == ["message 3"]

    tell(story)


def test_events_of_one_object_stay_in_order_while_others_overtake(tell, fault):
    async def story(api, recorder, clock):
        api.faults.append(fault(429, {"Retry-After": "20"}, method="POST"))
        for number in range(5):
            recorder.normal(about("slow"), f"Step{number}", "x")
        await asyncio.sleep(1)
        recorder.normal(about("quick"), "Step", "x")
        await asyncio.sleep(1)
        assert len(events_of(api, "quick")) == 1
        assert events_of(api, "slow") == []
        await recorder.flush()
        assert [event["reason"] for event in events_of(api, "slow")] == [f"Step{number}" for number in range(5)]

    tell(story)


def test_recording_never_blocks_even_when_nothing_can_be_sent(virtual, fake):
    async def story():
        async with fake() as api:
            client = api.client()
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with Recorder(client, "test") as recorder:
            for number in range(5000):
                recorder.normal(about(f"n{number}"), "Reason", "message")
            assert loop.time() == began
        assert loop.time() - began < 10
        await client.close()

    virtual(story)


def test_what_is_recorded_before_the_recorder_runs_is_sent(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            recorder = Recorder(client, "test")
            recorder.normal(about(), "Early", "x")
            async with recorder:
                await recorder.flush()
            assert len(events_of(api)) == 1

    virtual(story)


def test_a_name_of_full_length_makes_a_valid_event_name(tell):
    async def story(api, recorder, clock):
        recorder.normal(about("a" * 253), "Long", "x")
        await recorder.flush()
        [event] = events_of(api, "a" * 253)
        assert len(event["metadata"]["name"]) == 253

    tell(story)


def test_of_many_things_that_go_well_some_are_told_later_but_none_that_does_not(virtual, fake):
    async def story():
        loop = asyncio.get_running_loop()
        async with fake() as api, api.client() as client:
            async with Recorder(client, "kubelet", per_second=20) as recorder:
                for number in range(60):
                    recorder.normal(about(f"p{number}"), "Started", "Started container")
                recorder.warning(about("bad"), "FailedMount", "no such device")
                begun = loop.time()
                await asyncio.sleep(1.0)
                told = [number for number in range(60) if events_of(api, f"p{number}")]
                assert len(events_of(api, "bad")) == 1
                assert told == list(range(len(told)))  # in the order in which they came
                assert 15 <= len(told) <= 25
            assert loop.time() - begun < 2.9  # whoever leaves does not wait for each one's turn
            assert all(events_of(api, f"p{number}") for number in range(60))

    virtual(story)


@pytest.mark.parametrize("ends_at", [1.2, 60.0])
def test_who_is_busy_tells_later_but_not_too_late(virtual, fake, ends_at):
    async def story():
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with fake() as api, api.client() as client:
            busy: dict[str, Any] = {"per_second": 50, "is_busy": lambda: loop.time() < begun + ends_at}
            async with Recorder(client, "kubelet", **busy) as recorder:
                for number in range(5):
                    recorder.normal(about(f"p{number}"), "Started", "Started container")
                recorder.warning(about("bad"), "FailedMount", "no such device")
                await asyncio.sleep(1.0)
                assert not any(events_of(api, f"p{number}") for number in range(5))
                assert len(events_of(api, "bad")) == 1
                await recorder.flush()
                assert min(ends_at, 10.0) <= loop.time() - begun < min(ends_at, 10.0) + 2
            assert all(events_of(api, f"p{number}") for number in range(5))

    virtual(story)


def test_who_leaves_while_it_is_busy_tells_what_is_left(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            async with Recorder(client, "kubelet", per_second=50, is_busy=lambda: True) as recorder:
                recorder.normal(about(), "Started", "Started container")
                await asyncio.sleep(0.1)
            assert len(events_of(api)) == 1

    virtual(story)
