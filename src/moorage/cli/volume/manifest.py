"""`moorage volume manifest`: the PersistentVolume object with which a cluster finds a volume again."""

from typing import Annotated, Any

import typer

from moorage.cli import show
from moorage.cli.volume.group import Name, app
from moorage.errors import UsageError
from moorage.kube.names import PROVISIONED_BY
from moorage.kube.quantity import bytes_text
from moorage.plugin.settings import TOPOLOGY_KEY
from moorage.storage import Volume, VolumeKind
from moorage.storage.guests import volume_named


@app.command()
def manifest(
    ctx: typer.Context,
    name: Name,
    claim: Annotated[str, typer.Option(metavar="NAMESPACE/CLAIM", help="Reserve it for this claim.")] = "",
    claim_uid: Annotated[str, typer.Option(metavar="UID", help="The claim's uid, if the claim lost the volume.")] = "",
    storage_class: Annotated[str, typer.Option(metavar="NAME", help="The claim's storage class.")] = "",
    node: Annotated[str, typer.Option(metavar="NODE", help="The node that has the pool, unless all nodes do.")] = "",
    object_name: Annotated[str, typer.Option("--name", metavar="NAME", help="The object's name.")] = "",
    driver: Annotated[str, typer.Option(metavar="NAME", help="The driver that serves the pool.")] = "csi.moorage.dev",
) -> None:
    """Print a PersistentVolume for a volume, for kubectl create.

    Its policy is Retain: deleting the object does not delete the volume.

    Examples:

      moorage volume --pool /srv manifest db --node n1 | kubectl create -f -
    """
    if claim and claim.count("/") != 1:
        raise UsageError(f"--claim {claim!r}: want NAMESPACE/CLAIM")
    if claim_uid and not claim:
        raise UsageError("--claim-uid needs --claim")
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
    spec = _spec(found, driver) | ({"storageClassName": storage_class} if storage_class else {})
    if claim:
        namespace, _, own = claim.partition("/")
        reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": own}
        spec["claimRef"] = reference | ({"uid": claim_uid} if claim_uid else {})
    if node:
        expression = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}
    metadata = {"name": object_name or found.name, "annotations": {PROVISIONED_BY: driver}}
    show.json_out({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})


def _spec(volume: Volume, driver: str) -> dict[str, Any]:
    csi = {"driver": driver, "volumeHandle": volume.id}
    is_raw = volume.kind is VolumeKind.IMAGE and not volume.filesystem
    return {
        "capacity": {"storage": bytes_text(volume.size_bytes)},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "volumeMode": "Block" if is_raw else "Filesystem",
        "csi": csi | ({"fsType": volume.filesystem} if volume.filesystem else {}),
    }
