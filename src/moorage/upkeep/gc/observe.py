"""Looking for what no one owns: in a pool, on this machine, in a cluster.

Owns: filling `plan.Inventory`. Ages are such that nothing ever looks older than it is.
May not touch: anything; it only reads.
Start reading at: `observe`.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from moorage.errors import MoorageError
from moorage.host import loop, mountinfo
from moorage.host.loop import LoopDevice
from moorage.host.mountinfo import Mount
from moorage.host.mounts import is_corrupted
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    CSIDriver,
    CSINode,
    KubeObject,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    seconds_of,
)
from moorage.kube.volumes import claim_class, is_of_driver
from moorage.storage import Pool, PoolScope, VolumeKind
from moorage.storage.guests import FOR_EXPORT
from moorage.storage.leftovers import is_abandoned
from moorage.storage.listing import overview
from moorage.storage.transfer.unfinished import unfinished
from moorage.storage.usage import observe as observe_use
from moorage.upkeep.gc.plan import (
    PROVISIONED,
    DriverObjects,
    Inventory,
    SeenAttachment,
    SeenClaim,
    SeenDevice,
    SeenFile,
    SeenHold,
    SeenMount,
    SeenPv,
    SeenTrash,
    SeenVolume,
)

TOPOLOGY = "topology.moorage.dev/node"
_DEVICE_FILESYSTEMS = frozenset({"devtmpfs", "tmpfs"})
_POD = re.compile(r"/pods/([0-9a-f-]{36})/")
_SHARED_TMP_AGE_S = 24 * 3600.0


async def observe(pools: Sequence[Pool], client: Client | None, driver: str, node: str = "") -> Inventory:
    """One look at everything. Volumes are read before the cluster, so that a new one is not missed by its PV."""
    world = Inventory(time.time(), tuple(str(pool.directory) for pool in pools), node or socket.gethostname())
    for pool in pools:
        await asyncio.to_thread(look_at_pool, world, pool)
    if client is not None:
        world.cluster = await look_at_cluster(client, driver)
    return world


# --- the pool and this machine -------------------------------------------------------------


def look_at_pool(world: Inventory, pool: Pool) -> None:
    """Add what a pool holds and what this machine's kernel has of it."""
    where = str(pool.directory)
    rows = overview(pool)
    if pool.config.scope is PoolScope.SHARED:
        world.shared_pools.add(where)
    for row in rows:
        data = Path(pool.context.layout.volumes, row.id, "data")
        use = _use_of(pool, data)
        # A record that cannot be read has no time; its directory's is never older than the volume.
        created = row.created_ns / 1e9 or _mtime(str(data.parent), world.now_s)
        world.volumes.append(SeenVolume(row.id, row.name, where, created, use))
        if pool.config.scope is PoolScope.SHARED:
            _look_at_holds(world, pool, row.id, use)
    raw = {row.id for row in rows if not row.filesystem}
    _look_at_devices(world, pool, raw)
    _look_at_mounts(world, pool)
    _look_at_files(world, pool)
    owner = _owner_of(pool)
    world.trash += [
        SeenTrash(item.entry, item.name, where, item.deleted_ns / 1e9, item.expires_ns / 1e9, owner)
        for item in pool.trash.listed()
    ]


def _use_of(pool: Pool, data: Path) -> str:
    if not data.exists():
        return ""
    return observe_use(data, VolumeKind.DIRECTORY if data.is_dir() else VolumeKind.IMAGE).holders


def _look_at_holds(world: Inventory, pool: Pool, ident: str, use: str) -> None:
    attach = os.path.join(pool.context.layout.volumes, ident, "attach")
    states = [name for name in _names(attach) if not name.startswith(".")]  # the others are drafts
    since = max((_mtime(os.path.join(attach, name), world.now_s) for name in states), default=world.now_s)
    for held in pool.attachments.of_volume(ident):
        world.holds.append(SeenHold(ident, held.node_id, str(pool.directory), since, use))


def _look_at_devices(world: Inventory, pool: Pool, raw: set[str]) -> None:
    devices = loop.attached(pool.directory)
    if not devices:
        return
    everywhere = mounts_of_all_namespaces()
    openers = _openers()
    for device in devices:
        ident = _volume_behind(pool, device.backing_file)
        world.devices.append(
            SeenDevice(
                str(device.path),
                str(pool.directory),
                ident,
                device.is_deleted,
                ident in raw,
                # The kernel makes this directory when the device is attached; its time is never earlier than that.
                _mtime(f"/sys/block/loop{device.number}/loop", world.now_s),
                tuple(sorted({mount.target for mount in everywhere if shows(mount, device)})),
                openers.get(str(device.path), ()),
            )
        )


def _look_at_mounts(world: Inventory, pool: Pool) -> None:
    where = str(pool.directory)
    devices = loop.attached(pool.directory)
    home = mountinfo.mount_containing(pool.directory)
    for mount in mountinfo.mounts():
        device = next((each for each in devices if shows(mount, each)), None)
        is_bind = device is None and mount.device == home.device and "/volumes/" in mount.root and _is_ours(mount, pool)
        if device is None and not is_bind:
            continue
        gone = device.is_deleted if device is not None else mount.root.endswith("//deleted")
        pod = _POD.search(mount.target)
        world.mounts.append(
            SeenMount(
                mount.target,
                where,
                device.backing_file if device is not None else mount.root,
                _mtime(os.path.dirname(mount.target), world.now_s),
                gone,
                is_corrupted(mount.target),
                pod[1] if pod else "",
            )
        )


def _is_ours(mount: Mount, pool: Pool) -> bool:
    home = mountinfo.mount_containing(pool.directory)
    inside = os.path.normpath(os.path.join(home.root, os.path.relpath(pool.directory, home.target)))
    return mount.root.startswith(f"{inside}/volumes/")


def _look_at_files(world: Inventory, pool: Pool) -> None:
    where, tmp = str(pool.directory), pool.context.layout.tmp
    shared = pool.config.scope is PoolScope.SHARED
    for name in _names(tmp):
        path = os.path.join(tmp, name)
        alive = not is_abandoned(path, _SHARED_TMP_AGE_S if shared else 0.0)
        why = "unfinished work of a process that has ended"
        world.files.append(SeenFile("temporary", name, where, why, _mtime(path, world.now_s), alive))
    for ident, moved, alive in unfinished(pool):
        world.files.append(SeenFile("import", ident, where, "an import that did not end", moved, alive))
    for cut in pool.snapshots.page().items:
        if FOR_EXPORT in cut.parameters:
            why = f"an export of {cut.volume_id} cut it and did not end"
            world.files.append(SeenFile("export-snapshot", cut.id, where, why, cut.created_ns / 1e9))


def _owner_of(pool: Pool) -> str:
    """The process that serves the pool now, or nothing."""
    try:
        with open(os.path.join(pool.directory, "lock"), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read(64).decode(errors="replace").strip() or "unknown"
    except FileNotFoundError:
        pass
    return ""


def mounts_of_all_namespaces() -> list[Mount]:
    """Every mount of every process: a pod's containers have namespaces of their own."""
    found, seen = mountinfo.mounts(), set()
    for pid in (name for name in _names("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{pid}/ns/mnt")
            if space not in seen:
                seen.add(space)
                with open(f"/proc/{pid}/mountinfo", "rb") as lines:
                    found += mountinfo.parse(lines.read())
    return found


def _openers() -> dict[str, tuple[int, ...]]:
    """Which processes have which loop devices open."""
    found: dict[str, set[int]] = {}
    for pid in (name for name in _names("/proc") if name.isdigit()):
        for fd in _names(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("/dev/loop") and int(pid) != os.getpid():
                    found.setdefault(target, set()).add(int(pid))
    return {path: tuple(sorted(pids)) for path, pids in found.items()}


def shows(mount: Mount, device: LoopDevice) -> bool:
    """Whether a mount is a filesystem on the device, or a bind of its node."""
    if mount.device == device.device or mount.source == str(device.path):
        return True
    return mount.fstype in _DEVICE_FILESYSTEMS and os.path.basename(mount.root) == f"loop{device.number}"


def _volume_behind(pool: Pool, backing: str) -> str:
    parts = backing.removeprefix(f"{os.path.realpath(pool.directory)}/").split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "volumes" else ""


def _mtime(path: str, otherwise: float) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return otherwise


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


# --- the cluster ---------------------------------------------------------------------------


async def look_at_cluster(client: Client, driver: str) -> DriverObjects:
    """The driver's objects, and the names of everything that they refer to."""
    claims = (await client.list(PersistentVolumeClaim)).items  # before the volumes: a claim gets one meanwhile
    volumes, attachments, nodes, node_drivers, pods, drivers = await asyncio.gather(
        client.list(PersistentVolume),
        client.list(VolumeAttachment),
        client.list(Node),
        client.list(CSINode),
        client.list(Pod),
        client.list(CSIDriver),
    )
    # A handle counts under any driver's name: another installation may serve the same pool.
    handles = frozenset(pv.spec.csi.volume_handle for pv in volumes.items if pv.spec.csi is not None)
    return DriverObjects(
        driver=driver,
        is_installed=any(found.name == driver for found in drivers.items),
        pvs=tuple(_seen_pv(pv) for pv in volumes.items if is_of_driver(pv, driver)),
        pv_names=frozenset(pv.name for pv in volumes.items),
        handles=handles,
        attachments=tuple(_seen_attachment(va) for va in attachments.items if va.spec.attacher == driver),
        nodes=frozenset(node.name for node in nodes.items),
        node_ids=frozenset(
            each.node_id for node in node_drivers.items for each in node.spec.drivers if each.name == driver
        ),
        pod_uids=frozenset(pod.uid for pod in pods.items),
        claims=_claims_by_volume(claims),
    )


def _claims_by_volume(claims: Iterable[PersistentVolumeClaim]) -> dict[str, SeenClaim]:
    """Return the claims by the name of their volume. The claim that it was made for comes before one that names it."""
    seen = [SeenClaim(claim.key, claim.uid, claim_class(claim), claim.spec.volume_name) for claim in claims]
    named = {claim.volume_name: claim for claim in seen if claim.volume_name}
    return named | {f"{PROVISIONED}{claim.uid}": claim for claim in seen}


def _seen_pv(pv: PersistentVolume) -> SeenPv:
    if pv.spec.csi is None:
        raise MoorageError(f"PersistentVolume {pv.name} has no CSI volume")
    handle = pv.spec.csi.volume_handle
    return SeenPv(pv.name, pv.uid, handle, pv.status.phase, _created(pv), frozenset(_nodes_of(pv)), pv.is_deleting)


def _nodes_of(pv: PersistentVolume) -> Iterable[str]:
    affinity = pv.spec.node_affinity
    if affinity is None or affinity.required is None:
        return
    for term in affinity.required.node_selector_terms:
        for wanted in term.match_expressions:
            if wanted.key == TOPOLOGY:
                yield from wanted.values


def _seen_attachment(va: VolumeAttachment) -> SeenAttachment:
    pv = va.spec.source.persistent_volume_name or ""
    return SeenAttachment(va.name, va.uid, pv, va.spec.node_name, _created(va), va.is_deleting)


def _created(found: KubeObject) -> float:
    return seconds_of(found.metadata.creation_timestamp) or time.time()
