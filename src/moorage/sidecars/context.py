"""What all roles of a process share: the driver, the API client, one informer per kind, settings and metrics.

Owns: nothing by itself; `run.py` builds it, and the roles only read it.
Start reading at: `Context`, `Part`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from moorage.csi import csi_pb2 as pb
from moorage.csi.access_modes import capability_of
from moorage.kube.api.client import Client
from moorage.kube.api.config import ApiConfig
from moorage.kube.cache.informer import Informer, Informers
from moorage.kube.control.events import Recorder
from moorage.kube.control.queue import WorkQueue
from moorage.kube.errors import NotFound
from moorage.kube.objects import (
    CSINode,
    KubeObject,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    VolumeAttachment,
    VolumeSpec,
)
from moorage.kube.selectors import node_matches
from moorage.log import get_logger
from moorage.sidecars.driver import DriverConnection
from moorage.sidecars.metrics import Metrics
from moorage.sidecars.settings import Environment, SidecarSettings

log = get_logger(__name__)

_LOOK_FOR_KIND_S = 30.0


class NodeLabels(KubeObject, frozen=True):
    """A node without its spec and status: the sidecars only read its labels, and a status is large."""

    resource = Node.resource


class RoleTask(Protocol):
    """A role at work. `run` starts from nothing each time: it looks at every object first, then at what changes."""

    async def run(self) -> None: ...


@dataclass
class RoleContext:
    """The surroundings of every role in this process."""

    settings: SidecarSettings
    around: Environment
    driver: DriverConnection
    client: Client
    informers: Informers
    metrics: Metrics
    api: ApiConfig
    on_failed_creation: list[Callable[[str], None]] = field(default_factory=list)  # told the class: its room may differ

    @property
    def claims(self) -> Informer[PersistentVolumeClaim]:
        informer = self.informers.of(PersistentVolumeClaim)
        informer.index("uid", lambda claim: [claim.uid])
        return informer

    @property
    def volumes(self) -> Informer[PersistentVolume]:
        informer = self.informers.of(PersistentVolume)
        informer.index("claim", _claim_uid)
        return informer

    @property
    def classes(self) -> Informer[StorageClass]:
        return self.informers.of(StorageClass)

    @property
    def csi_nodes(self) -> Informer[CSINode]:
        return self.informers.of(CSINode)

    @property
    def nodes(self) -> Informer[NodeLabels]:
        return self.informers.of(NodeLabels)

    @property
    def attachments(self) -> Informer[VolumeAttachment]:
        informer = self.informers.of(VolumeAttachment)
        informer.index("volume", _attached_volume)
        return informer

    def queue(self, name: str) -> WorkQueue[str]:
        start_s, max_s = self.settings.retry_interval_start_s, self.settings.retry_interval_max_s
        return WorkQueue(name, start_s=start_s, max_s=max_s)

    def volume_capability(self, spec: VolumeSpec) -> pb.VolumeCapability:
        """Return the one CSI capability that a volume's spec amounts to."""
        return capability_of(
            spec.access_modes,
            spec.volume_mode == "Block",
            (spec.csi.fs_type if spec.csi is not None else "") or self.settings.default_fstype,
            spec.mount_options,
            self.driver.capabilities.single_node_multi_writer,
        )

    def recorder(self, component: str) -> Recorder:
        return Recorder(self.client, component, self.around.node_name)

    def is_local(self, volume: PersistentVolume) -> bool:
        """Whether this process is the one to handle the volume: always, unless each node handles its own."""
        if not self.settings.node_deployment:
            return True
        affinity = volume.spec.node_affinity
        required = affinity.required if affinity is not None else None
        return node_matches(required, self.driver.node.segments, self.around.node_name)


async def synced(*informers: Informer[Any]) -> None:
    """Return when each of the informers has taken in its first list."""
    for informer in informers:
        await informer.wait_synced()


async def is_served(client: Client, kind: type[KubeObject]) -> bool:
    """Whether the API server has the kind at all; some clusters lack the snapshot kinds."""
    resource = kind.resource
    path = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    try:
        found = msgspec.json.decode(await client.request("GET", path), type=_ResourceList)
    except NotFound:
        return False
    return any(each.name == resource.plural for each in found.resources)


async def wait_served(client: Client, kind: type[KubeObject]) -> None:
    """Return when the API server has the kind; it may be installed later."""
    while not await is_served(client, kind):
        log.info("the cluster lacks a kind; waiting for it", kind=kind.resource.kind, group=kind.resource.group)
        await asyncio.sleep(_LOOK_FOR_KIND_S)


class _ResourceEntry(msgspec.Struct):
    name: str = ""


class _ResourceList(msgspec.Struct):
    resources: list[_ResourceEntry] = []


def _claim_uid(volume: PersistentVolume) -> list[str]:
    reference = volume.spec.claim_ref
    return [reference.uid] if reference is not None and reference.uid else []


def _attached_volume(attachment: VolumeAttachment) -> list[str]:
    name = attachment.spec.source.persistent_volume_name
    return [name] if name else []
