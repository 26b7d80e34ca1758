"""Who owns whom, over all kinds: objects by uid, and the dependents of each.

Owns: `Graph`, kept by being told of changes.
May not touch: the API; decisions (`plan.py`).
Start reading at: `Graph.see`.
"""

from dataclasses import dataclass

from moorage.kube.objects.meta import KubeObject, OwnerReference, Resource

ORPHAN = "orphan"
FOREGROUND = "foregroundDeletion"


@dataclass(frozen=True, slots=True)
class Node:
    """What matters of one object: where it is, whom it belongs to, and how it is being deleted."""

    resource: Resource
    namespace: str
    name: str
    uid: str
    version: str
    owners: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()
    is_deleting: bool = False

    @property
    def awaits_dependents(self) -> bool:
        """It is being deleted in the foreground: its dependents go first."""
        return self.is_deleting and FOREGROUND in self.finalizers

    @property
    def lets_go(self) -> bool:
        """It is being deleted and its dependents are to stay, without it."""
        return self.is_deleting and ORPHAN in self.finalizers


def node_from(obj: KubeObject, resource: Resource) -> Node:
    meta = obj.metadata
    return Node(
        resource,
        meta.namespace,
        meta.name,
        meta.uid,
        meta.resource_version,
        tuple(meta.owner_references),
        tuple(meta.finalizers),
        obj.is_deleting,
    )


class Graph:
    """All objects that own or are owned, as far as they are known here."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._dependents: dict[str, dict[str, None]] = {}

    def see(self, old: Node | None, new: Node | None) -> set[str]:
        """Take note of a change; the uids that have to be looked at because of it."""
        concerned: set[str] = set()
        if old is not None:
            self._forget(old)
            concerned.update(owner.uid for owner in old.owners)
            if new is None:
                concerned.update(self._dependents.get(old.uid, {}))
        if new is not None:
            self._nodes[new.uid] = new
            for owner in new.owners:
                self._dependents.setdefault(owner.uid, {})[new.uid] = None
            concerned.add(new.uid)
            if new.is_deleting:
                concerned.update(owner.uid for owner in new.owners)
                if new.awaits_dependents or new.lets_go:
                    concerned.update(self._dependents.get(new.uid, {}))
        return {uid for uid in concerned if uid in self._nodes}

    def node(self, uid: str) -> Node | None:
        return self._nodes.get(uid)

    def dependents(self, uid: str) -> list[Node]:
        return [self._nodes[one] for one in self._dependents.get(uid, {}) if one in self._nodes]

    def _forget(self, node: Node) -> None:
        self._nodes.pop(node.uid, None)
        for owner in node.owners:
            dependents = self._dependents.get(owner.uid, {})
            dependents.pop(node.uid, None)
            if not dependents:
                self._dependents.pop(owner.uid, None)
