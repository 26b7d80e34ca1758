"""Where a channel connects to."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def path(tmp_path):
    return f"{tmp_path}/csi.sock"
