"""The process of one node: its agent and the sidecars beside its driver, run by `moorage up`.

Owns: nothing; it wires the node agent and the sidecars, which meet only at the API server and the driver's socket. One
process holds both because each would load the same libraries: half the memory of two.
Start reading at: `main`.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
import uvloop

from moorage import log
from moorage.kube.api import config as kube_config
from moorage.kube.names import HOSTNAME
from moorage.node import config as node_config
from moorage.node import run as node_agent
from moorage.process import stop_event
from moorage.sidecars import run as sidecars
from moorage.sidecars.roles import Role
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings

_log = log.get_logger(__name__)


class WorkerConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells a node's process, as JSON in its only argument."""

    node: str
    root: str
    kubeconfig: str
    csi_socket: str
    roles: list[str]  # empty: every role that the driver's capabilities call for
    hide: list[str]
    client_ca: str  # who may ask for logs and exec: the API server, by its authority's certificate
    log_level: str = "info"


def main() -> None:
    config = msgspec.json.decode(sys.argv[1].encode(), type=WorkerConfig)
    log.configure(config.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(config))


async def run(config: WorkerConfig) -> None:
    """Run until SIGTERM; then pods end, volumes are unmounted, and the sidecars stop last."""
    stop = stop_event()
    api = kube_config.from_kubeconfig(Path(config.kubeconfig))
    agent = node_config.AgentConfig(
        node_name=config.node,
        root=Path(config.root),
        api=api,
        hide=tuple(config.hide),
        client_ca=Path(config.client_ca),
        labels={HOSTNAME: config.node},
        on_stop=node_config.DRAIN,
        drain_timeout_s=45.0,
    )
    async with asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(sidecars.run(_wanted(config), api), name="sidecars")
        await node_agent.run(agent, stop)
        beside.cancel()
    _log.info("node's process ends", node=config.node)


def _wanted(config: WorkerConfig) -> sidecars.WantedRoles:
    settings = SidecarSettings(
        csi_address=config.csi_socket,
        plugin_registration_path=str(Path(config.root) / "plugins_registry"),
        kubelet_registration_path=config.csi_socket,
        extra_create_metadata=True,
        enable_capacity=True,
        capacity_ownerref_level=-1,
        retry_interval_start_s=0.2,
        retry_interval_max_s=30.0,
    )
    around = SidecarEnvironment(
        node_name=config.node, namespace="kube-system", capacity_namespace="kube-system", hostname=config.node
    )
    return sidecars.WantedRoles(settings, around, frozenset(Role(name) for name in config.roles))


if __name__ == "__main__":
    main()
