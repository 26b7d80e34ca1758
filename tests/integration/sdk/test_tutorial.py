"""The driver of the tutorial "Your own driver", exactly as printed there."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "tutorial" / "your-own-driver.md"


@pytest.mark.root
def test_the_driver_of_the_tutorial_passes_every_check():
    program = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    with tempfile.TemporaryDirectory(prefix="tut-") as directory:
        script = Path(directory, "folders.py")
        script.write_text(program)
        endpoint = f"unix://{directory}/csi.sock"
        command = [sys.executable, str(script), "--endpoint", endpoint, "--state-dir", f"{directory}/state"]
        driver = subprocess.Popen(command)
        try:
            deadline = time.monotonic() + 30
            while not Path(directory, "csi.sock").exists():
                assert driver.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            check = [sys.executable, "-m", "moorage.cli.main", "check", "--endpoint", endpoint]
            done = subprocess.run(check, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stdout
        finally:
            driver.terminate()
            assert driver.wait(30) == 0
