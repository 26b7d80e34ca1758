"""A node that is gone for good: release the objects that only its own process could have finished.

With --node-deployment no other process handles a node's volumes. If the node never comes back, these wait for ever:
its released volumes, attachments and contents that are being deleted, sources of copies, capacity objects, and claims
that it was provisioning. What is done here assumes that the node's data is lost: no driver is asked.

Owns: finding these objects, and releasing them. A bound volume is only reported, never touched.
Start reading at: `plan`, `carry_out`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moorage.kube import names
from moorage.kube.api.client import Client, PatchType
from moorage.kube.api.discovery import is_served
from moorage.kube.cache.informers import Informers
from moorage.kube.control.writer import Writer
from moorage.kube.errors import NotFound
from moorage.kube.names import lease_name
from moorage.kube.objects import (
    CSIStorageCapacity,
    KubeObject,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeAttachment,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.selectors import node_matches
from moorage.kube.volumes import is_of_driver, provisioner_of, selected_node_of
from moorage.log import get_logger
from moorage.sidecars.attacher.decide import finalizer_of
from moorage.sidecars.capacity.segments import managed_by
from moorage.sidecars.edits import Change, remove_annotation, remove_finalizer
from moorage.sidecars.provisioner.decide import should_delete
from moorage.sidecars.roles import Role
from moorage.sidecars.snapshotter.versions import best_served

log = get_logger(__name__)

What = Literal[
    "reschedule", "release-source", "forget-volume", "forget-attachment", "forget-snapshot", "remove", "keep"
]


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """What to do about one object, and why, for a person to read first."""

    what: What
    kind: type[KubeObject]
    namespace: str
    name: str
    why: str


async def plan(client: Client, driver: str, node: str, namespace: str) -> list[ReleaseStep]:
    """Return a step for every object that waits for the node."""
    return [
        *await _claims_and_volumes(client, driver, node),
        *await _attachments(client, driver, node),
        *await _snapshots(client, driver, node),
        *await _groups(client, driver, node),
        *await _leftovers(client, driver, node, namespace),
    ]


async def _claims_and_volumes(client: Client, driver: str, node: str) -> list[ReleaseStep]:
    nodes = {each.name: each.labels for each in (await client.list(Node)).items}
    volumes = {volume.name: volume for volume in (await client.list(PersistentVolume)).items}
    lost = {name for name, each in volumes.items() if is_of_driver(each, driver) and is_only_on(each, node, nodes)}
    steps = []
    for claim in (await client.list(PersistentVolumeClaim)).items:
        if selected_node_of(claim) == node and not claim.spec.volume_name and provisioner_of(claim) == driver:
            steps.append(_step("reschedule", claim, "waits for the node to make its volume"))
        elif claim.is_deleting and names.CLONE_PROTECTION in claim.finalizers and claim.spec.volume_name in lost:
            steps.append(_step("release-source", claim, "was a source of clones and waits to be deleted"))
    for name in sorted(lost):
        if should_delete(volumes[name], driver):
            steps.append(_step("forget-volume", volumes[name], "released; its data is lost"))
        else:
            why = f"is {volumes[name].status.phase}; delete its claim first if its data is given up"
            steps.append(_step("keep", volumes[name], why))
    return steps


async def _attachments(client: Client, driver: str, node: str) -> list[ReleaseStep]:
    return [
        _step("forget-attachment", each, "waits to be detached; counts as detached")
        for each in (await client.list(VolumeAttachment)).items
        if (each.spec.attacher, each.spec.node_name) == (driver, node)
        and each.is_deleting
        and finalizer_of(driver) in each.finalizers
    ]


async def _snapshots(client: Client, driver: str, node: str) -> list[ReleaseStep]:
    if not await is_served(client, VolumeSnapshotContent):
        return []
    steps = []
    for content in (await client.list(VolumeSnapshotContent, labels=f"{names.SNAPSHOT_MANAGED_BY}={node}")).items:
        if content.spec.driver != driver:
            continue
        of = content.spec.volume_snapshot_ref
        snapshot = await client.find(VolumeSnapshot, of.name, of.namespace)
        if snapshot is not None and snapshot.is_deleting and names.RESTORE_PROTECTION in snapshot.finalizers:
            steps.append(_step("release-source", snapshot, "was being restored and waits to be deleted"))
        if content.is_deleting:
            steps.append(_step("forget-snapshot", content, "waits to be deleted"))
    return steps


async def _groups(client: Client, driver: str, node: str) -> list[ReleaseStep]:
    kinds = await best_served(client)
    if kinds is None:
        return []
    contents = (await client.list(kinds.content, labels=f"{names.SNAPSHOT_MANAGED_BY}={node}")).items
    return [
        _step("forget-snapshot", each, "waits to be deleted")
        for each in contents
        if each.is_deleting and each.spec.driver == driver
    ]


async def _leftovers(client: Client, driver: str, node: str, namespace: str) -> list[ReleaseStep]:
    labels = f"{names.CAPACITY_DRIVER}={driver},{names.CAPACITY_MANAGED_BY}={managed_by(node)}"
    rooms = (await client.list(CSIStorageCapacity, labels=labels)).items
    steps = [_step("remove", room, "offers room that is gone") for room in rooms]
    journal = await client.find(Lease, f"{lease_name(Role.PROVISIONER, driver)}-intents-{node}".lower(), namespace)
    return [*steps, _step("remove", journal, "notes volumes that the node was making")] if journal else steps


def _step(what: What, obj: KubeObject, why: str) -> ReleaseStep:
    return ReleaseStep(what, type(obj), obj.namespace, obj.name, why)


async def carry_out(client: Client, step: ReleaseStep) -> None:
    """Do one step. An object that is gone already needs nothing."""
    writer = Writer(client, Informers(client))  # nothing is cached here

    async def update(change: Change) -> None:
        await writer.update(step.kind, step.name, step.namespace, change)

    try:
        match step.what:
            case "reschedule":
                await update(remove_annotation(names.SELECTED_NODE, names.ALPHA_SELECTED_NODE))
            case "forget-volume":
                volume = await client.get(step.kind, step.name)
                await writer.delete(volume)
                await writer.remove_finalizers(volume, names.EXTERNAL_DELETION, how=PatchType.STRATEGIC)
            case "release-source":
                is_claim = step.kind is PersistentVolumeClaim
                await update(remove_finalizer(names.CLONE_PROTECTION if is_claim else names.RESTORE_PROTECTION))
            case "forget-attachment" | "forget-snapshot":
                found = await client.get(step.kind, step.name)
                await writer.remove_finalizers(found, *_finalizers_of_node(found))
            case "remove":
                await client.delete(step.kind, step.name, step.namespace)
            case "keep":
                return
    except NotFound:
        return
    log.info("taken over", what=step.what, kind=step.kind.resource.kind, name=step.name)


def _finalizers_of_node(obj: KubeObject) -> list[str]:
    """Return the finalizers that only the process on the lost node would have removed."""
    if isinstance(obj, VolumeAttachment):
        return [finalizer_of(obj.spec.attacher)]
    return [names.SNAPSHOT_CONTENT_BOUND, names.GROUP_CONTENT_BOUND]


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
