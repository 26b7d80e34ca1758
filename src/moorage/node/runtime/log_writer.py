"""The log file of one container.

With the standard library only: runs in the process whose children containers are.
Owns: the format, the size at which a file is put aside, and what happens on a full disk.
Start reading at: `ContainerLog`.
"""

import os
import time

_LONGEST_LINE = 16384
_ROTATE_BYTES = 10 * 1024 * 1024


class ContainerLog:
    """One log file in the format of container runtimes: time, stream, F(ull) or P(artial), text."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._partial = {"stdout": b"", "stderr": b""}
        self._fd = -1  # opened with the first line: most containers that run for long say little
        self._size = 0
        self._is_cut = False

    def add(self, stream: str, data: bytes) -> None:
        text = self._partial[stream] + data
        *lines, rest = text.split(b"\n")
        out = _lines(stream, b"F", lines) if lines else b""
        if rest and (not data or len(rest) > _LONGEST_LINE):
            out += _lines(stream, b"P", [rest])
            rest = b""
        self._partial[stream] = rest
        if out:
            self._write(out)

    def close(self) -> None:
        for stream, rest in self._partial.items():
            if rest:
                self._write(_lines(stream, b"P", [rest]))
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        try:
            if self._size > _ROTATE_BYTES:
                os.close(self._fd)
                self._fd, self._size = -1, 0
                os.replace(self._path, f"{self._path}.1")
            if self._fd < 0:
                self._fd = self._open()
                self._size = os.fstat(self._fd).st_size
            text = b"\n" + data if self._is_cut else data
            written = os.write(self._fd, text)
            self._is_cut = written < len(text)  # the disk is full: what comes next must not look like the rest of it
            self._size += written
        except OSError:
            return  # a full disk must not stop the container

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def _lines(stream: str, flag: bytes, lines: list[bytes]) -> bytes:
    """All of this moment: a time for each would cost more than the rest, where a program floods its log."""
    now = time.time_ns()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
    head = f"{stamp}.{now % 10**9:09d}Z {stream} ".encode() + flag + b" "
    return head + (b"\n" + head).join(lines) + b"\n"
