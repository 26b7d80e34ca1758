"""Rules for all tests: who needs root, what they may reach, and that a run leaves no loop device or mount behind."""

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

# Variables that lead a client to a cluster, a driver, a proxy or the caller's own files.
_REACHING = {"CSI_ENDPOINT", "KUBECONFIG", "NAMESPACE", "NODE_NAME", "POD_NAME", "POD_NAMESPACE"}
_REACHING_PREFIXES = ("DOCKER_", "KUBERNETES_", "MOORAGE_", "XDG_")


def reaches_the_caller(name: str) -> bool:
    """Whether an environment variable would let a test act on the caller's cluster, pool, proxy or home."""
    return name in _REACHING or name.startswith(_REACHING_PREFIXES) or name.lower().endswith("_proxy")


def pytest_configure() -> None:
    """Give the run an empty home and no way to the caller's clusters; subprocesses inherit that."""
    pip = Path.home() / ".config" / "pip" / "pip.conf"  # the image is built in tests, from the caller's package index
    if pip.exists():
        os.environ.setdefault("PIP_CONFIG_FILE", str(pip))
    for name in [name for name in os.environ if reaches_the_caller(name)]:
        del os.environ[name]
    home = tempfile.mkdtemp(prefix="moorage-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["HOME"] = home


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-root", action="store_true", help="a root test that cannot run fails instead of being skipped"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root") is not None:
            if config.getoption("--require-root"):
                raise pytest.UsageError(f"{item.nodeid} needs root, and --require-root was given")
            item.add_marker(pytest.mark.skip(reason="needs root, for real mounts and loop devices"))


@pytest.fixture(scope="session")
def cannot_run(request: pytest.FixtureRequest) -> Callable[[str], NoReturn]:
    """For root tests on a machine that lacks something: call it with the reason. A failure with --require-root."""
    return pytest.fail if request.config.getoption("--require-root") else pytest.skip


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Mounts and loop devices below this run's temporary directory must be gone when it ends."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    left = [mount for mount in mounts if mount.startswith(base + "/")]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if backing.read_text().startswith(base + "/"):
                left.append(f"/dev/{backing.parts[3]}")
        except OSError:
            continue  # released in between
    assert not left, f"left behind by the tests: {left}"


@pytest.fixture
def run_command():
    """Run a program to its end and return (exit code, output); no shell."""

    def run(*argv: str, timeout_s: float = 120, env: dict[str, str] | None = None) -> tuple[int, str]:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, **(env or {})}
        )
        return done.returncode, done.stdout + done.stderr

    return run
