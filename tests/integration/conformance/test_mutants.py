"""`moorage check` finds each of the planted bugs, by the check that names it, and nothing in a driver without a bug."""

import asyncio

import pytest
from tests.support.mutants.catalogue import MUTANTS, Planted
from tests.support.mutants.running import check_mutant, no_bug

from moorage.conformance.model import CheckResult, Outcome, selected
from moorage.host import freeze

pytestmark = pytest.mark.root

ALWAYS = ("Identity.*", "Claims.*", "CreateVolume.works", "DeleteVolume.works")
AT_ONCE = 4
NEEDS_CAPABILITY = ("Data.grows-*", "Data.restore-larger")  # a mounted ext4 grows only with CAP_SYS_RESOURCE


@pytest.fixture(scope="module", autouse=True)
def _guard():
    yield
    freeze.stop_guard()


@pytest.fixture(scope="module")
def found() -> dict[str, list[CheckResult]]:
    """The results of every mutant: the check that should catch it, and a small set besides."""

    async def one(planted: Planted, turn: asyncio.Semaphore) -> list[CheckResult]:
        async with turn:
            only = tuple({planted.caught_by, *planted.also, *ALWAYS})
            return await asyncio.wait_for(check_mutant(planted, only), 120)

    async def every() -> dict[str, list[CheckResult]]:
        turn = asyncio.Semaphore(AT_ONCE)
        results = await asyncio.gather(*(one(planted, turn) for planted in MUTANTS.values()))
        return dict(zip(MUTANTS, results, strict=True))

    return asyncio.run(every())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught_by_the_check_that_names_it(found, name):
    failed = [(result.id, str(result.kind)) for result in found[name] if result.result is Outcome.FAILED]
    assert failed == [(MUTANTS[name].caught_by, MUTANTS[name].kind)]


def test_there_are_enough_bugs_and_each_names_a_check():
    assert len(MUTANTS) >= 40
    assert {planted.caught_by for planted in MUTANTS.values()} <= {one.id for one in selected()}


@pytest.mark.parametrize("block", [True, False], ids=["block", "filesystem"])
async def test_a_driver_without_a_bug_passes_every_check(block):
    only = [one.id for one in selected(skip=() if block else NEEDS_CAPABILITY)]
    results = await check_mutant(no_bug(), only, block=block)
    assert [f"{result.id}: {result.detail}" for result in results if result.result in ("failed", "not run")] == []
    assert sum(result.result is Outcome.PASSED for result in results) >= 195


async def test_the_order_of_checks_follows_the_seed_and_no_result_depends_on_it():
    orders = []
    for seed in (1, 1, 2):
        results = await check_mutant(no_bug(), ["CreateVolume.*"], seed=seed, jobs=1)
        assert {result.result for result in results} <= {Outcome.PASSED, Outcome.SKIPPED}
        orders.append([result.id for result in results])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


# A hang, a crash and a publish that mounts nothing have tests of their own below.
NAMED = {
    "a leak": ("unpublish-does-nothing", "NodeUnpublishVolume.works"),
    "a wrong code": ("create-wrong-code", "CreateVolume.needs-name"),
    "a double page": ("list-double-page", "ListVolumes.pages"),
    "a wrong size": ("create-ignores-size", "CreateVolume.size"),
    "a create that is not idempotent": ("create-not-idempotent", "CreateVolume.repeated"),
}
SLOW = ("Restart.*", "Data.*", "GetMetadata*", "*.given-up", "Orders.*")


async def test_a_bug_is_reported_once_in_a_run_of_many_checks():
    only = [one.id for one in selected(skip=SLOW)]
    turn = asyncio.Semaphore(AT_ONCE)

    async def reported(name: str) -> list[str]:
        async with turn:
            results = await check_mutant(MUTANTS[name], only)
        return [f"{result.id} {result.kind}" for result in results if result.result is Outcome.FAILED]

    found = await asyncio.gather(*(reported(name) for name, _ in NAMED.values()))
    wanted = [[f"{check_id} {MUTANTS[name].kind}"] for name, check_id in NAMED.values()]
    assert dict(zip(NAMED, found, strict=True)) == dict(zip(NAMED, wanted, strict=True))


async def test_what_follows_from_a_bug_is_not_reported_as_more_bugs():
    results = await check_mutant(MUTANTS["publish-mounts-nothing"], ["Node*", "Data.*", "CreateVolume.works"])
    failed = [result.id for result in results if result.result is Outcome.FAILED]
    assert failed == ["NodePublishVolume.works"]
    followers = [result for result in results if result.result is Outcome.NOT_RUN]
    assert {result.because for result in followers} == {"NodePublishVolume.works"}
    assert len(followers) > 15


async def test_a_call_that_always_hangs_is_waited_for_once_and_the_rest_goes_on():
    results = await check_mutant(MUTANTS["stage-hangs"], ["NodeStage*", "Data.*", "CreateSnapshot.*"])
    failed = [(result.id, str(result.kind)) for result in results if result.result is Outcome.FAILED]
    assert failed == [("NodeStageVolume.works", "hang")]
    assert "NodeStageVolume did not return within 1 s" in next(r.detail for r in results if r.result == "failed")
    passed = {result.id for result in results if result.result is Outcome.PASSED}
    assert {"CreateSnapshot.works", "CreateSnapshot.repeated"} <= passed


async def test_a_crash_among_parallel_checks_is_blamed_on_the_right_one_after_a_restart():
    only = ["CreateVolume.*", "DeleteVolume.*", "ListVolumes.*", "Leaks.*"]
    results = await check_mutant(MUTANTS["race-crashes"], only, jobs=6)
    failed = [(result.id, str(result.kind)) for result in results if result.result is Outcome.FAILED]
    assert failed == [("CreateVolume.concurrent", "crash")]
    left = next(result for result in results if result.id == "Leaks.volumes")
    assert left.result is Outcome.PASSED, left.detail
    assert not [result.id for result in results if result.result is Outcome.NOT_RUN]
