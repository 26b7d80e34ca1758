"""What no one owns any more: the decision, as a pure function of what was seen.

Owns: `Inventory` (what a look at a pool, this machine and a cluster found) and `plan`, which says what is garbage, why,
and what forbids to remove it. Nothing that is younger than the grace period or mounted is ever removable.
May not touch: the pool, the kernel, the API; `observe` looks and `remove` removes.
Start reading at: `plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from moorage.suggest import command

PROVISIONED = "pvc-"
"""How the names begin that provisioners give; what is called otherwise was made by hand."""

LONG_GRACE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Orphan:
    """One thing without an owner. `held` says why it is not removed; empty means that it may be."""

    kind: str
    id: str
    why: str
    age_s: float
    held: str = ""
    action: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class SeenVolume:
    id: str
    name: str
    pool: str
    created_s: float
    used_by: str = ""


@dataclass(frozen=True, slots=True)
class SeenDevice:
    """A loop device on a file of the pool. `since_s` is a time at which it was there already."""

    path: str
    pool: str
    volume_id: str
    is_gone: bool
    is_raw: bool
    since_s: float
    mounts: tuple[str, ...] = ()
    openers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SeenMount:
    target: str
    pool: str
    what: str
    since_s: float
    is_gone: bool = False
    is_dead: bool = False
    pod_uid: str = ""


@dataclass(frozen=True, slots=True)
class SeenFile:
    """Unfinished work: something in tmp/, an import, or a snapshot that an export cut."""

    kind: str
    id: str
    pool: str
    what: str
    since_s: float
    is_alive: bool = False


@dataclass(frozen=True, slots=True)
class SeenTrash:
    entry: str
    name: str
    pool: str
    deleted_s: float
    expires_s: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class SeenHold:
    """A volume of a shared pool that a node has."""

    volume_id: str
    node_id: str
    pool: str
    since_s: float
    used_by: str = ""


@dataclass(frozen=True, slots=True)
class SeenPv:
    name: str
    uid: str
    handle: str
    phase: str
    created_s: float
    nodes: frozenset[str] = frozenset()
    is_going: bool = False


@dataclass(frozen=True, slots=True)
class SeenAttachment:
    name: str
    uid: str
    pv: str
    node: str
    created_s: float
    is_going: bool = False


@dataclass(frozen=True, slots=True)
class SeenClaim:
    """A claim. `volume_name` is the object that it was bound to; empty before that."""

    key: str
    uid: str
    storage_class: str = ""
    volume_name: str = ""


@dataclass(frozen=True, slots=True)
class DriverObjects:
    """The objects of one driver."""

    driver: str
    is_installed: bool
    pvs: tuple[SeenPv, ...] = ()
    pv_names: frozenset[str] = frozenset()
    handles: frozenset[str] = frozenset()
    attachments: tuple[SeenAttachment, ...] = ()
    nodes: frozenset[str] = frozenset()
    node_ids: frozenset[str] = frozenset()
    pod_uids: frozenset[str] = frozenset()
    claims: dict[str, SeenClaim] = field(default_factory=dict)
    """The claims, by the name of the volume that each has or will get."""


@dataclass(slots=True)
class Inventory:
    """Everything that was seen; `cluster` is None where none was asked, and `pools` empty where no pool was."""

    now_s: float
    pools: tuple[str, ...] = ()
    this_node: str = ""
    volumes: list[SeenVolume] = field(default_factory=list)
    devices: list[SeenDevice] = field(default_factory=list)
    mounts: list[SeenMount] = field(default_factory=list)
    files: list[SeenFile] = field(default_factory=list)
    trash: list[SeenTrash] = field(default_factory=list)
    holds: list[SeenHold] = field(default_factory=list)
    cluster: DriverObjects | None = None
    shared_pools: set[str] = field(default_factory=set)


def plan(world: Inventory, grace_s: float) -> list[Orphan]:
    """Everything without an owner, with the reason; what may not be removed now says why not."""
    found = [
        *_volumes(world),
        *_pvs(world),
        *_attachments(world),
        *_holds(world),
        *_devices(world),
        *_mounts(world),
        *_files(world),
        *_trash(world),
    ]
    return [_with_grace(finding, grace_s) for finding in found]


def _with_grace(finding: Orphan, grace_s: float) -> Orphan:
    needed = max(grace_s, LONG_GRACE_S) if finding.kind == "export-snapshot" and grace_s else grace_s
    if finding.held or finding.age_s >= needed:
        return finding
    held = f"it is {finding.age_s:.0f} s old, younger than the grace period of {needed:.0f} s"
    return Orphan(finding.kind, finding.id, finding.why, finding.age_s, held, finding.action, finding.pool)


def _volumes(world: Inventory) -> Iterator[Orphan]:
    cluster = world.cluster
    if cluster is None:
        return
    for volume in world.volumes:
        if volume.id in cluster.handles or volume.id.startswith("ephemeral."):
            continue
        held = ""
        if volume.used_by:
            held = f"it is in use: {volume.used_by}"
        elif not cluster.is_installed:
            held = f"the driver {cluster.driver} is not installed in this cluster, so it may be another cluster's"
        elif volume.name in cluster.claims:
            held = _wanted_by(cluster.claims[volume.name], volume, world)
        elif not volume.name.startswith(PROVISIONED):
            held = f"its name {volume.name!r} is none that a provisioner gives, so it may have been made by hand"
        why = "no PersistentVolume of the cluster has its id as volumeHandle"
        age = world.now_s - volume.created_s
        yield Orphan("volume", volume.id, why, age, held, "move it to the trash", volume.pool)


def _wanted_by(claim: SeenClaim, volume: SeenVolume, world: Inventory) -> str:
    """Why a volume is kept whose claim exists, and the command that brings its object back."""
    if not claim.volume_name:
        return f"the claim {claim.key} waits for it, and the provisioner will make its PersistentVolume again"
    if volume.name != f"{PROVISIONED}{claim.uid}":  # anyone may write any name into a claim
        return f"the claim {claim.key} names it, but it was not made for that claim: find out whose data it holds"
    flags: tuple[str, ...] = ("--claim", claim.key, "--claim-uid", claim.uid, "--name", claim.volume_name)
    flags += ("--storage-class", claim.storage_class) if claim.storage_class else ()
    flags += ("--node", world.this_node) if world.this_node and volume.pool not in world.shared_pools else ()
    make = command("moorage", "volume", "--pool", volume.pool, "manifest", names=(volume.id,), flags=flags)
    return f"the claim {claim.key} has lost it; `{make} | kubectl create -f -` brings it back"


def _pvs(world: Inventory) -> Iterator[Orphan]:
    cluster = world.cluster
    if cluster is None or not world.pools:
        return
    here = {volume.id for volume in world.volumes}
    ours = {node for pv in cluster.pvs if pv.handle in here for node in pv.nodes} | {world.this_node}
    trashed = {item.entry.partition("-volume-")[2]: item for item in world.trash}
    for pv in cluster.pvs:
        if pv.handle in here or (pv.nodes and not pv.nodes & ours):
            continue
        held = ""
        if pv.handle in trashed:
            undelete = command("moorage", "volume", "--pool", trashed[pv.handle].pool, "undelete", names=(pv.handle,))
            held = f"its volume is in the trash; `{undelete}` brings it back"
        elif pv.is_going:
            held = "it is being deleted already and waits for its finalizers"
        elif pv.phase not in ("Released", "Available", "Failed"):
            held = f"it is {pv.phase or 'not settled'}: a claim uses it; delete the claim first"
        elif not pv.nodes:
            held = "it names no node, so its volume may lie in a pool that was not looked at"
        why = f"its volume {pv.handle} is in none of the pools {', '.join(world.pools)}"
        yield Orphan("pv", pv.name, why, world.now_s - pv.created_s, held, "delete the object")


def _attachments(world: Inventory) -> Iterator[Orphan]:
    cluster = world.cluster
    if cluster is None:
        return
    for item in cluster.attachments:
        if item.node not in cluster.nodes:
            why = f"its node {item.node} does not exist"
        elif item.pv and item.pv not in cluster.pv_names:
            why = f"its volume {item.pv} does not exist"
        else:
            continue
        held = "it is being deleted already; the attacher has to detach it" if item.is_going else ""
        yield Orphan("attachment", item.name, why, world.now_s - item.created_s, held, "delete the object")


def _holds(world: Inventory) -> Iterator[Orphan]:
    cluster = world.cluster
    if cluster is None or not cluster.is_installed:
        return
    attached = {item.node for item in cluster.attachments}
    for hold in world.holds:
        if hold.node_id in cluster.node_ids | cluster.nodes | attached:
            continue
        held = f"it is in use: {hold.used_by}" if hold.used_by else ""
        if hold.node_id.startswith("by-hand-"):
            held = held or "it was mounted by hand; `moorage volume unmount` gives it back"
        why = f"node {hold.node_id}, which has it, is not in the cluster"
        age = world.now_s - hold.since_s
        yield Orphan("pool-attachment", f"{hold.volume_id} {hold.node_id}", why, age, held, "detach it", hold.pool)


def _devices(world: Inventory) -> Iterator[Orphan]:
    known = {volume.id for volume in world.volumes}
    for device in world.devices:
        if device.mounts and not device.is_gone:
            continue
        if device.is_gone:
            why = "its file was deleted"
        elif device.volume_id not in known:
            why = f"its volume {device.volume_id or '(none)'} does not exist"
        elif device.is_raw:
            continue  # attached is all that staging does to a raw volume
        else:
            why = f"volume {device.volume_id} is mounted nowhere"
        held = ""
        if device.mounts:
            held = f"it is mounted at {', '.join(device.mounts)}"
        elif device.openers:
            held = f"process {', '.join(map(str, device.openers))} has it open"
        yield Orphan("loop-device", device.path, why, world.now_s - device.since_s, held, "detach it", device.pool)


def _mounts(world: Inventory) -> Iterator[Orphan]:
    for mount in world.mounts:
        if mount.is_dead:
            why = f"it does not answer any more ({mount.what})"
        elif mount.is_gone:
            why = f"what it shows was deleted ({mount.what})"
        elif mount.pod_uid and world.cluster is not None and mount.pod_uid not in world.cluster.pod_uids:
            why = f"its pod {mount.pod_uid} is not in the cluster"
        else:
            continue
        held = ""
        if not mount.is_dead and not mount.is_gone and world.cluster is not None and not world.cluster.is_installed:
            held = f"the driver {world.cluster.driver} is not installed in this cluster: the pod may be another's"
        yield Orphan("mount", mount.target, why, world.now_s - mount.since_s, held, "unmount it", mount.pool)


def _files(world: Inventory) -> Iterator[Orphan]:
    for item in world.files:
        held = "its process is alive" if item.is_alive else ""
        yield Orphan(item.kind, item.id, item.what, world.now_s - item.since_s, held, "remove it", item.pool)


def _trash(world: Inventory) -> Iterator[Orphan]:
    for item in world.trash:
        if item.expires_s > world.now_s:
            continue
        held = f"the plugin that serves the pool (pid {item.owner}) reclaims it" if item.owner else ""
        why = f"{item.name} was deleted, and its time in the trash is over"
        yield Orphan("trash", item.entry, why, world.now_s - item.deleted_s, held, "reclaim its space", item.pool)
