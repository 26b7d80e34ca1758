"""What a driver can do is asked once for all who want to know, and of the process that is there now."""

import asyncio

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.node.plugins.registry import RegisteredDriver

STAGE, STATS = "STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS"


def answer(*names):
    kinds = pb.NodeServiceCapability.RPC.Type
    told = [pb.NodeServiceCapability(rpc=pb.NodeServiceCapability.RPC(type=kinds.Value(name))) for name in names]
    return pb.NodeGetCapabilitiesResponse(capabilities=told)


class Asked:
    """Stands for the connection: each question waits until it is answered or refused."""

    def __init__(self):
        self.questions = []

    async def NodeGetCapabilities(self, _request, _timeout_s=None):
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    async def close(self):
        for question in self.questions:
            if not question.done():
                question.set_exception(CsiError("NodeGetCapabilities", "UNAVAILABLE", "the connection was closed"))


@pytest.fixture
def driver(tmp_path):
    made = RegisteredDriver("a.dev", str(tmp_path / "a.sock"), (1, 0, 0), 1.0)
    made.client = Asked()
    return made


async def asking(driver, count=1):
    tasks = [asyncio.create_task(driver.capabilities()) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_all_who_wait_share_one_question_and_its_failure(driver):
    tasks = await asking(driver, 6)
    assert len(driver.client.questions) == 1
    driver.client.questions[0].set_exception(CsiError("NodeGetCapabilities", "DEADLINE_EXCEEDED", "late"))
    for one in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(one, CsiError)
    (task,) = await asking(driver)  # a failure is not kept
    driver.client.questions[1].set_result(answer(STAGE))
    assert await task == {STAGE}
    assert await driver.capabilities() == {STAGE}
    assert len(driver.client.questions) == 2


async def test_who_gives_up_waiting_does_not_take_the_answer_from_the_others(driver):
    first, second = await asking(driver, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    driver.client.questions[0].set_result(answer(STAGE))
    assert await second == {STAGE}
    assert first.cancelled()


async def test_an_answer_that_nobody_waits_for_any_more_is_kept(driver):
    (task,) = await asking(driver)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    driver.client.questions[0].set_result(answer(STATS))
    assert await driver.capabilities() == {STATS}
    assert len(driver.client.questions) == 1


async def test_what_a_driver_that_was_replaced_meanwhile_says_is_not_kept(driver):
    (before,) = await asking(driver)
    driver._forget_capabilities()  # its connection is over, but this call is still answered
    (after,) = await asking(driver)
    driver.client.questions[1].set_result(answer(STATS))
    assert await after == {STATS}
    driver.client.questions[0].set_result(answer(STAGE))
    assert await before == {STAGE}
    assert await driver.capabilities() == {STATS}


async def test_those_who_wait_are_told_when_the_driver_goes(driver):
    (task,) = await asking(driver)
    await driver.close()
    with pytest.raises(CsiError, match="closed"):
        await task
    assert not [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
