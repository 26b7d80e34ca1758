"""A container's root directory: an overlay of the host's root with its volumes in it, in a mount namespace of its own.

With the standard library and `host.libc` only: used by the process whose children containers are.
Owns: the plan of the container's mounts, and the template that every container's mount namespace is a copy of.
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
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from moorage.host import libc
from moorage.host.libc import AT_FDCWD
from moorage.node.runtime import namespaces
from moorage.node.runtime.launch import Plan, Result, Unusable, errors

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
_TO_EMPTY_PATH = 0x40  # of move_mount
_ATTRIBUTES = struct.Struct("=QQQQ")  # to set, to clear, propagation, and a user namespace
_HOW = struct.Struct("=QQQ")  # of openat2: flags, mode, what a path may lead through
_MISSING, _IS_FILE = errors(errno.ENOENT), errors(errno.ENOTDIR)
_EXISTS = errors(errno.EEXIST, errno.EROFS)  # NFS mounted read-only says so of what is there, too; the next step tells
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


def enter(plan: Plan, spec: dict[str, Any], template: Template) -> Result:
    """Leave the host's mounts for those of a new container. The process has the `template`. Returns the container's
    /dev/null, opened before a volume could put something else there."""
    trees = [_tree_of(plan, volume) for volume in spec["mounts"]]  # taken here, where the host's mounts are
    system = _tree_at(plan, "/sys")
    _set_attributes(plan, system, namespaces.MS_PRIVATE, 0 if spec.get("privileged") else namespaces.ATTR_RDONLY)
    host_devices = _tree_at(plan, "/dev") if spec.get("privileged") else None
    plan.do("setns", plan.at["template"], namespaces.CLONE_NEWNS, text="enter the template")
    kinds = namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS | (0 if spec.get("host_ipc") else namespaces.CLONE_NEWIPC)
    plan.do("unshare", kinds, text="unshare")
    place = f"{_PLACE}/place"
    _mount(plan, "moorage-root", place, "tmpfs", 0, f"mode=0755,size={spec.get('root_bytes', 1 << 30)}")
    _change_to(plan, place)
    for name in ("upper", "work", "root"):
        plan.do("mkdirat", AT_FDCWD, name, 0o755, text=f"make {name}")
    nodes = [_node_of(plan, device, f"device{number}") for number, device in enumerate(spec.get("devices", []))]
    _mount(plan, "moorage-root", "root", "overlay", namespaces.MS_NODEV if host_devices is None else 0, _LAYERS)
    _change_to(plan, "root")
    for name, mode in template.uncovered:
        _mount(plan, "moorage-hidden", name, "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, f"mode={mode:o}")
    _attach(plan, system, AT_FDCWD, "sys", text="mount /sys")
    if host_devices is not None:
        _set_attributes(plan, host_devices, namespaces.MS_PRIVATE)
        _attach(plan, host_devices, AT_FDCWD, "dev", text="mount /dev")
    else:
        devices = _own_devices(plan)
        options = "newinstance,ptmxmode=0666,mode=0620,gid=5"
        _mount(plan, "devpts", "dev/pts", "devpts", namespaces.MS_NOSUID | namespaces.MS_NOEXEC, options)
        if spec.get("read_only_root"):
            _mount(plan, "shm", "dev/shm", "tmpfs", _HARMLESS, "mode=1777,size=64m")
    plan.do("pivot_root", ".", ".", text="pivot_root")
    plan.do("umount2", ".", namespaces.MNT_DETACH, text="leave the host's root")
    _change_to(plan, "/")
    null = plan.get("openat", AT_FDCWD, os.devnull, os.O_RDONLY | os.O_CLOEXEC, 0, text=f"open {os.devnull}")
    for volume, tree in zip(spec["mounts"], trees, strict=True):
        _place_volume(plan, volume, tree)
    for volume, tree in zip(spec["mounts"], trees, strict=True):
        if volume.get("read_only_last"):  # once others have been mounted in it
            _forbid_writing(plan, tree, volume["target"])
            plan.do("close", tree, text="close a volume")
    for device, node in zip(spec.get("devices", []), nodes, strict=True):
        _place(plan, node, device["path"], f"make device {device['path']}")
    if spec.get("read_only_root") and host_devices is None:
        _forbid_writing(plan, devices, "/dev")
    name = str(spec["hostname"])[:63]
    plan.do("sethostname", name, len(os.fsencode(name)), text="set the host name")
    return null


def finish(plan: Plan, spec: dict[str, Any]) -> None:
    """Its view of processes, and the last word on writing."""
    _mount(plan, "proc", "/proc", "proc", _HARMLESS)
    if not spec.get("privileged"):
        for path in _OF_THE_MACHINE:
            plan.do("mount", path, path, 0, namespaces.MS_BIND, 0, accept=_MISSING, skip=1, text=f"keep {path}")
            _make_read_only(plan, path)
    if spec.get("cwd"):  # here, where it may be made whoever the program runs as
        plan.do("close", _make_directories(plan, spec["cwd"]), text=f"make directory {spec['cwd']}")
    if spec.get("read_only_root"):
        _make_read_only(plan, "/")


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
        os.write(made, json.dumps(_furnish(hide)).encode())
        os.read(done, 1)
    except BaseException as error:
        os.write(made, str(error).encode() or repr(error).encode())
    finally:
        os._exit(0)


def _own_devices(plan: Plan) -> Result:
    """The same directory as a mount of its own, where device nodes are of use: in the rest of the root, which is the
    host's, they are not. Its descriptor stays open."""
    devices = plan.get("open_tree", AT_FDCWD, "dev", libc.OPEN_TREE_CLONE | os.O_CLOEXEC, text="open /dev")
    wanted = plan.data(_ATTRIBUTES.pack(0, namespaces.ATTR_NODEV, 0, 0))
    plan.do("mount_setattr", devices, "", libc.AT_EMPTY_PATH, wanted, _ATTRIBUTES.size, text="allow devices in /dev")
    _attach(plan, devices, AT_FDCWD, "dev", text="mount /dev", keep=True)
    return devices


def _furnish(hide: Sequence[str]) -> list[tuple[str, int]]:
    """In the working directory. Returns the places that must be mounted over instead."""
    for name in ("proc", "sys", "dev"):
        _hide(name, 0o755)  # what the host's root has there lies below mounts of the host, and is for nobody
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


def _mount(plan: Plan, source: str, target: str, fstype: str, flags: int, options: str = "") -> None:
    plan.do("mount", source, target, fstype, flags, options or 0, text=f"mount {fstype} at {target}")


def _change_to(plan: Plan, directory: str) -> None:
    plan.do("chdir", directory, text=f"change to {directory}")


def _set_attributes(plan: Plan, tree: Result, propagation: int, attributes: int = 0) -> None:
    """Of every mount in a tree that is mounted nowhere yet."""
    wanted = plan.data(_ATTRIBUTES.pack(attributes, 0, propagation, 0))
    flags = libc.AT_EMPTY_PATH | libc.AT_RECURSIVE
    plan.do("mount_setattr", tree, "", flags, wanted, _ATTRIBUTES.size, text="set how mounts propagate")


def _make_read_only(plan: Plan, path: str) -> None:
    """A mount at a path that no pod has a say in."""
    wanted = plan.data(_ATTRIBUTES.pack(namespaces.ATTR_RDONLY, 0, 0, 0))
    plan.do("mount_setattr", AT_FDCWD, path, 0, wanted, _ATTRIBUTES.size, text=f"make {path} read-only")


def _forbid_writing(plan: Plan, tree: Result, target: str, *, recursive: bool = False) -> None:
    """To a volume, wherever it is mounted: its path may lead elsewhere by now, through a link in another volume."""
    wanted = plan.data(_ATTRIBUTES.pack(namespaces.ATTR_RDONLY, 0, 0, 0))
    flags = libc.AT_EMPTY_PATH | (libc.AT_RECURSIVE if recursive else 0)
    plan.do("mount_setattr", tree, "", flags, wanted, _ATTRIBUTES.size, text=f"make {target} read-only")


def _attach(plan: Plan, tree: Result, at: int | Result, path: str = "", *, text: str, keep: bool = False) -> None:
    """Mount a tree at a path, or at a descriptor. Its own descriptor is closed, unless it is to be kept."""
    flags = libc.FROM_EMPTY_PATH | (0 if path else _TO_EMPTY_PATH)
    plan.do("move_mount", tree, "", at, path, flags, text=text)
    if not keep:
        plan.do("close", tree, text=text)


def open_inside(plan: Plan, base: int | Result, path: str, flags: int, text: str) -> Result:
    """What a pod has named, as `O_PATH`. Links are followed, but none of /proc: those lead out of the container, to
    whatever this process has open, or to the root of a process of the host."""
    how = _HOW.pack(os.O_PATH | os.O_CLOEXEC | flags, 0, libc.NO_MAGICLINKS)
    return plan.get("openat2", base, path, plan.data(how), _HOW.size, text=text)


def _make_directories(plan: Plan, path: str) -> Result:
    """The directory at a path, made if it is missing, as those above it are. What is there stays as it is."""
    at = open_inside(plan, AT_FDCWD, "/", os.O_DIRECTORY, "open /")
    text = f"make directory {path}"  # one for all: each part of the path on its own would take the square of its length
    for name in filter(None, path.split("/")):
        plan.do("mkdirat", at, name, 0o755, accept=_EXISTS, text=text)
        below = open_inside(plan, at, name, os.O_DIRECTORY, text)
        plan.do("close", at, text=text)
        at = below
    return at


def _tree_at(plan: Plan, path: str) -> Result:
    """A copy of the mounts at a path and below it, mounted nowhere yet; a peer of what it was copied from."""
    flags = libc.OPEN_TREE_CLONE | os.O_CLOEXEC | libc.AT_RECURSIVE
    return plan.get("open_tree", AT_FDCWD, path, flags, text=f"open volume {path}")


def _tree_of(plan: Plan, volume: dict[str, Any]) -> Result:
    """A copy of a volume's mounts. Copied from the host's own, it can stay a peer of them."""
    source = volume["source"]
    if volume.get("sub_path"):
        tree = _sub_path(plan, source, volume["sub_path"], volume.get("sub_path_mode", 0o750))
    else:
        tree = _tree_at(plan, source)
    propagation = _PROPAGATION.get(volume.get("propagation", "None"), namespaces.MS_PRIVATE)
    _set_attributes(plan, tree, propagation, 0 if volume.get("has_devices") else namespaces.ATTR_NODEV)
    return tree


def _sub_path(plan: Plan, source: str, path: str, mode: int) -> Result:
    """What is at a path below a volume; links may not lead out of it. Missing directories are made."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Unusable(f"subPath {path!r} must not contain '..'")
    plan.words[errno.EXDEV] = "it leads out of the volume"
    text = f"subPath {path!r} of volume {source} cannot be used"
    base = plan.get("openat", AT_FDCWD, source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, text=text)
    for depth, name in enumerate(parts):
        above = _open_beneath(plan, base, parts[:depth], os.O_DIRECTORY, text)
        plan.do("mkdirat", above, name, mode, accept=_EXISTS, text=text)
        plan.do("close", above, text=text)
    entry = _open_beneath(plan, base, parts, 0, text)
    flags = libc.OPEN_TREE_CLONE | os.O_CLOEXEC | libc.AT_RECURSIVE | libc.AT_EMPTY_PATH
    return plan.get("open_tree", entry, "", flags, text=text)


def _open_beneath(plan: Plan, base: Result, parts: list[str], flags: int, text: str) -> Result:
    how = _HOW.pack(os.O_PATH | os.O_CLOEXEC | flags, 0, libc.BENEATH | libc.NO_MAGICLINKS)
    return plan.get("openat2", base, "/".join(parts) or ".", plan.data(how), _HOW.size, text=text)


def _place_volume(plan: Plan, volume: dict[str, Any], tree: Result) -> None:
    target = volume["target"]
    if volume.get("read_only"):
        _forbid_writing(plan, tree, target, recursive=bool(volume.get("recursive_read_only")))
    _place(plan, tree, target, f"mount volume at {target}", keep=bool(volume.get("read_only_last")))


def _place(plan: Plan, tree: Result, target: str, text: str, *, keep: bool = False) -> None:
    """Mount what may be a directory or a file."""
    directory, name = _make_directories(plan, os.path.dirname(target)), os.path.basename(target) or "."
    # Not asked with faccessat: a server may refuse root that, and take the pod's user all the same.
    plan.do("openat", tree, ".", os.O_PATH | os.O_CLOEXEC, 0, accept=_IS_FILE, skip=1, text=text)
    plan.do("mkdirat", directory, name, 0o755, accept=_EXISTS, text=text)
    plan.do("mknodat", directory, name, stat.S_IFREG | 0o644, 0, accept=_EXISTS, text=text)
    place = open_inside(plan, directory, name, 0, text)
    _attach(plan, tree, place, text=text, keep=keep)
    for fd in (place, directory):
        plan.do("close", fd, text=text)


def _node_of(plan: Plan, device: dict[str, Any], name: str) -> Result:
    """The node of a block volume, in the container's own layer, to be mounted where the pod wants it: that may be in
    another volume, where a node would stay when its number has become somebody else's."""
    text = f"make device {device['path']}"
    mode = stat.S_IFBLK | (0o440 if device.get("read_only") else 0o660)
    plan.do("mknodat", AT_FDCWD, name, mode, device["number"] & 0xFFFFFFFF, text=text)
    if device.get("gid") is not None:
        plan.do("fchownat", AT_FDCWD, name, -1, device["gid"], 0, text=text)
    return plan.get("open_tree", AT_FDCWD, name, libc.OPEN_TREE_CLONE | os.O_CLOEXEC, text=text)
