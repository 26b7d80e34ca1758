"""The health monitor: reports what the driver says about its volumes as events on their claims.

Owns: the calls (conditions of CSI v1.12, health calls of v1.13), and which claims have had a warning.
May not touch: the volumes; it only reports.
Start reading at: `HealthMonitor.run`, `HealthMonitor.look`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.control.controller import Watch, run
from moorage.kube.errors import ApiError
from moorage.kube.objects import Event, Node, ObjectReference, PersistentVolume, Pod, seconds_of
from moorage.kube.volumes import claims_of, is_of_driver
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.listing import pages
from moorage.sidecars.roles import Role

log = get_logger(__name__)

_ABNORMAL, _NORMAL = "VolumeConditionAbnormal", "VolumeConditionNormal"
_NODE_FAILED, _NODE_RECOVERED = "NodeFailed", "NodeRecovered"
_NODE_GRACE_S = 300.0
_NODE_LOOK_S = 30.0

_Ask = Callable[[str], Awaitable[str | None]]
Trouble = dict[str, str]  # by volume handle: what is wrong; a handle that is known and well maps to ""


class HealthMonitor:
    """Stands for external-health-monitor-controller."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._events = context.recorder(f"csi-pv-monitor-controller-{context.driver.name}")
        self._warned: set[str] = set()  # uids of claims whose last event was a warning
        self._failed_nodes: set[str] = set()
        self._gone_nodes: list[str] = []

    async def run(self) -> None:
        """Check the volumes periodically until cancelled."""
        context, settings = self._context, self._context.settings
        if not context.driver.capabilities.reports_health and not settings.enable_node_watcher:
            log.warning("the driver reports no health; the role waits for one that does", driver=context.driver.name)
            await asyncio.Event().wait()
        caches, watches, beside = context.caches, [], []
        if context.driver.capabilities.reports_health:
            beside.append(self._check_volumes_forever)
        if settings.enable_node_watcher:
            watches.append(Watch(caches.nodes, self._on_node, replay=False))
            beside.append(self._check_nodes_forever)
        await self._recall()
        async with self._events:
            await run([], watches, reads=[caches.volumes, *([caches.claims] if watches else [])], beside=beside)

    async def _recall(self) -> None:
        """Read which claims an earlier run has warned, so that they get an event when they recover."""
        try:
            warned = (await self._context.client.list(Event, fields=f"reason={_ABNORMAL}")).items
        except ApiError as error:
            log.info("earlier events cannot be read", reason=str(error))
            return
        self._warned |= {event.involved_object.uid for event in warned if event.involved_object.uid}

    async def _check_volumes_forever(self) -> None:
        can, settings = self._context.driver.capabilities, self._context.settings
        lists = can.controller("LIST_VOLUME_HEALTH") or (
            can.controller("VOLUME_CONDITION") and can.controller("LIST_VOLUMES")
        )
        while True:
            try:
                await self.look()
            except CsiError as error:  # not knowing is not a condition of the volume
                log.warning("volume health is not known", reason=str(error))
            await asyncio.sleep(settings.list_volumes_interval_s if lists else settings.monitor_interval_s)

    async def look(self) -> None:
        """Ask about all volumes once, and record what changed as events on their claims."""
        volumes = [v for v in self._context.caches.volumes if self._is_ours(v)]
        trouble = await self._trouble(volumes)
        for volume in volumes:
            handle = volume.spec.csi.volume_handle if volume.spec.csi is not None else ""
            if handle in trouble and volume.spec.claim_ref is not None:
                self._report(volume.spec.claim_ref, trouble[handle])

    def _is_ours(self, volume: PersistentVolume) -> bool:
        is_bound = volume.status.phase == "Bound" and not volume.is_deleting
        is_ours = is_of_driver(volume, self._context.driver.name)
        return is_ours and is_bound and self._context.is_local(volume)

    def _report(self, claim: ObjectReference, what: str) -> None:
        about = ObjectReference(
            api_version="v1", kind="PersistentVolumeClaim", namespace=claim.namespace, name=claim.name, uid=claim.uid
        )
        if what:
            self._warned.add(claim.uid)
            self._events.warning(about, _ABNORMAL, what)
        elif claim.uid in self._warned:
            self._warned.discard(claim.uid)
            self._events.normal(about, _NORMAL, "The Volume returns to the healthy state")

    async def _trouble(self, volumes: list[PersistentVolume]) -> Trouble:
        can = self._context.driver.capabilities
        if can.controller("LIST_VOLUME_HEALTH"):
            return await self._listed_health(volumes)
        if can.controller("GET_VOLUME_HEALTH"):
            return await self._one_by_one(volumes, self._health_of)
        if can.controller("LIST_VOLUMES"):
            return await self._listed_conditions(volumes)
        return await self._one_by_one(volumes, self._condition_of)

    async def _listed_health(self, volumes: list[PersistentVolume]) -> Trouble:
        """The driver lists only the volumes in trouble; all others are well."""
        trouble = dict.fromkeys(_handles(volumes), "")
        client = self._context.driver.client

        async def page(token: str) -> pb.ControllerListVolumeHealthResponse:
            request = pb.ControllerListVolumeHealthRequest(starting_token=token)
            return await client.ControllerListVolumeHealth(request, timeout_s=self._timeout_s)

        async for answer in pages("ControllerListVolumeHealth", page):
            trouble |= {one.volume_id: health_text(one) for one in answer.entries if one.volume_id in trouble}
        return trouble

    async def _listed_conditions(self, volumes: list[PersistentVolume]) -> Trouble:
        trouble: Trouble = {}
        known, most = _handles(volumes), self._context.settings.max_entries
        client = self._context.driver.client

        async def page(token: str) -> pb.ListVolumesResponse:
            request = pb.ListVolumesRequest(max_entries=most, starting_token=token)
            return await client.ListVolumes(request, timeout_s=self._timeout_s)

        async for answer in pages("ListVolumes", page):
            for entry in answer.entries:
                if entry.status.HasField("volume_condition") and entry.volume.volume_id in known:
                    trouble[entry.volume.volume_id] = condition_text(entry.status.volume_condition)
        return trouble

    async def _one_by_one(self, volumes: list[PersistentVolume], ask: _Ask) -> Trouble:
        trouble: Trouble = {}
        slots = asyncio.Semaphore(self._context.settings.workers_for(Role.HEALTH))

        async def one(handle: str) -> None:
            async with slots:
                try:
                    found = await ask(handle)
                except CsiError as error:
                    log.debug("health of a volume is not known", volume=handle, reason=str(error))
                    return
            if found is not None:
                trouble[handle] = found

        async with asyncio.TaskGroup() as tasks:
            for volume in volumes:
                if volume.spec.csi is not None:
                    tasks.create_task(one(volume.spec.csi.volume_handle))
        return trouble

    async def _health_of(self, handle: str) -> str | None:
        request = pb.ControllerGetVolumeHealthRequest(volume_id=handle)
        answer = await self._context.driver.client.ControllerGetVolumeHealth(request, timeout_s=self._timeout_s)
        return health_text(answer.volume_health)

    async def _condition_of(self, handle: str) -> str | None:
        request = pb.ControllerGetVolumeRequest(volume_id=handle)
        answer = await self._context.driver.client.ControllerGetVolume(request, timeout_s=self._timeout_s)
        if not answer.status.HasField("volume_condition"):
            return None
        return condition_text(answer.status.volume_condition)

    @property
    def _timeout_s(self) -> float:
        return self._context.settings.timeout_for(Role.HEALTH)

    async def _check_nodes_forever(self) -> None:
        while True:
            for name in list(self._gone_nodes):
                if await self._warn_claims_on(name, _NODE_FAILED, "is gone"):
                    self._gone_nodes.remove(name)
            for node in self._context.caches.nodes:
                await self._check_node(node)
            await asyncio.sleep(_NODE_LOOK_S)

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if new is None and old is not None:
            self._failed_nodes.discard(old.name)
            self._gone_nodes.append(old.name)  # by name: the object is no longer there to be looked up

    async def _check_node(self, node: Node) -> None:
        ready = next((c for c in node.status.conditions if c.type == "Ready"), None)
        since = seconds_of(ready.last_transition_time) if ready is not None and ready.status != "True" else None
        has_failed = since is not None and time.time() - since > _NODE_GRACE_S
        if has_failed and node.name not in self._failed_nodes:
            text = f"has not been ready for {_NODE_GRACE_S / 60:.0f} minutes"
            if await self._warn_claims_on(node.name, _NODE_FAILED, text):
                self._failed_nodes.add(node.name)
        if node.is_ready and node.name in self._failed_nodes:
            is_warned = await self._warn_claims_on(node.name, _NODE_RECOVERED, "is ready again")
            self._failed_nodes -= {node.name} if is_warned else set()

    async def _warn_claims_on(self, node: str, reason: str, what: str) -> bool:
        """Record an event on every claim that a pod uses on a node. Returns False if it must be tried again."""
        try:
            pods = (await self._context.client.list(Pod, fields=f"spec.nodeName={node}")).items
        except ApiError as error:
            log.warning("pods of a node cannot be listed", node=node, reason=str(error))
            return False
        for pod in pods:
            for claim in map(self._context.caches.claims.get, claims_of(pod)):
                if claim is not None:
                    self._events.warning(claim, reason, f"node {node}, where pod {pod.name} uses it, {what}")
        return True


def _handles(volumes: list[PersistentVolume]) -> set[str]:
    return {volume.spec.csi.volume_handle for volume in volumes if volume.spec.csi is not None}


def health_text(health: pb.VolumeHealth) -> str:
    """Return what is wrong with a volume in one line, worst first; empty if nothing is."""
    kinds = pb.VolumeHealthErrorType
    known = [entry for entry in health.health_statuses if entry.status in (1, 2, 3)]
    known.sort(key=lambda entry: (-entry.status, entry.reason))
    return "; ".join(
        f"{kinds.Name(entry.status)}: {entry.reason}" + (f": {entry.message}" if entry.message else "")
        for entry in known
    )


def condition_text(condition: pb.VolumeCondition) -> str:
    return (condition.message or "the driver says that the volume is abnormal") if condition.abnormal else ""
