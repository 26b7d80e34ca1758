"""Volumes by hand on real filesystems: the command line in processes of its own."""

import contextlib
import io
import json
import subprocess
import sys
import time

import pytest

from moorage.cli.main import main
from moorage.host import freeze


@pytest.fixture(scope="session", autouse=True)
def guard_ends_with_the_tests():
    """The freeze guard is a child of this process; it goes when the tests do."""
    yield
    freeze.stop_guard()


@pytest.fixture(autouse=True)
def logging_stays_as_it_is(monkeypatch):
    """Commands in this process must not leave a handler on a stderr that is gone."""
    monkeypatch.setattr("moorage.log.configure", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["moorage", "volume"])


class Moorage:
    """`moorage volume --pool POOL …`: the whole command line in this process, or started in one of its own."""

    def __init__(self, pool):
        self.pool = pool

    def argv(self, *arguments):
        return [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(self.pool), *map(str, arguments)]

    def run(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(self.argv(*arguments)[3:])
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, out.getvalue(), err.getvalue())

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
