"""Volumes by hand, without any cluster: mounted, grown and checked as the plugin would.

Owns: what `moorage volume` does on this machine beyond the pool: the same staging and publishing as the plugin's,
with a person's path in place of the kubelet's.
May not touch: how staging works (moorage.plugin), Kubernetes.
Start reading at: `mount`, `unmount`, `check`.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from moorage.errors import MoorageError
from moorage.host import loop
from moorage.host.commands import run
from moorage.host.errors import CannotGrow
from moorage.host.extents import clone_file
from moorage.host.probe import probe_known
from moorage.host.safe_remove import remove_tree
from moorage.host.targets import Target
from moorage.plugin.node import publishing, staging
from moorage.plugin.node.expansion import expand_on_node
from moorage.plugin.node.observe import NodeVolume, is_node_of, observe
from moorage.plugin.node.publishing import Bind
from moorage.sdk.model import Access, AccessMode
from moorage.storage import HealthEntry, HealthStatus, Pool, PoolScope, Volume, VolumeKind
from moorage.storage.errors import AttachedElsewhere
from moorage.storage.health import node_signs

_CHECK_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Mounted:
    path: str
    formatted: bool
    repaired: bool
    grown: bool


@dataclass(frozen=True, slots=True)
class VolumeCheck:
    """One thing that was looked at; `ok` None says that it could not be, and `said` why."""

    what: str
    ok: bool | None
    said: str = ""


def mount(pool: Pool, volume: Volume, path: str, *, read_only: bool = False, options: Sequence[str] = ()) -> Mounted:
    """Stage a volume at a person's path: formatted only if proven empty, checked, grown, mounted, verified."""
    here = NodeVolume(volume, pool)
    target = Target.from_request("path", os.path.abspath(path))
    if pool.config.scope is PoolScope.SHARED:
        _attach(pool, volume, read_only)
    mode = AccessMode.SINGLE_NODE_READER_ONLY if read_only else AccessMode.SINGLE_NODE_WRITER
    if _is_block(volume):
        access = Access(mode, is_block=True)
        staging.ensure_staged(here, target, access, read_only_device=read_only)
        publishing.ensure_published(here, Bind(target, target, access, read_only))
        return Mounted(target.path, False, False, False)
    done = staging.ensure_staged(here, target, Access(mode, mount_flags=tuple(options)))
    return Mounted(target.path, done.formatted, done.repaired, done.grown)


def unmount(pool: Pool, volume: Volume, path: str) -> bool:
    """Unmount a volume from a path and release its loop device if it is unused. Return whether it was mounted."""
    here = NodeVolume(volume, pool)
    target = Target.from_request("path", os.path.abspath(path))
    was_there = target.mounted() is not None
    if _is_block(volume):
        publishing.ensure_unpublished(volume.id, here, target, [pool.directory])
        _release_unused_loops(here)
    else:
        # Others may be the plugin's pods: what they use stays.
        staging.ensure_unstaged(volume.id, here, target, [pool.directory], others_may_use=True)
    if pool.config.scope is PoolScope.SHARED and not observe(here).mounts:
        pool.attachments.detach(volume.id, _node_id())
    return was_there


def resize(pool: Pool, volume: Volume, size_bytes: int) -> tuple[Volume, str]:
    """Grow a volume, and its filesystem where it is mounted on this machine; the text says why it is not."""
    grown = pool.expand_volume(volume.id, size_bytes)
    here = NodeVolume(grown, pool)
    seen = observe(here)
    if seen.loops or seen.mounts:
        path = seen.mounts[0].target if seen.mounts else ""
        try:
            expand_on_node(here, path, 0, 0)
        except CannotGrow as failed:
            return grown, str(failed)
    return grown, ""


def places(pool: Pool, volume: Volume) -> tuple[list[str], list[str]]:
    """The loop devices and mount points of a volume on this machine."""
    seen = observe(NodeVolume(volume, pool))
    return [str(device.path) for device in seen.loops], sorted({mount.target for mount in seen.mounts})


def check(pool: Pool, ident: str) -> list[VolumeCheck]:
    """Look at the record, the data and the filesystem; nothing is changed."""
    try:
        volume = pool.volumes.get(ident)
    except MoorageError as error:
        return [VolumeCheck("record", False, str(error))]
    found = [VolumeCheck("record", True)]
    signs = pool.health.of(volume.id)
    found += [_sign("data", sign) for sign in signs] or [VolumeCheck("data", True)]
    if volume.kind is not VolumeKind.IMAGE or not volume.data.is_file():
        return found
    seen = observe(NodeVolume(volume, pool))
    if seen.loops:
        adverse = node_signs(volume)
        found += [_sign("kernel", sign) for sign in adverse] or [VolumeCheck("kernel", True)]
        if volume.filesystem:
            found.append(VolumeCheck("filesystem", None, "it is in use; unmount it to have it checked whole"))
        return found
    return [*found, *_check_filesystem(pool, volume)]


def _sign(what: str, sign: HealthEntry) -> VolumeCheck:
    """Lost or unreachable data is a failure; what works in a lesser way is only told."""
    return VolumeCheck(what, None if sign.status is HealthStatus.DEGRADED else False, f"{sign.reason}: {sign.message}")


def _check_filesystem(pool: Pool, volume: Volume) -> list[VolumeCheck]:
    content = probe_known(volume.data)
    if pool.volumes.is_half_formatted(volume.id):
        return [VolumeCheck("filesystem", True, "its first format was interrupted; the next mount formats it again")]
    if content is None:
        if not staging.is_blank(volume.data):
            return [VolumeCheck("filesystem", not volume.filesystem or None, "it holds data of no known filesystem")]
        return [
            VolumeCheck("filesystem", True, "it is empty; the first mount formats it" if volume.filesystem else "empty")
        ]
    if content.fstype != volume.filesystem:
        return [
            VolumeCheck("filesystem", None, f"it holds {content.fstype}, the record says {volume.filesystem or 'none'}")
        ]
    if content.fstype == "ext4":
        return [_check_ext4(pool, volume)]
    if content.fstype == "xfs":
        done = run(["xfs_repair", "-n", "-f", volume.data], timeout_s=_CHECK_TIMEOUT_S, accept=range(256))
        text = done.stdout + done.stderr
        if "valuable metadata changes in a log" in text:
            return [VolumeCheck("filesystem", None, "its log waits to be replayed; mount it once, then check again")]
    else:
        done = run(["btrfs", "check", "--readonly", volume.data], timeout_s=_CHECK_TIMEOUT_S, accept=range(256))
        text = done.stdout + done.stderr
    return [VolumeCheck("filesystem", done.returncode == 0, "" if done.returncode == 0 else _last_lines(text))]


def _check_ext4(pool: Pool, volume: Volume) -> VolumeCheck:
    """e2fsck on the image; on a copy where the journal has to be replayed first."""
    path = os.fspath(volume.data)
    with pool.context.layout.building("check") as place:
        try:
            if pool.copies_by_reflink:
                path = os.path.join(place, "data")
                with open(volume.data, "rb") as source, open(path, "wb+") as target:
                    clone_file(source.fileno(), target.fileno())
                run(["e2fsck", "-p", "-E", "journal_only", path], timeout_s=_CHECK_TIMEOUT_S, accept=range(256))
            done = run(["e2fsck", "-f", "-n", path], timeout_s=_CHECK_TIMEOUT_S, accept=range(256))
        finally:
            remove_tree(place)
    if done.returncode == 0:
        return VolumeCheck("filesystem", True)
    if not pool.copies_by_reflink and "skipping journal recovery" in (done.stdout + done.stderr).lower():
        return VolumeCheck("filesystem", None, "its journal waits to be replayed; mount it once, then check again")
    return VolumeCheck("filesystem", False, _last_lines(done.stdout + done.stderr))


def _last_lines(text: str) -> str:
    return "; ".join(line.strip() for line in text.strip().splitlines()[-4:])


def _is_block(volume: Volume) -> bool:
    return volume.kind is VolumeKind.IMAGE and not volume.filesystem


def _release_unused_loops(volume: NodeVolume) -> None:
    seen = observe(volume)
    for device in seen.loops:
        if not any(is_node_of(mount, device.number) for mount in seen.mounts):
            loop.detach(device)
            loop.wait_detached(device)


def _node_id() -> str:
    return f"by-hand-{socket.gethostname()}"


def _attach(pool: Pool, volume: Volume, read_only: bool) -> None:
    """In a shared pool a mount needs the volume's attachment, as a node's does: others are kept away by it."""
    node = _node_id()
    others = [held.node_id for held in pool.attachments.of_volume(volume.id) if held.node_id != node]
    if others and volume.kind is VolumeKind.IMAGE:
        raise AttachedElsewhere(f"volume {volume.id} is attached to {', '.join(others)}; detach it there first")
    pool.attachments.register_node(node)
    mode = "MULTI_NODE_MULTI_WRITER" if volume.kind is VolumeKind.DIRECTORY else "SINGLE_NODE_WRITER"
    pool.attachments.attach(volume.id, node, mode, read_only)
