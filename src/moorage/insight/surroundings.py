"""Reading what lies around one object: everything that an explanation of it can need.

Owns: which objects those are. A claim among thousands costs a dozen small requests: objects by name, events by the
object's name, and whole lists only of kinds with few objects.
Start reading at: `read_around`, `Surroundings.claim`.
"""

import asyncio
from collections.abc import Awaitable, Callable

from moorage.csi.pending import WAITING
from moorage.insight.causes.model import code_in
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import class_of, nodes_that_fit
from moorage.insight.reader import Reader
from moorage.kube.api.client import Client
from moorage.kube.names import DRIVER_EXITED, NO_PROVISIONER
from moorage.kube.objects import (
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    KubeObject,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.volumes import attachment_name, claim_class, claims_of, requires_attach

_MANY_NODES = 16  # up to here attachments are asked for by name, one for each node
_FEW_NODES = 3  # up to here pods are asked for by node


async def read_around(client: Client, kind: type[KubeObject], name: str, namespace: str) -> ClusterView:
    """Read what an explanation of one object can need."""
    key = f"{namespace}/{name}" if kind.resource.namespaced else name
    async with Reader(client) as reader:
        around = Surroundings(reader)
        visit: dict[type[KubeObject], Callable[[str], Awaitable[None]]] = {
            PersistentVolumeClaim: around.claim,
            PersistentVolume: around.volume,
            Pod: around.pod,
            VolumeAttachment: around.attachment,
            VolumeSnapshot: around.snapshot,
            Node: around.node,
        }
        await visit[kind](key)
        return reader.view


class Surroundings:
    """Reads from one object outwards. Objects may refer to each other in a circle; each is visited once."""

    def __init__(self, reader: Reader) -> None:
        self._read, self._view = reader, reader.view
        self._visited: set[tuple[str, str]] = set()
        self._of_pods: set[str] = set()  # claims of a pod that is asked about: their other users are read there

    def _is_first(self, kind: str, key: str) -> bool:
        """Whether an object is visited for the first time."""
        is_first = (kind, key) not in self._visited
        self._visited.add((kind, key))
        return is_first

    async def claim(self, key: str) -> None:
        """A claim, its class and driver, its volume, its source, the pods that use it."""
        if self._is_first("claim", key):
            await self._claim(key)

    async def volume(self, name: str) -> None:
        """A volume, the claim that holds it, where it is attached and where it may be."""
        if name and self._is_first("volume", name):
            await self._volume(name)

    async def pod(self, key: str) -> None:
        if self._is_first("pod", key):
            await self._pod(key)

    async def attachment(self, name: str) -> None:
        if self._is_first("attachment", name):
            await self._attachment(name)

    async def snapshot(self, key: str) -> None:
        if self._is_first("snapshot", key):
            await self._snapshot(key)

    async def node(self, name: str) -> None:
        await asyncio.gather(
            self._read.one(Node, name),
            self._read.one(CSINode, name),
            self._read.all(VolumeAttachment),
            self._read.events(Node, name),
            self._read.events_with(WAITING),
            self._read.events_with(DRIVER_EXITED),
        )
        waiting = [events[0].involved_object for events in self._view.events.values()]
        pods = [f"{one.namespace}/{one.name}" for one in waiting if one.kind == "Pod"]
        await asyncio.gather(*(self._read.events(Pod, key) for key in pods))

    async def _claim(self, key: str) -> None:
        await asyncio.gather(
            self._read.one(PersistentVolumeClaim, key),
            self._read.events(PersistentVolumeClaim, key),
            self._read.all(StorageClass),
        )
        claim = self._view.claims.get(key)
        if claim is None:
            return
        await asyncio.gather(
            self._modifier(claim),
            self._source(claim),
            self._consumers(claim),
            self._provisioner(claim),
            self._candidates(claim),
        )

    async def _modifier(self, claim: PersistentVolumeClaim) -> None:
        name = claim.spec.volume_attributes_class_name
        if name:
            await self._read.one(VolumeAttributesClass, name)

    async def _source(self, claim: PersistentVolumeClaim) -> None:
        source = claim.spec.data_source_ref or claim.spec.data_source
        if source is None or claim.status.phase == "Bound":
            return
        key = f"{source.namespace or claim.namespace}/{source.name}"
        if source.kind == "VolumeSnapshot":
            await self.snapshot(key)
        elif source.kind == "PersistentVolumeClaim":
            await self.claim(key)

    async def _consumers(self, claim: PersistentVolumeClaim) -> None:
        """The pods that use a claim. No selector finds them, so the namespace's pods are narrowed by what they must be:
        pending for a claim that waits, on the volume's node for one that is bound."""
        await self.volume(claim.spec.volume_name)
        if claim.is_deleting:
            await self._read.all(Pod, claim.namespace)
        elif claim.status.phase != "Bound":
            await self._read.pods(claim.namespace, "status.phase=Pending")
        elif claim.key not in self._of_pods:
            await self._pods_near(claim)
        for pod in self._view.pods_of(claim)[:1]:
            if pod.status.phase in ("", "Pending") or claim.is_deleting or claim.status.phase != "Bound":
                await self.pod(pod.key)
            else:
                await self._read.events(Pod, pod.key)

    async def _pods_near(self, claim: PersistentVolumeClaim) -> None:
        volume = self._view.volumes.get(claim.spec.volume_name)
        nodes = {a.spec.node_name for a in self._view.attachments_of(volume)} if volume is not None else set()
        if volume is not None and not nodes and volume.spec.node_affinity is not None:
            nodes = set(nodes_that_fit(self._view, volume))
        if 0 < len(nodes) <= _FEW_NODES:
            chosen = [f"spec.nodeName={node}" for node in sorted(nodes)]
            await asyncio.gather(*(self._read.pods(claim.namespace, fields) for fields in chosen))
        else:
            await self._read.all(Pod, claim.namespace)

    async def _provisioner(self, claim: PersistentVolumeClaim) -> None:
        """What serves a claim that waits or grows: its driver's objects, leases and secrets."""
        storage_class = class_of(self._view, claim)
        await self._read.all(CSIDriver)
        if storage_class is None or (claim.status.phase == "Bound" and not _asks_for_more(claim)):
            return
        driver = storage_class.provisioner
        work = [
            self._read.events_with(DRIVER_EXITED),
            self._read.leases(driver),
            self._read.secrets(storage_class),
            self._installed(driver),
        ]
        if storage_class.allowed_topologies:
            work.append(self._read.all(Node))
        if any(code_in(event.message) == "RESOURCE_EXHAUSTED" for event in self._view.events_of(claim)):
            work.append(self._read.all(CSIStorageCapacity))
        await asyncio.gather(*work)

    async def _installed(self, driver: str) -> None:
        if driver not in self._view.drivers:
            await self._read.all(CSINode)

    async def _candidates(self, claim: PersistentVolumeClaim) -> None:
        """All volumes, for a claim that can only have one that exists: the closest ones are compared with it."""
        if claim.status.phase in ("", "Pending") and not claim.spec.volume_name:
            found = class_of(self._view, claim)
            if not claim_class(claim) or (found is not None and found.provisioner == NO_PROVISIONER):
                await self._read.all(PersistentVolume)

    async def _volume(self, name: str) -> None:
        await asyncio.gather(
            self._read.one(PersistentVolume, name),
            self._read.events(PersistentVolume, name),
            self._read.all(CSIDriver),
        )
        volume = self._view.volumes.get(name)
        if volume is None:
            return
        reference = volume.spec.claim_ref
        driver = volume.spec.csi.driver if volume.spec.csi is not None else ""
        work: list[Awaitable[None]] = [self._attachments_of(volume)]
        if reference is not None:
            work.append(self._read.one(PersistentVolumeClaim, f"{reference.namespace}/{reference.name}"))
        if volume.spec.node_affinity is not None:
            work.append(self._read.all(Node))
        if volume.status.phase != "Bound" or volume.is_deleting:
            work += [self._read.leases(driver), self._holder(volume)]
        await asyncio.gather(*work)

    async def _holder(self, volume: PersistentVolume) -> None:
        reference = volume.spec.claim_ref
        if volume.is_deleting and reference is not None:
            await self.claim(f"{reference.namespace}/{reference.name}")

    async def _attachments_of(self, volume: PersistentVolume) -> None:
        """By name where there are few nodes: a list holds every attachment of the cluster."""
        csi = volume.spec.csi
        driver = self._view.drivers.get(csi.driver) if csi is not None else None
        if csi is None or not requires_attach(driver):
            return
        await self._read.all(Node)
        if len(self._view.nodes) > _MANY_NODES:
            await self._read.all(VolumeAttachment)
        else:
            names = [attachment_name(csi.driver, csi.volume_handle, node) for node in self._view.nodes]
            await asyncio.gather(*(self._read.one(VolumeAttachment, name) for name in names))
        found = [a for a in self._view.attachments_of(volume) if a.is_deleting or not a.status.attached]
        await asyncio.gather(*(self.attachment(a.name) for a in found))

    async def _pod(self, key: str) -> None:
        await asyncio.gather(
            self._read.one(Pod, key),
            self._read.events(Pod, key),
            self._read.all(Node),
            self._read.all(CSIDriver),
        )
        pod = self._view.pods.get(key)
        if pod is None:
            return
        claims = claims_of(pod)
        self._of_pods.update(claims)
        node: list[Awaitable[None]] = []
        if pod.spec.node_name:
            node = [self._read.one(CSINode, pod.spec.node_name), self._read.events_with(DRIVER_EXITED)]
        waits = pod.status.phase in ("", "Pending")
        has_no_node = waits and not pod.spec.node_name
        capacity: list[Awaitable[None]] = [self._read.all(CSINode)] if has_no_node else []
        if has_no_node and any("enough free storage" in condition.message for condition in pod.status.conditions):
            capacity.append(self._read.all(CSIStorageCapacity))
        await asyncio.gather(*node, *capacity, *(self.claim(each) for each in claims))
        if waits:
            await self._rivals(pod, claims)

    async def _rivals(self, pod: Pod, claims: list[str]) -> None:
        """Pods that may hold what this one waits for: a ReadWriteOncePod claim, or a volume on another node."""
        found = [self._view.claims[key] for key in claims if key in self._view.claims]
        if any("ReadWriteOncePod" in claim.spec.access_modes for claim in found):
            await self._read.all(Pod, pod.namespace)
        volumes = [v for v in (self._view.volumes.get(claim.spec.volume_name) for claim in found) if v is not None]
        nodes = {a.spec.node_name for v in volumes for a in self._view.attachments_of(v)} - {pod.spec.node_name}
        await asyncio.gather(*(self._read.pods(pod.namespace, f"spec.nodeName={node}") for node in sorted(nodes)))

    async def _attachment(self, name: str) -> None:
        await asyncio.gather(self._read.one(VolumeAttachment, name), self._read.events(VolumeAttachment, name))
        attachment = self._view.attachments.get(name)
        if attachment is None:
            return
        node, driver = attachment.spec.node_name, attachment.spec.attacher
        await asyncio.gather(
            self._read.one(Node, node),
            self._read.one(CSINode, node),
            self._read.leases(driver),
            self._read.one(PersistentVolume, attachment.spec.source.persistent_volume_name or ""),
        )

    async def _snapshot(self, key: str) -> None:
        await asyncio.gather(
            self._read.one(VolumeSnapshot, key),
            self._read.events(VolumeSnapshot, key),
            self._read.all(VolumeSnapshotClass),
        )
        snapshot = self._view.snapshots.get(key)
        if snapshot is None:
            return
        source, status = snapshot.spec.source, snapshot.status
        work: list[Awaitable[None]] = []
        if source.persistent_volume_claim_name:
            work.append(self.claim(f"{snapshot.namespace}/{source.persistent_volume_claim_name}"))
        bound = status.bound_volume_snapshot_content_name if status is not None else None
        content = bound or source.volume_snapshot_content_name
        if content:
            work.append(self._content(content))
        if snapshot.is_deleting:
            work.append(self._restores_of(snapshot))
        await asyncio.gather(*work)

    async def _restores_of(self, snapshot: VolumeSnapshot) -> None:
        """The claims that are being filled from a snapshot: they keep it."""
        await self._read.all(PersistentVolumeClaim, snapshot.namespace)
        for claim in list(self._view.claims.values()):
            source = claim.spec.data_source_ref or claim.spec.data_source
            is_from_it = source is not None and (source.kind, source.name) == ("VolumeSnapshot", snapshot.name)
            if is_from_it and claim.namespace == snapshot.namespace and claim.status.phase != "Bound":
                await self.claim(claim.key)

    async def _content(self, name: str) -> None:
        await asyncio.gather(
            self._read.one(VolumeSnapshotContent, name), self._read.events(VolumeSnapshotContent, name)
        )
        content = self._view.contents.get(name)
        if content is not None:
            await self._read.leases(content.spec.driver)


def _asks_for_more(claim: PersistentVolumeClaim) -> bool:
    return claim.spec.resources.requests.get("storage") != claim.status.capacity.get("storage")
