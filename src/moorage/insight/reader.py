"""Reading a cluster: everything, or only what lies around one object.

Owns: which objects an explanation of one object can need, and asking for each once. A claim among thousands costs
a dozen small requests: objects by name, events by the object's name, and only kinds that are small whole.
May not touch: writes; judging. What may not be read is noted in `World.unreadable`, and the rest goes on.
Start reading at: `read_around`, `Reader.claim`.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Self

from moorage.insight.cluster_view import ClusterView, claim_names, last_seen
from moorage.insight.matching import class_name_of, class_of, lease_names, nodes_that_fit
from moorage.kube.api.client import Client
from moorage.kube.errors import ApiError
from moorage.kube.objects import (
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    Event,
    KubeObject,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Secret,
    StorageClass,
    VolumeAttachment,
    VolumeAttributesClass,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)

_MANY_NODES = 16  # up to here attachments are asked for by name, one for each node
_FEW_NODES = 3  # up to here pods are asked for by node
_FIELDS: dict[type[KubeObject], str] = {
    StorageClass: "classes",
    Node: "nodes",
    CSIDriver: "drivers",
    CSINode: "node_drivers",
    CSIStorageCapacity: "capacities",
    VolumeAttributesClass: "modifiers",
    VolumeSnapshotClass: "snapshot_classes",
    Lease: "leases",
    PersistentVolumeClaim: "claims",
    Pod: "pods",
    VolumeSnapshot: "snapshots",
    PersistentVolume: "volumes",
    VolumeAttachment: "attachments",
    VolumeSnapshotContent: "contents",
}


async def read_all(client: Client) -> ClusterView:
    """The whole cluster, for `moorage explain` without a name."""
    async with Reader(client) as reader:
        await asyncio.gather(*(reader.all(kind) for kind in _FIELDS), reader.all_events())
        await asyncio.gather(*(reader.secrets(found) for found in list(reader.world.classes.values())))
        return reader.world


async def read_around(client: Client, kind: type[KubeObject], name: str, namespace: str) -> ClusterView:
    """What an explanation of one object can need."""
    key = f"{namespace}/{name}" if kind.resource.namespaced else name
    async with Reader(client) as reader:
        around: dict[type[KubeObject], Callable[[str], Awaitable[None]]] = {
            PersistentVolumeClaim: reader.claim,
            PersistentVolume: reader.volume,
            Pod: reader.pod,
            VolumeAttachment: reader.attachment,
            VolumeSnapshot: reader.snapshot,
            Node: reader.node,
        }
        await around[kind](key)
        return reader.world


class Reader:
    """Fills a world from one object outwards; nothing is asked for twice."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asked: dict[tuple[object, ...], asyncio.Task[None]] = {}
        self._of_pods: set[str] = set()  # claims of a pod that is asked about: who else uses them is asked there
        self.world = ClusterView()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is still being asked when one question has failed."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def claim(self, key: str) -> None:
        """A claim, its class and driver, its volume, its source, the pods that use it."""
        await self._once(("around", key, "claim"), self._claim, key)

    async def volume(self, name: str) -> None:
        """A volume, the claim that holds it, where it is attached and where it may be."""
        if name:
            await self._once(("around", name, "volume"), self._volume, name)

    async def pod(self, key: str) -> None:
        await self._once(("around", key, "pod"), self._pod, key)

    async def attachment(self, name: str) -> None:
        await self._once(("around", name, "attachment"), self._attachment, name)

    async def snapshot(self, key: str) -> None:
        await self._once(("around", key, "snapshot"), self._snapshot, key)

    async def node(self, name: str) -> None:
        await asyncio.gather(
            self.one(Node, name), self.one(CSINode, name), self.all(VolumeAttachment), self.events(Node, name)
        )

    async def _claim(self, key: str) -> None:
        world = self.world
        await asyncio.gather(
            self.one(PersistentVolumeClaim, key), self.events(PersistentVolumeClaim, key), self.all(StorageClass)
        )
        claim = world.claims.get(key)
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
            await self.one(VolumeAttributesClass, name)

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
            await self.all(Pod, claim.namespace)
        elif claim.status.phase != "Bound":
            await self._pods(claim.namespace, "status.phase=Pending")
        elif claim.key not in self._of_pods:
            await self._pods_near(claim)
        for pod in self.world.pods_of(claim)[:1]:
            if pod.status.phase in ("", "Pending") or claim.is_deleting or claim.status.phase != "Bound":
                await self.pod(pod.key)
            else:
                await self.events(Pod, pod.key)

    async def _pods_near(self, claim: PersistentVolumeClaim) -> None:
        volume = self.world.volumes.get(claim.spec.volume_name)
        nodes = {a.spec.node_name for a in self.world.attachments_of(volume)} if volume is not None else set()
        if volume is not None and not nodes and volume.spec.node_affinity is not None:
            nodes = set(nodes_that_fit(self.world, volume))
        if 0 < len(nodes) <= _FEW_NODES:
            chosen = [f"spec.nodeName={node}" for node in sorted(nodes)]
            await asyncio.gather(*(self._pods(claim.namespace, fields) for fields in chosen))
        else:
            await self.all(Pod, claim.namespace)

    async def _pods(self, namespace: str, fields: str) -> None:
        if (Pod, namespace, "all") not in self._asked:
            await self._once((Pod, namespace, fields), self._read, Pod, namespace, fields)

    async def _provisioner(self, claim: PersistentVolumeClaim) -> None:
        """What serves a claim that waits or grows: its driver's objects, leases and secrets."""
        storage_class = class_of(self.world, claim)
        await self.all(CSIDriver)
        if storage_class is None or (claim.status.phase == "Bound" and not _asks_for_more(claim)):
            return
        driver = storage_class.provisioner
        await asyncio.gather(self.leases(driver), self.secrets(storage_class), self._installed(driver))

    async def _installed(self, driver: str) -> None:
        if driver not in self.world.drivers:
            await self.all(CSINode)

    async def _candidates(self, claim: PersistentVolumeClaim) -> None:
        """All volumes, for a claim that can only have one that exists: the closest ones are compared with it."""
        if claim.status.phase in ("", "Pending") and not claim.spec.volume_name:
            found = class_of(self.world, claim)
            if not class_name_of(claim) or (found is not None and found.provisioner.endswith("/no-provisioner")):
                await self.all(PersistentVolume)

    async def _volume(self, name: str) -> None:
        await asyncio.gather(self.one(PersistentVolume, name), self.events(PersistentVolume, name), self.all(CSIDriver))
        volume = self.world.volumes.get(name)
        if volume is None:
            return
        reference = volume.spec.claim_ref
        driver = volume.spec.csi.driver if volume.spec.csi is not None else ""
        work: list[Awaitable[None]] = [self._attachments_of(volume)]
        if reference is not None:
            work.append(self.one(PersistentVolumeClaim, f"{reference.namespace}/{reference.name}"))
        if volume.spec.node_affinity is not None:
            work.append(self.all(Node))
        if volume.status.phase != "Bound" or volume.is_deleting:
            work += [self.leases(driver), self._holder(volume)]
        await asyncio.gather(*work)

    async def _holder(self, volume: PersistentVolume) -> None:
        reference = volume.spec.claim_ref
        if volume.is_deleting and reference is not None:
            await self.claim(f"{reference.namespace}/{reference.name}")

    async def _attachments_of(self, volume: PersistentVolume) -> None:
        """By name where there are few nodes: a list holds every attachment of the cluster."""
        csi = volume.spec.csi
        driver = self.world.drivers.get(csi.driver) if csi is not None else None
        if csi is None or (driver is not None and driver.spec.attach_required is False):
            return
        await self.all(Node)
        if len(self.world.nodes) > _MANY_NODES:
            await self.all(VolumeAttachment)
        else:
            names = [attachment_name(csi.driver, csi.volume_handle, node) for node in self.world.nodes]
            await asyncio.gather(*(self.one(VolumeAttachment, name) for name in names))
        found = [a for a in self.world.attachments_of(volume) if a.is_deleting or not a.status.attached]
        await asyncio.gather(*(self.attachment(a.name) for a in found))

    async def _pod(self, key: str) -> None:
        world = self.world
        await asyncio.gather(self.one(Pod, key), self.events(Pod, key), self.all(Node), self.all(CSIDriver))
        pod = world.pods.get(key)
        if pod is None:
            return
        claims = [f"{pod.namespace}/{name}" for name in claim_names(pod)]
        self._of_pods.update(claims)
        node: list[Awaitable[None]] = [self.one(CSINode, pod.spec.node_name)] if pod.spec.node_name else []
        waits = pod.status.phase in ("", "Pending")
        capacity: list[Awaitable[None]] = [self.all(CSINode)] if waits and not pod.spec.node_name else []
        await asyncio.gather(*node, *capacity, *(self.claim(each) for each in claims))
        if waits:
            await self._rivals(pod, claims)

    async def _rivals(self, pod: Pod, claims: list[str]) -> None:
        """Pods that may hold what this one waits for: a ReadWriteOncePod claim, or a volume on another node."""
        found = [claim for claim in map(self.world.claims.get, claims) if claim is not None]
        if any("ReadWriteOncePod" in claim.spec.access_modes for claim in found):
            await self.all(Pod, pod.namespace)
        volumes = [v for v in (self.world.volumes.get(claim.spec.volume_name) for claim in found) if v is not None]
        nodes = {a.spec.node_name for v in volumes for a in self.world.attachments_of(v)} - {pod.spec.node_name}
        await asyncio.gather(*(self._pods(pod.namespace, f"spec.nodeName={node}") for node in sorted(nodes)))

    async def _attachment(self, name: str) -> None:
        await asyncio.gather(self.one(VolumeAttachment, name), self.events(VolumeAttachment, name))
        attachment = self.world.attachments.get(name)
        if attachment is None:
            return
        node, driver = attachment.spec.node_name, attachment.spec.attacher
        await asyncio.gather(
            self.one(Node, node),
            self.one(CSINode, node),
            self.leases(driver),
            self.one(PersistentVolume, attachment.spec.source.persistent_volume_name or ""),
        )

    async def _snapshot(self, key: str) -> None:
        world = self.world
        await asyncio.gather(
            self.one(VolumeSnapshot, key), self.events(VolumeSnapshot, key), self.all(VolumeSnapshotClass)
        )
        snapshot = world.snapshots.get(key)
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
        await self.all(PersistentVolumeClaim, snapshot.namespace)
        for claim in list(self.world.claims.values()):
            source = claim.spec.data_source_ref or claim.spec.data_source
            is_from_it = source is not None and (source.kind, source.name) == ("VolumeSnapshot", snapshot.name)
            if is_from_it and claim.namespace == snapshot.namespace and claim.status.phase != "Bound":
                await self.claim(claim.key)

    async def _content(self, name: str) -> None:
        await asyncio.gather(self.one(VolumeSnapshotContent, name), self.events(VolumeSnapshotContent, name))
        content = self.world.contents.get(name)
        if content is not None:
            await self.leases(content.spec.driver)

    async def leases(self, driver: str) -> None:
        """The leases of a driver's sidecars, wherever they are: never all leases, of which every node has one."""
        await asyncio.gather(*(self._leases_called(name) for name in lease_names(driver)))

    async def _leases_called(self, name: str) -> None:
        await self._once((Lease, name), self._read, Lease, "", f"metadata.name={name}")

    async def secrets(self, storage_class: StorageClass) -> None:
        """Whether the secrets exist that a class names outright; templates are left to the provisioner's own words."""
        await asyncio.gather(*(self._once((Secret, *ref), self._secret, *ref) for ref in _secrets_of(storage_class)))

    async def _secret(self, namespace: str, name: str) -> None:
        try:
            found = await self._client.find(Secret, name, namespace)
        except ApiError as error:
            self._excuse("Secret", error)
            return
        self.world.asked_secrets[f"{namespace}/{name}"] = found is not None

    async def one(self, kind: type[KubeObject], key: str) -> None:
        """One object by its key; absent ones stay absent."""
        if key:
            await self._once((kind, key, "one"), self._get, kind, key)

    async def _get(self, kind: type[KubeObject], key: str) -> None:
        namespace, name = kind.resource.split(key)
        try:
            found = await self._client.find(kind, name, namespace)
        except ApiError as error:
            self._excuse(kind.resource.kind, error)
            return
        if found is not None:
            getattr(self.world, _FIELDS[kind])[found.key] = found

    async def all(self, kind: type[KubeObject], namespace: str = "") -> None:
        """All objects of a kind (in a namespace)."""
        await self._once((kind, namespace, "all"), self._read, kind, namespace, "")

    async def _read(self, kind: type[KubeObject], namespace: str, fields: str) -> None:
        try:
            found = await self._client.list(kind, namespace, fields=fields, page=5000)
        except ApiError as error:
            self._excuse(kind.resource.kind, error)
            return
        getattr(self.world, _FIELDS[kind]).update({obj.key: obj for obj in found.items})

    async def events(self, kind: type[KubeObject], key: str) -> None:
        """The events about one object, by its name: it can be asked for before its uid is known."""
        namespace, name = kind.resource.split(key)
        chosen = f"involvedObject.name={name},involvedObject.kind={kind.resource.kind}"
        await self._once((Event, kind, key), self._events, namespace or "default", chosen)

    async def all_events(self) -> None:
        await self._events("", "")

    async def _events(self, namespace: str, fields: str) -> None:
        try:
            found = await self._client.list(Event, namespace, fields=fields, page=5000)
        except ApiError as error:
            self._excuse("Event", error)
            return
        told: dict[str, list[Event]] = {}
        for event in found.items:
            told.setdefault(event.involved_object.uid, []).append(event)
        for uid, some in told.items():
            self.world.events[uid] = sorted(some, key=last_seen, reverse=True)

    def _excuse(self, kind: str, error: ApiError) -> None:
        """A cluster without the snapshot kinds, or a right we lack: go on without. No server at all: give up."""
        if error.status in (401, 503):
            raise error
        self.world.unreadable[kind] = str(error)

    async def _once(
        self, key: tuple[object, ...], work: Callable[..., Coroutine[Any, Any, None]], *arguments: object
    ) -> None:
        """Await a piece of work that is done once, whoever asks first; in a circle of objects, do not wait for it."""
        if key in self._asked:
            if key[0] != "around":
                await asyncio.shield(self._asked[key])
            return
        self._asked[key] = asyncio.create_task(work(*arguments))
        await self._asked[key]


def attachment_name(driver: str, handle: str, node: str) -> str:
    """The name that the attach/detach controller gives to the attachment of a CSI volume on a node."""
    return "csi-" + hashlib.sha256(f"{handle}{driver}{node}".encode()).hexdigest()


def _asks_for_more(claim: PersistentVolumeClaim) -> bool:
    return claim.spec.resources.requests.get("storage") != claim.status.capacity.get("storage")


def _secrets_of(storage_class: StorageClass) -> Iterable[tuple[str, str]]:
    parameters = storage_class.parameters
    for key, name in parameters.items():
        if key.startswith("csi.storage.k8s.io/") and key.endswith("-secret-name") and "$" not in name:
            namespace = parameters.get(key.removesuffix("-name") + "-namespace", "")
            if namespace and "$" not in namespace:
                yield namespace, name
