"""What pods leave on disk, and its removal.

Owns: finding containers of an earlier agent, and removing a pod's directory once nothing is mounted in it.
Start reading at: `find_containers`, `remove_pod_directory`.
"""

import os
from contextlib import suppress
from pathlib import Path

from moorage.host import mountinfo
from moorage.host.dir_walk import MountInTheWay
from moorage.host.safe_remove import remove_empty, remove_empty_tree, remove_tree
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.runtime import RunningContainer
from moorage.node.runtime.container_state import read_spec
from moorage.node.volumes import leftovers
from moorage.node.volumes.observe import past_dead_mounts


def find_containers(layout: NodeLayout) -> dict[PodUid, dict[str, list[RunningContainer]]]:
    """Every attempt at every container that is recorded on disk, oldest first."""
    found: dict[PodUid, dict[str, list[RunningContainer]]] = {}
    for pod in _directories(layout, layout.pods):
        by_name = found.setdefault(PodUid(pod.name), {})
        for container in _directories(layout, layout.containers_of(pod.name)):
            attempts = sorted((int(one.name), one) for one in _directories(layout, container) if one.name.isdecimal())
            by_name[container.name] = [
                RunningContainer(pod.name, container.name, number, directory, Path(read_spec(directory).get("log", "")))
                for number, directory in attempts
            ]
    return found


def pod_directories(layout: NodeLayout) -> list[PodUid]:
    """The pods that have a directory here."""
    return [PodUid(one.name) for one in _directories(layout, layout.pods)]


def _directories(layout: NodeLayout, above: Path) -> list[Path]:
    """What other programs put beside them is not ours, and no reason to stop; nor is a dead mount."""
    with past_dead_mounts(layout, above), suppress(FileNotFoundError, NotADirectoryError):
        return [above / name for name in os.listdir(above) if _is_directory(layout, above / name)]
    return []


def _is_directory(layout: NodeLayout, path: Path) -> bool:
    with past_dead_mounts(layout, path):
        return path.is_dir()
    return False


def remove_attempt(container: RunningContainer) -> None:
    """Remove an old attempt with its log."""
    remove_tree(container.directory)
    if container.log.name:
        container.log.unlink(missing_ok=True)
        Path(f"{container.log}.1").unlink(missing_ok=True)


def remove_pod_directory(layout: NodeLayout, uid: PodUid) -> None:
    """Remove what a pod left. Volumes must be unmounted by now: below `volumes` only empty directories are removed,
    and anything else found there, or mounted anywhere below, is an error that leaves it in place."""
    pod = layout.pod(uid)
    if not pod.is_dir():
        return
    leftovers.release_pod(layout, uid)
    mounted = mountinfo.mounts_below(pod)
    if mounted:
        raise MountInTheWay(mounted[0].target)
    remove_empty_tree(layout.volumes_of(uid))
    remove_empty_tree(layout.devices_of(uid))
    remove_empty_tree(layout.subpaths_of(uid))
    remove_tree(layout.containers_of(uid))
    for left in pod.iterdir():  # directories of other tools, such as `plugins` and `etc-hosts` of a kubelet
        if left.name == "plugins":
            remove_empty_tree(left)
    remove_empty(pod)


def remove_logs(layout: NodeLayout, uid: PodUid) -> None:
    if layout.logs.is_dir():
        for directory in layout.logs.iterdir():
            if directory.name.endswith(f"_{uid}"):
                remove_tree(directory)
