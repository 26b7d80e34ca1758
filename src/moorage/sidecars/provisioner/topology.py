"""Where a volume must and may best be: the accessibility requirement of CreateVolume. Pure.

Owns: terms, flattening allowedTopologies, the order of requisite and preferred, and the rotation that spreads the
claims of a StatefulSet. The order is part of the contract: an official instance must send the same.
Start reading at: `requirement`.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import StorageClass, TopologyTerm
from moorage.sidecars.errors import ProvisionError, ProvisioningState

Term = tuple[tuple[str, str], ...]

_FNV_START, _FNV_PRIME, _UINT32 = 2166136261, 16777619, 0xFFFFFFFF


MOST_TERMS = 10_000  # in one request; a few expressions multiply to any number


@dataclass(frozen=True, slots=True)
class Selected:
    """The node that the scheduler chose: the driver's topology keys there, and the node's labels."""

    name: str
    keys: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodeTopology:
    """What is known of the nodes: the driver's keys on each, and all nodes' labels."""

    keys_by_node: Mapping[str, tuple[str, ...]]
    labels_by_node: Mapping[str, Mapping[str, str]]


def term_of(labels: Mapping[str, str], keys: Iterable[str]) -> Term | None:
    """Return the term of a node: its labels under the keys. Returns None if one of them is missing."""
    keys = list(keys)
    if any(key not in labels for key in keys):
        return None
    return tuple(sorted((key, labels[key]) for key in keys))


def flattened(allowed: Sequence[TopologyTerm]) -> list[Term]:
    """allowedTopologies as plain terms: each one's expressions multiplied out. Raises ProvisionError for too many."""
    terms: list[Term] = []
    for term in allowed:
        choices = [[(e.key, value) for value in e.values] for e in term.match_label_expressions]
        if len(terms) + math.prod(map(len, choices)) > MOST_TERMS:
            raise ProvisionError(f"the class's allowedTopologies stand for more than {MOST_TERMS} topologies")
        if choices:
            terms += [tuple(sorted(choice)) for choice in itertools.product(*choices)]
    return terms


def allows(allowed: Sequence[TopologyTerm], place: Term) -> bool:
    """Whether one of the class's allowedTopologies holds for a place; without any, each place is allowed."""
    pairs = set(place)
    terms = [term.match_label_expressions for term in allowed if term.match_label_expressions]
    fits = (all(any((e.key, value) in pairs for value in e.values) for e in term) for term in terms)
    return not terms or any(fits)


def ordered(terms: Iterable[Term]) -> list[Term]:
    """Sort terms by their number of pairs, then by key and value, without doubles."""
    return sorted(set(terms), key=lambda term: (len(term), term))


def is_subset(small: Term, large: Term) -> bool:
    return set(small) <= set(large)


def fnv1_32(text: str) -> int:
    """FNV-1 (multiply, then xor): not 1a."""
    value = _FNV_START
    for byte in text.encode():
        value = ((value * _FNV_PRIME) & _UINT32) ^ byte
    return value


def hash_and_index(claim_name: str) -> tuple[int, int]:
    """Claims of one StatefulSet get one hash and count up, so they are spread over the terms one after the other."""
    base, dash, number = claim_name.rpartition("-")
    if dash and number.isascii() and number.isdigit() and int(number) <= _UINT32:
        return fnv1_32(base.rpartition("-")[2]), int(number)
    return fnv1_32(claim_name), 0


def rotated(terms: Sequence[Term], by: int) -> list[Term]:
    return [*terms[by:], *terms[:by]]


def requirement(
    storage_class: StorageClass,
    claim_name: str,
    selected: Selected | None,
    cluster: NodeTopology,
    *,
    strict: bool,
    immediate: bool,
) -> pb.TopologyRequirement | None:
    """Return the requirement to send, None if the driver is free to choose."""
    chosen = _selected_term(selected)
    if strict and chosen is not None:
        if not allows(storage_class.allowed_topologies, chosen):
            raise ProvisionError(f"node {selected and selected.name} is outside the class's allowedTopologies")
        return _message([chosen], [chosen])
    if storage_class.allowed_topologies:
        requisite = ordered(flattened(storage_class.allowed_topologies))
    elif selected is None and not immediate:
        return None
    else:
        requisite = ordered(_aggregated(selected, cluster))
    if not requisite:
        return None
    if chosen is None:
        number, index = hash_and_index(claim_name)
        return _message(requisite, rotated(requisite, ((number + index) & _UINT32) % len(requisite)))
    first = next((at for at, term in enumerate(requisite) if is_subset(term, chosen)), None)
    if first is None:
        raise ProvisionError(f"node {selected and selected.name} is in none of the topologies that the class allows")
    return _message(requisite, rotated(requisite, first))


def _selected_term(selected: Selected | None) -> Term | None:
    if selected is None:
        return None
    if not selected.keys:
        raise ProvisionError(f"the driver has registered no topology keys on node {selected.name}")
    term = term_of(selected.labels, selected.keys)
    if term is None:
        missing = [key for key in selected.keys if key not in selected.labels]
        raise ProvisionError(f"node {selected.name} lacks the topology labels {', '.join(missing)}")
    return term


def _aggregated(selected: Selected | None, cluster: NodeTopology) -> list[Term]:
    keys = selected.keys if selected is not None else _any_keys(cluster)
    if not keys:
        raise ProvisionError("no available topology found: the driver is registered on no node with topology keys")
    terms = (term_of(labels, keys) for labels in cluster.labels_by_node.values())
    return [term for term in terms if term is not None]


def _any_keys(cluster: NodeTopology) -> tuple[str, ...]:
    """The keys of some node; always the same one, so that a retry sends the same."""
    return next((keys for _, keys in sorted(cluster.keys_by_node.items()) if keys), ())


def _message(requisite: Sequence[Term], preferred: Sequence[Term]) -> pb.TopologyRequirement:
    return pb.TopologyRequirement(
        requisite=[pb.Topology(segments=dict(term)) for term in requisite],
        preferred=[pb.Topology(segments=dict(term)) for term in preferred],
    )


def node_terms(topologies: Iterable[pb.Topology]) -> list[dict[str, object]]:
    """Returned topologies as nodeSelectorTerms: one expression with one value per segment."""
    return [
        {
            "matchExpressions": [
                {"key": key, "operator": "In", "values": [value]} for key, value in sorted(topology.segments.items())
            ]
        }
        for topology in topologies
        if topology.segments
    ]


def unreachable(message: str) -> ProvisionError:
    """Return the error for a selected node that is gone: the scheduler must choose again."""
    return ProvisionError(message, ProvisioningState.RESCHEDULE)
