"""Running checks: in stages, several at a time, each on its own, whatever the driver does.

Owns: the order, what a failure is called, who is to blame for a crash, and that everything is cleaned up at the end.
Start reading at: `run_checks`.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from moorage.conformance.bench import Bench, settled
from moorage.conformance.caller import Caller
from moorage.conformance.follow_ups import FOLLOW_UPS, root_of
from moorage.conformance.model import (
    Check,
    CheckConfig,
    CheckFailed,
    CheckResult,
    CheckSkipped,
    DriverCrashed,
    DriverHung,
    FailureKind,
    LeftBehind,
    NotMet,
    Outcome,
    Stage,
    selected,
)
from moorage.conformance.process import CannotRestart, CommandControl, Control
from moorage.conformance.session import Session, opened
from moorage.csi.endpoint import socket_path_from
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.log import get_logger
from moorage.process import cancel_all

log = get_logger(__name__)

_COMES_BACK_S = 3.0  # a supervisor may start a crashed driver again
_CLEAN_UP_S = 120.0
_CONDITIONS = {
    "run:restart": "it kills the driver; give --restart-command",
    "run:block": "it needs raw block volumes; give --block",
    "run:mount": "it needs volumes with a filesystem; leave out --block",
    "run:mutable-parameters": "give --mutable-parameter with one that the driver takes",
    "run:fs-type": "give --fs-type",
}


async def run_checks(
    config: CheckConfig,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    control: Control | None = None,
) -> AsyncGenerator[CheckResult, None]:
    """Run the selected checks and yield each result as it comes. Raises NoDriver if nothing answers."""
    chosen = selected(only, skip)
    if control is None and config.restart_command:
        control = CommandControl(socket_path_from(config.endpoint), config.restart_command)
    async with opened(config, control) as session:
        run = Run(session, [one.id for one in chosen])
        for stage, checks in in_stages(chosen, config.seed):
            jobs = config.jobs if stage is Stage.PARALLEL else 1
            if stage is Stage.LAST:
                await run.finish_clean_up()
            async with aclosing(run.stage(checks, jobs)) as results:
                async for result in results:
                    yield result


def in_stages(chosen: Sequence[Check], seed: int) -> list[tuple[Stage, list[Check]]]:
    """Return the checks of each stage. The seed decides the order of those that do not rely on an order."""
    shuffled = random.Random(seed)
    roots = list(FOLLOW_UPS)
    stages = []
    for stage in Stage:
        is_early = stage is Stage.BASIC
        found = [one for one in chosen if one.stage is stage and (is_early or one.id not in FOLLOW_UPS)]
        if stage in (Stage.QUICK, Stage.PARALLEL, Stage.ALONE):
            shuffled.shuffle(found)
        if is_early:
            rest = [one for one in chosen if one.id in FOLLOW_UPS and one.stage is not stage]
            found += sorted(rest, key=lambda one: roots.index(one.id))
        stages.append((stage, found))
    return stages


class Run:
    """The checks of one run, and what is known of the driver's crashes."""

    def __init__(self, session: Session, ids: Iterable[str]) -> None:
        self._session = session
        self._waiting = set(ids)
        self._lost_in = ""  # the check in which the driver went away for good

    async def stage(self, checks: list[Check], jobs: int) -> AsyncGenerator[CheckResult, None]:
        """Run checks, `jobs` at a time. Those in flight when the driver crashed are repeated, one at a time."""
        waiting, running = list(checks), set[asyncio.Task[tuple[Check, CheckResult]]]()
        suspects: list[tuple[Check, CheckResult]] = []
        try:
            while waiting or running:
                while waiting and len(running) < jobs and not suspects:
                    running.add(asyncio.create_task(self._with_check(waiting.pop(0)), name="check"))
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for check, result in sorted((task.result() for task in done), key=lambda pair: pair[0].id):
                    if result.kind is FailureKind.CRASH:
                        suspects.append((check, result))
                    else:
                        yield self._noted(result)
                if suspects and not running:
                    for result in await self._judged(suspects):
                        yield self._noted(result)
                    suspects = []
        finally:
            await cancel_all(running)

    async def finish_clean_up(self) -> None:
        """Remove what the checks had made that saw the driver crash."""
        steps, self._session.unfinished = self._session.unfinished, []
        if not self._session.is_alive:
            return
        for act in steps:
            try:
                await settled(act)
            except (CsiError, CheckFailed, NotMet) as error:
                log.warning("clean-up failed", error=str(error))

    async def _with_check(self, check: Check) -> tuple[Check, CheckResult]:
        return check, await self._run(check)

    def _noted(self, result: CheckResult) -> CheckResult:
        self._waiting.discard(result.id)
        if result.result in (Outcome.FAILED, Outcome.FOLLOW_UP):
            self._session.broken[result.id] = result
        return result

    # --- crashes -----------------------------------------------------------------------------------------------------

    async def _judged(self, suspects: list[tuple[Check, CheckResult]]) -> list[CheckResult]:
        """Return the results of checks that saw the driver crash: one caused it, the others were only there."""
        is_back = await self._bring_back()
        if len(suspects) == 1:
            if not is_back:
                self._lost_in = suspects[0][0].id
            return [suspects[0][1]]
        if is_back:
            return await self._repeated(suspects)
        names = ", ".join(check.id for check, _ in suspects)
        self._lost_in = suspects[0][0].id
        note = f"these checks ran at that moment: {names}; with --jobs 1 or --restart-command the right one is found"
        first, *rest = suspects
        blamed = replace(first[1], notes=(*first[1].notes, note))
        return [blamed, *(self._not_run(check, first[0].id) for check, _ in rest)]

    async def _repeated(self, suspects: list[tuple[Check, CheckResult]]) -> list[CheckResult]:
        results = []
        for check, before in suspects:
            result = await self._run(check)
            if result.kind is FailureKind.CRASH and not await self._bring_back():
                self._lost_in = check.id
            results.append(result if result.kind is FailureKind.CRASH else replace(result, seconds=before.seconds))
        if not any(result.kind is FailureKind.CRASH for result in results):
            note = "the driver crashed in the first attempt, and not when the check was repeated alone"
            results[0] = replace(suspects[0][1], notes=(*suspects[0][1].notes, note))
        return results

    async def _bring_back(self) -> bool:
        """Return whether the driver is there again, started by us or by its supervisor."""
        session = self._session
        if not session.is_alive and session.control is not None:
            with suppress(CannotRestart):
                await session.control.start()
        try:
            await session.client.wait_ready(session.config.timeout_s if session.is_alive else _COMES_BACK_S)
        except (CsiError, TimeoutError):
            return False
        return True

    # --- one check ---------------------------------------------------------------------------------------------------

    async def _run(self, check: Check) -> CheckResult:
        if self._lost_in:
            return self._not_run(check, self._lost_in)
        missing = [need for need in check.needs if need not in self._session.capabilities]
        if missing:
            words = [_CONDITIONS.get(need, f"the driver does not claim {need}") for need in missing]
            return CheckResult(check.id, check.rule, Outcome.SKIPPED, detail="; ".join(words))
        began = time.monotonic()
        bench = Bench(self._session, Caller(self._session))
        result = CheckResult(check.id, check.rule, Outcome.PASSED)
        try:
            result = await self._outcome(check, bench)
        finally:
            problems = await _to_the_end(bench.clean_up())
        result = self._marked(self._after_clean_up(result, problems))
        calls = tuple(bench.client.exchanges.values()) if result.result is Outcome.FAILED else ()
        return replace(result, seconds=time.monotonic() - began, calls=calls, notes=(*result.notes, *bench.notes))

    async def _outcome(self, check: Check, bench: Bench) -> CheckResult:
        try:
            await check.body(bench)
        except CheckSkipped as reason:
            return CheckResult(check.id, check.rule, Outcome.SKIPPED, detail=str(reason))
        except NotMet as unmet:
            return self._follow_up(check, unmet)
        except (CheckFailed, CsiError) as failure:
            return self._failed(check, failure)
        except (OSError, MoorageError) as error:
            text = str(error) if isinstance(error, MoorageError) else f"{error.filename}: {error.strerror}"
            return self._failed(check, CheckFailed(f"the check could not go on: {text}"))
        except Exception as error:  # what one driver answered must not end the checks of the rest
            log.exception("check broke", check=check.id)
            return self._failed(check, CheckFailed(f"the check itself broke: {type(error).__name__}: {error}"))
        return CheckResult(check.id, check.rule, Outcome.PASSED)

    def _follow_up(self, check: Check, unmet: NotMet) -> CheckResult:
        """A step failed that another check is about. If that one has failed as well, it is reported there."""
        if unmet.owner in self._session.broken and not isinstance(unmet.cause, DriverCrashed):
            return self._not_run(check, unmet.owner)
        return self._failed(check, unmet.cause)

    def _failed(self, check: Check, failure: CheckFailed | CsiError) -> CheckResult:
        if isinstance(failure, DriverHung):
            self._session.note_hang(failure.what, check.id, check.stage is Stage.BASIC)
        if isinstance(failure, CsiError):
            failure = CheckFailed(f"{failure.method} answered {failure.code}: {failure.message}", "OK")
        detail = self._session.without_secrets(failure.got)
        return CheckResult(check.id, check.rule, Outcome.FAILED, failure.kind, failure.expected or check.rule, detail)

    def _after_clean_up(self, result: CheckResult, problems: Sequence[LeftBehind | NotMet]) -> CheckResult:
        """A failure of the clean-up fails the check, unless another check is about that call and reports it."""
        for problem in problems:
            cause = problem.cause if isinstance(problem, NotMet) else problem
            owner = problem.owner if isinstance(problem, NotMet) else ""
            text = cause.got if isinstance(cause, CheckFailed) else str(cause)
            is_known = owner in self._session.broken
            if owner in self._waiting and owner != result.id:
                self._session.deferred.append((owner, f"after {result.id}: {text}"))
                continue
            if is_known or result.result is Outcome.FAILED:
                result = replace(result, notes=(*result.notes, f"clean-up: {text}" + (f" (see {owner})" * is_known)))
                continue
            kind = cause.kind if isinstance(cause, CheckFailed) else FailureKind.WRONG_ANSWER
            result = replace(
                result,
                result=Outcome.FAILED,
                kind=kind,
                detail=f"clean-up: {self._session.without_secrets(text)}",
                expected="nothing is left of the check, and its clean-up succeeds",
            )
        return result

    def _marked(self, result: CheckResult) -> CheckResult:
        """Mark a failure that follows from another one. A crash or a hang follows only from one of its kind."""
        if result.result is not Outcome.FAILED:
            return result
        is_leftover = result.kind is FailureKind.LEFTOVER
        alike = [id for id, one in self._session.broken.items() if is_leftover or one.kind is result.kind]
        root = root_of(result.id, alike)
        return replace(result, result=Outcome.FOLLOW_UP, because=self._first_cause(root)) if root else result

    def _first_cause(self, check_id: str) -> str:
        known = self._session.broken.get(check_id)
        return known.because or check_id if known is not None else check_id

    def _not_run(self, check: Check, because: str) -> CheckResult:
        because = self._first_cause(because)
        return CheckResult(check.id, check.rule, Outcome.NOT_RUN, because=because)


async def _to_the_end(work: Coroutine[Any, Any, Sequence[LeftBehind | NotMet]]) -> Sequence[LeftBehind | NotMet]:
    """Finish a clean-up although the run is being cancelled, within a bound; then go on with the cancellation."""
    task = asyncio.create_task(work, name="clean-up")
    cancelled: asyncio.CancelledError | None = None
    deadline = time.monotonic() + _CLEAN_UP_S
    while not task.done() and time.monotonic() < deadline:
        try:
            await asyncio.wait({task}, timeout=deadline - time.monotonic())
        except asyncio.CancelledError as error:
            cancelled = error
            if (current := asyncio.current_task()) is not None and current.cancelling() > 1:
                break  # a second Ctrl-C
    if not task.done():
        await cancel_all([task])
    if cancelled is not None:
        raise cancelled
    if task.cancelled():
        return [NotMet("", DriverHung("the clean-up", _CLEAN_UP_S))]
    return task.result()
