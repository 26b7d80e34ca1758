"""A whole stack on this machine, driven as a person would: `moorage up` in a process of its own, and kubectl."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from moorage.host import loop, mountinfo

KUBECTL = shutil.which("kubectl")


class Stack:
    """`moorage up` on a data directory; started, killed and started again at will."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.data_dir = data_dir
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None
        self.output = data_dir.parent / f"{data_dir.name}.out"

    def start(self) -> None:
        command = [sys.executable, "-m", "moorage.cli.main", "up", "--data-dir", str(self.data_dir), *self._flags]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self.wait(lambda: "Moorage is up" in self.output.read_text() or self.process.poll(), "the stack to come up", 60)
        assert self.process.poll() is None, self.output.read_text()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            assert self.process.wait(90) == 0, self.output.read_text()
        self.process = None

    def kill(self) -> None:
        """SIGKILL to the supervisor; the kernel takes its children along."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def children(self) -> dict[str, int]:
        """The processes that the supervisor started, by what they are."""
        assert self.process is not None
        found = {}
        for path in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            words = Path(f"/proc/{path}/cmdline").read_text().split("\0")
            name = "worker" if "moorage.cluster.node_process" in words else "plugin"
            found[name if name not in found else f"{name}-{path}"] = int(path)
        return found

    def kubectl(self, *words: str, check: bool = True, stdin: str = "") -> str:
        done = subprocess.run(
            [KUBECTL or "kubectl", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.data_dir / "kubeconfig")},
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def get(self, *words: str) -> dict:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def names(self, kind: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.get(kind)["items"]]

    def log_of(self, pod: str, text: str) -> str:
        """The pod's log, once it has said `text`."""
        log = ""

        def said() -> bool:
            nonlocal log
            log = self.kubectl("logs", pod, check=False)
            return text in log

        self.wait(said, f"pod {pod} to say {text!r}")
        return log

    def ready(self, pod: str) -> None:
        self.kubectl("wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=60s")

    def gone(self, *kinds: str) -> None:
        for kind in kinds:
            self.wait(lambda kind=kind: not self.names(kind), f"every {kind} to go")

    def wait(self, holds, what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                logs = "".join(f"\n== {p.name}\n{p.read_text()[-3000:]}" for p in (self.data_dir / "logs").glob("*"))
                raise AssertionError(f"waited for {what}\n{self.output.read_text()[-3000:]}{logs}")
            time.sleep(0.05)

    def left_behind(self) -> list[str]:
        below = [mount.target for mount in mountinfo.mounts_below(self.data_dir)]
        return below + [str(device.path) for device in loop.attached(self.data_dir)]


@pytest.fixture
def stack_at():
    """Makes stacks; whatever happens, they are stopped and release what they held."""
    stacks: list[Stack] = []
    # Beside the directory that it has by default, and a short path: sockets end at 107 characters.
    tmp_path = Path(tempfile.mkdtemp(prefix="moo-", dir="/var/lib"))

    def make(name: str, *flags: str) -> Stack:
        stack = Stack(tmp_path / name, *flags)
        stacks.append(stack)
        stack.start()
        return stack

    yield make
    for stack in stacks:
        if stack.process is not None and stack.process.poll() is not None:
            stack.start()  # a killed one is taken up again, so that it can clean up
        stack.stop()
        assert stack.left_behind() == []
    shutil.rmtree(tmp_path)
