"""Topology segments, capacity items and their objects. Pure.

Owns: which segments a cluster has, which objects there should be, and the names of the labels that mark them as ours.
Start reading at: `segments_of`, `managed_by`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from moorage.kube.objects import CSINode, CSIStorageCapacity, StorageClass
from moorage.kube.objects.meta import KubeObject
from moorage.sidecars.provisioner.topology import Term, term_of

_LABEL_MAX = 63
_BASE = "external-provisioner"


@dataclass(frozen=True, slots=True)
class CapacityItem:
    """One thing to publish: the room that a class has in a segment."""

    segment: Term
    storage_class: str


def segments_of(csi_nodes: Iterable[CSINode], nodes: Iterable[KubeObject], driver: str) -> frozenset[Term]:
    """Return the distinct segments of the cluster by the driver's topology keys. Without keys there is one."""
    labels = {node.name: node.labels for node in nodes}
    found = set()
    for csi_node in csi_nodes:
        for entry in csi_node.spec.drivers:
            if entry.name == driver and csi_node.name in labels:
                term = term_of(labels[csi_node.name], entry.topology_keys)
                if term is not None:
                    found.add(term)
    return frozenset(found)


def items_of(
    segments: Iterable[Term], classes: Iterable[StorageClass], driver: str, for_immediate: bool
) -> frozenset[CapacityItem]:
    """Combine every segment with every class of the driver. The scheduler does not read Immediate classes."""
    wanted = [
        each.name
        for each in classes
        if each.provisioner == driver and (for_immediate or each.volume_binding_mode != "Immediate")
    ]
    return frozenset(CapacityItem(segment, name) for segment in segments for name in wanted)


def item_of(published: CSIStorageCapacity) -> CapacityItem:
    """Return the item that an object describes."""
    labels = published.node_topology.match_labels if published.node_topology is not None else {}
    return CapacityItem(tuple(sorted(labels.items())), published.storage_class_name)


def managed_by(node: str = "") -> str:
    """The value of the managed-by label, shortened as the official provisioner does it when a node's name is long."""
    name = f"{_BASE}-{node}" if node else _BASE
    if len(name) <= _LABEL_MAX:
        return name
    if len(node) + 10 < _LABEL_MAX:
        room = _LABEL_MAX - len(node) - 10
        return f"{_BASE[:room]}-{fnv1a_32(_BASE):08x}-{node}"
    return f"{_BASE[: _LABEL_MAX - 9]}-{fnv1a_32(name):08x}"


def fnv1a_32(text: str) -> int:
    """FNV-1a (xor, then multiply); the rotation of topologies uses FNV-1 instead."""
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value
