"""What can go wrong between Moorage and the kernel.

Owns: the errors that every module of `host` raises.
May not touch: pools, volumes, gRPC.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from moorage.errors import MoorageError


class HostError(MoorageError):
    """The kernel or a system tool refused; `errno` is set where a system call said why."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.errno = number


class CommandFailed(HostError):
    """A system tool ended with an error, was missing, or ran past its time."""

    def __init__(self, argv: Sequence[str], status: int, stderr: str) -> None:
        said = stderr.strip() or "it said nothing"
        super().__init__(f"{argv[0]} failed with status {status}: {said} (command: {' '.join(argv)})")
        self.argv = tuple(argv)
        self.status = status
        self.stderr = stderr


class NotEmpty(HostError):
    """A device that was to be formatted holds something."""

    code = "FAILED_PRECONDITION"
    retryable = False


class UnknownFilesystem(HostError):
    """A type of filesystem that Moorage does not make."""

    code = "INVALID_ARGUMENT"
    retryable = False


class FilesystemDamaged(HostError):
    """A filesystem needs a person; Moorage repairs nothing that could lose data."""

    retryable = False


class CannotGrow(HostError):
    """The filesystem cannot be grown in the state it is in."""

    code = "FAILED_PRECONDITION"


class LoopGone(HostError):
    """A loop device was detached from the file it was seen with. Its number may belong to another file by now."""

    code = "ABORTED"

    def __init__(self, device: Path, file: str) -> None:
        super().__init__(f"{device} shows {file} no more", errno.ENXIO)


class FreezeBroken(HostError):
    """A filesystem was thawed before the work under the freeze had ended."""


def host_error(what: str, path: str | Path, cause: OSError) -> HostError:
    """An OSError in words: what was tried, on what, and why it failed."""
    number = cause.errno or 0
    name = errno.errorcode.get(number, str(number))
    return HostError(f"{what} {path}: {os.strerror(number)} ({name})", number)
