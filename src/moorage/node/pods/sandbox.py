"""A container's own view of the machine: namespaces, root, volumes, identity; then its program.

Runs in the container's first process, forked from the shim, with the standard library only.
Owns: everything between fork and exec.
Start reading at: `become`.

Nothing is ever mounted where the host could see it: the root is an overlay of the host's root whose writable layer is a
tmpfs that lives in the container's own mount namespace, so it goes when the container goes.
"""

import ctypes
import errno
import os
import signal
import stat
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MS_PRIVATE, _MS_SLAVE, _MS_SHARED = 1 << 18, 1 << 19, 1 << 20
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 437, 442
_OPEN_TREE_CLONE, _AT_RECURSIVE, _AT_EMPTY_PATH = 1, 0x8000, 0x1000
_MOVE_FROM_EMPTY = 0x4
_ATTR_RDONLY = 1
_RESOLVE_BENEATH, _RESOLVE_NO_MAGICLINKS = 0x08, 0x02
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# What container runtimes leave to a root that is not privileged.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
_LAST_CAPABILITY = 40
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p


def become(spec: dict[str, Any], out: int, err: int, fail: int) -> None:
    """Turn this process into the container; on any failure write why to `fail` and exit."""
    try:
        os.set_inheritable(fail, False)
        reset_signals()
        os.umask(0)
        join(spec.get("cgroups", []))
        trees = _enter_new_root(spec)
        _place_volumes(spec, trees)
        _finish_root(spec)
        _take_streams(out, err)
        _take_identity(spec)
        _execute(spec)
    except BaseException as error:
        os.write(fail, f"{error}".encode() or repr(error).encode())
    finally:
        os._exit(127)


def reset_signals() -> None:
    """A program must find every signal as a fresh one does; what is ignored now would stay ignored in it."""
    for number in range(1, 32):  # straight to the C library: Python's own way makes an enum of each
        _libc.signal(number, None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def join(cgroups: list[str]) -> None:
    """Move this process into cgroups, given as directories."""
    for directory in cgroups:
        with open(os.path.join(directory, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write("0")


def take_identity(spec: dict[str, Any]) -> None:
    """Groups, user, capabilities, and death with the parent."""
    _take_identity(spec)


def _enter_new_root(spec: dict[str, Any]) -> list[int]:
    kinds = CLONE_NEWNS | CLONE_NEWUTS | (0 if spec.get("host_ipc") else CLONE_NEWIPC)
    unshare(kinds)
    trees = [_open_tree(volume) for volume in spec["mounts"]]
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    os.chdir(spec["scratch"])
    _mount("moorage-root", ".", "tmpfs", 0, f"mode=0755,size={spec.get('root_bytes', 1 << 30)}")
    os.chdir(spec["scratch"])  # the directory that is on top now
    for name in ("upper", "work", "root"):
        os.mkdir(name, 0o755)
    _mount("moorage-root", "root", "overlay", 0, "lowerdir=/,upperdir=upper,workdir=work")
    os.chdir("root")
    _furnish(spec)
    _check(_libc.syscall(_SYS_PIVOT_ROOT.get(os.uname().machine, 41), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "leave the host's root")
    os.chdir("/")
    return trees


def _furnish(spec: dict[str, Any]) -> None:
    """proc, sys, dev, and empty places where the agent's own directories would be, all in the working directory."""
    for name in ("proc", "sys", "dev"):
        os.makedirs(name, 0o755, exist_ok=True)
    _mount("proc", "proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("/sys", "sys", "", _MS_BIND | _MS_REC)
    if not spec.get("privileged"):
        _read_only("sys", recursive=True)
    _mount("moorage-dev", "dev", "tmpfs", _MS_NOSUID, "mode=0755,size=65536k")
    if spec.get("privileged"):
        _mount("/dev", "dev", "", _MS_BIND | _MS_REC)
    else:
        for name in _DEVICES:
            os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            _mount(f"/dev/{name}", f"dev/{name}", "", _MS_BIND)
        for name in ("pts", "shm", "mqueue"):
            os.mkdir(f"dev/{name}", 0o755)
        _mount("devpts", "dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")
        _mount("shm", "dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=1777,size=65536k")
        for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
                             ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")):  # fmt: skip
            os.symlink(target, f"dev/{name}")
    for name in ("tmp", "var/tmp", "run"):  # what others leave there is no part of an image
        if os.path.isdir(name) and not os.path.islink(name):
            _mount(
                f"moorage-{name}", name, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777" if "tmp" in name else "mode=0755"
            )
    for path in spec.get("hide", []):
        inside = path.lstrip("/")
        if os.path.isdir(inside) and not os.path.islink(inside):
            _mount("moorage-hidden", inside, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")


def _open_tree(volume: dict[str, Any]) -> int:
    """A detached copy of a volume's mounts, taken before ours are made private, so that it can stay a peer."""
    source = volume["source"]
    if volume.get("sub_path"):
        base = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            entry = _sub_path(base, source, volume["sub_path"], volume.get("sub_path_mode", 0o750))
        finally:
            os.close(base)
    else:
        entry = os.open(source, os.O_PATH | os.O_CLOEXEC)
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | _AT_EMPTY_PATH | os.O_CLOEXEC
    tree: int = _libc.syscall(_SYS_OPEN_TREE, entry, b"", flags)
    _check(tree, f"open volume {source}")
    os.close(entry)
    return tree


def _sub_path(base: int, shown: str, path: str, mode: int) -> int:
    """Open a path below a volume; links may not lead out of it. Missing directories are made."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise OSError(f"subPath {path!r} must not contain '..'")
    try:
        for depth in range(1, len(parts)):
            _ensure_directory(base, "/".join(parts[:depth]), mode)
        try:
            return _beneath(base, "/".join(parts) or ".", os.O_PATH)
        except FileNotFoundError:
            _ensure_directory(base, "/".join(parts), mode)
        return _beneath(base, "/".join(parts), os.O_PATH)
    except OSError as error:
        why = "it leads out of the volume" if error.errno == errno.EXDEV else error.strerror
        raise OSError(f"subPath {path!r} of volume {shown} cannot be used: {why}") from error


def _ensure_directory(base: int, path: str, mode: int) -> None:
    try:
        os.close(_beneath(base, path, os.O_PATH | os.O_DIRECTORY))
    except FileNotFoundError:
        above, _, name = path.rpartition("/")
        parent = _beneath(base, above or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.mkdir(name, mode, dir_fd=parent)
        except FileExistsError:
            pass
        finally:
            os.close(parent)


def _beneath(base: int, path: str, flags: int) -> int:
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    found: int = _libc.syscall(_SYS_OPENAT2, base, path.encode(), how, len(how))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return found


def _place_volumes(spec: dict[str, Any], trees: list[int]) -> None:
    for volume, tree in zip(spec["mounts"], trees, strict=True):
        target = volume["target"]
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.makedirs(target, 0o755, exist_ok=True)
        elif not os.path.exists(target):
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        moved = _libc.syscall(_SYS_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), _MOVE_FROM_EMPTY)
        _check(moved, f"mount volume at {target}")
        os.close(tree)
        propagation = volume.get("propagation", "None")
        if propagation == "Bidirectional":
            _mount("none", target, "", _MS_REC | _MS_SHARED)
        else:
            _mount("none", target, "", _MS_REC | (_MS_SLAVE if propagation == "HostToContainer" else _MS_PRIVATE))
        if volume.get("read_only"):
            _read_only(target, recursive=bool(volume.get("recursive_read_only")))
    for device in spec.get("devices", []):
        path = device["path"]
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        if os.path.lexists(path):
            os.unlink(path)
        os.mknod(path, stat.S_IFBLK | (0o440 if device.get("read_only") else 0o660), device["number"])
        if device.get("gid") is not None:
            os.chown(path, -1, device["gid"])


def _finish_root(spec: dict[str, Any]) -> None:
    name = str(spec["hostname"])[:63].encode()
    _check(_libc.sethostname(name, len(name)), "set the host name")
    if spec.get("read_only_root"):
        _read_only("/", recursive=False)


def _take_streams(out: int, err: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in {null, out, err} - {0, 1, 2}:
        os.close(fd)


def _take_identity(spec: dict[str, Any]) -> None:
    os.umask(0o022)
    if not spec.get("privileged"):
        for capability in range(_LAST_CAPABILITY + 1):
            if capability not in _KEPT_CAPABILITIES:
                _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(spec.get("groups", []))
    os.setgid(spec.get("gid", 0))
    os.setuid(spec.get("uid", 0))
    if spec.get("no_new_privileges"):
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def _execute(spec: dict[str, Any]) -> None:
    cwd = spec.get("cwd") or "/"
    if not os.path.isdir(cwd):
        os.makedirs(cwd, 0o755, exist_ok=True)
    os.chdir(cwd)
    environment = {"PATH": _PATH, "HOME": "/", **spec["env"]}
    argv = spec["argv"]
    try:
        if "/" in argv[0]:
            os.execve(argv[0], argv, environment)
        else:
            os.execvpe(argv[0], argv, environment)
    except OSError as error:
        raise OSError(f"exec: {argv[0]!r}: {error.strerror}") from error


def _read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    done = _libc.syscall(_SYS_MOUNT_SETATTR, -100, os.fsencode(path), flags, attributes, len(attributes))
    _check(done, f"make {path} read-only")


def _mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    done = _libc.mount(
        os.fsencode(source), os.fsencode(target), fstype.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(done, f"mount {fstype or source} at {target}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
