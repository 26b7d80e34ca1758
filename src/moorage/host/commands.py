"""System tools, run without a shell.

Owns: starting a program with an argument list, its time limit, and its error as an exception.
May not touch: anything about what the program is for.
Start reading at: `run`.
"""

import os
import subprocess
from collections.abc import Collection, Sequence

from moorage.host.errors import CommandFailed

_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"}


def run(
    argv: Sequence[str | os.PathLike[str]], *, timeout_s: float = 120.0, accept: Collection[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run one program to its end; a status outside `accept` raises with what it said on stderr."""
    words = [os.fspath(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=_ENVIRONMENT,
            check=False,
        )
    except FileNotFoundError as missing:
        raise CommandFailed(words, 127, f"{words[0]} is not installed on this machine") from missing
    except subprocess.TimeoutExpired as late:
        raise CommandFailed(words, 124, f"no result after {timeout_s:g} s, ended") from late
    if done.returncode not in accept:
        raise CommandFailed(words, done.returncode, done.stderr or done.stdout)
    return done
