"""Ctrl-C: once stops in order, twice kills the pods, and in both cases nothing is left mounted."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from moorage.host import loop, mountinfo

pytestmark = pytest.mark.root

MOORAGE = [sys.executable, "-m", "moorage.cli.main"]
STUBBORN = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "stubborn"},
    "spec": {
        "terminationGracePeriodSeconds": 600,
        "containers": [
            {"name": "c", "image": "host", "command": ["sh", "-c", "trap '' TERM; while true; do sleep 0.2; done"]}
        ],
    },
}
WEB = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "host"}]}},
    },
}


def what_no_controller_runs_is_said_by_kubectl_and_explain(stack):
    environment = {**os.environ, "KUBECONFIG": str(stack.data_dir / "kubeconfig")}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": True, "env": environment}
    made = subprocess.run(["kubectl", "create", "-f", "-"], input=json.dumps(WEB), **how)
    assert made.stderr.startswith("Warning: Moorage runs no controller for deployments: this Deployment makes no pods")
    told = subprocess.run([*MOORAGE, "explain", "deployment/web"], **how).stdout
    assert told.startswith("deployment/web: no controller has acted on it. Moorage runs none for deployments")
    assert "create a pod like the template of web" in told


def test_a_second_ctrl_c_kills_pods_that_do_not_end(stack_at):
    stack = stack_at("one")
    what_no_controller_runs_is_said_by_kubectl_and_explain(stack)
    stack.kubectl("create", "-f", "-", stdin=json.dumps(STUBBORN))
    stack.ready("stubborn")
    stack.process.send_signal(signal.SIGINT)
    stack.wait(lambda: "Stopping" in stack.output.read_text(), "the stop to begin")
    stack.wait(lambda: "Ctrl-C again kills the pods" in stack.output.read_text(), "what a second Ctrl-C does")
    with pytest.raises(subprocess.TimeoutExpired):
        stack.process.wait(1)  # the pod has ten minutes
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(30) == 0, stack.output.read_text()
    assert "Killing the pods" in stack.output.read_text()
    stack.process = None  # nothing is to be started again
    assert stack.left_behind() == []


def test_ctrl_c_in_the_demo_says_so_and_leaves_nothing():
    with tempfile.TemporaryDirectory(prefix="moo-") as scratch:
        command = [*MOORAGE, "demo", "--brief"]
        playing = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": scratch}
        )
        assert playing.stdout is not None
        first = playing.stdout.readline()  # the stack is up, and the story has begun
        playing.send_signal(signal.SIGINT)
        said = (first + playing.communicate(timeout=60)[0]).decode()
        assert playing.returncode == 130, said
        assert "Interrupted. Everything that the demo made is gone." in said
        assert "Traceback" not in said
        assert list(Path(scratch).iterdir()) == []
        assert mountinfo.mounts_below(scratch) == []
        assert loop.attached(Path(scratch)) == []
