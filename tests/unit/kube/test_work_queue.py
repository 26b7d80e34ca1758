"""The work queue: each key once, one worker a key, failures later and later, and an end without remains."""

import asyncio
import contextlib
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from tests.support.examples import examples

from moorage.errors import MoorageError
from moorage.kube.control.queue import WorkQueue


@contextlib.asynccontextmanager
async def running(queue, work, workers=1):
    task = asyncio.create_task(queue.run(work, workers))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def at_rest(queue):
    while not queue.is_idle or queue.delayed:
        await asyncio.sleep(0.01)


def test_a_key_added_many_times_is_worked_on_once(virtual):
    async def story():
        seen = []

        async def work(key):
            seen.append(key)

        queue: WorkQueue[str] = WorkQueue("once")
        for key in "aabab":
            queue.add(key)
        assert len(queue) == 2
        async with running(queue, work, 4):
            await at_rest(queue)
        assert seen == ["a", "b"]

    virtual(story)


def test_a_key_added_during_its_work_is_looked_at_once_more_and_never_twice_at_a_time(virtual):
    async def story():
        active, runs = set(), []

        async def work(key):
            assert key not in active
            active.add(key)
            runs.append(key)
            if len(runs) == 1:
                queue.add(key)
                queue.add(key)
            await asyncio.sleep(1)
            active.discard(key)

        queue: WorkQueue[str] = WorkQueue("again")
        queue.add("a")
        async with running(queue, work, 8):
            await at_rest(queue)
        assert runs == ["a", "a"]

    virtual(story)


def test_failures_come_back_exponentially_and_success_resets(virtual):
    async def story():
        times, outcomes = [], iter([False, False, False, False, True, False, True])
        loop = asyncio.get_running_loop()

        async def work(key):
            times.append(loop.time())
            if not next(outcomes):
                raise MoorageError("not yet")
            if len(times) == 5:
                queue.add(key)

        queue: WorkQueue[str] = WorkQueue("back-off", start_s=1, max_s=4)
        queue.add("a")
        async with running(queue, work):
            await at_rest(queue)
        gaps = [round(b - a) for a, b in itertools.pairwise(times)]
        assert gaps == [1, 2, 4, 4, 0, 1]
        assert queue.failures("a") == 0

    virtual(story)


def test_an_unexpected_failure_is_logged_and_retried(virtual, caplog):
    async def story():
        tries = []

        async def work(key):
            tries.append(key)
            if len(tries) == 1:
                raise ZeroDivisionError

        queue: WorkQueue[str] = WorkQueue("unexpected")
        queue.add("a")
        async with running(queue, work):
            await at_rest(queue)
        assert tries == ["a", "a"]

    virtual(story)
    assert "work failed unexpectedly" in caplog.text


def test_of_several_delays_the_earliest_counts(virtual):
    async def story():
        times = []
        loop = asyncio.get_running_loop()

        async def work(key):
            times.append(round(loop.time() - began))

        queue: WorkQueue[str] = WorkQueue("delays")
        began = loop.time()
        for delay_s in (30, 10, 20):
            queue.add_after("a", delay_s)
        assert queue.delayed == 1
        assert round(queue.next_due_s() or 0) == 10
        async with running(queue, work):
            await asyncio.sleep(60)
        assert times == [10]

    virtual(story)


def test_a_worker_may_say_when_to_look_again(virtual):
    async def story():
        times = []
        loop = asyncio.get_running_loop()

        async def work(key):
            times.append(round(loop.time() - began))
            return 5 if len(times) < 3 else None

        queue: WorkQueue[str] = WorkQueue("look-again")
        began = loop.time()
        queue.add("a")
        async with running(queue, work):
            await at_rest(queue)
        assert times == [0, 5, 10]

    virtual(story)


def test_draining_finishes_what_is_queued_and_takes_nothing_new(virtual):
    async def story():
        done = []

        async def work(key):
            await asyncio.sleep(1)
            done.append(key)

        queue: WorkQueue[int | str] = WorkQueue("drain")
        for key in range(6):
            queue.add(key)
        queue.add_after("late", 0.5)
        async with running(queue, work, 2):
            await queue.drain()
            assert done == list(range(6))
            queue.add("new")
            assert queue.is_idle

    virtual(story)


def test_draining_a_queue_whose_run_has_ended_returns(virtual):
    async def story():
        async def work(key):
            await asyncio.sleep(3600)

        queue: WorkQueue[str] = WorkQueue("ended")
        queue.add("a")
        queue.add("b")
        async with running(queue, work):
            await asyncio.sleep(1)
        await queue.drain()
        assert list(queue.running_since()) == []

    virtual(story)


def test_stopping_cancels_the_work_and_waits_for_it(virtual):
    async def story():
        ended = []

        async def work(key):
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(1)
                ended.append(key)

        queue: WorkQueue[int] = WorkQueue("stop")
        for key in range(3):
            queue.add(key)
        async with running(queue, work, 3):
            await asyncio.sleep(1)
        assert sorted(ended) == [0, 1, 2]

    virtual(story)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    adds=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), max_size=40),
    workers=st.integers(1, 4),
    fails=st.sets(st.integers(0, 30)),
)
def test_nothing_is_lost_whatever_the_order(virtual, adds, workers, fails):
    """After its last addition every key is worked on from start to end, and no key twice at a time."""

    async def story():
        loop = asyncio.get_running_loop()
        added: dict[int, float] = {}
        finished: dict[int, float] = {}
        active: set[int] = set()
        count = 0

        async def work(key):
            nonlocal count
            count += 1
            began = loop.time()
            assert key not in active
            assert len(active) < workers
            active.add(key)
            await asyncio.sleep(0.3)
            active.discard(key)
            if count in fails:
                raise MoorageError("scripted")
            finished[key] = began

        queue: WorkQueue[int] = WorkQueue("property", start_s=0.1, max_s=1)
        async with running(queue, work, workers):
            began = loop.time()
            for at, key in sorted(adds):
                await asyncio.sleep(max(0.0, began + at - loop.time()))
                added[key] = loop.time()
                queue.add(key)
            await at_rest(queue)
        assert set(finished) == set(added)
        assert all(finished[key] >= added[key] for key in added)

    virtual(story)


def test_metrics_have_the_official_names(virtual):
    async def story():
        def value(metric):
            return REGISTRY.get_sample_value(f"workqueue_{metric}", {"name": "measured"})

        release = asyncio.Event()

        async def work(key):
            await release.wait()
            if key == "fails" and queue.failures(key) == 0:
                raise MoorageError("once")

        queue: WorkQueue[str] = WorkQueue("measured")
        for key in ("a", "fails", "waits"):
            queue.add(key)
        async with running(queue, work, 2):
            await asyncio.sleep(1)
            assert value("depth") == 1
            assert value("unfinished_work_seconds") > 0
            assert value("longest_running_processor_seconds") > 0
            release.set()
            await at_rest(queue)
        assert value("adds_total") == 4
        assert value("retries_total") == 1
        assert value("queue_duration_seconds_count") == 4
        assert value("work_duration_seconds_count") == 4
        assert value("depth") == 0

    virtual(story)
