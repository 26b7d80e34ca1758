"""Giving a volume's files to the pod's group.

Owns: the walk that changes group and mode. It works with descriptors and follows no link, not even one that a pod
puts in a file's place while we look.
Start reading at: `apply_group`.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from moorage.host.dir_walk import DirWalk, hold
from moorage.log import get_logger

log = get_logger(__name__)

OwnershipProgress = Callable[[int], None]

_READ_WRITE, _READ_ONLY, _DIRECTORY = 0o660, 0o440, 0o110
# A read-only filesystem, an export that maps root to another user, an immutable file, or another mount in the volume.
_REFUSALS = frozenset({errno.EPERM, errno.EACCES, errno.EROFS, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV})
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
    progress: OwnershipProgress | None = None,
) -> int:
    """Give everything below `root` to `gid`, depth first, the top last, so an interrupted walk is noticed.

    Returns how many entries were looked at. `progress` hears the count after 30 s and then every minute. What may not
    be changed, or looked into, stays as it is, and one line of the log tells of it: whether the pod can work with it is
    for the pod to find out.
    """
    if only_on_root_mismatch and has_group(root, gid, read_only):
        return 0
    walk = _Walk(gid, read_only, progress)
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError as error:
        walk.pass_over(root, error)
    else:
        try:
            walk.tree(top)
        finally:
            os.close(top)
    if walk.refused:
        text = "files of a volume stay with their group, for we may not change them"
        log.warning(text, path=str(root), group=gid, entries=walk.refused, first=walk.first_refusal)
    return walk.count


class _Walk:
    def __init__(self, gid: int, read_only: bool, progress: OwnershipProgress | None) -> None:
        self._gid = gid
        self._bits = _READ_ONLY if read_only else _READ_WRITE
        self._progress = progress
        self._report_at = time.monotonic() + FIRST_REPORT_S
        self.count = 0
        self.refused, self.first_refusal = 0, ""

    def tree(self, top: int) -> None:
        """Change everything below an open directory, then that. Names are read in batches, however many there are."""
        with DirWalk(top) as way:
            while True:
                name = None
                with self._passing_over(way.fd):
                    name = way.next_name()
                if name is not None:
                    with self._passing_over(way.fd, name):
                        self._visit(way, name)
                    continue
                with self._passing_over(way.fd):
                    self._change(way.fd, self._bits | _DIRECTORY | stat.S_ISGID)
                if way.depth == 0:
                    return
                way.up()

    def _visit(self, way: DirWalk, name: str) -> None:
        """Go into a directory; change anything else."""
        if stat.S_ISDIR(os.stat(name, dir_fd=way.fd, follow_symlinks=False).st_mode):
            with contextlib.suppress(NotADirectoryError):  # replaced while we walked
                way.down(name)
                return
        self._entry(way.fd, name)

    def _entry(self, directory: int, name: str) -> None:
        if self._is_right(os.stat(name, dir_fd=directory, follow_symlinks=False), self._bits):
            self._counted()  # as most are: one look is all that they cost
            return
        # The name may lead to something else by now: what is looked at again, and changed, is what we hold.
        with hold(directory, name) as fd:
            self._change(fd, self._bits)

    def _is_right(self, status: os.stat_result, bits: int) -> bool:
        return status.st_gid == self._gid and (status.st_mode & bits == bits or stat.S_ISLNK(status.st_mode))

    def _change(self, fd: int, bits: int) -> None:
        """Change what a descriptor holds: a link itself, never what it leads to."""
        status = os.fstat(fd)
        self._counted()
        if self._is_right(status, bits):
            return
        held, mode = f"/proc/self/fd/{fd}", stat.S_IMODE(status.st_mode)  # fchmod takes no descriptor of this kind
        try:
            if status.st_gid != self._gid:
                os.chown(held, -1, self._gid)
        finally:  # whatever became of the group: it may be one of the pod's already
            # What runs as its owner or group is given its mode once more: a new group has taken that away.
            if not stat.S_ISLNK(status.st_mode) and (mode | bits != mode or mode & (stat.S_ISUID | stat.S_ISGID)):
                os.chmod(held, mode | bits)

    @contextlib.contextmanager
    def _passing_over(self, directory: int, name: str = "") -> Iterator[None]:
        """One place in a directory, or the directory itself. What is gone has been removed while we walked."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self.pass_over(Path(os.readlink(f"/proc/self/fd/{directory}"), name), error)

    def pass_over(self, path: Path, error: OSError) -> None:
        """Note what we may not do; any other error is raised, with the path of what it came from."""
        if error.errno not in _REFUSALS:
            raise OSError(error.errno, error.strerror, str(path)) from error
        self.refused += 1
        self.first_refusal = self.first_refusal or f"{path}: {error.strerror}"

    def _counted(self) -> None:
        self.count += 1
        if self._progress is not None and time.monotonic() >= self._report_at:
            self._progress(self.count)
            self._report_at = time.monotonic() + NEXT_REPORT_S
