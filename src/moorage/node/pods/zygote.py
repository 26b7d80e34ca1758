"""The small process from which containers are forked.

Run as a script with an isolated interpreter and the standard library only: it must start fast, stay small and have no
threads. It reads requests from a socket; each request forks a process that becomes a container's shim (`shim.py`) or
enters a running container (`enter.py`). It ends when the agent closes the socket; shims live on.
Owns: the request loop. May not touch: anything else of Moorage.
Start reading at: `main`.
"""

import array
import gc
import json
import os
import signal
import socket
import sys

# The interpreter is started without site packages; only the package's own, empty parents are imported on the way.
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from moorage.node.pods import enter, shim

_LARGEST = 1 << 18
_MOST_FDS = 4


def main(control_fd: int) -> None:
    """Serve requests until the other side is closed."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    gc.disable()  # a collection in a fork would touch, and so copy, every page that it shares with this process
    gc.freeze()
    while True:
        data, fds = _receive(control)
        if not data:
            return
        if os.fork() == 0:
            _serve(control, json.loads(data), fds)
        for fd in fds:
            os.close(fd)


def _serve(control: socket.socket, request: dict[str, object], fds: list[int]) -> None:
    """In the child: never returns. The last descriptor is where the answer goes."""
    status = 1
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        if request["op"] == "run":
            status = shim.run(str(request["spec"]), fds[-1])
        else:
            status = enter.run(request, fds[:3], fds[-1])
    except BaseException as error:
        os.write(fds[-1], json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(status)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(_LARGEST, socket.CMSG_LEN(_MOST_FDS * size))
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - (len(content) % size)])
    return data, list(fds)


if __name__ == "__main__":
    main(int(sys.argv[1]))
