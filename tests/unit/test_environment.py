"""A test run must not reach the clusters, pools or files of the person who starts it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import reaches_the_caller

ROOT = Path(__file__).parents[2]

PROBE = """
import os, subprocess, sys
from tests.conftest import reaches_the_caller

def test_probe():
    assert [name for name in os.environ if reaches_the_caller(name)] == []
    command = [sys.executable, "-m", "moorage.cli.main", "explain", "pvc/a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "no Kubernetes API to talk to" in done.stderr
"""


def test_no_variable_leads_to_the_caller():
    assert [name for name in os.environ if reaches_the_caller(name)] == []
    assert not (Path.home() / ".kube").exists()


def test_a_run_ignores_the_kubeconfig_of_its_caller(tmp_path):
    """A kubeconfig that cannot be parsed names itself in the error of every command that reads it."""
    (tmp_path / ".kube").mkdir()
    for place in (tmp_path / "canary", tmp_path / ".kube" / "config"):
        place.write_text("canary: [")
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE)
    settings = [
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-p",
        "tests.conftest",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *settings, str(probe)],
        env={**os.environ, "KUBECONFIG": str(tmp_path / "canary"), "HOME": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:1"},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
