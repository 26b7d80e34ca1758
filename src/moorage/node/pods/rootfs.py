"""A container's root directory: an overlay of the host's root with its volumes in it, in a mount namespace of its own.

Runs in the container's first process, before its program, with the standard library only.
Owns: the mounts of the container, and the template that every container's mount namespace is a copy of.
Start reading at: `enter`.

Nothing is ever mounted where the host could see it: the writable layer is a tmpfs that lives in the container's own
mount namespace, so it goes when the container goes. The namespace is copied from a template that holds nothing but the
host's root filesystem and the furniture: a copy of the host's own would cost more with each volume that is mounted, and
would hold all of them for a moment. The furniture is a layer between the host's root and the container's own, made once
for all containers: devices, and empty places where the host's files would show.
"""

import errno
import json
import os
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

from moorage.node.pods import kernel

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
          ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2"))  # fmt: skip
_EMPTY = (("tmp", 0o1777), ("var/tmp", 0o1777), ("run", 0o755))  # what others leave there is no part of an image
_OPAQUE = "trusted.overlay.opaque"
_PROPAGATION = {"HostToContainer": kernel.MS_SLAVE, "Bidirectional": kernel.MS_SHARED}
_PLACE = "/proc"  # a directory that every root has, to mount on before the root is changed
_LAYERS = f"lowerdir={_PLACE}/furniture:/,upperdir=upper,workdir=work"


class Template(NamedTuple):
    """What every container begins with."""

    namespace: int  # a descriptor
    uncovered: list[tuple[str, int]]  # places, with modes, that the furniture cannot hide and must be mounted over


def template(hide: Sequence[str]) -> Template:
    """A mount namespace with the host's root filesystem, the furniture, and no other mount. Beside what no image has,
    these directories of the host are hidden."""
    made_read, made_write = os.pipe()
    done_read, done_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done_write)
        _become_template(hide, made_write, done_read)
    os.close(made_write)
    os.close(done_read)
    try:
        made = os.read(made_read, 65536)
        if not made.startswith(b"["):
            raise OSError(made.decode(errors="replace") or "the template of containers was not made")
        uncovered = [(str(name), int(mode)) for name, mode in json.loads(made)]
        return Template(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), uncovered)
    finally:
        os.close(made_read)
        os.close(done_write)
        os.waitpid(pid, 0)


def enter(spec: dict[str, Any], template: Template) -> None:
    """Leave the host's mounts for those of a new container."""
    trees = [_tree_of(volume) for volume in spec["mounts"]]  # taken here, where the host's mounts are
    system = _tree_at("/sys")
    kernel.set_propagation(system, kernel.MS_PRIVATE, read_only=not spec.get("privileged"))
    devices = _tree_at("/dev") if spec.get("privileged") else -1
    kernel.set_namespace(template.namespace, kernel.CLONE_NEWNS)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | (0 if spec.get("host_ipc") else kernel.CLONE_NEWIPC))
    place = f"{_PLACE}/place"
    kernel.mount("moorage-root", place, "tmpfs", 0, f"mode=0755,size={spec.get('root_bytes', 1 << 30)}")
    os.chdir(place)
    for name in ("upper", "work", "root"):
        os.mkdir(name, 0o755)
    kernel.mount("moorage-root", "root", "overlay", 0, _LAYERS)
    os.chdir("root")
    for name, mode in template.uncovered:
        kernel.mount("moorage-hidden", name, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode={mode:o}")
    kernel.attach(system, "sys")
    if devices >= 0:
        kernel.set_propagation(devices, kernel.MS_PRIVATE)
        kernel.attach(devices, "dev")
    else:
        options = "newinstance,ptmxmode=0666,mode=0620,gid=5"
        kernel.mount("devpts", "dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    kernel.take_root()
    _place_volumes(spec, trees)
    kernel.set_host_name(str(spec["hostname"])[:63].encode())


def finish(spec: dict[str, Any]) -> None:
    """Its view of processes, and the last word on writing."""
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    cwd = spec.get("cwd")
    if cwd and not os.path.isdir(cwd):  # here, where it may be made whoever the program runs as
        os.makedirs(cwd, 0o755, exist_ok=True)
    if spec.get("read_only_root"):
        kernel.make_read_only("/", recursive=False)


def _become_template(hide: Sequence[str], made: int, done: int) -> None:
    try:
        os.umask(0)
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("/", _PLACE, "", kernel.MS_BIND)
        os.chdir(_PLACE)
        kernel.take_root()
        kernel.mount("moorage-furniture", _PLACE, "tmpfs", 0, "mode=0755")
        for name in ("furniture", "place"):
            os.mkdir(f"{_PLACE}/{name}", 0o755)
        os.chdir(f"{_PLACE}/furniture")
        os.write(made, json.dumps(_furnish(hide)).encode())
        os.read(done, 1)
    except BaseException as error:
        os.write(made, str(error).encode() or repr(error).encode())
    finally:
        os._exit(0)


def _furnish(hide: Sequence[str]) -> list[tuple[str, int]]:
    """In the working directory. Returns the places that must be mounted over instead."""
    for name in ("proc", "sys", "dev"):
        os.mkdir(name, 0o755)
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    for name, mode in (("pts", 0o755), ("shm", 0o1777), ("mqueue", 0o755)):
        os.mkdir(f"dev/{name}", mode)
    for name, target in _LINKS:
        os.symlink(target, f"dev/{name}")
    places = [(name, mode) for name, mode in _EMPTY if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    emptied: list[str] = []
    left = []
    wanted = [
        (os.path.realpath(f"/{name}").lstrip("/"), mode) for name, mode in (*places, *((one, 0o755) for one in hide))
    ]
    for inside, mode in sorted(wanted):  # what lies in another one comes after it
        if any(inside == one or inside.startswith(f"{one}/") for one in emptied):
            continue
        if not _hide(inside, mode):
            left.append((inside, mode))
        emptied.append(inside)
    return left


def _hide(inside: str, mode: int) -> bool:
    """An empty directory that hides the host's of the same name, also one that is made later; False where the layer
    cannot say that it does."""
    above = ""
    for part in inside.split("/")[:-1]:
        above = f"{above}{part}"
        if not os.path.isdir(above):
            os.mkdir(above, 0o755)
            if os.path.isdir(f"/{above}"):
                like = os.stat(f"/{above}")
                os.chmod(above, stat.S_IMODE(like.st_mode))
                os.chown(above, like.st_uid, like.st_gid)
        above += "/"
    os.mkdir(inside, mode)
    try:
        os.setxattr(inside, _OPAQUE, b"y")
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    return True


def _tree_at(path: str) -> int:
    entry = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return kernel.open_tree(entry, path)
    finally:
        os.close(entry)


def _tree_of(volume: dict[str, Any]) -> int:
    """A detached copy of a volume's mounts. Copied from the host's own, it can stay a peer of them."""
    source = volume["source"]
    if not volume.get("sub_path"):
        tree = _tree_at(source)
    else:
        base = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        entry = -1
        try:
            entry = _sub_path(base, source, volume["sub_path"], volume.get("sub_path_mode", 0o750))
            tree = kernel.open_tree(entry, source)
        finally:
            os.close(base)
            if entry >= 0:
                os.close(entry)
    kernel.set_propagation(tree, _PROPAGATION.get(volume.get("propagation", "None"), kernel.MS_PRIVATE))
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
            return kernel.open_beneath(base, "/".join(parts) or ".", os.O_PATH)
        except FileNotFoundError:
            _ensure_directory(base, "/".join(parts), mode)
        return kernel.open_beneath(base, "/".join(parts), os.O_PATH)
    except OSError as error:
        why = "it leads out of the volume" if error.errno == errno.EXDEV else error.strerror
        raise OSError(f"subPath {path!r} of volume {shown} cannot be used: {why}") from error


def _ensure_directory(base: int, path: str, mode: int) -> None:
    try:
        os.close(kernel.open_beneath(base, path, os.O_PATH | os.O_DIRECTORY))
    except FileNotFoundError:
        above, _, name = path.rpartition("/")
        parent = kernel.open_beneath(base, above or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.mkdir(name, mode, dir_fd=parent)
        except FileExistsError:
            pass
        finally:
            os.close(parent)


def _place_volumes(spec: dict[str, Any], trees: list[int]) -> None:
    for volume, tree in zip(spec["mounts"], trees, strict=True):
        target = volume["target"]
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.makedirs(target, 0o755, exist_ok=True)
        elif not os.path.exists(target):
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        kernel.attach(tree, target)
        if volume.get("read_only"):
            kernel.make_read_only(target, recursive=bool(volume.get("recursive_read_only")))
    for device in spec.get("devices", []):
        path = device["path"]
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        if os.path.lexists(path):
            os.unlink(path)
        os.mknod(path, stat.S_IFBLK | (0o440 if device.get("read_only") else 0o660), device["number"])
        if device.get("gid") is not None:
            os.chown(path, -1, device["gid"])
