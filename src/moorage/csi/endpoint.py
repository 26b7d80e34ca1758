"""Addresses of CSI sockets: `unix:///run/csi.sock`, `unix:/run/csi.sock` or a plain path.

Owns: parsing an address, and finding out whether a process answers behind a socket file.
Start reading at: `socket_path_from`, `is_live`.
"""

import errno
import os
import socket
import stat
from pathlib import Path

from moorage.csi.errors import InvalidEndpoint

_LONGEST_SOCKET_PATH = 107  # sun_path is 108 bytes and ends with a NUL


def socket_path_from(endpoint: str) -> Path:
    """The socket's path; InvalidEndpoint says what is wrong with the address."""
    text = endpoint.strip()
    if text.startswith("unix:"):
        text = text.removeprefix("unix:")
        if text.startswith("//"):
            text = text.removeprefix("//")
    elif "://" in text:
        raise InvalidEndpoint(f"endpoint {endpoint!r}: only unix sockets are supported, as unix:///path/to/csi.sock")
    if not text.startswith("/"):
        raise InvalidEndpoint(f"endpoint {endpoint!r}: the socket's path must be absolute, as unix:///path/to/csi.sock")
    if "\0" in text or len(os.fsencode(text)) > _LONGEST_SOCKET_PATH:
        raise InvalidEndpoint(f"endpoint {endpoint!r}: a socket's path has at most {_LONGEST_SOCKET_PATH} bytes")
    return Path(text)


def grpc_target(path: Path) -> str:
    return f"unix:{path}"


def is_live(path: Path) -> bool:
    """Whether a process accepts connections at `path`; a file left by a dead one does not."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidEndpoint(f"{path} exists and is not a socket; it is left alone")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            # A full backlog (EAGAIN) belongs to a process that is alive, only busy.
            return error.errno in (errno.EAGAIN, errno.EINPROGRESS)
    return True
