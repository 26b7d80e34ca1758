"""System tools, run without a shell.

Owns: starting a program with an argument list, its time limit, how much is kept of its output, and its error as an
exception.
May not touch: anything about what the program is for.
Start reading at: `run`.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Collection, Sequence

from moorage.host.errors import CommandFailed

_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"}
_KEPT_AT_EITHER_END = 16 * 1024  # of each output: a damaged image can make a repair tool print without end


def run(
    argv: Sequence[str | os.PathLike[str]], *, timeout_s: float = 120.0, accept: Collection[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run one program to its end; a status outside `accept` raises with what it said on stderr.

    Of a long output only the beginning and the end are kept.
    """
    words = [os.fspath(word) for word in argv]
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=_ENVIRONMENT, bufsize=0
        ) as process:
            try:
                said, complained = _outputs(process, time.monotonic() + timeout_s)
            except BaseException:
                process.kill()
                raise
    except FileNotFoundError as missing:
        raise CommandFailed(words, 127, f"{words[0]} is not installed on this machine") from missing
    except subprocess.TimeoutExpired as late:
        raise CommandFailed(words, 124, f"no result after {timeout_s:g} s, ended") from late
    if process.returncode not in accept:
        raise CommandFailed(words, process.returncode, complained or said)
    return subprocess.CompletedProcess(words, process.returncode, said, complained)


def _outputs(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str]:
    """Return what a program prints on stdout and on stderr, once it has ended. Raises TimeoutExpired."""
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout.fileno(): _Output(), process.stderr.fileno(): _Output()}
    with selectors.DefaultSelector() as open_ends:
        for descriptor in kept:
            open_ends.register(descriptor, selectors.EVENT_READ)
        while open_ends.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in open_ends.select(left_s):
                piece = os.read(key.fd, 65536)
                kept[key.fd].add(piece)
                if not piece:
                    open_ends.unregister(key.fd)
    process.wait(max(0.0, deadline - time.monotonic()))
    said, complained = (output.text() for output in kept.values())
    return said, complained


class _Output:
    """The beginning and the end of what a program prints."""

    def __init__(self) -> None:
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def add(self, piece: bytes) -> None:
        room = _KEPT_AT_EITHER_END - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        surplus = max(0, len(self._tail) - _KEPT_AT_EITHER_END)
        del self._tail[:surplus]
        self._left_out += surplus

    def text(self) -> str:
        gap = f"\n[{self._left_out} bytes are left out]\n".encode() if self._left_out else b""
        return bytes(self._head + gap + self._tail).decode(errors="replace")
