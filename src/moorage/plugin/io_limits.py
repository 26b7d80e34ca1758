"""Limits on a volume's I/O, put on the cgroups of the pods that use it.

Owns: finding a pod's cgroups, and writing limits for one block device into them: `io.max` with
cgroup v2, `blkio.throttle.*` with v1. Limits live in the kernel only; they are written again
whenever a volume is published, modified, or found after a restart.
May not touch: volumes, mounts. Callers pass a device, a pod and the limits.
Start reading at: `Cgroups.apply`.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moorage.errors import MoorageError
from moorage.log import get_logger

log = get_logger(__name__)

_DEEPEST = 5
_POD_IN_PATH = (
    re.compile(r"/pods/([^/]+)/volume"),
    re.compile(r"/volumeDevices/publish/[^/]+/([^/]+)$"),
)


class LimitsUnsupported(MoorageError):
    """This machine's kernel cannot limit I/O by cgroup, or not that of such a volume."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Zero means no limit."""

    read_iops: int = 0
    write_iops: int = 0
    read_bytes_per_second: int = 0
    write_bytes_per_second: int = 0

    def __bool__(self) -> bool:
        return any((self.read_iops, self.write_iops, self.read_bytes_per_second, self.write_bytes_per_second))


class IoCgroups:
    """The cgroup hierarchy that can limit I/O, if there is one."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self.version, self.root = _hierarchy(root)

    def why_unsupported(self, is_directory: bool = False) -> str:
        """Why a volume's I/O cannot be limited here; empty when it can."""
        if self.version and is_directory:
            return "a directory volume has no device of its own, and limits are for devices; use kind: image"
        if self.version:
            return ""
        return "this machine has neither the io controller of cgroup v2 nor the blkio controller of v1"

    def apply(self, pod_uid: str, device: tuple[int, int], limits: IoLimits) -> int:
        """Put the limits on every cgroup of the pod; returns on how many. None may exist yet.

        With v1 limits are not inherited, so a pod's containers get them one by one.
        """
        if not self.version:
            raise LimitsUnsupported(self.why_unsupported())
        count = 0
        for cgroup in self._of_pod(pod_uid):
            if self.version == 2:
                count += _write_v2(self.root, cgroup, device, limits)
            else:
                for each in (cgroup, *_below(cgroup)):
                    count += _write_v1(each, device, limits)
        return count

    def _of_pod(self, uid: str) -> Iterator[Path]:
        """Directories named after the pod by kubelet's two drivers (`pod<uid>`, `…-pod<uid>.slice`)."""
        plain, escaped = f"pod{uid}", f"pod{uid.replace('-', '_')}.slice"
        level = [self.root]
        for _ in range(_DEEPEST):
            below: list[Path] = []
            for directory in level:
                for child in _children(directory):
                    if child.name in (plain, uid) or child.name.endswith((f"-{plain}", escaped)):
                        yield child
                    else:
                        below.append(child)
            level = below


def pod_uid_from(target_path: str) -> str:
    """The pod that a kubelet's target path belongs to; empty for paths of another layout."""
    for pattern in _POD_IN_PATH:
        if found := pattern.search(target_path):
            return found[1]
    return ""


def _hierarchy(root: Path) -> tuple[int, Path]:
    for candidate in (root, root / "unified"):
        controllers = candidate / "cgroup.controllers"
        if controllers.is_file() and "io" in controllers.read_text().split():
            return 2, candidate
    if (root / "blkio" / "blkio.throttle.read_bps_device").exists():
        return 1, root / "blkio"
    return 0, root


def _children(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # a cgroup may go while it is looked at
        return []


def _below(directory: Path) -> Iterator[Path]:
    for child in _children(directory):
        yield child
        yield from _below(child)


def _write_v2(root: Path, cgroup: Path, device: tuple[int, int], limits: IoLimits) -> int:
    values = {
        "rbps": limits.read_bytes_per_second,
        "wbps": limits.write_bytes_per_second,
        "riops": limits.read_iops,
        "wiops": limits.write_iops,
    }
    words = " ".join(f"{key}={value or 'max'}" for key, value in values.items())
    if not (cgroup / "io.max").exists():
        # Each level must hand the controller down to the next; kubelet asks for cpu and memory only.
        for level in reversed([each for each in cgroup.parents if each == root or root in each.parents]):
            _write(level / "cgroup.subtree_control", "+io")
    return _write(cgroup / "io.max", f"{device[0]}:{device[1]} {words}")


def _write_v1(cgroup: Path, device: tuple[int, int], limits: IoLimits) -> int:
    values = {
        "read_bps_device": limits.read_bytes_per_second,
        "write_bps_device": limits.write_bytes_per_second,
        "read_iops_device": limits.read_iops,
        "write_iops_device": limits.write_iops,
    }
    written = [
        _write(cgroup / f"blkio.throttle.{name}", f"{device[0]}:{device[1]} {value}") for name, value in values.items()
    ]
    return min(written)


def _write(file: Path, text: str) -> int:
    """1 if the kernel took it; 0, with a log line, if the cgroup has gone or the device is not known."""
    try:
        file.write_text(text)
    except OSError as failed:
        log.warning("an I/O limit was not taken", file=str(file), value=text, error=str(failed))
        return 0
    return 1
