"""The checks as tests in another project's suite, exactly as the how-to page prints it."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moorage.conformance.model import CheckResult, Exchange, FailureKind, Outcome
from moorage.conformance.pytest import explained

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "check-a-driver.md"


def test_the_suite_of_the_page_runs_the_checks_and_names_what_fails():
    conftest, module = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory(prefix="suite-") as directory:
        Path(directory, "conftest.py").write_text(conftest)
        Path(directory, "test_driver.py").write_text(module)
        Path(directory, "my_driver.py").write_text((ROOT / "examples" / "drivers" / "folders.py").read_text())
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--csi-only", "CreateVolume.*"]
        command += ["--csi-only", "NodePublishVolume.*", "-rs"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [(passed, skipped)] = re.findall(r"(\d+) passed, (\d+) skipped", done.stdout)
    assert int(passed) > 25
    assert int(skipped) > 5
    assert "the driver does not claim controller:CREATE_DELETE_SNAPSHOT" in done.stdout


def test_a_failed_check_is_explained_with_its_calls_and_commands():
    call = Exchange("Probe", "{}", "moorage csi Probe --endpoint unix:///run/csi.sock", "INTERNAL", "\x1b[5mno")
    result = CheckResult(
        "A.b", "Rule.", Outcome.FAILED, FailureKind.CRASH, "OK", "gone", calls=(call,), notes=("more",)
    )
    text = explained(result)
    assert "A.b (crash)" in text
    assert "came back INTERNAL \\u001b[5mno" in text
    assert "by hand:  moorage csi Probe" in text
