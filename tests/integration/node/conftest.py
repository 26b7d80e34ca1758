"""A node with a real API server, real mounts and a scripted driver."""

import pytest
from tests.support.node_lab import node_lab


@pytest.fixture
async def lab(tmp_path):
    async with node_lab(tmp_path) as made:
        yield made
