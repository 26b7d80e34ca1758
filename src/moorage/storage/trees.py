"""Copy directory trees faithfully, whatever is in them, also while they change.

Owns: copies that keep hard links, extended attributes (ACLs are among them), holes, devices, sockets, owners and times.
Both trees are walked by descriptors; see `host.dir_walk`.
Start reading at: `copy_tree`.
"""

import contextlib
import errno
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from moorage.host import dir_walk
from moorage.host.dir_walk import DirWalk, Moment, held_path, hold, opened, walk
from moorage.host.extents import CopyProgress, clone_file, copy_sparse
from moorage.host.safe_remove import remove_tree_in


@dataclass(slots=True)
class TreeCopy:
    """What a tree copy did: `cloned` counts files that share their blocks, `copied` the others."""

    files: int = 0
    cloned: int = 0
    copied: int = 0
    done_bytes: int = 0


def copy_tree(source: str, target: str, progress: CopyProgress | None = None) -> TreeCopy:
    """Copy what is below `source` into the existing directory `target`, and its own attributes.

    Nothing is fsynced: the caller does one syncfs. Raises MountInTheWay if something is mounted in the source.
    """
    total = 0 if progress is None else tree_bytes(source)
    with opened(source) as old, opened(target) as new:
        links = f".moorage-links-{secrets.token_hex(8)}"
        os.mkdir(links, 0o700, dir_fd=new)
        try:
            with opened(f"{target}/{links}") as index:
                done = _Copying(source, old, new, index, progress, total).run()
        finally:
            remove_tree_in(new, links, Path(target, links))
        _copy_attributes(old, held_path(new), os.fstat(old))
    return done


def tree_bytes(path: str) -> int:
    """What a tree takes on disk; a file with several names counts once."""
    with opened(path) as top:
        return sum(dir_walk.tree_bytes(top))


class _Copying:
    """One tree on its way into another.

    The first copy of a file with several names gets one more name in `index`, so that the others become links to it: a
    table in memory could be made as large as the attacker likes, and a path could be longer than any call takes.
    """

    def __init__(self, source: str, old: int, new: int, index: int, progress: CopyProgress | None, total: int) -> None:
        self._old = DirWalk(old, named=source)
        self._new = DirWalk(new)
        self._index = index
        self._progress = progress
        self._total = total
        self._done = TreeCopy()

    def run(self) -> TreeCopy:
        with self._old, self._new:
            for moment, name in walk(self._old):
                if moment is Moment.ENTERED:
                    os.mkdir(name, 0o700, dir_fd=self._new.fd)
                    self._new.down(name)
                elif moment is Moment.LEAVING:
                    _copy_attributes(self._old.fd, held_path(self._new.fd), os.fstat(self._old.fd))
                    self._new.up()
                else:
                    self._entry(name)
        return self._done

    def _entry(self, name: str) -> None:
        try:
            with hold(self._old.fd, name) as held:
                self._copy(held, name, os.fstat(held))
        except FileNotFoundError:  # removed since it was listed: a live copy takes what is there
            if not self._is_gone(name):
                raise
        except OSError as error:
            if error.errno == errno.EXDEV and error.filename == name:
                raise dir_walk.MountInTheWay(self._old.shown(name), "read") from error
            raise

    def _is_gone(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._old.fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def _copy(self, held: int, name: str, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):  # it took the place of a file just now; the next copy sees it
            return
        key = f"{found.st_dev:x}-{found.st_ino:x}"
        if found.st_nlink > 1 and self._is_linked(key, name):
            return
        self._make(held, name, found)
        _copy_attributes(held, f"{held_path(self._new.fd)}/{name}", found)
        if found.st_nlink > 1:
            with contextlib.suppress(FileExistsError):
                os.link(name, key, src_dir_fd=self._new.fd, dst_dir_fd=self._index, follow_symlinks=False)

    def _is_linked(self, key: str, name: str) -> bool:
        try:
            os.link(key, name, src_dir_fd=self._index, dst_dir_fd=self._new.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EMLINK:  # the name in the index was one too many: the rest is a second file
                raise
            os.unlink(key, dir_fd=self._index)
            return False
        return True

    def _make(self, held: int, name: str, found: os.stat_result) -> None:
        mode, target = found.st_mode, self._new.fd
        if stat.S_ISREG(mode):
            self._copy_file(held, name)
            self._done.done_bytes += found.st_blocks * 512
            if self._progress is not None:
                self._progress(self._done.done_bytes, max(self._total, self._done.done_bytes))
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink("", dir_fd=held), name, dir_fd=target)
        elif stat.S_ISSOCK(mode):
            make_socket(target, name)
        else:  # fifo, character or block device
            os.mknod(name, mode, found.st_rdev, dir_fd=target)

    def _copy_file(self, held: int, name: str) -> None:
        source = os.open(held_path(held), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            target = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._new.fd)
            try:
                self._done.files += 1
                if os.fstat(source).st_size == 0 or clone_file(source, target):
                    self._done.cloned += 1
                else:
                    copy_sparse(source, target)
                    self._done.copied += 1
            finally:
                os.close(target)
        finally:
            os.close(source)


def _copy_attributes(held: int, new: str, found: os.stat_result) -> None:
    """Owner first (it clears set-id bits), then the mode, attributes, and times last.

    `new` is below /proc/self/fd: either a descriptor itself, or one name in an open directory of the copy.
    """
    is_itself = os.path.basename(os.path.dirname(new)) == "fd"
    old = held_path(held)
    os.chown(new, found.st_uid, found.st_gid, follow_symlinks=is_itself)
    if not stat.S_ISLNK(found.st_mode):
        os.chmod(new, stat.S_IMODE(found.st_mode))
    for name in os.listxattr(old):
        try:
            os.setxattr(new, name, os.getxattr(old, name), follow_symlinks=is_itself)
        except OSError as failed:
            if failed.errno == errno.ENODATA:  # removed since it was listed
                continue
            # The security module of the target decides about its own labels.
            if not (name.startswith("security.") and failed.errno in (errno.EPERM, errno.EOPNOTSUPP)):
                raise
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=is_itself)


def make_socket(directory: int, name: str) -> None:
    """Make a socket's file in an open directory, whose path may be longer than a socket address."""
    short = f".moorage-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{held_path(directory)}/{short}")
    os.rename(short, name, src_dir_fd=directory, dst_dir_fd=directory)
