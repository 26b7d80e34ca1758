"""What to do about one object, given which of its owners are there and what depends on it. Pure.

Owns: the rules of background, foreground and orphaning deletion.
May not touch: the API. That an owner is gone is something the caller has to have confirmed.
Start reading at: `plan_node`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moorage.controllers.garbage.graph import FOREGROUND, ORPHAN, Node

OwnerState = Literal["there", "waiting", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this propagation policy."""

    policy: Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True, slots=True)
class DropOwners:
    """Take these owners off the object; others still hold it."""

    uids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Disown:
    """Take this object off a dependent, which stays."""

    dependent: Node


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left that the finalizer waits for: remove it."""

    finalizer: str


@dataclass(frozen=True, slots=True)
class LookAt:
    """A dependent has to go first."""

    uid: str


Action = Delete | DropOwners | Disown | Finish | LookAt


def plan_node(node: Node, owners: Mapping[str, OwnerState], dependents: Sequence[Node]) -> list[Action]:
    """What to do now. `owners` tells of each owner reference whether its object is there, waits for its dependents to
    go, is gone for certain, or cannot be known; an owner that cannot be known counts as there."""
    if node.lets_go:
        return [Disown(dependent) for dependent in dependents] or [Finish(ORPHAN)]
    if node.awaits_dependents:
        return _plan_foreground(node, dependents)
    if node.is_deleting or not node.owners:
        return []
    states = {owner.uid: owners.get(owner.uid, "unknown") for owner in node.owners}
    absent = frozenset(uid for uid, state in states.items() if state in ("gone", "waiting"))
    if any(state in ("there", "unknown") for state in states.values()):
        return [DropOwners(absent)] if absent else []
    if "waiting" in states.values() and dependents:
        return [Delete("Foreground")]
    return [Delete(_own_policy(node))]


def _plan_foreground(node: Node, dependents: Sequence[Node]) -> list[Action]:
    blocking = [d for d in dependents if any(o.uid == node.uid and o.block_owner_deletion for o in d.owners)]
    if not blocking:
        return [Finish(FOREGROUND)]
    return [LookAt(dependent.uid) for dependent in blocking if not dependent.is_deleting]


def _own_policy(node: Node) -> Literal["Background", "Foreground", "Orphan"]:
    """A finalizer that the object carries already says how its own dependents are to be treated."""
    if ORPHAN in node.finalizers:
        return "Orphan"
    return "Foreground" if FOREGROUND in node.finalizers else "Background"
