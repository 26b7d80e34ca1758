"""How much room drivers say that there is, in numbers, and where a class lets volumes be made.

Owns: sentences about CSIStorageCapacity objects and allowedTopologies, for the causes of claims and of pods.
Start reading at: `most_room`, `places`.
"""

from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import class_of
from moorage.kube.objects import CSIStorageCapacity, LabelSelector, PersistentVolumeClaim, StorageClass
from moorage.kube.quantity import bytes_text
from moorage.kube.volumes import readable_bytes, requested_bytes
from moorage.suggest import Command, kubectl

_COLUMNS = "CLASS:.storageClassName,CAPACITY:.capacity,LARGEST:.maximumVolumeSize,WHERE:.nodeTopology.matchLabels"


def show_room() -> Command:
    """Return the command that shows how much room there is, by class and place."""
    return kubectl("get", "csistoragecapacities", flags=("-A", "-o", f"custom-columns={_COLUMNS}"))


def most_room(view: ClusterView, claim: PersistentVolumeClaim) -> str:
    """Return how much the place with the most room has for the claim's class; empty if no driver says."""
    found = class_of(view, claim)
    known = [each for each in view.capacities.values() if found is not None and each.storage_class_name == found.name]
    if not known:
        return ""
    best = max(known, key=_usable)
    where = _where(best.node_topology)
    return f"the most that one place has is {bytes_text(_usable(best))}" + (f" ({where})" if where else "")


def demand(claims: list[PersistentVolumeClaim]) -> str:
    """Return what claims ask for: `1Gi for claim a, 2Gi for claim b`."""
    return ", ".join(f"{bytes_text(requested_bytes(claim))} for claim {claim.name}" for claim in claims)


def places(storage_class: StorageClass) -> str:
    """Return the class's allowedTopologies in words: `zone is a or b, or zone is c and rack is 1`."""
    terms = [
        " and ".join(f"{one.key} is {' or '.join(one.values)}" for one in term.match_label_expressions)
        for term in storage_class.allowed_topologies
    ]
    return ", or ".join(filter(None, terms))


def place_keys(storage_class: StorageClass) -> list[str]:
    """Return the node labels that the class's allowedTopologies name."""
    return sorted({one.key for term in storage_class.allowed_topologies for one in term.match_label_expressions})


def _usable(capacity: CSIStorageCapacity) -> int:
    room = readable_bytes(capacity.capacity)
    return min(room, readable_bytes(capacity.maximum_volume_size)) if capacity.maximum_volume_size is not None else room


def _where(topology: LabelSelector | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(topology.match_labels.items())) if topology else ""
