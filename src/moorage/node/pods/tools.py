"""What every pod's worker works with.

Start reading at: `Tools`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moorage.kube.api.client import Client
from moorage.kube.control.events import Recorder
from moorage.node.layout import NodeLayout
from moorage.node.pods.container_spec import SpecMaker
from moorage.node.pods.status_writer import StatusWriter
from moorage.node.runtime import ContainerRuntime
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.node.volumes.manager import VolumeManager


@dataclass(frozen=True)
class Tools:
    """What every worker works with."""

    layout: NodeLayout
    client: Client
    volumes: VolumeManager
    runtime: ContainerRuntime
    specs: SpecMaker
    cgroups: ContainerCgroups
    statuses: StatusWriter
    recorder: Recorder
    host_ip: str
    clock: Callable[[], float]
