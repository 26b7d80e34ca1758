"""The node agent, put together.

Owns: which parts there are, in which order they start, what happens when the agent is asked to stop.
Decides nothing. Open it first.
Start reading at: `run`.

Order matters at the start: disk first (nothing mounted is forgotten), then the API (nothing wanted is unmounted), then
work.
"""

import asyncio
import fcntl
import os
import resource
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

from moorage.csi.pending import on_behalf_of
from moorage.errors import MoorageError, UsageError
from moorage.kube.api.client import Client
from moorage.kube.cache.by_name import ByNameInformer
from moorage.kube.cache.informers import Informers
from moorage.kube.control.events import Recorder
from moorage.kube.objects.core import Node
from moorage.kube.objects.meta import KubeObject, ObjectReference
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.log import get_logger
from moorage.node.config import KEEP, REMOVE, AgentConfig
from moorage.node.layout import NodeLayout
from moorage.node.node_object import NodeFacts, NodeObject
from moorage.node.plugins.csi_node import NodeDrivers
from moorage.node.plugins.manager import PluginManager
from moorage.node.plugins.registry import DriverRegistry
from moorage.node.pods.container_spec import SpecMaker
from moorage.node.pods.manager import PodManager
from moorage.node.pods.status_writer import StatusWriter
from moorage.node.pods.tools import Tools
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.node.runtime.process_runtime import ProcessRuntime
from moorage.node.serve.run import Endpoint
from moorage.node.volumes.claims import LiveClaims
from moorage.node.volumes.execute import VolumeExecutor
from moorage.node.volumes.expand import Grower
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.manager import VolumeManager
from moorage.node.volumes.mounters.builtin import PlainMounter
from moorage.node.volumes.mounters.csi_block import BlockMounter
from moorage.node.volumes.mounters.csi_filesystem import FilesystemMounter
from moorage.node.volumes.sources import Sources
from moorage.node.volumes.state import CsiSource, Expand, StepOutcome, UnmountVolume, VolumeAction, VolumeUse
from moorage.node.volumes.state import MountVolume as Mount
from moorage.node.volumes.stats import VolumeStats
from moorage.process import StopEvent, run_unless

log = get_logger(__name__)

_GROW = {"expand": "MountVolume.NodeExpandVolume"}
_STEPS = {"device": "MountVolume.MountDevice", "pod": "MountVolume.SetUp", **_GROW}  # as a kubelet calls them in events
_BLOCK_STEPS = {"device": "MapVolume.SetUpDevice", "pod": "MapVolume.MapPodDevice", **_GROW}
_DRIVERS_S = 1.0
_EVENTS_PER_S = 50.0  # as a kubelet has by default
_FEW = 8  # volumes: while more are being mounted, that is what the machine is for


class Agent:
    """The parts of one agent, wired; `run` starts them."""

    def __init__(
        self, config: AgentConfig, client: Client, informers: Informers, recorder: Recorder, open_files: int
    ) -> None:
        self.config = config
        self.client = client
        self.layout = NodeLayout(config.root)
        self.recorder = recorder
        self.nodes = informers.of(Node, fields=f"metadata.name={config.node_name}")
        self.drivers = informers.of(CSIDriver)
        self.claims = ByNameInformer(
            client,
            PersistentVolumeClaim,
            wanted=self._wanted_claims,
            is_settled=_is_claim_settled,
            settled_s=config.sync_s,
        )
        self.pvs = ByNameInformer(client, PersistentVolume, wanted=self._wanted_volumes, settled_s=config.sync_s)
        informers.share(self.claims)
        informers.share(self.pvs)
        self.pods_informer = informers.of(Pod, fields=f"spec.nodeName={config.node_name}")
        self.registry = DriverRegistry(call_timeout_s=config.call_timeout_s)
        claims = LiveClaims(client, self.claims, lambda: self.volumes.under_way)
        self.fetch = Fetch(client, config.node_name, self.drivers, claims, lambda uid: self.volumes.seen_at(uid))
        self.volumes = self._volume_manager()
        self.runtime = ProcessRuntime(
            lambda container: self.pods.container_ended(container),
            hide=(str(self.layout.root), *config.hide),
            open_files=open_files,
        )
        self.statuses = StatusWriter(client, lambda: self.to_come)
        self.cgroups = ContainerCgroups(config.node_name)
        self.pods = self._pod_manager()
        self.stats = VolumeStats(self.layout, self.registry, self.volumes)
        self.endpoint = Endpoint(self.pods, self.statuses, self.runtime, self.stats, config, client)

    @property
    def to_come(self) -> int:
        """How many volumes beyond a few are being worked on: where there are any, telling of pods may wait."""
        return max(0, self.volumes.under_way - _FEW)

    def _volume_manager(self) -> VolumeManager:
        layout, node, registry, fetch = self.layout, self.config.node_name, self.registry, self.fetch
        executor = VolumeExecutor(
            FilesystemMounter(layout, node, registry, fetch, self._ownership_progress),
            BlockMounter(layout, node, registry, fetch),
            PlainMounter(layout, fetch),
            Grower(layout, self.client, registry, fetch, self.claims, self.recorder),
            self._concern,
        )
        se_linux = self.config.has_se_linux
        sources = Sources(self.claims, self.pvs, self.drivers, self.nodes, node, has_se_linux=se_linux)
        return VolumeManager(layout, sources, executor, sync_s=self.config.sync_s, on_failure=self._volume_failed)

    def _pod_manager(self) -> PodManager:
        tools = Tools(
            layout=self.layout,
            client=self.client,
            volumes=self.volumes,
            runtime=self.runtime,
            specs=SpecMaker(self.layout, self.fetch, self.volumes, self.config.address, self.config.api.server),
            cgroups=self.cgroups,
            statuses=self.statuses,
            recorder=self.recorder,
            host_ip=self.config.address,
            clock=time.time,
        )
        return PodManager(tools)

    def _wanted_claims(self) -> Collection[str]:
        return self.volumes.claims_wanted

    def _wanted_volumes(self) -> Collection[str]:
        claims = (self.claims.get(key) for key in self.volumes.claims_wanted)
        return {claim.spec.volume_name for claim in claims if claim is not None and claim.spec.volume_name}

    def _concern(self, action: VolumeAction) -> AbstractContextManager[None]:
        """Calls for an action are for its pod; when that is gone already, for the node."""
        about: ObjectReference | KubeObject | None = self.nodes.get(self.config.node_name)
        if isinstance(action, Mount | Expand):
            about = _reference(action.use)
        elif isinstance(action, UnmountVolume) and (worker := self.pods.workers.get(action.uid)) is not None:
            about = worker.pod or about
        return on_behalf_of(self.recorder.event, about) if about is not None else nullcontext()

    def _volume_failed(self, action: VolumeAction, outcome: StepOutcome) -> None:
        if not isinstance(action, Mount):
            return
        use = action.use
        step = (_BLOCK_STEPS if isinstance(use.source, CsiSource) and use.source.is_block else _STEPS)[outcome.step]
        name = use.source.spec_name
        self.recorder.warning(_reference(use), "FailedMount", f'{step} failed for volume "{name}" : {outcome.message}')

    def _ownership_progress(self, use: VolumeUse, count: int) -> None:
        assert isinstance(use.source, CsiSource)
        text = f"Setting volume ownership for {use.source.spec_name}: {count} entries so far"
        self.recorder.normal(_reference(use), "VolumePermissionChangeInProgress", text)

    def subscribe(self) -> None:
        """Connect every informer to the parts that need its changes."""
        self.volumes.on_moved = self.pods.volumes_moved
        self.registry.subscribe(self.volumes.plugin_changed)
        self.nodes.subscribe(self.volumes.node_changed)
        self.drivers.subscribe(self.volumes.driver_changed)
        self.claims.subscribe(self.volumes.claim_changed)
        self.pvs.subscribe(self.volumes.volume_changed)
        self.pods_informer.subscribe(self.pods.pod_changed)


async def run(config: AgentConfig, stop: asyncio.Event) -> None:
    """Run one agent until `stop` is set; raise when it cannot run at all. A StopEvent also says when to hurry."""
    lock = prepare_root(config.root)
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(config.api, identity="moorage-node"))
            informers = Informers(client)
            recorder = await stack.enter_async_context(
                Recorder(
                    client,
                    "kubelet",
                    config.node_name,
                    per_second=_EVENTS_PER_S,
                    is_busy=lambda: agent.to_come > 0,
                )
            )
            agent = Agent(config, client, informers, recorder, _allow_open_files())
            started = time.monotonic()
            agent.volumes.reconstruct()
            agent.pods.recover()
            log.info("disk read", volumes=len(agent.volumes.world.actual), seconds=time.monotonic() - started)
            stack.push_async_callback(agent.runtime.close)
            await agent.runtime.open()
            await stack.enter_async_context(agent.endpoint)
            await _serve(agent, informers, stop)
    finally:
        os.close(lock)


async def _serve(agent: Agent, informers: Informers, stop: asyncio.Event) -> None:
    config = agent.config
    endpoint = agent.endpoint
    facts = NodeFacts(config.node_name, config.root, config.address, endpoint.port, config.labels, endpoint.certificate)
    published = NodeDrivers(agent.client, config.node_name)
    plugins = PluginManager(
        agent.layout.registry, agent.registry, published, refresh_period_s=lambda name: _refresh_period(agent, name)
    )
    in_use, in_use_changed = agent.volumes.world.in_use, agent.volumes.in_use_changed
    node = NodeObject(agent.client, facts, agent.nodes, in_use, in_use_changed, on_made_anew=plugins.publish_again)
    agent.drivers.subscribe(lambda _old, _new: plugins.reconsider())
    await _retry_until_stopped("node cannot be registered yet", node.register, stop)
    await _retry_until_stopped("CSINode cannot be made yet", published.ensure_csi_node, stop)
    if stop.is_set():
        return
    async with informers, asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(node.run(), name="node-object"),
            tasks.create_task(plugins.run(), name="plugins"),
            tasks.create_task(agent.volumes.run(), name="volumes"),
            tasks.create_task(agent.statuses.run(), name="pod-statuses"),
        ]
        agent.subscribe()
        is_drained = False  # nothing can be, before the pods are known
        if await run_unless(stop, _all_heard(agent, informers, node, plugins)):
            agent.pods.begin()
            running.append(tasks.create_task(agent.pods.run(), name="pods"))
            await asyncio.sleep(0)  # every worker says what it wants before anything is unmounted
            await _first_wishes(agent)
            agent.volumes.begin()
            node.set_ready(True)
            log.info("agent is ready", node=config.node_name, root=str(config.root), port=agent.endpoint.port)
            await stop.wait()
            is_drained = await _drained(agent, node, stop)
        await node.stopped(remove=is_drained and config.on_stop == REMOVE)
        for task in running:
            task.cancel()
    agent.cgroups.remove_own()
    log.info("agent stopped", node=config.node_name)


async def _all_heard(agent: Agent, informers: Informers, node: NodeObject, plugins: PluginManager) -> None:
    """The API has told of everything, and the drivers that are there have been asked."""
    await informers.wait_synced()
    node.start_reporting_use()
    if agent.volumes.world.actual:  # else each of them would fail once for want of a driver that is about to come
        await plugins.first_round(_DRIVERS_S)


async def _drained(agent: Agent, node: NodeObject, stop: asyncio.Event) -> bool:
    """Whether nothing of this node's pods is left, where that was asked for. A Node that is removed no longer says
    which volumes are in use, so they would be detached while they are mounted."""
    config = agent.config
    if config.on_stop == KEEP:
        return False
    node.set_ready(False, "KubeletNotReady", "the node agent is being stopped")  # so no more pods are sent here
    ends_at = time.monotonic() + config.drain_timeout_s
    hurrying = asyncio.create_task(_hurry(agent, stop), name="hurry")
    try:
        are_stopped = await agent.pods.drain(config.drain_timeout_s)
        are_gone = await agent.volumes.all_gone(max(1.0, ends_at - time.monotonic()))
    finally:
        hurrying.cancel()
    is_empty = are_stopped and are_gone and not agent.pods.is_running
    if config.on_stop == REMOVE and not is_empty:
        log.error("node is not removed: pods or volumes are left on it", node=config.node_name)
    return is_empty


async def _hurry(agent: Agent, stop: asyncio.Event) -> None:
    """Kill containers, without their grace, as soon as the agent is asked to stop a second time."""
    if isinstance(stop, StopEvent):
        await stop.hurry.wait()
        agent.pods.hurry()


async def _first_wishes(agent: Agent) -> None:
    """Populate the desired state from every pod that is to run, before the first unmount is considered."""
    for worker in list(agent.pods.workers.values()):
        pod = worker.pod
        if pod is not None and not worker.is_gone and pod.status.phase not in ("Succeeded", "Failed"):
            if pod.is_deleting and not any(c.is_running for a in worker.containers.values() for c in a):
                continue
            if worker.may_run(pod):
                try:
                    agent.volumes.want(pod)
                except Exception as error:  # its worker tries again, and nothing of the pod is unmounted until then
                    log.warning("volumes of a pod cannot be made out yet", pod=pod.key, reason=str(error))


async def _retry_until_stopped(what: str, act: Callable[[], Coroutine[Any, Any, object]], stop: asyncio.Event) -> None:
    delay_s = 0.2
    while not stop.is_set():
        try:
            await run_unless(stop, act())
            return
        except MoorageError as error:
            log.warning(what, reason=str(error), seconds=delay_s)
        try:
            async with asyncio.timeout(delay_s):
                await stop.wait()
        except TimeoutError:
            delay_s = min(delay_s * 2, 15.0)


def _allow_open_files() -> int:
    """Let this process have as many files open as it may, for each container takes one. Returns how many it could have
    before, which is what containers are to have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def prepare_root(root: Path) -> int:
    """The root directory, ours alone; UsageError when another agent has it or it cannot be written."""
    if not root.is_absolute() or root.resolve() != root:
        raise UsageError(f"--root-dir {root} must be an absolute path without symbolic links")
    layout = NodeLayout(root)
    try:
        for directory in (root, layout.registry, layout.plugins, layout.pods, layout.logs, layout.run):
            directory.mkdir(parents=True, exist_ok=True, mode=0o755 if directory == layout.registry else 0o750)
        lock = os.open(layout.run / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MoorageError(f"root directory {root} cannot be used: {error.strerror} ({error.filename})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"another node agent uses {root}; give this one another --root-dir") from None
    return lock


def _is_claim_settled(claim: PersistentVolumeClaim) -> bool:
    """Nothing of it is expected to change soon: it is bound, and no growth is requested."""
    return claim.status.phase == "Bound" and not claim.status.allocated_resource_statuses


def _refresh_period(agent: Agent, driver: str) -> float:
    spec = agent.fetch.driver_spec(driver)
    return float(spec.node_allocatable_update_period_seconds or 0) if spec else 0.0


def _reference(use: VolumeUse) -> ObjectReference:
    return ObjectReference(
        api_version="v1", kind="Pod", namespace=use.pod.namespace, name=use.pod.name, uid=use.pod.uid
    )
