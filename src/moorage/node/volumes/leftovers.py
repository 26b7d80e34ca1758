"""Volumes that an earlier run left without the data that teardown needs, so that no driver can be asked to undo them.

Owns: one plain attempt to unmount each, and the removal of the empty directories around it.
May not touch: volumes that are known. Nothing is forced, nothing is removed recursively, and what a pod of this node
still shows is left mounted.
Start reading at: `release_pod`, `release_staged`.
"""

import os
from collections.abc import Collection
from pathlib import Path

from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from moorage.host.safe_remove import remove_empty, remove_empty_up_to
from moorage.kube.names import CSI_PLUGIN
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, escaped
from moorage.node.volumes.mounters import vol_data

log = get_logger(__name__)


def release_pod(layout: NodeLayout, uid: str) -> None:
    """A pod that is gone: what is mounted for it and cannot be given back is unmounted, or this raises."""
    volumes = layout.volumes_of(uid) / escaped(CSI_PLUGIN)
    for directory in volumes.iterdir() if volumes.is_dir() else ():
        if not _has_data(directory):
            _release_target(directory / "mount")
            vol_data.remove(directory)
            remove_empty(directory)
    devices = layout.devices_of(uid) / escaped(CSI_PLUGIN)
    for link in devices.iterdir() if devices.is_dir() else ():
        if link.is_symlink() and not _has_data(layout.block_data(link.name)):
            _release_target(layout.block_map(link.name, uid))
            target = layout.block_publish(link.name, uid)
            _release_target(target)
            remove_empty_up_to(target.parent, layout.block_devices)
            _release_block(layout, link.name)
            link.unlink()


def release_staged(layout: NodeLayout, found: Collection[Path], known: Collection[Path]) -> None:
    """Directories of staged volumes without usable data: those that belong to no known volume are taken away."""
    for directory in found:
        if directory in known or _has_data(directory):  # it may have been wanted in the meantime
            continue
        try:
            if directory.parent.parent == layout.block_devices:
                _release_block(layout, directory.parent.name)
            else:
                _release_globalmount(layout, directory)
        except (MoorageError, OSError) as error:
            log.warning("staged volume without usable data is left", path=str(directory), reason=str(error))


def _release_globalmount(layout: NodeLayout, directory: Path) -> None:
    target = directory / "globalmount"
    table = mountinfo.mounts()
    staged = mountinfo.mount_at(target, table)
    shown = [one.target for one in table if staged is not None and _is_same(one, staged)]
    if any(place.startswith(f"{layout.pods}/") for place in shown):
        raise MoorageError(f"{target} is still mounted for a pod")
    _release_target(target)
    vol_data.remove(directory)
    remove_empty(directory)


def _release_block(layout: NodeLayout, spec_name: str) -> None:
    base = layout.block_devices / spec_name
    in_use = [layout.block_devices / "publish" / spec_name, *(base / "dev").glob("*")]
    if any(os.path.lexists(place) for place in in_use):
        return  # another pod has it, or its driver has it published: not before these are gone
    _release_target(layout.block_staging(spec_name))
    vol_data.remove(base / "data")
    for directory in (base / "data", base / "dev", base):
        remove_empty(directory)


def _release_target(target: Path) -> None:
    if mountinfo.mount_at(target) is not None:
        log.warning("volume without usable data is unmounted without its driver", path=str(target))
        mounts.unmount(target)
    if target.is_dir() and not target.is_symlink():
        remove_empty(target)
    elif target.is_file() and not target.stat().st_size:
        target.unlink()


def _is_same(one: mountinfo.Mount, other: mountinfo.Mount) -> bool:
    return (one.device, one.root) == (other.device, other.root)


def _has_data(directory: Path) -> bool:
    try:
        return vol_data.read(directory) is not None
    except vol_data.UnreadableVolumeData as error:
        log.warning("volume data is unreadable", path=str(directory), reason=str(error))
        return False
