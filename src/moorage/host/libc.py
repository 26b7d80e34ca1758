"""The system calls that Python's standard library does not offer.

Owns: the ctypes declarations of mount, umount2, open_tree, mount_setattr, move_mount, openat2, statx, getdents64,
syncfs, sync_file_range and quotactl.
May not touch: policy; every function is one system call and raises OSError as `os` does.
"""

import ctypes
import os
import struct

# The same numbers on every architecture.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 437, 442
OPEN_TREE_CLONE, FROM_EMPTY_PATH, TO_FOLLOWS_LINKS, TO_EMPTY_PATH = 1, 4, 0x10, 0x40
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
AT_FDCWD = -100
_AT_AS_IT_IS = 0x100 | 0x800 | 0x4000  # no link followed, nothing mounted by asking, no server asked
_STATX = struct.Struct("=8xQ40xQ192x")  # of struct statx, the attributes and which of them are known
_STATX_ATTR_MOUNT_ROOT = 0x2000
_DIRENT, _DIRENTS_BYTES = struct.Struct("=8xqH"), 32 * 1024  # of struct dirent64; a type of one byte and a name follow
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH = 0x01, 0x02, 0x04, 0x08  # how openat2 resolves a path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.getdents64.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_libc.getdents64.restype = ctypes.c_ssize_t
_libc.quotactl.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)


def _check(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    _check(
        _libc.mount(os.fsencode(source), os.fsencode(target), fstype.encode(), flags, data.encode() or None),
        target,
    )


def umount2(target: str, flags: int) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), target)


def is_mount_root(path: str) -> bool | None:
    """Whether a mount is on top at this path; None where the kernel does not tell."""
    found = ctypes.create_string_buffer(_STATX.size)
    _check(_libc.statx(AT_FDCWD, os.fsencode(path), _AT_AS_IT_IS, 0, found), path)
    attributes, known = _STATX.unpack(found.raw)
    return bool(attributes & _STATX_ATTR_MOUNT_ROOT) if known & _STATX_ATTR_MOUNT_ROOT else None


def open_tree(source: str, *, recursive: bool, at: int = AT_FDCWD) -> int:
    """A copy of the mount at a path, or at a descriptor if the path is empty, that is mounted nowhere yet."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0) | (0 if source else AT_EMPTY_PATH)
    return _check(_libc.syscall(_SYS_OPEN_TREE, at, os.fsencode(source), flags), source)


def openat2(base: int, path: str, flags: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags, 0, resolve)
    return _check(_libc.syscall(_SYS_OPENAT2, base, os.fsencode(path), how, len(how)), path)


def getdents(fd: int) -> list[tuple[str, int]]:
    """The next names in an open directory, each with the file position after it; empty at the end."""
    buffer = ctypes.create_string_buffer(_DIRENTS_BYTES)
    while True:
        filled = _check(_libc.getdents64(fd, buffer, _DIRENTS_BYTES), f"fd {fd}")
        raw, at, found = buffer.raw[:filled], 0, []
        while at < filled:
            position, length = _DIRENT.unpack_from(raw, at)
            name = raw[at + _DIRENT.size + 1 : raw.index(b"\0", at + _DIRENT.size + 1)]
            if name not in (b".", b".."):
                found.append((os.fsdecode(name), position))
            at += length
        if found or not filled:
            return found


def mount_setattr(
    path: str, attributes: int, *, clear: int = 0, propagation: int = 0, recursive: bool = False, at: int = AT_FDCWD
) -> None:
    """Change the attributes of the mount at a path, or at a descriptor if the path is empty."""
    flags = (AT_RECURSIVE if recursive else 0) | (0 if path else AT_EMPTY_PATH)
    wanted = struct.pack("=QQQQ", attributes, clear, propagation, 0)
    done = _libc.syscall(_SYS_MOUNT_SETATTR, at, os.fsencode(path), flags, wanted, len(wanted))
    _check(done, path or f"fd {at}")


def move_mount(tree: int, target: str, *, follow_links: bool, at: int = AT_FDCWD) -> None:
    """Mount what `open_tree` has returned at a path, or at a descriptor if the path is empty."""
    flags = FROM_EMPTY_PATH | (TO_FOLLOWS_LINKS if follow_links else 0) | (0 if target else TO_EMPTY_PATH)
    moved = _libc.syscall(_SYS_MOVE_MOUNT, tree, b"", at, os.fsencode(target), flags)
    _check(moved, target or f"fd {at}")


def syncfs(fd: int) -> None:
    _check(_libc.syncfs(fd), f"fd {fd}")


def sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
    _check(_libc.sync_file_range(fd, offset, length, flags), f"fd {fd}")


def quotactl(command: int, device: str, ident: int, data: ctypes.Structure) -> None:
    _check(_libc.quotactl(command, os.fsencode(device), ident, ctypes.byref(data)), device)
