"""A node that is gone for good: let go of what only its own process could have finished.

With --node-deployment nobody else handles a node's volumes, so when the node never comes back its released volumes,
contents being deleted, capacity objects and half-made claims would wait for ever. What is done here assumes that the
node's data is lost: no driver is asked.

Owns: finding these objects and, when told to, letting them go. A bound volume is only reported, never touched.
Start reading at: `plan`, `carry_out`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moorage.kube.client import Client, PatchType
from moorage.kube.errors import NotFound
from moorage.kube.objects import (
    CSIStorageCapacity,
    KubeObject,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeSnapshotContent,
)
from moorage.kube.selectors import node_matches
from moorage.log import get_logger
from moorage.sidecars import names
from moorage.sidecars.capacity.segments import managed_by
from moorage.sidecars.context import is_served
from moorage.sidecars.edits import finalizer_patch, remove_annotation, update_whole
from moorage.sidecars.leases import lease_name
from moorage.sidecars.provisioner.decide import provisioner_of, selected_node_of, should_delete
from moorage.sidecars.roles import Role

log = get_logger(__name__)

What = Literal["reschedule", "forget-volume", "forget-snapshot", "remove", "keep"]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do about one object, and why, for a person to read first."""

    what: What
    kind: type[KubeObject]
    namespace: str
    name: str
    why: str


async def plan(client: Client, driver: str, node: str, namespace: str) -> list[Step]:
    """Everything that waits for the node."""
    nodes = {each.name: each.labels for each in (await client.list(Node)).items}
    steps = [
        Step("reschedule", PersistentVolumeClaim, claim.namespace, claim.name, "waits for the node to make its volume")
        for claim in (await client.list(PersistentVolumeClaim)).items
        if selected_node_of(claim) == node and not claim.spec.volume_name and provisioner_of(claim) == driver
    ]
    for volume in (await client.list(PersistentVolume)).items:
        if volume.spec.csi is not None and volume.spec.csi.driver == driver and is_only_on(volume, node, nodes):
            if should_delete(volume, driver):
                steps.append(Step("forget-volume", PersistentVolume, "", volume.name, "released; its data is lost"))
            else:
                why = f"is {volume.status.phase}; delete its claim first if its data is given up"
                steps.append(Step("keep", PersistentVolume, "", volume.name, why))
    if await is_served(client, VolumeSnapshotContent):
        labels = f"{names.SNAPSHOT_MANAGED_BY}={node}"
        steps += [
            Step("forget-snapshot", VolumeSnapshotContent, "", content.name, "waits to be deleted")
            for content in (await client.list(VolumeSnapshotContent, labels=labels)).items
            if content.is_deleting and content.spec.driver == driver
        ]
    labels = f"{names.CAPACITY_DRIVER}={driver},{names.CAPACITY_MANAGED_BY}={managed_by(node)}"
    steps += [
        Step("remove", CSIStorageCapacity, room.namespace, room.name, "offers room that is gone")
        for room in (await client.list(CSIStorageCapacity, labels=labels)).items
    ]
    journal = f"{lease_name(Role.PROVISIONER, driver)}-intents-{node}".lower()
    if await client.find(Lease, journal, namespace) is not None:
        steps.append(Step("remove", Lease, namespace, journal, "notes volumes that the node was making"))
    return steps


async def carry_out(client: Client, step: Step) -> None:
    """Do one step; what is gone already is done."""
    try:
        match step.what:
            case "reschedule":
                change = remove_annotation(names.SELECTED_NODE, names.SELECTED_NODE_ALPHA)
                await update_whole(client, step.kind, step.name, step.namespace, change)
            case "forget-volume":
                await client.delete(step.kind, step.name)
                patch = finalizer_patch(names.VOLUME_FINALIZER, False)
                await client.patch(step.kind, step.name, patch, how=PatchType.STRATEGIC)
            case "forget-snapshot":
                content = await client.get(VolumeSnapshotContent, step.name)
                left = [each for each in content.finalizers if each != names.CONTENT_FINALIZER]
                patch = {"metadata": {"finalizers": left or None}}
                await client.patch(step.kind, step.name, patch, version=content.metadata.resource_version)
            case "remove":
                await client.delete(step.kind, step.name, step.namespace)
            case "keep":
                return
    except NotFound:
        return
    log.info("taken over", what=step.what, kind=step.kind.resource.kind, name=step.name)


def is_only_on(volume: PersistentVolume, node: str, nodes: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether the volume can be reached from that node alone (which may no longer have a Node object)."""
    affinity = volume.spec.node_affinity
    if affinity is None or affinity.required is None:
        return False
    if any(node_matches(affinity.required, labels, name) for name, labels in nodes.items() if name != node):
        return False
    if node in nodes:
        return node_matches(affinity.required, nodes[node], node)
    return any(
        requirement.operator == "In" and requirement.values == [node]
        for term in affinity.required.node_selector_terms
        for requirement in term.match_expressions
    )
