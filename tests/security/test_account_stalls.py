"""The measure itself: a callback that holds the event loop is found, and named."""

import asyncio
import time

import pytest
from tests.support.stall import no_stall


def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_callback_that_holds_the_loop_is_found():
    async def greedy():
        burn(0.06)

    with pytest.raises(AssertionError, match=r"greedy.*held the event loop"), no_stall():
        await asyncio.create_task(greedy())


async def test_many_short_steps_and_the_test_itself_are_not_stalls():
    async def polite():
        for _ in range(10):
            burn(0.01)
            await asyncio.sleep(0)

    with no_stall() as stalls:
        await asyncio.create_task(polite())
        burn(0.06)
        await asyncio.sleep(0)
    assert stalls.longest_s >= 0.01
