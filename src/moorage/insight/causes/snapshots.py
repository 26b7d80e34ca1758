"""Why a snapshot is not ready, or will not go away."""

from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import is_leaderless
from moorage.kube.names import DEFAULT_SNAPSHOT_CLASS
from moorage.kube.objects import VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent
from moorage.suggest import NOTHING, kubectl, pods_like


def is_waiting(snapshot: VolumeSnapshot) -> bool:
    ready = snapshot.status is not None and bool(snapshot.status.ready_to_use)
    return not ready and not snapshot.is_deleting


def content_of(view: ClusterView, snapshot: VolumeSnapshot) -> VolumeSnapshotContent | None:
    name = snapshot.status.bound_volume_snapshot_content_name if snapshot.status else None
    return view.contents.get(name or "")


def class_of(view: ClusterView, snapshot: VolumeSnapshot) -> VolumeSnapshotClass | None:
    return view.snapshot_classes.get(snapshot.spec.volume_snapshot_class_name or "")


def driver_of(view: ClusterView, snapshot: VolumeSnapshot) -> str:
    claim = view.claims.get(f"{snapshot.namespace}/{snapshot.spec.source.persistent_volume_claim_name}")
    volume = view.volumes.get(claim.spec.volume_name) if claim is not None else None
    return volume.spec.csi.driver if volume is not None and volume.spec.csi is not None else ""


@cause(
    "snapshot-deleting-source",
    VolumeSnapshot,
    "The snapshot is being deleted while a volume is restored from it",
    "Wait for the restore; the snapshot then goes by itself.",
)
def deleting_source(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """A snapshot that is the source of a pending claim is protected until that claim is bound."""
    if not snapshot.is_deleting:
        return None
    for claim in view.claims.values():
        source = claim.spec.data_source_ref or claim.spec.data_source
        is_source = source is not None and source.kind == "VolumeSnapshot" and source.name == snapshot.name
        if is_source and claim.namespace == snapshot.namespace and claim.status.phase in ("", "Pending"):
            return Finding(f"it is being deleted, and claim {claim.name} is being restored from it", waits_for=claim)
    return None


@cause(
    "snapshot-deleting",
    VolumeSnapshot,
    "The snapshot is being deleted",
    "The driver deletes its storage, then the finalizers go; read the content's error if it has one.",
)
def deleting(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """The snapshot controller and the driver's snapshotter take the content away first."""
    if not snapshot.is_deleting:
        return None
    content = content_of(view, snapshot)
    error = content.status.error if content is not None and content.status is not None else None
    event = view.warning(content, "SnapshotDeleteError") if content is not None else None
    words = f": {event.message}" if event is not None else f": {error.message}" if error is not None else ""
    return Finding(
        f"it is being deleted{words}",
        kubectl("describe", "volumesnapshot", snapshot.name, namespace=snapshot.namespace),
        (*said(event), *(f"finalizer {name}" for name in snapshot.finalizers)),
    )


@cause(
    "snapshot-class-missing",
    VolumeSnapshot,
    "The snapshot's class does not exist",
    "Create the VolumeSnapshotClass, or name one that exists.",
)
def class_missing(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """`spec.volumeSnapshotClassName` names a class that is not there."""
    name = snapshot.spec.volume_snapshot_class_name
    if not is_waiting(snapshot) or not name or name in view.snapshot_classes:
        return None
    return Finding(
        f"snapshot class {name!r} does not exist", kubectl("get", "volumesnapshotclass"), said(view.warning(snapshot))
    )


@cause(
    "snapshot-class-none",
    VolumeSnapshot,
    "The snapshot names no class and its driver has no default one",
    'Annotate one class of the driver with snapshot.storage.kubernetes.io/is-default-class: "true".',
)
def class_none(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """Without a class name, the default class of the claim's driver is used; there must be exactly one."""
    if (
        not is_waiting(snapshot)
        or snapshot.spec.volume_snapshot_class_name
        or snapshot.spec.source.volume_snapshot_content_name
    ):
        return None
    driver = driver_of(view, snapshot)
    defaults = [
        c
        for c in view.snapshot_classes.values()
        if c.driver == driver and c.annotations.get(DEFAULT_SNAPSHOT_CLASS) == "true"
    ]
    if not driver or len(defaults) == 1:
        return None
    what = "no snapshot class is" if not defaults else f"{len(defaults)} snapshot classes are"
    return Finding(
        f"it names no class, and {what} the default for driver {driver}",
        kubectl("get", "volumesnapshotclass"),
        said(view.warning(snapshot)),
    )


@cause(
    "snapshot-claim-missing",
    VolumeSnapshot,
    "The claim to snapshot does not exist",
    "Correct the name; the claim must be in the snapshot's namespace.",
)
def claim_missing(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """`spec.source.persistentVolumeClaimName` names a claim that is not there."""
    name = snapshot.spec.source.persistent_volume_claim_name
    if not is_waiting(snapshot) or not name or f"{snapshot.namespace}/{name}" in view.claims:
        return None
    return Finding(
        f"claim {name} does not exist in {snapshot.namespace}",
        kubectl("get", "pvc", namespace=snapshot.namespace),
        said(view.warning(snapshot)),
    )


@cause(
    "snapshot-claim-not-bound",
    VolumeSnapshot,
    "The claim to snapshot is not bound",
    "The explanation follows the claim.",
)
def claim_not_bound(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """Only a bound claim has a volume to take a snapshot of."""
    claim = view.claims.get(f"{snapshot.namespace}/{snapshot.spec.source.persistent_volume_claim_name}")
    if not is_waiting(snapshot) or claim is None or claim.status.phase == "Bound":
        return None
    return Finding(f"it waits for claim {claim.name} to be bound", waits_for=claim)


@cause(
    "snapshot-driver-differs",
    VolumeSnapshot,
    "The snapshot's class is of another driver than its claim",
    "Name a class of the claim's driver.",
)
def driver_differs(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """A snapshot is taken by the driver that has the volume."""
    chosen, driver = class_of(view, snapshot), driver_of(view, snapshot)
    if not is_waiting(snapshot) or chosen is None or not driver or chosen.driver == driver:
        return None
    return Finding(
        f"its class {chosen.name} is of driver {chosen.driver}, its claim of {driver}",
        kubectl("get", "volumesnapshotclass"),
        said(view.warning(snapshot)),
    )


@cause(
    "snapshot-content-missing",
    VolumeSnapshot,
    "The content that the snapshot names does not exist",
    "Create the VolumeSnapshotContent, or correct the name.",
)
def content_missing(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """`spec.source.volumeSnapshotContentName` names a content that is not there."""
    name = snapshot.spec.source.volume_snapshot_content_name
    if not is_waiting(snapshot) or not name or name in view.contents:
        return None
    return Finding(
        f"content {name} does not exist", kubectl("get", "volumesnapshotcontents"), said(view.warning(snapshot))
    )


@cause(
    "snapshot-content-lost",
    VolumeSnapshot,
    "The content of the snapshot is gone",
    "If the driver still has the snapshot, create a VolumeSnapshotContent with its handle and a snapshot that names it.",
)
def content_lost(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """The snapshot was bound to a content that does not exist any more."""
    name = snapshot.status.bound_volume_snapshot_content_name if snapshot.status is not None else None
    if snapshot.is_deleting or not name or name in view.contents or "VolumeSnapshotContent" in view.unreadable:
        return None
    return Finding(
        f"its content {name} does not exist any more",
        kubectl("get", "volumesnapshotcontents"),
        said(view.warning(snapshot)),
    )


@cause("snapshot-fails", VolumeSnapshot, "Taking the snapshot fails", "Read the driver's words; it is tried again.")
def fails(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """CreateSnapshot fails; the error in the content's and the snapshot's status holds the driver's words."""
    content = content_of(view, snapshot)
    # The snapshot keeps an error until it is ready; the content's is taken back as soon as the driver succeeds.
    told = content if content is not None and content.status is not None else snapshot
    error = told.status.error if told.status is not None else None
    if not is_waiting(snapshot) or error is None:
        return None
    return Finding(
        f"taking it fails: {error.message}",
        kubectl("describe", "volumesnapshot", snapshot.name, namespace=snapshot.namespace),
        said(view.warning(told)) or said(view.warning(snapshot)),
    )


@cause(
    "snapshot-controller-not-running",
    VolumeSnapshot,
    "No snapshot controller works in the cluster",
    "Start the snapshot controller (`moorage controllers snapshots`); one serves all drivers.",
)
def controller_not_running(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """The snapshot has no content and no finalizer: the cluster's snapshot controller has not touched it."""
    if not is_waiting(snapshot) or snapshot.finalizers or content_of(view, snapshot) is not None:
        return None
    return Finding(
        "the snapshot controller has not looked at it; is it running?",
        pods_like("snapshot-controller"),
    )


@cause(
    "snapshot-snapshotter-not-running",
    VolumeSnapshot,
    "The driver's snapshotter has not taken the snapshot",
    "Start the driver's snapshotter (`moorage sidecars snapshotter`).",
)
def snapshotter_not_running(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """There is a content, and the driver's snapshotter has not put a handle into its status."""
    content = content_of(view, snapshot)
    has_handle = content is not None and content.status is not None and content.status.snapshot_handle
    if not is_waiting(snapshot) or content is None or has_handle:
        return None
    stale = " (its lease has run out)" if is_leaderless(view, content.spec.driver, "snapshotter") else ""
    return Finding(f"it waits for the snapshotter of {content.spec.driver}{stale}", pods_like("snapshotter"))


@cause("snapshot-not-ready", VolumeSnapshot, "The snapshot is being taken", "Wait; the driver is copying.")
def not_ready(view: ClusterView, snapshot: VolumeSnapshot) -> Finding | None:
    """The driver has the snapshot and says that it is not ready to use yet."""
    if not is_waiting(snapshot):
        return None
    return Finding("the driver is still making it", NOTHING, said(next(iter(view.events_of(snapshot)), None)))
