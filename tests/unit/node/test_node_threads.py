"""Calls that block, in threads: none waits for another, and threads are used again."""

import asyncio
import threading

import pytest

from moorage.host.threads import in_thread
from moorage.node.volumes.mounters import vol_data


async def test_calls_that_hang_hold_up_no_other():
    release = threading.Event()
    hanging = [asyncio.create_task(in_thread(release.wait, 60)) for _ in range(40)]
    await asyncio.sleep(0)
    assert await in_thread(lambda: "answer") == "answer"
    assert not any(task.done() for task in hanging)
    release.set()
    assert all(await asyncio.gather(*hanging))


async def test_one_call_after_the_other_needs_one_thread():
    found = {await in_thread(threading.get_ident) for _ in range(50)}
    assert len(found) < 10  # a thread may still be on its way back when the next call comes


async def test_a_failure_is_the_callers_and_the_thread_goes_on():
    def fail():
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await in_thread(fail)
    assert await in_thread(int, "7") == 7


async def test_a_caller_that_went_away_disturbs_nothing():
    release = threading.Event()
    task = asyncio.create_task(in_thread(release.wait, 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await in_thread(lambda: 1) == 1


def test_volume_data_that_is_right_is_not_written_again(tmp_path):
    directory = tmp_path / "volume"
    vol_data.write(directory, {"driverName": "d", "volumeHandle": "h"})
    first = (directory / vol_data.NAME).stat().st_ino
    vol_data.write(directory, {"driverName": "d", "volumeHandle": "h"})
    assert (directory / vol_data.NAME).stat().st_ino == first
    vol_data.write(directory, {"driverName": "d", "volumeHandle": "other"})
    assert vol_data.read(directory) == {"driverName": "d", "volumeHandle": "other"}
    assert [entry.name for entry in directory.iterdir()] == [vol_data.NAME]
