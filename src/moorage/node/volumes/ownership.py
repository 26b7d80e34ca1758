"""Giving a volume's files to the pod's group.

Owns: the walk that changes group and mode. It works with directory descriptors and follows no link.
Start reading at: `apply_group`.
"""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int], None]

_READ_WRITE, _READ_ONLY, _DIRECTORY = 0o660, 0o440, 0o110
FIRST_REPORT_S, NEXT_REPORT_S = 30.0, 60.0


def has_group(root: Path, gid: int, read_only: bool = False) -> bool:
    """Whether the top directory already looks as the walk would leave it."""
    status = os.stat(root)
    bits = (_READ_ONLY if read_only else _READ_WRITE) | _DIRECTORY
    return status.st_gid == gid and status.st_mode & bits == bits and bool(status.st_mode & stat.S_ISGID)


def apply_group(
    root: Path,
    gid: int,
    *,
    only_on_root_mismatch: bool = False,
    read_only: bool = False,
    progress: Progress | None = None,
) -> int:
    """Give everything below `root` to `gid`, depth first, the top last, so an interrupted walk is noticed.

    Returns how many entries were looked at. `progress` hears the count after 30 s and then every minute.
    """
    if only_on_root_mismatch and has_group(root, gid, read_only):
        return 0
    walk = _Walk(gid, read_only, progress)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        walk.directory(top)
    finally:
        os.close(top)
    return walk.count


class _Walk:
    def __init__(self, gid: int, read_only: bool, progress: Progress | None) -> None:
        self._gid = gid
        self._bits = _READ_ONLY if read_only else _READ_WRITE
        self._progress = progress
        self._report_at = time.monotonic() + FIRST_REPORT_S
        self.count = 0

    def directory(self, fd: int) -> None:
        with os.scandir(fd) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_directory in names:
            try:
                if is_directory:
                    child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        self.directory(child)
                    finally:
                        os.close(child)
                else:
                    self._entry(fd, name)
            except FileNotFoundError:
                continue  # removed while we walked
        self._change(
            os.fstat(fd), _DIRECTORY | stat.S_ISGID, lambda gid: os.fchown(fd, -1, gid), lambda m: os.fchmod(fd, m)
        )

    def _entry(self, fd: int, name: str) -> None:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        is_link = stat.S_ISLNK(status.st_mode)
        self._change(
            status,
            0,
            lambda gid: os.chown(name, -1, gid, dir_fd=fd, follow_symlinks=False),
            None if is_link else lambda mode: os.chmod(name, mode, dir_fd=fd),
        )

    def _change(
        self,
        status: os.stat_result,
        extra: int,
        chown: Callable[[int], None],
        chmod: Callable[[int], None] | None,
    ) -> None:
        if status.st_gid != self._gid:
            chown(self._gid)
        mode = stat.S_IMODE(status.st_mode) | self._bits | extra
        if chmod is not None and (mode != stat.S_IMODE(status.st_mode) or status.st_gid != self._gid):
            chmod(mode)
        self.count += 1
        if self._progress is not None and time.monotonic() >= self._report_at:
            self._progress(self.count)
            self._report_at = time.monotonic() + NEXT_REPORT_S
