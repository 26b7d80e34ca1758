"""Directory trees: copying them faithfully, removing them completely.

Owns: copies that keep hard links, extended attributes (ACLs are among them), holes, devices,
sockets, owners and times; removal that copes with btrfs subvolumes and immutable files.
May not touch: pools; it is given two paths.
Start reading at: `copy_tree`, `remove_tree`.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

from moorage.host import subvolumes
from moorage.host.extents import CopyProgress, clone_file, copy_sparse
from moorage.log import get_logger

log = get_logger(__name__)

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_STUCK_FLAGS = 0x10 | 0x20  # immutable, append-only


@dataclass(slots=True)
class TreeCopy:
    """What a tree copy did: `cloned` counts files that share their blocks, `copied` the others."""

    files: int = 0
    cloned: int = 0
    copied: int = 0
    done_bytes: int = 0


def copy_tree(source: str, target: str, progress: CopyProgress | None = None) -> TreeCopy:
    """Copy what is below `source` into the existing directory `target`, and its own attributes.

    Every file is fsynced by one syncfs at the end, which the caller does.
    """
    result = TreeCopy()
    links: dict[tuple[int, int], str] = {}
    total = 0 if progress is None else tree_bytes(source)
    _copy_directory(source, target, links, result, progress, total)
    return result


def tree_bytes(path: str) -> int:
    """What a tree takes on disk; a file with several names counts once."""
    seen: set[int] = set()
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(directory, name))
                if found.st_nlink == 1 or found.st_ino not in seen:
                    total += found.st_blocks * 512
                    if found.st_nlink > 1:
                        seen.add(found.st_ino)
    return total


def remove_tree(path: str) -> None:
    """Remove a file or tree whatever it holds; what is gone already is fine."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        _unlink(path)
        return
    if subvolumes.is_subvolume(path) and _destroy(path):
        return
    shutil.rmtree(path, onerror=_retry)


def _copy_directory(
    source: str,
    target: str,
    links: dict[tuple[int, int], str],
    result: TreeCopy,
    progress: CopyProgress | None,
    total: int,
) -> None:
    with os.scandir(source) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        old, new = os.path.join(source, name), os.path.join(target, name)
        try:
            found = os.lstat(old)
        except FileNotFoundError:  # it went while we looked; a live copy takes what is there
            continue
        key = (found.st_dev, found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(new, 0o700)
            _copy_directory(old, new, links, result, progress, total)
        elif found.st_nlink > 1 and key in links:
            os.link(links[key], new, follow_symlinks=False)
        else:
            _copy_one(old, new, found, result, progress, total)
            _copy_attributes(old, new, found)
            if found.st_nlink > 1:
                links[key] = new
    _copy_attributes(source, target, os.lstat(source))


def _copy_one(
    old: str, new: str, found: os.stat_result, result: TreeCopy, progress: CopyProgress | None, total: int
) -> None:
    mode = found.st_mode
    if stat.S_ISREG(mode):
        _copy_file(old, new, result)
        result.done_bytes += found.st_blocks * 512
        if progress is not None:
            progress(result.done_bytes, max(total, result.done_bytes))
    elif stat.S_ISLNK(mode):
        os.symlink(os.readlink(old), new)
    elif stat.S_ISSOCK(mode):
        make_socket(new)
    else:  # fifo, character or block device
        os.mknod(new, mode, found.st_rdev)


def _copy_file(old: str, new: str, result: TreeCopy) -> None:
    source = os.open(old, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        target = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            result.files += 1
            if os.fstat(source).st_size == 0 or clone_file(source, target):
                result.cloned += 1
            else:
                copy_sparse(source, target)
                result.copied += 1
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy_attributes(old: str, new: str, found: os.stat_result) -> None:
    """Owner first (it clears set-id bits), then the mode, attributes, and times last."""
    os.chown(new, found.st_uid, found.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        os.chmod(new, stat.S_IMODE(found.st_mode))
    for name in os.listxattr(old, follow_symlinks=False):
        try:
            os.setxattr(new, name, os.getxattr(old, name, follow_symlinks=False), follow_symlinks=False)
        except OSError as failed:
            # The security module of the target decides about its own labels.
            if not (name.startswith("security.") and failed.errno in (errno.EPERM, errno.EOPNOTSUPP)):
                raise
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


def make_socket(path: str) -> None:
    """A socket's file; bound through its directory, as the path may be longer than addresses go."""
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            short = f"/proc/self/fd/{directory}/.moorage-socket"
            made.bind(short)
        os.rename(short, path)
    finally:
        os.close(directory)


def _destroy(path: str) -> bool:
    """Remove a btrfs subvolume at once; False where it holds others or the call is refused."""
    try:
        subvolumes.destroy(path)
    except OSError as failed:
        log.debug("subvolume is removed file by file", path=path, error=str(failed))
        return False
    return True


def _retry(call: Callable[..., object], path: str, error: object) -> None:
    """What rmtree could not remove: nested subvolumes, immutable files, or things already gone."""
    failed = error[1] if isinstance(error, tuple) else error
    if isinstance(failed, FileNotFoundError):
        return
    if isinstance(failed, OSError) and failed.errno in (errno.EPERM, errno.EACCES):
        for stuck in (path, os.path.dirname(path)):
            _clear_flags(stuck)
        if os.path.isdir(path) and not os.path.islink(path):
            remove_tree(path)
        else:
            _unlink(path)
        return
    if isinstance(failed, BaseException):
        raise failed


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _clear_flags(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            flags = struct.unpack("=l", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8)))[0]
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("=l", flags & ~_STUCK_FLAGS))
        finally:
            os.close(fd)
