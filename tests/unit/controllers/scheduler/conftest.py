"""A cluster of three nodes, and the objects that it is made of."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scheduler_objects import Cluster


@pytest.fixture
def cluster() -> Cluster:
    found = Cluster()
    for name in ("a", "b", "c"):
        found.add_node(name)
    found.add_class()
    return found
