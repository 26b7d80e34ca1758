"""The example drivers keep the contract, on real mounts and loop devices."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.authoring.project import KINDS, Project, write
from moorage.csi.endpoint import is_live
from moorage.host import loop, mountinfo

pytestmark = pytest.mark.root

EXAMPLES = Path(__file__).parents[3] / "examples" / "drivers"
LONGEST = {"folders": 60, "images": 250, "remote": 150}  # lines: what the library promises to authors


class Example:
    """One example driver in a process of its own."""

    def __init__(self, name: str, directory: Path, *flags: str) -> None:
        self.endpoint = f"unix://{directory}/csi.sock"
        self.directory = directory
        self._command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--endpoint", self.endpoint]
        self._command += ["--state-dir", str(directory / "state"), "--node-id", "n1", *flags]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.directory / "log", "ab") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not is_live(self.directory / "csi.sock"):
            assert process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


@pytest.fixture
def example() -> Iterator[Callable[..., Example]]:
    directory = Path(tempfile.mkdtemp(prefix="sdk-"))
    running: list[Example] = []

    def make(name: str, *flags: str) -> Example:
        running.append(Example(name, directory, *flags))
        return running[-1]

    yield make
    for each in running:
        if each.process.poll() is None:
            assert each.stop() == 0, (directory / "log").read_text()
    assert mountinfo.mounts_below(directory) == []
    assert loop.attached(below=directory) == []
    shutil.rmtree(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_of_a_new_project_pass_at_once(tmp_path, kind):
    """They run `moorage check` on the driver, which is the example of its kind."""
    write(Project("my-driver", kind), tmp_path / "p")
    with tempfile.TemporaryDirectory(prefix="p-") as short:  # a socket's path is short
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", f"{short}/t"]
        done = subprocess.run(command, cwd=tmp_path / "p", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_block_volumes_of_images_pass_every_check(example):
    driver = example("images")
    command = [sys.executable, "-m", "moorage.cli.main", "check", "--endpoint", driver.endpoint, "--block"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_killed_driver_goes_on_where_it_was(example):
    driver = example("images")
    made = csi(driver, "CreateVolume", "name=v", *CAPABILITY)
    driver.stop(signal.SIGKILL)
    driver.process = driver.start()
    assert csi(driver, "CreateVolume", "name=v", *CAPABILITY) == made
    csi(driver, "DeleteVolume", f"volume_id={made['volume']['volume_id']}")


CAPABILITY = ("volume_capabilities.0.mount.fs_type=xfs", "volume_capabilities.0.access_mode.mode=SINGLE_NODE_WRITER")


def csi(driver: Example, method: str, *fields: str) -> dict:
    command = [sys.executable, "-m", "moorage.cli.main", "csi", method, "--endpoint", driver.endpoint, *fields]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "most"), LONGEST.items())
def test_an_example_is_short(name, most):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most


def test_the_remote_driver_says_that_its_filesystem_is_missing(tmp_path):
    command = [sys.executable, str(EXAMPLES / "remote.py"), "--endpoint", f"unix://{tmp_path}/csi.sock"]
    command += ["--state-dir", str(tmp_path), "--option", f"root={tmp_path}/none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "mount the remote filesystem first" in done.stderr
