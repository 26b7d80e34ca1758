"""Volumes by hand on real filesystems: the command line in processes of its own."""

import json
import subprocess
import sys
import time

import pytest

from moorage.host import freeze


@pytest.fixture(scope="session", autouse=True)
def guard_ends_with_the_tests():
    """The freeze guard is a child of this process; it goes when the tests do."""
    yield
    freeze.stop_guard()


class Moorage:
    """`moorage volume --pool POOL …`, to its end or started."""

    def __init__(self, pool):
        self.pool = pool

    def argv(self, *arguments):
        return [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(self.pool), *map(str, arguments)]

    def run(self, *arguments):
        return subprocess.run(self.argv(*arguments), capture_output=True, text=True, timeout=120, check=False)

    def ok(self, *arguments):
        done = self.run(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments):
        return subprocess.Popen(self.argv(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture
def moorage():
    return Moorage


@pytest.fixture
def wait_until():
    """Wait for a condition, generously."""

    def wait(condition, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.002)

    return wait
