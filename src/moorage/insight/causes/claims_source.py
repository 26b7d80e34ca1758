"""Why a claim that is to be filled from something is Pending: its snapshot, its source claim, its populator."""

from moorage.insight.causes.claims import is_waiting
from moorage.insight.causes.model import Finding, cause, said
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import class_of
from moorage.kube.objects import PersistentVolumeClaim, TypedReference
from moorage.kube.quantity import bytes_text
from moorage.kube.volumes import readable_bytes
from moorage.suggest import command, in_words, kubectl


@cause(
    "claim-source-snapshot-missing",
    PersistentVolumeClaim,
    "The snapshot to restore does not exist",
    "Create the snapshot, or delete the claim.",
)
def source_snapshot_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The data source is a VolumeSnapshot that is not in the claim's namespace."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if (
        not is_waiting(claim)
        or source is None
        or source.kind != "VolumeSnapshot"
        or source.namespace not in (None, claim.namespace)
    ):
        return None
    if f"{claim.namespace}/{source.name}" in view.snapshots or "VolumeSnapshot" in view.unreadable:
        return None
    return Finding(
        f"it is to be restored from snapshot {source.name}, which does not exist in {claim.namespace}",
        kubectl("get", "volumesnapshot", namespace=claim.namespace),
        said(view.warning(claim)),
    )


@cause(
    "claim-source-snapshot-not-ready",
    PersistentVolumeClaim,
    "The snapshot to restore is not ready",
    "Wait for the snapshot; the explanation follows it.",
)
def source_snapshot_not_ready(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The data source is a VolumeSnapshot whose readyToUse is not true yet."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None or source.kind != "VolumeSnapshot":
        return None
    snapshot = view.snapshots.get(f"{claim.namespace}/{source.name}")
    if snapshot is None or (snapshot.status is not None and snapshot.status.ready_to_use):
        return None
    return Finding(f"it waits for snapshot {source.name} to be ready", waits_for=snapshot)


@cause(
    "claim-source-claim-missing",
    PersistentVolumeClaim,
    "The claim to clone does not exist",
    "Create the source claim, or delete this one.",
)
def source_claim_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The data source is a PersistentVolumeClaim that is not in the claim's namespace."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None or source.kind != "PersistentVolumeClaim":
        return None
    if f"{claim.namespace}/{source.name}" in view.claims:
        return None
    return Finding(
        f"it is to be cloned from claim {source.name}, which does not exist in {claim.namespace}",
        kubectl("get", "pvc", namespace=claim.namespace),
        said(view.warning(claim)),
    )


@cause(
    "claim-source-claim-not-bound",
    PersistentVolumeClaim,
    "The claim to clone is not bound",
    "Wait for the source claim; the explanation follows it.",
)
def source_claim_not_bound(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """A clone is made from a bound claim only."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None or source.kind != "PersistentVolumeClaim":
        return None
    origin = view.claims.get(f"{claim.namespace}/{source.name}")
    if origin is None or origin.status.phase == "Bound":
        return None
    return Finding(f"it waits for claim {source.name}, its source, to be bound", waits_for=origin)


@cause(
    "claim-source-deleting",
    PersistentVolumeClaim,
    "The source of the claim is being deleted",
    "Keep the source until the clone or restore is made; delete this claim if it came too late.",
)
def source_deleting(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The source still exists and is on its way out; a clone or restore that has not begun is refused."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None:
        return None
    key = f"{claim.namespace}/{source.name}"
    origin = view.snapshots.get(key) if source.kind == "VolumeSnapshot" else view.claims.get(key)
    if origin is None or not origin.is_deleting or view.warning(claim, "ProvisioningFailed") is None:
        return None
    return Finding(
        f"its source {source.name} is being deleted",
        kubectl("get", origin.resource.kind.lower(), origin.name, namespace=claim.namespace, flags=("-o", "yaml")),
        said(view.warning(claim, "ProvisioningFailed")),
    )


@cause(
    "claim-source-driver-differs",
    PersistentVolumeClaim,
    "The source of the claim belongs to another driver",
    "Use a class of the driver that has the source; no driver can read the volumes of another.",
)
def source_driver_differs(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """A snapshot or a claim can only be copied by the driver that holds it."""
    source, storage_class = claim.spec.data_source_ref or claim.spec.data_source, class_of(view, claim)
    if not is_waiting(claim) or source is None or storage_class is None:
        return None
    driver = _driver_of_source(view, claim, source)
    if not driver or driver == storage_class.provisioner:
        return None
    return Finding(
        f"its source {source.name} is of driver {driver}, its class {storage_class.name} of {storage_class.provisioner}",
        in_words("recreate claim {} with a class of {}", claim.name, driver),
        said(view.warning(claim, "ProvisioningFailed")),
    )


@cause(
    "claim-source-too-large",
    PersistentVolumeClaim,
    "The claim is smaller than its source",
    "Ask for at least the size of the source.",
)
def source_too_large(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """A restore or a clone must be at least as large as what it is made from."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None:
        return None
    size = 0
    if source.kind == "VolumeSnapshot":
        snapshot = view.snapshots.get(f"{claim.namespace}/{source.name}")
        status = snapshot.status if snapshot is not None else None
        size = readable_bytes(status.restore_size) if status is not None else 0
    elif source.kind == "PersistentVolumeClaim":
        origin = view.claims.get(f"{claim.namespace}/{source.name}")
        size = readable_bytes(origin.status.capacity.get("storage")) if origin is not None else 0
    want = readable_bytes(claim.spec.resources.requests.get("storage"))
    if not size or want >= size:
        return None
    return Finding(
        f"it asks for {bytes_text(want)}, and its source {source.name} has {bytes_text(size)}",
        in_words("recreate the claim with at least {}", bytes_text(size)),
        said(view.warning(claim)),
    )


@cause(
    "claim-populator-missing",
    PersistentVolumeClaim,
    "The claim's data source needs a populator that is not there",
    "Install the populator for that kind, or use a VolumeSnapshot or a PersistentVolumeClaim as the source.",
)
def populator_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.dataSourceRef` names a kind that no CSI driver fills; an extra controller, a populator, must do it."""
    source = claim.spec.data_source_ref
    if not is_waiting(claim) or source is None or source.kind in ("VolumeSnapshot", "PersistentVolumeClaim"):
        return None
    return Finding(
        f"its content is to come from {source.kind} {source.name}, and nothing has filled it yet",
        command("kubectl", "api-resources", flags=(f"--api-group={source.api_group or ''}",)),
        said(view.warning(claim)),
    )


def _driver_of_source(view: ClusterView, claim: PersistentVolumeClaim, source: TypedReference) -> str:
    """The driver that holds what the claim is to be filled from; empty when it is not known."""
    key = f"{claim.namespace}/{source.name}"
    if source.kind == "VolumeSnapshot":
        snapshot = view.snapshots.get(key)
        name = snapshot.status.bound_volume_snapshot_content_name if snapshot is not None and snapshot.status else None
        content = view.contents.get(name or "")
        return content.spec.driver if content is not None else ""
    origin = view.claims.get(key) if source.kind == "PersistentVolumeClaim" else None
    volume = view.volumes.get(origin.spec.volume_name) if origin is not None else None
    return volume.spec.csi.driver if volume is not None and volume.spec.csi is not None else ""
