"""What the supervisor does with pipes, sockets and its own process; imports the standard library and host.libc alone.

Start reading at: `receive`.
"""

import array
import contextlib
import itertools
import json
import os
import signal
import socket
from typing import Any

from moorage.node.runtime import launch

LARGEST = 1 << 16
_MOST_FDS = 6  # three streams, a container's first process, a long request, where to answer


def pipes(count: int) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    try:
        made.extend(os.pipe() for _ in range(count))
    except OSError:
        for fd in itertools.chain(*made):
            os.close(fd)
        raise
    return made


def end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, launch.Unusable) else f"{type(error).__name__}: {error}"


def answer(reply: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the agent no longer waits for it
        os.write(reply, json.dumps(message).encode() + b"\n")


def receive(control: socket.socket) -> tuple[bytes | None, list[int]]:
    size = array.array("i").itemsize
    try:
        data, ancillary, _, _ = control.recvmsg(
            LARGEST, socket.CMSG_LEN(_MOST_FDS * size), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
    except BlockingIOError:
        return None, []
    except ConnectionError:
        return b"", []
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - (len(content) % size)])
    return data, list(fds)


def become_quiet() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.chdir("/")
