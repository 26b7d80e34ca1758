"""What is on disk after a restart: every volume that may be mounted is found again.

Owns: the scan of the pods' directories and of staged volumes that no pod holds any more.
May not touch: anything it finds; it only reads. What it reports is UNCERTAIN until a driver has confirmed it. What lies
behind a dead mount is left out; anything else that cannot be read is an error, since what is forgotten is detached.
Start reading at: `observe`, `has_begun`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from moorage.host import mountinfo, mounts
from moorage.kube.names import CSI_PLUGIN
from moorage.kube.volumes import VolumeName, csi_volume_name
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, PodUid, pod_volume_name, unescaped
from moorage.node.volumes.mounters import vol_data
from moorage.node.volumes.state import ActualPod, ActualVolume, CsiSource, MountState, PlainSource

log = get_logger(__name__)

_CSI_DIRECTORY = "kubernetes.io~csi"


@dataclass(slots=True)
class ObservedVolumes:
    """The volumes found, and those of which not even the driver's name is known."""

    volumes: dict[VolumeName, ActualVolume] = field(default_factory=dict)
    unreadable: list[Path] = field(default_factory=list)
    staged_unreadable: list[Path] = field(default_factory=list)
    pods: set[PodUid] = field(default_factory=set)


def observe(layout: NodeLayout) -> ObservedVolumes:
    """Everything that an earlier run may have left mounted."""
    found = ObservedVolumes()
    for pod in _directories(layout, layout.pods):
        uid = PodUid(pod.name)
        found.pods.add(uid)
        for plugin in _directories(layout, layout.volumes_of(uid)):
            for volume in _directories(layout, plugin):
                _take_volume(found, layout, uid, plugin.name, volume)
        for plugin in _directories(layout, layout.devices_of(uid)):
            for link in _entries(layout, plugin):
                _take_block(found, layout, uid, link.name)
    _take_staged(found, layout)
    return found


def staged_without_data(layout: NodeLayout) -> list[Path]:
    """Directories of staged volumes whose content is unknown."""
    found = ObservedVolumes()
    _take_staged(found, layout)
    return found.staged_unreadable


def has_begun(layout: NodeLayout, uid: PodUid) -> bool:
    """A container of the pod was started, now or by an earlier agent: its processes may have seen its volumes."""
    return any(_entries(layout, container) for container in _directories(layout, layout.containers_of(uid)))


def _take_volume(found: ObservedVolumes, layout: NodeLayout, uid: PodUid, plugin: str, directory: Path) -> None:
    if plugin != _CSI_DIRECTORY:
        name = pod_volume_name(unescaped(plugin), uid, directory.name)
        source = PlainSource(unescaped(plugin), directory.name, None)
        _add(found, name, source, uid)
        return
    try:
        data = vol_data.read(directory)
    except vol_data.UnreadableVolumeData as error:
        log.warning("volume cannot be recognised", path=str(directory), reason=str(error))
        found.unreadable.append(directory)
        return
    if data is None:
        found.unreadable.append(directory)
        return
    _add_csi(found, vol_data.source_from(data, directory.name), uid, data.get("seLinuxMountContext", ""))


def _take_block(found: ObservedVolumes, layout: NodeLayout, uid: PodUid, spec_name: str) -> None:
    try:
        data = vol_data.read(layout.block_data(spec_name))
    except vol_data.UnreadableVolumeData as error:
        log.warning("block volume cannot be recognised", volume=spec_name, reason=str(error))
        data = None
    if data is None:
        found.unreadable.append(layout.block_link(uid, spec_name))
        return
    _add_csi(found, vol_data.source_from(data, spec_name, is_block=True), uid)


def _take_staged(found: ObservedVolumes, layout: NodeLayout) -> None:
    """Staged volumes without a pod: the agent died between unpublish and unstage."""
    base = layout.plugins / "kubernetes.io" / "csi"
    for driver in _directories(layout, base):
        if driver == layout.block_devices:
            continue
        for directory in _directories(layout, driver):
            _take_device(found, directory, is_block=False, spec_name="")
    for published in _directories(layout, layout.block_devices / "publish"):
        for entry in _entries(layout, published):  # the agent died before the pod had its link
            _take_block(found, layout, PodUid(entry.name), published.name)
    for volume in _directories(layout, layout.block_devices):
        if volume.name not in ("staging", "publish"):
            _take_device(found, volume / "data", is_block=True, spec_name=volume.name)


def _take_device(found: ObservedVolumes, directory: Path, *, is_block: bool, spec_name: str) -> None:
    try:
        data = vol_data.read(directory)
    except vol_data.UnreadableVolumeData as error:
        log.warning("staged volume cannot be recognised", path=str(directory), reason=str(error))
        data = None
    if data is None:
        found.staged_unreadable.append(directory)
        return
    source = vol_data.source_from(data, spec_name, is_block=is_block)
    name = csi_volume_name(source.driver, source.handle)
    if name not in found.volumes:
        found.volumes[name] = ActualVolume(name, source)
    found.volumes[name].device = MountState.UNCERTAIN
    found.volumes[name].device_is_reconstructed = True
    found.volumes[name].se_linux_label = data.get("seLinuxMountContext", "")


def _add_csi(found: ObservedVolumes, source: CsiSource, uid: PodUid, se_linux_label: str = "") -> None:
    if source.is_ephemeral:
        name = pod_volume_name(CSI_PLUGIN, uid, source.spec_name)
        _add(found, name, source, uid)
        found.volumes[name].se_linux_label = se_linux_label
        return
    name = csi_volume_name(source.driver, source.handle)
    _add(found, name, source, uid)
    found.volumes[name].se_linux_label = se_linux_label
    found.volumes[name].device = MountState.UNCERTAIN
    found.volumes[name].device_is_reconstructed = True


def _add(found: ObservedVolumes, name: VolumeName, source: CsiSource | PlainSource, uid: PodUid) -> None:
    volume = found.volumes.setdefault(name, ActualVolume(name, source))
    volume.pods[uid] = ActualPod(MountState.UNCERTAIN, is_reconstructed=True, source=source)


@contextmanager
def past_dead_mounts(layout: NodeLayout, path: Path) -> Iterator[None]:
    """Whatever is asked of the path in here may fail because of a dead mount: that is logged, and no reason to stop."""
    try:
        yield
    except OSError as error:
        if not _is_behind_dead_mount(layout, path):
            raise
        log.warning("directory is left alone: what is mounted there is dead", path=str(path), reason=str(error))


def _is_behind_dead_mount(layout: NodeLayout, path: Path) -> bool:
    """Something is mounted at this path or above it, below our root, and its server or device is gone."""
    if not mounts.is_corrupted(path):
        return False
    places = {str(path), *map(str, path.parents)} - {str(layout.root)}
    return any(one.target in places for one in mountinfo.mounts_below(layout.root))


def _directories(layout: NodeLayout, path: Path) -> Iterator[Path]:
    for entry in _entries(layout, path):
        if entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _entries(layout: NodeLayout, path: Path) -> list["os.DirEntry[str]"]:
    with past_dead_mounts(layout, path), suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []
