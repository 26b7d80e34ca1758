"""A cluster of three nodes, and the objects that it is made of."""

import pytest
from tests.unit.controllers.scheduler.scheduler_objects import Cluster


@pytest.fixture
def cluster() -> Cluster:
    found = Cluster()
    for name in ("a", "b", "c"):
        found.add_node(name)
    found.add_class()
    return found
