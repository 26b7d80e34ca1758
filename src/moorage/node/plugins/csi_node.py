"""What the cluster knows about this node's drivers: CSINode, the node-id annotation, topology labels.

Owns: those three writes, one at a time, each repeated on conflict.
May not touch: the drivers; it is handed what NodeGetInfo answered.
Start reading at: `NodeDrivers.publish`, `NodeDrivers.withdraw`.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from moorage.errors import MoorageError
from moorage.kube.api.client import Client, PatchType
from moorage.kube.errors import AlreadyExists, ApiError, Conflict, Invalid, NotFound
from moorage.kube.names import CSI_NODE_IDS, CSI_NODE_MIGRATED
from moorage.kube.objects.core import Node
from moorage.kube.objects.meta import as_document
from moorage.kube.objects.storage import CSINode, NodeDriver, NodeDriverAllocatable
from moorage.log import get_logger

log = get_logger(__name__)

_TRIES = 4
_MAX_COUNT = 2**31 - 1


class TopologyConflict(MoorageError):
    """The node already carries another value for one of the driver's topology keys."""

    code = "FAILED_PRECONDITION"


class BadNodeInfo(MoorageError):
    """NodeGetInfo answered something that cannot be used."""

    code = "INVALID_ARGUMENT"


@dataclass(frozen=True, slots=True)
class DriverNodeInfo:
    """NodeGetInfo's answer."""

    driver: str
    node_id: str
    topology: dict[str, str]
    max_volumes: int = 0

    def entry(self) -> NodeDriver:
        count = min(self.max_volumes, _MAX_COUNT)
        return NodeDriver(
            name=self.driver,
            node_id=self.node_id,
            topology_keys=sorted(self.topology),
            allocatable=NodeDriverAllocatable(count=count) if count > 0 else None,
        )


class NodeDrivers:
    """The drivers of one node, as the API server shows them."""

    def __init__(self, client: Client, node_name: str) -> None:
        self._client = client
        self._node = node_name
        self._writing = asyncio.Lock()

    async def ensure_csi_node(self) -> CSINode:
        """CSINode exists and belongs to this Node object; one left by an earlier Node of the name is replaced."""
        node = await self._client.get(Node, self._node)
        found = await self._client.find(CSINode, self._node)
        if found is not None:
            if any((owner.kind, owner.uid) == ("Node", node.uid) for owner in found.metadata.owner_references):
                return await self._without_migrations(found)
            log.info("CSINode belongs to no node or to another one; it is replaced", node=self._node)
            await self._client.delete(CSINode, self._node, uid=found.uid)
        body = {
            "metadata": {
                "name": self._node,
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": node.uid}],
            },
            "spec": {"drivers": []},
        }
        try:
            return await self._client.create(CSINode, body)
        except AlreadyExists:
            return await self._client.get(CSINode, self._node)

    async def _without_migrations(self, found: CSINode) -> CSINode:
        """A kubelet that was here before may have said that it mounts in-tree volumes through CSI; we do not."""
        if CSI_NODE_MIGRATED not in found.annotations:
            return found
        patch = {"metadata": {"annotations": {CSI_NODE_MIGRATED: None}}}
        return await self._client.patch(CSINode, self._node, patch)

    async def publish(self, info: DriverNodeInfo) -> None:
        """The driver can be used on this node: annotation and labels first, then its CSINode entry."""
        if not info.node_id:
            raise BadNodeInfo(f"driver {info.driver}: NodeGetInfo answered an empty node_id")
        async with self._writing:
            await _repeated(lambda: self._annotate(info.driver, info.node_id, info.topology))
            await _repeated(lambda: self._enter(info))

    async def withdraw(self, driver: str) -> None:
        """The driver is gone: its entry and its annotation go, topology labels stay."""
        async with self._writing:
            await _repeated(lambda: self._leave(driver))
            await _repeated(lambda: self._annotate(driver, None, {}))

    async def _annotate(self, driver: str, node_id: str | None, labels: dict[str, str]) -> None:
        node = await self._client.get(Node, self._node)
        for key, value in labels.items():
            if node.labels.get(key, value) != value:
                raise TopologyConflict(
                    f"driver {driver} wants label {key}={value} on node {self._node}, which has {node.labels[key]}; "
                    "labels stay when a driver goes, so if this one is of the past, remove it by hand"
                )
        ids = _ids_from(node.annotations.get(CSI_NODE_IDS, ""))
        wanted = dict(ids)
        wanted.pop(driver, None)
        if node_id is not None:
            wanted[driver] = node_id
        missing = {key: value for key, value in labels.items() if key not in node.labels}
        if wanted == ids and not missing:
            return
        text = json.dumps(wanted, separators=(",", ":"), sort_keys=True) if wanted else None
        patch: dict[str, Any] = {"metadata": {"annotations": {CSI_NODE_IDS: text}}}
        if missing:
            patch["metadata"]["labels"] = missing
        await self._client.patch(
            Node,
            self._node,
            patch,
            how=PatchType.STRATEGIC,
            subresource="status",
            version=node.metadata.resource_version,
        )

    async def _enter(self, info: DriverNodeInfo) -> None:
        current = await self.ensure_csi_node()
        entry = info.entry()
        known = next((one for one in current.spec.drivers if one.name == info.driver), None)
        if known == entry:
            return
        if known is not None and (known.node_id, known.topology_keys) != (entry.node_id, entry.topology_keys):
            current = await self._write(current, [one for one in current.spec.drivers if one.name != info.driver])
        others = [one for one in current.spec.drivers if one.name != info.driver]
        await self._write(current, [*others, entry])

    async def _leave(self, driver: str) -> None:
        current = await self._client.find(CSINode, self._node)
        if current is None or all(one.name != driver for one in current.spec.drivers):
            return
        await self._write(current, [one for one in current.spec.drivers if one.name != driver])

    async def _write(self, current: CSINode, drivers: list[NodeDriver]) -> CSINode:
        patch = {"spec": {"drivers": [as_document(one) for one in drivers]}}
        return await self._client.patch(CSINode, self._node, patch, version=current.metadata.resource_version)


def _ids_from(text: str) -> dict[str, str]:
    """What the annotation says; nonsense is replaced, since no driver could be registered beside it."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


async def _repeated(write: Callable[[], Awaitable[None]]) -> None:
    delay_s = 0.01
    for attempt in range(1, _TRIES + 1):
        try:
            await write()
            return
        except (Invalid, NotFound):
            raise
        except ApiError as error:
            if attempt == _TRIES:
                raise
            log.debug("write is tried again", reason=str(error), conflict=isinstance(error, Conflict))
        await asyncio.sleep(delay_s * random.uniform(1.0, 1.1))
        delay_s *= 5
