"""The garbage collector, running: one informer per kind that can be deleted, one queue of uids. Decides nothing.

Owns: finding out which kinds there are, confirming that an owner is gone, and the deletes and patches.
Start reading at: `run`, `Collector.sync`.
"""

import asyncio
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from moorage.controllers.context import ControllerContext
from moorage.controllers.garbage.graph import Graph, Node, node_from
from moorage.controllers.garbage.plan import (
    Action,
    Delete,
    Disown,
    DropOwners,
    Finish,
    LookAt,
    OwnerState,
    plan_node,
)
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informers
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import ApiError, Conflict, NotFound
from moorage.kube.objects.meta import KubeObject, OwnerReference, Resource, as_document
from moorage.log import get_logger

log = get_logger(__name__)

_LOOK_FOR_KINDS_S = 30.0
_NEEDED = frozenset({"delete", "list", "watch", "patch"})
_IGNORED = frozenset({("", "events"), ("events.k8s.io", "events"), ("coordination.k8s.io", "leases")})


async def run(context: ControllerContext) -> None:
    """Collect garbage until cancelled; kinds that appear later are taken in."""
    options = context.options
    queue: WorkQueue[str] = WorkQueue("garbage", start_s=options.retry_start_s, max_s=options.retry_max_s)
    context.activity.register(queue)
    collector = Collector(context.client, context.informers, queue)
    with context.activity.busy("garbage starts"):
        await collector.find_kinds()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(queue.run(collector.sync, options.workers), name="garbage")
        tasks.create_task(collector.find_kinds_forever(), name="garbage-kinds")


class Collector:
    """Keeps the graph, and carries out what is planned for one object at a time."""

    def __init__(self, client: Client, informers: Informers, queue: WorkQueue[str]) -> None:
        self._client = client
        self._informers = informers
        self._queue = queue
        self._graph = Graph()
        self._kinds: dict[tuple[str, str], type[KubeObject]] = {}  # (apiVersion, kind)
        self._gone: dict[str, None] = {}  # uids that were confirmed to be gone: they never come back

    async def find_kinds_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_FOR_KINDS_S)
            try:
                await self.find_kinds()
            except ApiError as error:
                log.warning("kinds cannot be listed", reason=str(error))

    async def find_kinds(self) -> None:
        """Follow every kind that can be listed, watched, patched and deleted; return when all are known."""
        for resource in await discover(self._client):
            key = (resource.api_version, resource.kind)
            if key not in self._kinds:
                self._kinds[key] = await self._follow(resource)

    async def _follow(self, resource: Resource) -> type[KubeObject]:
        kind = kind_of(resource)
        informer = self._informers.of(kind)
        await informer.wait_synced()

        def on_change(old: KubeObject | None, new: KubeObject | None) -> None:
            before = node_from(old, resource) if old is not None else None
            after = node_from(new, resource) if new is not None else None
            for uid in self._graph.see(before, after):
                self._queue.add(uid)

        informer.subscribe(on_change)
        return kind

    async def sync(self, uid: str) -> None:
        """Look at one object, and do what has to be done."""
        node = self._graph.node(uid)
        if node is None:
            return
        owners = {} if node.is_deleting else {owner.uid: await self._state(owner, node) for owner in node.owners}
        for action in plan_node(node, owners, self._graph.dependents(uid)):
            try:
                await self._execute(action, node)
            except NotFound:
                log.debug("was gone already", kind=node.resource.kind, name=node.name)

    async def _state(self, owner: OwnerReference, node: Node) -> OwnerState:
        known = self._graph.node(owner.uid)
        if known is not None:
            return "waiting" if known.awaits_dependents else "there"
        if owner.uid in self._gone:
            return "gone"
        return await self._state_itself(owner, node)

    async def _state_itself(self, owner: OwnerReference, node: Node) -> OwnerState:
        """Ask the API: a copy that is late must not cost anybody an object."""
        kind = self._kinds.get((owner.api_version, owner.kind))
        if kind is None or (kind.resource.namespaced and not node.namespace):
            return "unknown"  # a kind that is not served here, or a reference that cannot be: leave it alone
        found = await self._client.find(kind, owner.name, node.namespace if kind.resource.namespaced else "")
        if found is not None and found.uid == owner.uid:
            return "waiting" if node_from(found, kind.resource).awaits_dependents else "there"
        self._gone[owner.uid] = None
        if len(self._gone) > 10_000:
            del self._gone[next(iter(self._gone))]
        return "gone"

    async def _execute(self, action: Action, node: Node) -> None:
        match action:
            case Delete(policy):
                log.info("object has no owner left", kind=node.resource.kind, name=node.name, namespace=node.namespace)
                await self._delete(node, policy)
            case DropOwners(uids):
                await self._write(node, _without_owners(node, uids))
            case Disown(dependent):
                await self._write(dependent, _without_owners(dependent, {node.uid}))
            case Finish(finalizer):
                kept = [name for name in node.finalizers if name != finalizer]
                await self._write(node, {"metadata": {"finalizers": kept}})
            case LookAt(uid):
                self._queue.add(uid)

    async def _delete(self, node: Node, policy: str) -> None:
        kind = kind_of(node.resource)
        await self._client.delete(
            kind, node.name, node.namespace, uid=node.uid, version=node.version, propagation=policy
        )

    async def _write(self, node: Node, patch: Mapping[str, Any]) -> None:
        kind = kind_of(node.resource)
        try:
            written = await self._client.patch(kind, node.name, patch, node.namespace, version=node.version)
        except Conflict:
            current = await self._client.get(kind, node.name, node.namespace)
            if current.uid != node.uid:
                return  # another object of that name: this one is gone
            raise
        self._informers.of(kind).remember(written)


def _without_owners(node: Node, uids: frozenset[str] | set[str]) -> dict[str, Any]:
    return {"metadata": {"ownerReferences": [as_document(owner) for owner in node.owners if owner.uid not in uids]}}


_classes: dict[Resource, type[KubeObject]] = {}


def kind_of(resource: Resource) -> type[KubeObject]:
    """A class that reads only the metadata of a kind; always the same one, so that informers are shared."""
    if resource not in _classes:
        body = {"__annotations__": {"resource": ClassVar[Resource]}, "resource": resource, "__module__": __name__}
        _classes[resource] = types.new_class(
            f"MetaOf{resource.kind}", (KubeObject,), {"frozen": True}, lambda namespace: namespace.update(body)
        )
    return _classes[resource]


async def discover(client: Client) -> list[Resource]:
    """The kinds that the API serves and that garbage collection can work with, each in its preferred version."""
    groups = msgspec.json.decode(await client.request("GET", "/apis"))["groups"]
    preferred = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
    found = []
    for group_version in preferred:
        path = f"/apis/{group_version}" if "/" in group_version else f"/api/{group_version}"
        try:
            listed = msgspec.json.decode(await client.request("GET", path))
        except ApiError as error:  # an aggregated API that is down hides only itself
            log.warning("kinds of a group cannot be listed", group=group_version, reason=str(error))
            continue
        group, _, version = group_version.rpartition("/")
        for entry in listed.get("resources") or []:
            is_usable = "/" not in entry["name"] and set(entry.get("verbs") or ()) >= _NEEDED
            if is_usable and (group, entry["name"]) not in _IGNORED:
                found.append(Resource(group, version, entry["name"], entry["kind"], entry["namespaced"]))
    return found
