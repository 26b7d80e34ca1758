"""What is mounted, read from the kernel.

Owns: parsing /proc/self/mountinfo. The text of `mount` or `findmnt` is never read.
May not touch: the mounts themselves; see `mounts`.
Start reading at: `mounts`, `mount_at`.
"""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from moorage.host import libc

_ESCAPE = re.compile(rb"\\([0-7]{3})")
_MOUNTINFO = "/proc/self/mountinfo"
_LOOP_MAJOR = 7


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `root` is the part of the filesystem that is visible at `target`."""

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    root: str
    target: str
    options: tuple[str, ...]
    propagation: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]

    @property
    def is_read_only(self) -> bool:
        """Whether writes through this mount are refused, by the mount or by its filesystem."""
        return "ro" in self.options or "ro" in self.super_options


def mounts() -> list[Mount]:
    """Every mount that this process sees, oldest first."""
    with open(_MOUNTINFO, "rb") as lines:
        return parse(lines.read())


def parse(text: bytes) -> list[Mount]:
    """mountinfo's bytes as mounts; lines that are cut short are left out."""
    found = []
    for line in text.splitlines():
        mount = _mount_from(line)
        if mount is not None:
            found.append(mount)
    return found


def mount_at(target: str | Path, among: Iterable[Mount] | None = None) -> Mount | None:
    """The mount that is on top at exactly this path. The path must have no symbolic links; it is not asked, as a server
    behind it may hang."""
    found = mounts_at(target, among)
    return found[-1] if found else None


def mounts_at(target: str | Path, among: Iterable[Mount] | None = None) -> list[Mount]:
    """All that are stacked at exactly this path, from the lowest to the one on top."""
    wanted = os.path.normpath(os.fspath(target))
    return [mount for mount in (_mounts_naming(wanted) if among is None else among) if mount.target == wanted]


def is_mounted(target: str | Path) -> bool:
    """The same as a question, asked of the path: at the same cost however many mounts there are."""
    try:
        is_root = libc.is_mount_root(os.fspath(target))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a dead mount answers with its own errors
        is_root = None
    return mount_at(target) is not None if is_root is None else is_root


def mounts_below(directory: str | Path, among: Iterable[Mount] | None = None) -> list[Mount]:
    """The mounts at or below a directory."""
    base = os.path.normpath(os.fspath(directory))
    prefix = base.rstrip("/") + "/"
    return [
        mount
        for mount in (mounts() if among is None else among)
        if mount.target == base or mount.target.startswith(prefix)
    ]


def mounts_of_device(device: tuple[int, int], among: Iterable[Mount] | None = None) -> list[Mount]:
    """The mounts of one block device (major, minor), whatever part of it they show.

    A btrfs has a number of its own; there only the source tells the device.
    """
    is_loop = device[0] == _LOOP_MAJOR
    source = f"/dev/loop{device[1]}" if is_loop else ""
    if among is None:
        among = mounts_of_loops([device[1]]) if is_loop else mounts()
    return [mount for mount in among if mount.device == device or (source and mount.source == source)]


def mounts_of_loops(numbers: Collection[int]) -> list[Mount]:
    """The mounts that may show one of these loop devices: a filesystem on it, or its node."""
    if not numbers:
        return []
    names = b"|".join(b"%d" % number for number in numbers)
    may_show = re.compile(rb" %d:(?:%b) |loop(?:%b) " % (_LOOP_MAJOR, names, names))
    with open(_MOUNTINFO, "rb") as lines:
        return parse(b"\n".join(line for line in lines.read().split(b"\n") if may_show.search(line)))


def mount_containing(path: str | Path) -> Mount:
    """The mount that a path lies on; found by device first, so btrfs and binds are right too."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts():
        is_parent = real == mount.target or real.startswith(mount.target.rstrip("/") + "/")
        if is_parent and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    if best is None:
        raise FileNotFoundError(f"no mount holds {path}")
    return best


def binds_of(directory: str | Path) -> list[Mount]:
    """Bind mounts elsewhere that show this directory or something below it."""
    real = os.path.realpath(directory)
    table = mounts()
    home = mount_containing(real)
    relative = os.path.relpath(real, home.target)
    inside = os.path.normpath(os.path.join(home.root, relative)) if relative != "." else home.root
    prefix = inside.rstrip("/") + "/"
    return [
        mount
        for mount in table
        if mount.device == home.device
        and mount.mount_id != home.mount_id
        and (mount.root == inside or mount.root.startswith(prefix))
        and not real.startswith(mount.target.rstrip("/") + "/")
    ]


def _mounts_naming(path: str) -> list[Mount]:
    """The mounts whose line has this path in it: with a thousand mounts, reading every line takes most of the time."""
    word = os.fsencode(path)
    with open(_MOUNTINFO, "rb") as lines:
        text = lines.read()
    if any(letter in word for letter in b" \t\n\\#"):  # these are written as octal numbers
        return parse(text)
    word = b" " + word + b" "
    return parse(b"\n".join(line for line in text.split(b"\n") if word in line))


def _mount_from(line: bytes) -> Mount | None:
    before, found, after = line.partition(b" - ")
    left, right = before.split(b" "), after.split(b" ")
    if not found or len(left) < 6 or len(right) < 3:
        return None
    major, _, minor = left[2].partition(b":")
    return Mount(
        mount_id=int(left[0]),
        parent_id=int(left[1]),
        device=(int(major), int(minor)),
        root=_text(left[3]),
        target=_text(left[4]),
        options=tuple(_text(left[5]).split(",")),
        propagation=tuple(_text(word) for word in left[6:]),
        fstype=_text(right[0]),
        source=_text(right[1]),
        super_options=tuple(_text(right[2]).split(",")),
    )


def _text(escaped: bytes) -> str:
    if b"\\" in escaped:
        escaped = _ESCAPE.sub(lambda match: bytes((int(match[1], 8),)), escaped)
    return os.fsdecode(escaped)
