"""Where a new volume's data comes from: a snapshot, another claim, or nothing.

Owns: reading dataSource and dataSourceRef, every check of the source, and grants across namespaces. A kind that is
neither snapshot nor claim belongs to an external populator (`NotOurs`).
Start reading at: `content_source`.
"""

from dataclasses import dataclass

from moorage.csi import csi_pb2 as pb
from moorage.kube import names
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.errors import NotFound
from moorage.kube.objects import (
    PersistentVolume,
    PersistentVolumeClaim,
    ReferenceGrant,
    StorageClass,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.quantity import bytes_of
from moorage.kube.volumes import claim_class, required_bytes, volume_mode
from moorage.sidecars.errors import OtherProvisioner, ProvisionError, ProvisioningState

_CLAIM, _SNAPSHOT = "PersistentVolumeClaim", "VolumeSnapshot"


@dataclass(frozen=True, slots=True)
class DataSource:
    """The source that a claim names, normalised."""

    group: str
    kind: str
    namespace: str
    name: str
    crosses: bool = False

    @property
    def is_claim(self) -> bool:
        return self.kind == _CLAIM and self.group == ""

    @property
    def is_snapshot(self) -> bool:
        return self.kind == _SNAPSHOT and self.group == names.SNAPSHOT_GROUP


def data_source_of(claim: PersistentVolumeClaim, crossing_allowed: bool) -> DataSource | None:
    """The claim's source, None without one; errors are final until the claim changes."""
    spec = claim.spec
    source = spec.data_source or spec.data_source_ref
    if source is None:
        return None
    namespace = (spec.data_source_ref.namespace or "") if spec.data_source_ref is not None else ""
    if spec.data_source is None and namespace and not crossing_allowed:
        raise ProvisionError(
            "dataSourceRef names another namespace, and the gate CrossNamespaceVolumeDataSource is off",
            ProvisioningState.FINISHED,
        )
    crosses = spec.data_source is None and bool(namespace) and namespace != claim.namespace
    where = namespace if crosses else claim.namespace
    found = DataSource(source.api_group or "", source.kind, where, source.name, crosses)
    if source.kind == _SNAPSHOT and found.group != names.SNAPSHOT_GROUP:
        raise ProvisionError(
            f"data source VolumeSnapshot must have apiGroup {names.SNAPSHOT_GROUP}", ProvisioningState.FINISHED
        )
    if not found.is_claim and not found.is_snapshot:
        raise OtherProvisioner(
            f"a {source.kind} is not ours to read: an external populator is expected to fill the volume"
        )
    return found


async def content_source(
    source: DataSource,
    claim: PersistentVolumeClaim,
    storage_class: StorageClass,
    client: Client,
    claims: Informer[PersistentVolumeClaim],
    *,
    prevent_conversion: bool,
) -> pb.VolumeContentSource:
    """The checked source as CreateVolume takes it."""
    if source.crosses:
        await _check_grant(source, claim, client)
    if source.is_snapshot:
        return await _from_snapshot(source, claim, storage_class, client, prevent_conversion)
    return await _from_claim(source, claim, storage_class, client, claims)


async def _check_grant(source: DataSource, claim: PersistentVolumeClaim, client: Client) -> None:
    grants = (await client.list(ReferenceGrant, source.namespace)).items
    if not any(_grants(grant, source, claim) for grant in grants):
        message = f"no ReferenceGrant in {source.namespace} lets claims of {claim.namespace} use {source.kind}"
        raise ProvisionError(f"{message} {source.name}", ProvisioningState.FINISHED)


def _grants(grant: ReferenceGrant, source: DataSource, claim: PersistentVolumeClaim) -> bool:
    comes = any(
        (each.get("group") or "") == "" and each.get("kind") == _CLAIM and each.get("namespace") == claim.namespace
        for each in grant.spec.get("from") or []
    )
    goes = any(
        (each.get("group") or "") == source.group
        and each.get("kind") == source.kind
        and (each.get("name") or source.name) == source.name
        for each in grant.spec.get("to") or []
    )
    return comes and goes


async def _from_snapshot(
    source: DataSource,
    claim: PersistentVolumeClaim,
    storage_class: StorageClass,
    client: Client,
    prevent_conversion: bool,
) -> pb.VolumeContentSource:
    what = f"snapshot {source.namespace}/{source.name}"
    snapshot = await client.find(VolumeSnapshot, source.name, source.namespace)
    if snapshot is None:
        raise ProvisionError(f"{what} does not exist")
    if snapshot.is_deleting and names.RESTORE_PROTECTION not in snapshot.finalizers:
        raise ProvisionError(f"{what} is being deleted")
    status = snapshot.status
    if status is None or not status.bound_volume_snapshot_content_name:
        raise ProvisionError(f"{what} is not bound to a content yet")
    try:
        content = await client.get(VolumeSnapshotContent, status.bound_volume_snapshot_content_name)
    except NotFound:
        raise ProvisionError(
            f"{what} is bound to content {status.bound_volume_snapshot_content_name}, which is gone"
        ) from None
    reference = content.spec.volume_snapshot_ref
    if (reference.uid, reference.namespace, reference.name) != (snapshot.uid, snapshot.namespace, snapshot.name):
        raise ProvisionError(f"{what} and content {content.name} are not bound to each other")
    if content.spec.driver != storage_class.provisioner:
        raise ProvisionError(f"{what} is of driver {content.spec.driver}, the class of {storage_class.provisioner}")
    if status.ready_to_use is not True:
        raise ProvisionError(f"{what} is not ready to use yet")
    if content.status is None or not content.status.snapshot_handle:
        raise ProvisionError(f"content {content.name} of {what} has no handle yet")
    size = bytes_of(status.restore_size)
    if size and required_bytes(claim) < size:
        raise ProvisionError(f"{what} needs {size} bytes, the claim asks for {required_bytes(claim)}")
    if prevent_conversion:
        _check_mode(content, claim, what)
    return pb.VolumeContentSource(
        snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id=content.status.snapshot_handle)
    )


def _check_mode(content: VolumeSnapshotContent, claim: PersistentVolumeClaim, what: str) -> None:
    was, wanted = content.spec.source_volume_mode, claim.spec.volume_mode
    allowed = content.annotations.get(names.ALLOW_MODE_CHANGE, "").lower() in ("true", "1", "t")
    if was and wanted and was != wanted and not allowed:
        raise ProvisionError(
            f"{what} is of a {was} volume and the claim asks for {wanted}; "
            f"an administrator can allow that with the annotation {names.ALLOW_MODE_CHANGE} on {content.name}"
        )


async def _from_claim(
    source: DataSource,
    claim: PersistentVolumeClaim,
    storage_class: StorageClass,
    client: Client,
    claims: Informer[PersistentVolumeClaim],
) -> pb.VolumeContentSource:
    what = f"source claim {source.namespace}/{source.name}"
    origin = claims.get(f"{source.namespace}/{source.name}")
    if origin is None:
        raise ProvisionError(f"{what} does not exist")
    if origin.status.phase != "Bound" or not origin.spec.volume_name:
        raise ProvisionError(f"{what} is not bound")
    if origin.is_deleting:
        raise ProvisionError(f"{what} is being deleted")
    if not claim_class(origin) or not claim_class(claim):
        raise ProvisionError(f"{what} and the clone must both have a storage class")
    if required_bytes(claim) < required_bytes(origin):
        raise ProvisionError(f"{what} has {required_bytes(origin)} bytes, the clone asks for less")
    volume = await client.find(PersistentVolume, origin.spec.volume_name)
    if volume is None:
        raise ProvisionError(f"volume {origin.spec.volume_name} of {what} does not exist")
    if volume.spec.csi is None or volume.spec.csi.driver != storage_class.provisioner:
        raise ProvisionError(f"{what} is not a volume of driver {storage_class.provisioner}")
    reference = volume.spec.claim_ref
    if reference is None or (reference.uid, reference.namespace, reference.name) != (
        origin.uid,
        origin.namespace,
        origin.name,
    ):
        raise ProvisionError(f"{what} and volume {volume.name} are not bound to each other")
    if volume.status.phase != "Bound":
        raise ProvisionError(f"volume {volume.name} of {what} is {volume.status.phase}, not Bound")
    if volume_mode(origin.spec.volume_mode) != volume_mode(claim.spec.volume_mode):
        raise ProvisionError(f"{what} is {volume_mode(origin.spec.volume_mode)}, the clone another volume mode")
    return pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=volume.spec.csi.volume_handle))
