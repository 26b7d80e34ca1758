"""A container's root directory: an overlay of the host's root with its volumes in it, in a mount namespace of its own.

With the standard library and `host.libc` only: used by the process whose children containers are.
Owns: the container's mounts, and the template that every container's mount namespace is a copy of.
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
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moorage.host import libc
from moorage.host.libc import AT_FDCWD
from moorage.node.runtime import namespaces
from moorage.node.runtime.launch import step

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
          ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2"))  # fmt: skip
_EMPTY = (("tmp", 0o1777), ("var/tmp", 0o1777), ("run", 0o755))  # what others leave there is no part of an image
_OPAQUE = "trusted.overlay.opaque"
_PROPAGATION = {"HostToContainer": namespaces.MS_SLAVE, "Bidirectional": namespaces.MS_SHARED}
_PLACE = "/proc"  # a directory that every root has, to mount on before the root is changed
_OF_THE_MACHINE = tuple(  # not of the container alone; a kernel need not have them all
    f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus", "fs", "scsi", "acpi", "asound", "dynamic_debug")
)
_HARMLESS = namespaces.MS_NOSUID | namespaces.MS_NODEV | namespaces.MS_NOEXEC
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


def enter(spec: dict[str, Any], template: Template) -> int:
    """Leave the host's mounts for those of a new container. Returns a descriptor of the container's /dev/null, opened
    before a volume could put something else there."""
    trees = [_tree_of(volume) for volume in spec["mounts"]]  # taken here, where the host's mounts are
    system = _tree_at("/sys")
    _set_attributes(system, namespaces.MS_PRIVATE, 0 if spec.get("privileged") else namespaces.ATTR_RDONLY)
    host_devices = _tree_at("/dev") if spec.get("privileged") else None
    with step("enter the template"):
        namespaces.set_namespace(template.namespace, namespaces.CLONE_NEWNS)
    kinds = namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS | (0 if spec.get("host_ipc") else namespaces.CLONE_NEWIPC)
    namespaces.unshare(kinds)
    place = f"{_PLACE}/place"
    namespaces.mount("moorage-root", place, "tmpfs", 0, f"mode=0755,size={spec.get('root_bytes', 1 << 30)}")
    os.chdir(place)
    for name in ("upper", "work", "root"):
        os.mkdir(name, 0o755)
    nodes = [_node_of(device, f"device{number}") for number, device in enumerate(spec.get("devices", []))]
    namespaces.mount("moorage-root", "root", "overlay", namespaces.MS_NODEV if host_devices is None else 0, _LAYERS)
    os.chdir("root")
    for name, mode in template.uncovered:
        flags = namespaces.MS_NOSUID | namespaces.MS_NODEV
        namespaces.mount("moorage-hidden", name, "tmpfs", flags, f"mode={mode:o}")
    _attach(system, "sys")
    devices = _devices(spec, host_devices)
    namespaces.take_root()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for volume, tree in zip(spec["mounts"], trees, strict=True):
        _place_volume(volume, tree)
    for volume, tree in zip(spec["mounts"], trees, strict=True):
        if volume.get("read_only_last"):  # once others have been mounted in it
            _forbid_writing(tree, volume["target"])
            os.close(tree)
    for device, node in zip(spec.get("devices", []), nodes, strict=True):
        with step(f"make device {device['path']}"):
            _place(node, device["path"])
    if spec.get("read_only_root") and host_devices is None:
        _forbid_writing(devices, "/dev")
    with step("set the host name"):
        socket.sethostname(str(spec["hostname"])[:63])
    return null


def finish(spec: dict[str, Any]) -> None:
    """Mount the container's view of processes, and make read-only what must be."""
    namespaces.mount("proc", "/proc", "proc", _HARMLESS)
    if not spec.get("privileged"):
        for path in _OF_THE_MACHINE:
            try:
                namespaces.mount(path, path, "", namespaces.MS_BIND)
            except FileNotFoundError:
                continue
            _make_read_only(path)
    if spec.get("cwd"):  # here, where it can be made for any user of the program
        with step(f"make directory {spec['cwd']}"):
            os.close(_make_directories(spec["cwd"]))
    if spec.get("read_only_root"):
        _make_read_only("/")


def _devices(spec: dict[str, Any], host_devices: int | None) -> int:
    """Mount /dev in the working directory, and return a descriptor of that mount, or -1 for the host's own."""
    if host_devices is not None:
        _set_attributes(host_devices, namespaces.MS_PRIVATE)
        _attach(host_devices, "dev")
        return -1
    devices = _own_devices()
    options = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    namespaces.mount("devpts", "dev/pts", "devpts", namespaces.MS_NOSUID | namespaces.MS_NOEXEC, options)
    if spec.get("read_only_root"):
        namespaces.mount("shm", "dev/shm", "tmpfs", _HARMLESS, "mode=1777,size=64m")
    return devices


def _become_template(hide: Sequence[str], made: int, done: int) -> None:
    try:
        os.umask(0)
        namespaces.unshare(namespaces.CLONE_NEWNS)
        namespaces.mount("none", "/", "", namespaces.MS_REC | namespaces.MS_PRIVATE)
        namespaces.mount("/", _PLACE, "", namespaces.MS_BIND)
        os.chdir(_PLACE)
        namespaces.take_root()
        namespaces.mount("moorage-furniture", _PLACE, "tmpfs", 0, "mode=0755")
        for name in ("furniture", "place"):
            os.mkdir(f"{_PLACE}/{name}", 0o755)
        os.chdir(f"{_PLACE}/furniture")
        os.write(made, json.dumps(_install_devices(hide)).encode())
        os.read(done, 1)
    except BaseException as error:
        os.write(made, str(error).encode() or repr(error).encode())
    finally:
        os._exit(0)


def _own_devices() -> int:
    """Mount `dev` on itself without MS_NODEV, which the rest of the root keeps because it is the host's. Return a
    descriptor of the mount."""
    with step("mount /dev"):
        devices = libc.open_tree("dev", recursive=False)
        libc.mount_setattr("", 0, clear=namespaces.ATTR_NODEV, at=devices)
        libc.move_mount(devices, "dev", follow_links=False)
    return devices


def _install_devices(hide: Sequence[str]) -> list[tuple[str, int]]:
    """In the working directory. Returns the places that must be mounted over instead."""
    for name in ("proc", "sys", "dev"):
        _hide(name, 0o755)  # what the host's root has there lies below mounts of the host, and no program may use it
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


def _set_attributes(tree: int, propagation: int, attributes: int = 0) -> None:
    """Set those of every mount in a tree that is mounted nowhere yet."""
    with step("set how mounts propagate"):
        libc.mount_setattr("", attributes, propagation=propagation, recursive=True, at=tree)


def _make_read_only(path: str) -> None:
    """Make the mount at a path read-only. The path must not depend on what a pod says."""
    with step(f"make {path} read-only"):
        libc.mount_setattr(path, namespaces.ATTR_RDONLY)


def _forbid_writing(tree: int, target: str, *, recursive: bool = False) -> None:
    """Make a volume read-only wherever it is mounted. Its path may lead elsewhere by now, through a link in another
    volume."""
    with step(f"make {target} read-only"):
        libc.mount_setattr("", namespaces.ATTR_RDONLY, recursive=recursive, at=tree)


def _attach(tree: int, path: str) -> None:
    """Mount a tree at a path of the new root, and close its descriptor."""
    with step(f"mount /{path}"):
        libc.move_mount(tree, path, follow_links=False)
        os.close(tree)


def open_inside(base: int, path: str, flags: int) -> int:
    """Open a path that a pod has named, as `O_PATH`. Links are followed, but none of /proc: those lead out of the
    container, to whatever this process has open, or to the root of a process of the host."""
    return libc.openat2(base, path, os.O_PATH | os.O_CLOEXEC | flags, libc.NO_MAGICLINKS)


def _make_directories(path: str) -> int:
    """Open the directory at a path. It and its parents are made if they are missing; what exists is not changed."""
    at = open_inside(AT_FDCWD, "/", os.O_DIRECTORY)
    for name in filter(None, path.split("/")):
        _ensure(os.mkdir, name, 0o755, dir_fd=at)
        below = open_inside(at, name, os.O_DIRECTORY)
        os.close(at)
        at = below
    return at


def _ensure(make: Callable[..., None], *arguments: object, dir_fd: int) -> None:
    """Make an entry, unless it exists. NFS mounted read-only returns EROFS for existing entries, too."""
    try:
        make(*arguments, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.EROFS):
            raise


def _tree_at(path: str) -> int:
    """Copy the mounts at a path and below it. The copy is mounted nowhere yet, and a peer of its origin."""
    with step(f"open volume {path}"):
        return libc.open_tree(path, recursive=True)


def _tree_of(volume: dict[str, Any]) -> int:
    """Copy a volume's mounts. Copied from the host's own, the copy can stay a peer of them."""
    source = volume["source"]
    if volume.get("sub_path"):
        tree = _sub_path(source, volume["sub_path"], volume.get("sub_path_mode", 0o750))
    else:
        tree = _tree_at(source)
    propagation = _PROPAGATION.get(volume.get("propagation", "None"), namespaces.MS_PRIVATE)
    _set_attributes(tree, propagation, 0 if volume.get("has_devices") else namespaces.ATTR_NODEV)
    return tree


def _sub_path(source: str, path: str, mode: int) -> int:
    """Copy the mounts at a path below a volume. Links may not lead out of it, and missing directories are made."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    with step(f"subPath {path!r} of volume {source} cannot be used"):
        if ".." in parts:
            raise OSError(errno.EINVAL, "it must not contain '..'")
        base = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for depth, name in enumerate(parts):
            above = _open_beneath(base, parts[:depth], os.O_DIRECTORY)
            _ensure(os.mkdir, name, mode, dir_fd=above)
            os.close(above)
        return libc.open_tree("", recursive=True, at=_open_beneath(base, parts, 0))


def _open_beneath(base: int, parts: list[str], flags: int) -> int:
    flags |= os.O_PATH | os.O_CLOEXEC
    try:
        return libc.openat2(base, "/".join(parts) or ".", flags, libc.BENEATH | libc.NO_MAGICLINKS)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(error.errno, "it leads out of the volume") from error
        raise


def _place_volume(volume: dict[str, Any], tree: int) -> None:
    target = volume["target"]
    if volume.get("read_only"):
        _forbid_writing(tree, target, recursive=bool(volume.get("recursive_read_only")))
    with step(f"mount volume at {target}"):
        _place(tree, target, keep=bool(volume.get("read_only_last")))


def _place(tree: int, target: str, *, keep: bool = False) -> None:
    """Mount what may be a directory or a file. Its descriptor is closed, unless it is to be kept."""
    directory, name = _make_directories(os.path.dirname(target)), os.path.basename(target) or "."
    try:  # not asked with faccessat: a server may refuse root that, and accept the pod's user all the same
        os.close(os.open(".", os.O_PATH | os.O_CLOEXEC, dir_fd=tree))
        _ensure(os.mkdir, name, 0o755, dir_fd=directory)
    except NotADirectoryError:
        _ensure(os.mknod, name, stat.S_IFREG | 0o644, dir_fd=directory)
    place = open_inside(directory, name, 0)
    libc.move_mount(tree, "", follow_links=False, at=place)
    for fd in (place, directory, *(() if keep else (tree,))):
        os.close(fd)


def _node_of(device: dict[str, Any], name: str) -> int:
    """Make the node of a block volume in the container's own layer, to be mounted where the pod wants it. That may be
    in another volume, where a node would stay when its number belongs to another device."""
    with step(f"make device {device['path']}"):
        os.mknod(name, stat.S_IFBLK | (0o440 if device.get("read_only") else 0o660), device["number"])
        if device.get("gid") is not None:
            os.chown(name, -1, device["gid"])
        return libc.open_tree(name, recursive=False)
