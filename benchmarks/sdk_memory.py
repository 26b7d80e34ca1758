"""What a driver written with moorage.sdk takes of memory at rest. Wanted: at most 45 MiB.

Run: python benchmarks/sdk_memory.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import record
from plugin_common import rss_mib

DRIVER = Path(__file__).parents[1] / "examples" / "drivers" / "images.py"

with tempfile.TemporaryDirectory(prefix="sdk-") as directory:
    socket = Path(directory, "csi.sock")
    command = [sys.executable, str(DRIVER), "--endpoint", f"unix://{socket}", "--state-dir", f"{directory}/state"]
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not socket.exists() and driver.poll() is None:
            time.sleep(0.05)
        time.sleep(2)
        used = rss_mib(driver.pid)
    finally:
        driver.terminate()
        driver.wait(30)
record("memory of a driver of moorage.sdk at rest", f"{used:.1f} MiB", used <= 45)
print(f"the driver images.py at rest: {used:.1f} MiB (wanted <= 45)")
