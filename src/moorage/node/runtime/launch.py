"""From a fork to a program: the process in between, and the report of why it did not get there.

Runs in forks of the supervisor, with the standard library and `host.libc` only.
Owns: forking, naming the step that failed, and the form of the report.
Start reading at: `fork`.
"""

import json
import os
from collections.abc import Callable
from typing import NamedTuple

from moorage.node.runtime import namespaces

_FIRST_FD = 3  # after the streams
_FAILED = 127


class Unusable(Exception):
    """A specification that no process can be started with."""


class LaunchFailure(NamedTuple):
    """Why a process did not execute its program."""

    text: str
    is_created: bool  # whether the container existed by then


class step:  # noqa: N801: read as a statement
    """Name what is done in a block: an OSError raised in it carries this text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{self._text}: {error.strerror or error}") from error


class Report:
    """Where a new process writes why it failed. The descriptor is closed once its program runs."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_created = False

    def write(self, error: BaseException) -> None:
        text = error.strerror if isinstance(error, OSError) else None
        document = LaunchFailure(text or f"{type(error).__name__}: {error}", self.is_created)._asdict()
        os.write(self.fd, json.dumps(document).encode())


def fork(become: Callable[[Report], object], report: Report) -> int:
    """Return the pid of a new process that runs `become`, which executes a program or raises."""
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.close_range(_FIRST_FD, namespaces.LAST_FD, at_exec=True)
            become(report)
        except BaseException as error:
            report.write(error)
        finally:
            os._exit(_FAILED)
    return pid


def failure_from(data: bytes) -> LaunchFailure:
    """Return the failure that a process has reported."""
    try:
        return LaunchFailure(**json.loads(data))
    except (ValueError, TypeError):  # the process was killed while it wrote the report
        return LaunchFailure("the process that becomes the program ended early", True)
