"""The manifests as a cluster would get them, built by the real kubectl."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3] / "deploy"


@cache
def built(name: str) -> list[dict]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "kubernetes" / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
def manifests():
    """The objects of one kustomization, by its folder's name."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on the PATH")
    return built


@pytest.fixture
def deploy_folder() -> Path:
    return ROOT
