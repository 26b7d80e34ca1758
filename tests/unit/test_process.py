"""Processes that end by a signal, and tasks that end together."""

import asyncio
import os
import signal

import pytest

from moorage.process import first_of, run_unless, run_until_signal, stop_event


@pytest.fixture(autouse=True)
def handlers():
    """Give the signals back to pytest."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Work:
    """Runs until cancelled, and says that it was."""

    def __init__(self):
        self.ended = False

    async def __call__(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event(number):
    stop = stop_event()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        await stop.wait()


async def test_a_second_signal_says_to_hurry_and_the_third_is_no_longer_caught():
    stop = stop_event()
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(5):
        await stop.wait()
    assert not stop.hurry.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        await stop.hurry.wait()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_cancels_the_work(number):
    work = Work()
    asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)
    with pytest.raises(asyncio.CancelledError):
        await run_until_signal(work())
    assert work.ended


async def test_work_that_ends_by_itself_gives_its_result():
    async def answer():
        return 42

    assert await run_until_signal(answer()) == 42


async def test_the_first_task_that_ends_ends_the_others():
    work = Work()

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await first_of([asyncio.create_task(work()), asyncio.create_task(fail())])
    assert work.ended


async def test_cancelling_the_race_ends_all_of_them():
    both = [Work(), Work()]
    race = asyncio.create_task(first_of([asyncio.create_task(one()) for one in both]))
    await asyncio.sleep(0.01)
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert all(one.ended for one in both)


async def test_work_is_given_up_when_the_process_is_to_stop():
    work, stop = Work(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    assert not await run_unless(stop, work())
    assert work.ended
    assert await run_unless(asyncio.Event(), asyncio.sleep(0))

    async def fail():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_unless(asyncio.Event(), fail())
