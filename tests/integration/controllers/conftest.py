"""A stage for replaying scenarios."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.controllers.replay import Stage, open_stage


@pytest.fixture(scope="session")
def stage_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the API servers of this run keep their certificate, which is slow to make; their state is in memory."""
    return tmp_path_factory.mktemp("stage")


@pytest.fixture
async def stage(stage_dir: Path) -> AsyncIterator[Stage]:
    """An empty API server in this process, without controllers."""
    async with open_stage(stage_dir) as stage:
        yield stage
