"""The volume manager: what pods and the API say about volumes, and what pods ask.

Owns: the desired state, filled from pods. `loop.py` plans and carries out steps, `restart.py` finds what an earlier
agent left. Start reading at: `VolumeManager.want`.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator

from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, CsiDriverSpec
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import VolumeName, claims_of
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.volumes.execute import VolumeExecutor
from moorage.node.volumes.expand import NOT_YET
from moorage.node.volumes.loop import FailureSink, Moved, VolumeLoop
from moorage.node.volumes.observe import ObservedVolumes, observe
from moorage.node.volumes.plan import PASSING
from moorage.node.volumes.populate import refuse_replacements, same_for_uses, uses_of
from moorage.node.volumes.restart import found_for, sweep
from moorage.node.volumes.sources import Sources
from moorage.node.volumes.state import (
    EXPAND,
    CsiSource,
    MountState,
    MountVolume,
    VolumeState,
    VolumeUse,
)

log = get_logger(__name__)

_LEAVING_S = 10.0  # a process that cannot be killed must not keep the next pod from starting for ever


def _ignore(_uid: PodUid) -> None:
    """Used until the agent has connected the pods."""


class VolumeManager:
    """What pods tell it: `want`, `release`, `hold`, `leave`. What they ask: `is_mounted`, `is_unmounted`."""

    def __init__(
        self,
        layout: NodeLayout,
        sources: Sources,
        executor: VolumeExecutor,
        *,
        sync_s: float = 60.0,
        on_failure: FailureSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world = VolumeState()
        self._layout = layout
        self._sources = sources
        self._sync_s = sync_s
        self._clock = clock
        self._wanted: dict[PodUid, Pod] = {}
        self._behind: set[PodUid] = set()  # wanted, but their volumes could not be made out to the end
        self._seen_at: dict[PodUid, float] = {}
        self._by_claim: dict[str, set[PodUid]] = {}
        self._touched: dict[PodUid, set[VolumeName]] = {}  # a pod's volumes, in either state
        self._named: dict[PodUid, dict[str, VolumeName]] = {}  # by the pod's names for them, be they wanted or not
        self._errors: dict[PodUid, dict[str, str]] = {}
        self._loop = VolumeLoop(self.world, executor, lambda uid: self.on_moved(uid), on_failure, clock)
        self._waiting = self._loop.waiting
        self.in_use_changed = self._loop.in_use_changed
        self.look_at = self._loop.look_at
        self._sweeping: asyncio.Task[None] | None = None
        self.on_moved: Moved = _ignore  # called whenever something about a pod's volumes changed
        self._has_leftovers = False

    # What is there after a restart.

    def reconstruct(self) -> ObservedVolumes:
        """Find everything an earlier run left; nothing is unmounted before `begin`."""
        found = observe(self._layout)
        self.world.actual.update(found.volumes)
        for name, volume in found.volumes.items():
            for uid in volume.pods:
                self._touched.setdefault(uid, set()).add(name)
        if found.volumes:
            log.info("volumes found on disk", volumes=len(found.volumes), pods=len(found.pods))
        self._has_leftovers = bool(found.staged_unreadable)
        self.in_use_changed.set()
        return found

    def begin(self) -> None:
        """The desired state is complete: from now on, what no pod wants is unmounted."""
        self.world.is_ready = True
        for name in self.world.actual:
            self.look_at(name)
        if self._has_leftovers:
            self._sweeping = asyncio.create_task(self.sweep(), name="volumes without data")

    async def sweep(self) -> None:
        """Remove what is staged for no pod and without data; see `restart.sweep`."""
        await sweep(self._layout, self.world)

    async def run(self) -> None:
        """Plan and carry out steps until cancelled."""
        try:
            await self._loop.run()
        finally:
            if self._sweeping is not None:
                self._sweeping.cancel()
                await asyncio.gather(self._sweeping, return_exceptions=True)

    # What pods say.

    def want(self, pod: Pod) -> None:
        """The pod is to run here with its volumes; called again whenever the pod changed."""
        uid = PodUid(pod.uid)
        known = self._wanted.get(uid)
        if known is pod and uid not in self._behind:  # whatever else it depends on tells by itself that it has changed
            return
        self._wanted[uid] = pod
        if known is None:
            self._seen_at[uid] = self._clock()
            for key in claims_of(pod):
                self._by_claim.setdefault(key, set()).add(uid)
        self._populate(pod)

    def release(self, uid: PodUid) -> None:
        """The pod's processes have ended: its volumes may go."""
        pod = self._wanted.pop(uid, None)
        self._behind.discard(uid)
        self._seen_at.pop(uid, None)
        self.world.held.discard(uid)
        self.world.leaving.pop(uid, None)
        self._errors.pop(uid, None)
        self._waiting.pop(uid, None)
        if pod is not None:
            for key in claims_of(pod):
                holders = self._by_claim.get(key, set())
                holders.discard(uid)
                if not holders:
                    self._by_claim.pop(key, None)
        for name in list(self._touched.get(uid, ())):
            self._unwant(name, uid)

    def hold(self, uid: PodUid) -> None:
        """Processes of this pod run although it is no longer wanted: its volumes stay until `release`."""
        self.world.held.add(uid)

    def leave(self, uid: PodUid) -> None:
        """No such pod is there any more, and its processes are being ended: until `release`, but not for long, no other
        gets a volume of its that is not meant for many. A pod that has none is in no one's way, and one that was
        released may be reported once more, and would never be forgotten."""
        if uid in self._touched:
            self.world.leaving.setdefault(uid, self._clock() + _LEAVING_S)

    def unmounted(self, pod: Pod) -> list[str]:
        """The names of the pod's volumes that are not there yet, with the reason where one is known."""
        uid = PodUid(pod.uid)
        names = [f"{name} ({reason})" for name, reason in self._errors.get(uid, {}).items()]
        for use in self._uses_of(uid):
            name = use.volume
            actual = self.world.actual.get(name)
            if actual is None or actual.state_of(uid) is not MountState.MOUNTED:
                reason = self._waiting.get(uid, {}).get(name, "")
                if actual is not None and not reason:
                    reason = actual.reason_against(uid)
                names.append(f"{use.outer_names[0]} ({reason})" if reason else use.outer_names[0])
        return names

    def refusals(self, uid: PodUid) -> frozenset[str]:
        """Why volumes of the pod are not even tried: nothing is under way that would change that."""
        waits = self._waiting.get(uid, {}).values()
        return frozenset(self._errors.get(uid, {}).values()) | {reason for reason in waits if reason not in PASSING}

    def is_mounted(self, pod: Pod) -> bool:
        """Every volume that the pod needs is there, confirmed by its driver."""
        uid = PodUid(pod.uid)
        if uid not in self._wanted or uid in self._behind or self._errors.get(uid):
            return False
        return all(self._is_mounted(use) for use in self._uses(uid))

    def is_unmounted(self, uid: PodUid) -> bool:
        """Nothing of the pod is, or may be, mounted."""
        for name in self._touched.get(uid, ()):
            actual = self.world.actual.get(name)
            if uid in self.world.desired.get(name, ()) or (
                actual is not None and actual.state_of(uid) is not MountState.ABSENT
            ):
                return False
            if actual is not None and isinstance(actual.pending, MountVolume) and actual.pending.use.pod.uid == uid:
                return False
        self._touched.pop(uid, None)
        self._named.pop(uid, None)
        return True

    async def publish_again(self, uid: PodUid, is_lost: Callable[[VolumeUse], Awaitable[bool]]) -> None:
        """Publish again the volumes that another program unmounted, or that died."""
        for use in self._uses_of(uid):
            if not self._is_mounted(use) or not await is_lost(use):
                continue
            actual = self.world.actual.get(use.volume)
            if actual is not None and self._is_mounted(use):  # still, after the wait
                log.warning("volume is gone from its place and is published again", volume=use.volume, pod=uid)
                actual.pods[uid].state = MountState.UNCERTAIN
                self.look_at(use.volume)

    async def all_gone(self, timeout_s: float) -> bool:
        """Wait until no volume is, or may be, mounted here; False when time ran out."""
        if not self.world.actual:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.emptied()
        except TimeoutError:
            log.warning("volumes were not unmounted in time", volumes=len(self.world.actual))
            return False
        return True

    @property
    def under_way(self) -> int:
        """How many volumes are being worked on."""
        return self._loop.under_way

    def seen_at(self, uid: PodUid) -> float:
        """When, of the manager's clock, a pod was first to run here."""
        return self._seen_at.get(uid, math.inf)

    @property
    def claims_wanted(self) -> Collection[str]:
        """The claims, as namespace/name, of every pod that is to run here."""
        return self._by_claim.keys()

    def use_named(self, uid: PodUid, pod_volume: str) -> VolumeUse | None:
        """The use behind a name in pod.spec.volumes."""
        name = self._named.get(uid, {}).get(pod_volume)
        use = self.world.desired.get(name, {}).get(uid) if name is not None else None
        return use if use is not None and pod_volume in use.outer_names else None

    # What the API says.

    def claim_changed(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        claim = new or old
        if claim is not None and not (old and new and same_for_uses(old, new)):
            self._repopulate(self._by_claim.get(claim.key, ()))

    def volume_changed(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        pv = new or old
        if pv is not None and pv.spec.claim_ref is not None:
            key = f"{pv.spec.claim_ref.namespace}/{pv.spec.claim_ref.name}"
            self._repopulate(self._by_claim.get(key, ()))

    def driver_changed(self, old: CSIDriver | None, new: CSIDriver | None) -> None:
        spec_before: CsiDriverSpec | None = old.spec if old else None
        if new is None or new.spec != spec_before:
            self._repopulate(list(self._wanted))

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        if new is None:
            return
        attached = frozenset(one.name for one in new.status.volumes_attached)
        reported = frozenset(new.status.volumes_in_use)
        moved = (attached ^ self.world.attached) | (reported ^ self.world.in_use_reported)
        if reported != self.world.in_use_reported and reported != self.world.in_use():
            self.in_use_changed.set()  # a write of ours was lost, or another client wrote
        self.world.attached, self.world.in_use_reported = attached, reported
        for name in moved:
            if VolumeName(name) in self.world.desired:
                self.look_at(VolumeName(name))
        if old is not None and old.labels != new.labels:
            self._repopulate([uid for uid in self._errors if self._errors[uid]])

    def plugin_changed(self, driver: str) -> None:
        """A driver came or went: what failed for want of it is tried at once."""
        for volume in self.world.actual.values():
            if isinstance(volume.source, CsiSource) and volume.source.driver == driver:
                for backoff in volume.backoffs.values():
                    backoff.until = 0.0
                self.look_at(volume.name)

    # Filling the desired state.

    def _repopulate(self, uids: object) -> None:
        for uid in list(uids):  # type: ignore[call-overload]
            pod = self._wanted.get(uid)
            if pod is None:
                continue
            try:
                self._populate(pod)
            except Exception:  # the others are still populated, and this pod's worker calls `want` again
                log.exception("volumes of a pod cannot be made out", pod=pod.key)
                self.on_moved(uid)

    def _populate(self, pod: Pod) -> None:
        """What fails on the way is made good by the next `want`, and takes nothing from the pod until then."""
        uid = PodUid(pod.uid)
        self._behind.add(uid)
        try:
            self._fill(pod, uid)
        except Exception:
            self.world.held.add(uid)
            raise
        self._behind.discard(uid)

    def _fill(self, pod: Pod, uid: PodUid) -> None:
        needs = uses_of(pod, self._sources, self._sync_s)
        wanted = {use.volume: use for use in needs.uses}
        touched = self._touched.setdefault(uid, set())
        kept: set[str] = set()
        for use in self._uses_of(uid):
            if use.volume in wanted and wanted[use.volume].source.spec_name == use.source.spec_name:
                continue
            # A claim that became unusable, or another one, after it was mounted: the pod keeps what it began with.
            if self._began_with(use):
                kept.update(use.outer_names)
            else:
                self._unwant(use.volume, uid)
        needs.uses = [use for use in needs.uses if kept.isdisjoint(use.outer_names)]
        refuse_replacements(
            needs,
            found_for(self._layout, self.world, uid, self._touched.get(uid, ())),
            given={use.volume for use in self._uses_of(uid)},
        )
        for use in needs.uses:
            name = use.volume
            touched.add(name)
            uses = self.world.desired.setdefault(name, {})
            known = uses.get(uid)
            if known != use:
                if use.is_attachable != (known is not None and known.is_attachable):
                    self.in_use_changed.set()
                self._reset_expand(name, use.size_bytes not in {one.size_bytes for one in uses.values()})
                uses[uid] = use
                self.look_at(name)
        self._named[uid] = {outer: use.volume for use in self._uses(uid) for outer in use.outer_names}
        if needs.errors:  # what the pod has, be it from before a restart, it keeps until it is released
            self.world.held.add(uid)
        if needs.errors != self._errors.get(uid, {}):
            self._errors[uid] = needs.errors
            self.on_moved(uid)

    def _began_with(self, use: VolumeUse) -> bool:
        """The pod's containers may have been started with this volume."""
        actual = self.world.actual.get(use.volume)
        pod = actual.pods.get(use.pod.uid) if actual is not None else None
        return pod is not None and pod.may_be_used

    def _reset_expand(self, name: VolumeName, is_new_size: bool) -> None:
        """Stop waiting for the claim. A driver that has refused is asked again soon only for
        another size: its refusal changes the claim as well, and that of a resizer changes it back."""
        actual = self.world.actual.get(name)
        backoff = actual.backoffs.get(EXPAND) if actual is not None else None
        if actual is not None and backoff is not None and (is_new_size or backoff.message == NOT_YET):
            del actual.backoffs[EXPAND]

    def _unwant(self, name: VolumeName, uid: PodUid) -> None:
        uses = self.world.desired.get(name)
        if uses is not None and uses.pop(uid, None) is not None and not uses:
            del self.world.desired[name]
            self.in_use_changed.set()
        actual = self.world.actual.get(name)
        if actual is not None:
            actual.backoffs.pop(("mount", uid), None)
        self.look_at(name)

    def _is_mounted(self, use: VolumeUse) -> bool:
        actual = self.world.actual.get(use.volume)
        return actual is not None and actual.state_of(use.pod.uid) is MountState.MOUNTED

    def _uses_of(self, uid: PodUid) -> list[VolumeUse]:
        return list(self._uses(uid))

    def _uses(self, uid: PodUid) -> Iterator[VolumeUse]:
        for name in self._touched.get(uid, ()):
            use = self.world.desired.get(name, {}).get(uid)
            if use is not None:
                yield use
