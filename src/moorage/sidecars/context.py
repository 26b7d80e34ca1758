"""What all roles of a process share: the driver, the API client, caches, writer, settings and metrics.

Owns: nothing by itself; `run.py` builds it, and the roles only read it.
Start reading at: `RoleContext`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from moorage.csi import csi_pb2 as pb
from moorage.csi.access_modes import capability_of
from moorage.kube.api.client import Client
from moorage.kube.api.config import ApiConfig
from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.control.controller import Backoff, Controller
from moorage.kube.control.events import Recorder
from moorage.kube.control.queue import Reconcile
from moorage.kube.control.shared import Shared
from moorage.kube.objects import KubeObject, Node, PersistentVolume, VolumeSpec
from moorage.kube.selectors import node_matches
from moorage.sidecars.driver import DriverConnection
from moorage.sidecars.metrics import Metrics
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings

K = TypeVar("K", bound=Hashable)


class NodeLabels(KubeObject, frozen=True):
    """A node without its spec and status: the sidecars only read its labels, and a status is large."""

    resource = Node.resource


class RoleTask(Protocol):
    """A role at work. `run` may be called again; it then starts with every object, as the first time."""

    async def run(self) -> None: ...


@dataclass
class RoleContext(Shared):
    """What every role in this process receives."""

    settings: SidecarSettings
    around: SidecarEnvironment
    driver: DriverConnection
    client: Client
    informers: Informers
    metrics: Metrics
    api: ApiConfig
    on_failed_creation: list[Callable[[str], None]] = field(default_factory=list)  # called with the class's name

    @property
    def nodes(self) -> Informer[NodeLabels]:
        return self.informers.of(NodeLabels)

    def controller(self, name: str, reconcile: Reconcile[K], workers: int = 1) -> Controller[K]:
        """Return a controller with the back-off of the settings."""
        backoff = Backoff(self.settings.retry_interval_start_s, self.settings.retry_interval_max_s)
        return Controller(name, reconcile, workers=workers, backoff=backoff)

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
        """Whether this process handles the volume. Always true unless each node handles its own."""
        if not self.settings.node_deployment:
            return True
        affinity = volume.spec.node_affinity
        required = affinity.required if affinity is not None else None
        return node_matches(required, self.driver.node.segments, self.around.node_name)
