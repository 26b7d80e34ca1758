"""Control groups of pods, where the machine has them.

Owns: `kubepods/<node>/pod<uid>/<container>` in every usable hierarchy, v1 or v2, and the limits in it. A pod's only
container is in the pod's own group: each group is work for the kernel, when it is made and as long as it is there.
May not touch: processes. A machine without cgroups runs pods without limits; that is said once in the log.
Start reading at: `Cgroups.prepare`.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from moorage.host import mountinfo
from moorage.kube.objects.pods import Pod
from moorage.kube.quantity import BadQuantity, Quantity
from moorage.log import get_logger
from moorage.node.runtime import orphans
from moorage.node.runtime.cpu_shares import Weights

log = get_logger(__name__)

# Only controllers that a limit of a container or of a volume is set in: each costs two directories and a move per pod.
_V1 = frozenset({"memory", "cpu", "blkio"})
_V2 = frozenset({"memory", "cpu", "pids", "io"})
_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1000  # the kernel refuses less


class ContainerCgroups:
    """The control groups of one agent."""

    def __init__(self, node: str, hierarchies: list[tuple[int, Path]] | None = None) -> None:
        self._node = node
        self._hierarchies = hierarchies if hierarchies is not None else find_hierarchies()
        self._has_complained = False
        self._weights = {
            root: Weights(version, root, node) for version, root in self._hierarchies if _has_cpu(version, root)
        }

    def prepare(self, pod: Pod) -> None:
        """Make the pod's groups. They must be there before volumes are published: drivers put I/O limits on them."""
        for version, root in self._hierarchies:
            group = self._pod(root, pod.uid)
            containers = (*pod.spec.init_containers, *pod.spec.containers)
            own = {f"{group}/{container.name}": container for container in containers} if len(containers) > 1 else {}
            limits = {directory: container.resources.limits for directory, container in own.items()}
            together = pod.spec.resources.limits
            if together or not own:
                limits[group] = {**together, **({} if own else containers[0].resources.limits)}
            for directory, most in limits.items():
                try:
                    _make(directory)
                    if version == 2:
                        self._enable(root, directory)
                    _limit(version, root.name, directory, most)
                except (OSError, BadQuantity) as error:
                    self._complain(directory, error)
            if root in self._weights:
                try:
                    self._weights[root].set(pod, group, own)
                except OSError as error:
                    self._complain(group, error)

    def of(self, uid: str, container: str) -> list[str]:
        """The directories whose groups a container's processes belong to."""
        found = [self._group(root, uid, container) for _, root in self._hierarchies]
        return [directory for directory in found if os.path.isdir(directory)]

    def oom_kills(self, uid: str, container: str) -> int:
        """How often the kernel has killed something of this container, in any of its attempts, for want of memory."""
        for version, root in self._hierarchies:
            name = "memory.events" if version == 2 else "memory.oom_control"
            path = Path(self._group(root, uid, container), name)
            with contextlib.suppress(OSError, ValueError):
                for line in path.read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return 0

    def remove(self, uid: str) -> None:
        """Remove the pod's groups; one that still holds a process is left and said so."""
        for _, root in self._hierarchies:
            for directory in reversed(orphans.groups_of(self._pod(root, uid))):
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    log.debug("cgroup is left behind", path=directory, reason=str(error))
        for root, weights in self._weights.items():
            try:
                weights.forget(uid)
            except OSError as error:
                self._complain(str(root), error)

    def remove_own(self) -> None:
        """Remove the agent's level, if no pod is left in it."""
        for _, root in self._hierarchies:
            for directory in (root / "kubepods" / self._node, root / "kubepods"):
                with contextlib.suppress(OSError):
                    directory.rmdir()

    def _pod(self, root: Path, uid: str) -> str:
        return f"{root}/kubepods/{self._node}/pod{uid}"

    def _group(self, root: Path, uid: str, container: str) -> str:
        pod = self._pod(root, uid)
        own = f"{pod}/{container}"
        return own if os.path.isdir(own) else pod

    def _enable(self, root: Path, directory: str) -> None:
        available = _V2.intersection((root / "cgroup.controllers").read_text().split())
        for level in reversed(Path(directory).relative_to(root).parents):
            control = root / level / "cgroup.subtree_control"
            missing = available - set(control.read_text().split())
            if missing:
                control.write_text(" ".join(f"+{name}" for name in sorted(missing)))

    def _complain(self, directory: str, error: Exception) -> None:
        if not self._has_complained:
            log.warning("pods run without some limits or weights", path=directory, reason=str(error))
            self._has_complained = True


def _make(directory: str) -> None:
    """mkdir -p from the top: making a cgroup is slow, so nothing is tried twice."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make(os.path.dirname(directory))
        os.mkdir(directory)


def find_hierarchies() -> list[tuple[int, Path]]:
    """Version and directory of each hierarchy in which a limit can be set. Version 2 may be mounted beside version 1
    with nothing in it that this agent needs."""
    found: list[tuple[int, Path]] = []
    for mount in mountinfo.mounts():
        path = Path(mount.target)
        if mount.fstype == "cgroup2":
            listed = path / "cgroup.controllers"
            if listed.is_file() and _V2.intersection(listed.read_text().split()):
                found.append((2, path))
        elif mount.fstype == "cgroup" and _V1.intersection(mount.super_options) and os.access(path, os.W_OK):
            found.append((1, path))
    return found


def _has_cpu(version: int, root: Path) -> bool:
    if version == 1:
        return "cpu" in root.name.split(",")
    listed = root / "cgroup.controllers"
    return listed.is_file() and "cpu" in listed.read_text().split()


def _limit(version: int, controller: str, group: str, limits: Mapping[str, str | int | float]) -> None:
    if not limits:
        return
    directory = Path(group)
    memory = Quantity.parse(limits["memory"]).value if "memory" in limits else None
    cpu = Quantity.parse(limits["cpu"]).milli_value if "cpu" in limits else None
    controllers = controller.split(",")  # "cpu,cpuacct" is one hierarchy on many machines
    if memory and (version == 2 or "memory" in controllers):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        (directory / name).write_text(str(memory))
    quota_us = max(cpu * _PERIOD_US // 1000, _LEAST_QUOTA_US) if cpu else None
    if quota_us and version == 2:
        (directory / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    elif quota_us and "cpu" in controllers:
        (directory / "cpu.cfs_quota_us").write_text(str(quota_us))
