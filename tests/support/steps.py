"""Taking the steps that an explanation prints, literally, as a person who pastes them into a shell."""

import asyncio
import os
import re
import sys
from pathlib import Path

from moorage.insight.explain import Story

_LOOKS = re.compile(r"^kubectl (-n \S+ )?(get|describe|logs|api-resources)\b")
_HARMS = re.compile(r"\b(delete|drain|--force)\b|taint .*=")
PATIENCE_S = 45.0


class Shell:
    """A shell of a person with a kubeconfig, in an empty directory."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path}
        self.folder = folder

    async def run(self, command: str) -> str:
        """Return what a command prints; it must succeed."""
        process = await self.start(command)
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, (command, output.decode())
        return output.decode()

    async def start(self, command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("bash", "-c", command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            cwd=self.folder,
        )


def is_command(step: str) -> bool:
    """Whether a step is to be pasted; others say in words what no single command does."""
    return step.startswith(("kubectl ", "moorage "))


def is_look(step: str) -> bool:
    """Whether a step changes nothing."""
    return bool(_LOOKS.match(step))


def check_marks(story: Story) -> None:
    """No first step can end or destroy anything, and every later one that does is marked."""
    assert not _HARMS.search(story.next_step), story.next_step
    for later in story.then:
        assert later.harm or not _HARMS.search(later.command), later
