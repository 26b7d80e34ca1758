"""The controllers are killed between any two of their writes, start again, and everything ends as recorded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.integration.controllers.replay import Scenario, Stage, config_of, open_stage, replay, scenarios

from moorage.kube.api.client import Client

CONTROLLERS = ("binder", "protection")
# Each has another sequence of writes: the four of a binding from either side, a default class and a provisioner's
# volume, two volumes for one claim, release and failure, loss and return, protection of what is in use.
CHOSEN = (
    "claims-to-be-bound-to-free-volume",
    "default-arrives-late",
    "failed-volume-deleted",
    "in-use-by-two-pods",
    "lost-volume-comes-back-without-uid",
    "names-volume",
    "provision-twice",
    "recover-with-volume-name",
    "reserved-after-claim-without-uid",
    "smallest-fit-uses-them-up",
)
SCENARIOS = {scenario["name"]: scenario for scenario in scenarios("binder") if scenario["name"] in CHOSEN}


class Guillotine(Client):
    """A client whose process dies at its n-th write: before the write is sent, or before its answer is heard."""

    def __init__(self, config: Any, at: int, *, is_sent: bool) -> None:
        super().__init__(config)
        self.at = at
        self.is_sent = is_sent
        self.writes = 0
        self.has_fallen = asyncio.Event()

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        if method in ("GET", "HEAD") or "/events" in path:
            return await super().request(method, path, body, **options)
        self.writes += 1
        if self.has_fallen.is_set() or self.writes == self.at:
            try:
                if not self.has_fallen.is_set() and self.is_sent:
                    await super().request(method, path, body, **options)
            finally:
                self.has_fallen.set()
            await asyncio.Event().wait()  # nothing of this process happens any more
        return await super().request(method, path, body, **options)


class DoomedStage(Stage):
    """A stage whose controllers, once dead, are started again."""

    guillotine: Guillotine

    async def settle(self, timeout_s: float = 30.0, *, resync: bool = True) -> None:
        resting = asyncio.create_task(super().settle(timeout_s, resync=resync))
        dying = asyncio.create_task(self.guillotine.has_fallen.wait())
        try:
            await asyncio.wait({resting, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not self.guillotine.has_fallen.is_set() or self.controllers_client is self.client:
                await resting
                return
        finally:
            for task in (resting, dying):
                task.cancel()
            await asyncio.gather(resting, dying, return_exceptions=True)
        await self.stop()
        self.controllers_client = self.client
        await self.start(CONTROLLERS)
        await super().settle(timeout_s, resync=resync)


async def _outcome(stage_dir: Path, scenario: Scenario, at: int, *, is_sent: bool) -> tuple[list[str], bool]:
    async with open_stage(stage_dir, kind=DoomedStage) as stage:
        assert isinstance(stage, DoomedStage)
        async with Guillotine(config_of(stage.server), at, is_sent=is_sent) as guillotine:
            stage.guillotine = guillotine
            stage.controllers_client = guillotine
            differences = await replay(stage, scenario, CONTROLLERS, with_events=False)
            await stage.stop()
            return differences, guillotine.has_fallen.is_set()


@pytest.mark.parametrize("is_sent", [False, True], ids=["before-it-is-sent", "before-it-is-answered"])
@pytest.mark.parametrize("name", CHOSEN)
async def test_a_crash_at_any_write_changes_nothing_in_the_end(stage_dir: Path, name: str, is_sent: bool) -> None:
    at, has_fallen = 0, True
    while has_fallen:
        at += 1
        differences, has_fallen = await _outcome(stage_dir, SCENARIOS[name], at, is_sent=is_sent)
        assert not differences, f"killed at write {at}\n" + "\n".join(differences)
    assert at > 2  # the scenario has writes to be killed at
