"""For tests: an operation on a pool in a process that is killed at a chosen step.

Owns: the child process, and the meaning of its end.
Start reading at: `killed_at`.
"""

import os
import signal
from collections.abc import Callable

from moorage.storage import failpoints
from moorage.storage.model import PoolConfig
from moorage.storage.pool import Pool


def killed_at(config: PoolConfig, act: Callable[[Pool], object], step: int) -> bool:
    """Run it in a child that dies at this step; True when the child reached its end instead."""
    child = os.fork()
    if child == 0:
        try:
            left = step

            def hook(_: str) -> None:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

            failpoints.install(hook)
            act(Pool.open(config))
            os._exit(0)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status != 0:
        raise AssertionError(f"the operation failed before step {step}: status {status:#x}")
    return True
