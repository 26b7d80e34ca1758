"""Pages of the documentation, run as they are printed.

Owns: reading the console blocks of a page, running their commands in one shell on a terminal of a given width, and
comparing the shape of what is printed with what the page shows. Numbers, ids and times are not compared, and `…` on the
page stands for any text. Only the page's directory /tmp/moor is replaced, by one of the test's own.
Start reading at: `commands_of`, `Terminal.run`, `differs`.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PLACES = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "UID"),
    (re.compile(r"\b[0-9a-f]{16,}\b"), "HASH"),
    (re.compile(r"\d+(\.\d+)?"), "9"),
)
_DONE = "-walk-done-"


@dataclass(frozen=True)
class Printed:
    """One command of a page, and what the page shows that it prints."""

    command: str
    shown: str


def commands_of(page: str) -> list[Printed]:
    """Return every command of a page's console blocks, in order."""
    found: list[Printed] = []
    for block in _BLOCK.findall((ROOT / page).read_text()):
        for part in re.split(r"^[$#] ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            found.append(Printed(command, shown))
    return found


def differs(shown: str, printed: str) -> str:
    """Return where the shape of a printed text leaves that of the page; empty if it does not.

    White space counts as one space: kubectl aligns columns and Moorage wraps prose as the terminal is wide.
    """
    words, text = _normal(shown).split(" "), _normal(printed)
    if not any(words):
        return ""
    pattern = "".join(".*?" if word == "…" else _of_word(word) + r"\ *" for word in words)
    if re.fullmatch(pattern, text, re.DOTALL):
        return ""
    return f"the page shows\n{shown}\nbut printed is\n{printed}"


def _of_word(word: str) -> str:
    return ".*?".join(re.escape(part) for part in word.split("…"))


def _normal(text: str) -> str:
    for pattern, place in _PLACES:
        text = pattern.sub(place, text)
    return " ".join(text.split())


class Terminal:
    """A shell on a terminal of so many columns, in the checkout, with `moorage` of this environment on its path."""

    def __init__(self, columns: int, home: Path) -> None:
        self.columns = columns
        self._home = home
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        environment = {**os.environ, "PATH": path, "PS1": "", "PS2": "", "TERM": "xterm", "NO_COLOR": "1"}
        environment.pop("COLUMNS", None)
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting"],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.run("stty -echo -onlcr")

    def run(self, command: str, seconds: float = 60) -> str:
        """Run a command to its end and return what it printed."""
        self.start(f"{command}\necho {_DONE}$?")
        text = self.until(f"{_DONE}\\d+\n", seconds)
        return re.sub(rf"\s*{_DONE}\d+\n$", "\n", text)

    def start(self, command: str) -> None:
        """Type a command, and do not wait for it."""
        os.write(self._master, f"{command}\n".replace("/tmp/moor", str(self._home)).encode())

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Return what is printed up to a pattern, as the page would show it."""
        read, ends_at = b"", time.monotonic() + seconds
        while True:
            text = (
                _ESCAPES.sub("", read.decode(errors="replace"))
                .replace("\r", "\n")
                .replace(str(self._home), "/tmp/moor")
            )
            if re.search(pattern, text):
                return text
            if time.monotonic() > ends_at:
                raise AssertionError(f"waited for {pattern!r}, and read\n{text}")
            if select.select([self._master], [], [], 0.1)[0]:
                read += os.read(self._master, 65536)

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        os.write(self._master, b"\x03")

    def close(self) -> None:
        os.killpg(self._shell.pid, signal.SIGHUP)
        self._shell.wait(10)
        os.close(self._master)
