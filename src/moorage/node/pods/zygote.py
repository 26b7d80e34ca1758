"""The small process from which containers are forked.

Run as a script with an isolated interpreter and the standard library only: it must start fast, stay small and have no
threads. It reads requests from a socket; each request forks a process that becomes a container's shim (`shim.py`) or
enters a running container (`enter.py`). It ends with the agent, whatever is still asked of it then; shims live on.
Owns: the request loop. May not touch: anything else of Moorage.
Start reading at: `main`.
"""

import array
import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import sys
from typing import Any

# The interpreter is started without site packages; only the package's own, empty parents are imported on the way.
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from moorage.node.pods import enter, kernel, rootfs, shim

_LARGEST = 1 << 18
_MOST_FDS = 4


def main(control_fd: int, hide: list[str]) -> None:
    """Serve requests until the other side is closed."""
    kernel.die_with_parent()  # what is still in the socket must not be started when the next agent looks around
    control = socket.socket(fileno=control_fd)
    template = rootfs.template(hide)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # shims keep it so
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    gc.disable()  # a collection in a fork would touch, and so copy, every page that it shares with this process
    gc.freeze()
    while True:
        data, fds = _receive(control)
        if not data:
            return
        request: dict[str, Any] = {}
        try:
            request = _read(data)  # here, where the pages that it touches are not copied
            if os.fork() == 0:
                _serve(control, request, fds, template)
        except (OSError, ValueError) as error:
            _answer(fds[-1], error)
        for fd in (*fds, *request.get("lock", ())):
            os.close(fd)


def _serve(control: socket.socket, request: dict[str, Any], fds: list[int], template: rootfs.Template) -> None:
    """In the child: never returns. The last descriptor is where the answer goes."""
    status = 1
    try:
        control.close()
        kernel.heed_children()
        os.setsid()
        if request["op"] == "run":
            status = shim.run(request["spec"], template, fds[-1], *request["lock"])
        else:
            status = enter.run(request, fds[:3], fds[-1])
    except BaseException as error:
        _answer(fds[-1], error)
    finally:
        os._exit(status)


def _read(data: bytes) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(data)
    if request["op"] == "run":
        lock = os.open(request["spec"], os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)  # until the shim has written its state: `Runtime.find` waits for it
        request |= {"spec": json.loads(shim.content_of(request["spec"])), "lock": [lock]}
    return request


def _answer(reply: int, error: BaseException) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(reply, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(_LARGEST, socket.CMSG_LEN(_MOST_FDS * size), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - (len(content) % size)])
    return data, list(fds)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
