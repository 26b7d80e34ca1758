"""One pod on this node, from its first sight to its last trace.

Owns: the pod's containers and the order of its end: processes, then volumes, then logs and control groups, then its
directory, then the object.
Start reading at: `PodWorker.run`, `PodWorker.sync`.
"""

import asyncio
from collections.abc import Mapping

from moorage.errors import MoorageError
from moorage.host.boot import boot_id
from moorage.kube.errors import ApiError, Conflict, NotFound
from moorage.kube.objects.meta import seconds_of
from moorage.kube.objects.pods import Container as ContainerSpec
from moorage.kube.objects.pods import Pod
from moorage.log import get_logger
from moorage.node.layout import PodUid
from moorage.node.pods import cleanup
from moorage.node.pods.attempts import attempts_of
from moorage.node.pods.errors import BadContainer
from moorage.node.pods.events import PodEvents, part_of
from moorage.node.pods.lifecycle import (
    ContainerAttempt,
    PodDecision,
    decide,
    first_to_end,
    grace_s_of,
    least_grace_s,
    next_streak,
)
from moorage.node.pods.status_report import status_of, steady
from moorage.node.pods.tools import Tools
from moorage.node.runtime import (
    DRAINED,
    START_ERROR,
    ContainerFailed,
    NotCreated,
    RunningContainer,
)

log = get_logger(__name__)

_RETRY_MAX_S = 60.0
_CONFIG_RETRY_S = 10.0
_KILL_AGAIN_S = 5.0


class PodWorker:
    """Brings one pod from what it is to what it should be, each time it is woken."""

    def __init__(self, tools: Tools, uid: PodUid) -> None:
        self.uid = uid
        self.pod: Pod | None = None
        self.is_gone = False  # no object in the API any more
        self.is_draining = False  # the agent stops and takes its pods with it
        self.is_hurried = False  # it does so at once
        self.is_done = False
        self.containers: dict[str, list[RunningContainer]] = {}
        self._tools = tools
        self._wake = asyncio.Event()
        self._failures = 0
        self._first_seen = tools.clock()
        self._events = PodEvents(tools, uid, self._first_seen)
        self._stop_at: float | None = None  # when what still runs is killed
        self._over: PodDecision | None = None
        self._over_reason = ("", "")
        self._config_errors: dict[str, tuple[str, str]] = {}
        self._is_prepared = False
        self._looked_after: dict[str, int] = {}  # container -> attempt
        self._asked: dict[str, float] = {}  # containers that were asked to end, and when

    def wake(self) -> None:
        self._wake.set()

    def mark_deleted(self) -> None:
        """There is no such pod any more."""
        self.is_gone = True
        self._tools.volumes.leave(self.uid)

    async def run(self) -> None:
        """Until the pod has left no trace."""
        while not self.is_done:
            self._wake.clear()
            try:
                again_s = await self.sync()
                self._failures = 0
            except (MoorageError, OSError) as error:
                self._failures += 1
                again_s = min(0.5 * 2.0 ** min(self._failures - 1, 10), _RETRY_MAX_S)
                log.warning("pod is tried again later", pod=self._shown, reason=str(error), seconds=again_s)
            if self.is_done:
                return
            try:
                async with asyncio.timeout(again_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def sync(self) -> float | None:
        """One step; returns after how many seconds to come back without being woken."""
        pod = self.pod
        if pod is None or self.is_gone or self.is_draining or pod.is_deleting or self._is_over(pod):
            return await self._terminate()
        return self._by_deadline(pod, await self._advance(pod))

    def newest(self, name: str) -> RunningContainer | None:
        attempts = self.containers.get(name)
        return attempts[-1] if attempts else None

    def may_run(self, pod: Pod) -> bool:
        """Whether any of its containers was, or could be, started here: else its volumes are not needed."""
        return any(self.containers.values()) or bool(decide(pod, {}, self._tools.clock()).start)

    # Forward.

    async def _advance(self, pod: Pod) -> float | None:
        if self._events.refuses_names(pod):
            return None
        if not self._is_prepared:
            self._prepare(pod)
        self._events.unsupported(pod)
        tools = self._tools
        now = tools.clock()
        attempts = self._attempts()
        decision = decide(pod, attempts, now)
        if decision.is_over:
            self._end(decision, attempts)
            return 0.0
        if not attempts and not decision.start:  # none of its images is here: its volumes are not needed
            self._tell(pod, decision, attempts)
            return None
        tools.volumes.want(pod)
        await self._look_after_volumes(decision.start)
        if not tools.volumes.is_mounted(pod):
            waiting_phase = decision.phase if attempts else "Pending"
            self._tell(pod, PodDecision(phase=waiting_phase, waiting=decision.waiting), attempts)
            return self._events.unmounted(pod, now)
        tried = decision.start
        for name in tried:
            await self._start(pod, name, attempts.get(name))
        if tried:
            attempts = self._attempts()
            decision = decide(pod, attempts, tools.clock())
            if decision.is_over:  # already; but a sidecar may still run
                self._end(decision, attempts)
                return 0.0
        held = self._config_errors
        self._tell(pod, PodDecision((), None, decision.phase, {**decision.waiting, **held}), attempts)
        self._events.back_off(pod, decision, attempts)
        times = [] if decision.look_again_at is None else [max(0.0, decision.look_again_at - tools.clock())]
        if held or decision.start:
            times.append(_CONFIG_RETRY_S if set(decision.start) <= {*tried, *held} else 0.0)
        return min(times, default=None)

    def _by_deadline(self, pod: Pod, again_s: float | None) -> float | None:
        """Whatever a pod waits for, it is come back to when its time is over."""
        deadline = self._deadline(pod)
        if deadline is None:
            return again_s
        left = max(0.05, deadline - self._tools.clock())
        return left if again_s is None else min(again_s, left)

    async def _look_after_volumes(self, names: tuple[str, ...]) -> None:
        """A container that is started once more must not find an empty directory where its volume was. Once for each
        attempt: a driver may publish without mounting anything."""
        due = {name: self.containers[name][-1].attempt for name in names if self.containers.get(name)}
        if not due.items() <= self._looked_after.items():
            self._looked_after |= due
            await self._tools.volumes.publish_again(self.uid, self._tools.specs.is_lost)

    def _prepare(self, pod: Pod) -> None:
        self._is_prepared = True
        self._tools.cgroups.prepare(pod)
        self._events.foreign_images(pod)

    async def _start(self, pod: Pod, name: str, last: ContainerAttempt | None) -> None:
        tools = self._tools
        spec = _container_named(pod, name)
        attempts = self.containers.setdefault(name, [])
        number = attempts[-1].attempt + 1 if attempts else 0
        try:
            document = await tools.specs.make(pod, spec, tools.cgroups.of(pod.uid, name))
        except (BadContainer, ApiError, OSError) as error:
            self._not_created(pod, name, error)
            return
        directory = tools.layout.attempt(pod.uid, name, number)
        log_file = tools.layout.log_file(pod.namespace, pod.name, pod.uid, name, number)
        container = RunningContainer(pod.uid, name, number, directory, log_file)
        attempts.append(container)
        owner = {"namespace": pod.namespace, "pod": pod.name, "streak": next_streak(last), "boot": boot_id()}
        if number:  # the group outlives its attempts: what was killed before is not this one's
            owner["oom_kills"] = tools.cgroups.oom_kills(pod.uid, name)
        try:
            await tools.runtime.start(container, {**document, **owner})
            self._config_errors.pop(name, None)
            tools.recorder.normal(part_of(pod, name), "Started", f"Started container {name}")
        except (NotCreated, OSError) as error:  # OSError: the root directory is full or read-only
            attempts.remove(container)
            self._not_created(pod, name, error)
        except ContainerFailed as error:
            self._config_errors.pop(name, None)
            now = tools.clock()
            container.state = {
                "exit_code": 128,
                "reason": START_ERROR,
                "message": str(error),
                "started": now,
                "finished": now,
                **container.state,
            }
            text = f"Error: failed to start container {name}: {error}"
            tools.recorder.warning(part_of(pod, name), "Failed", text)
        while len(attempts) > 2:
            cleanup.remove_attempt(attempts.pop(0))

    def _not_created(self, pod: Pod, name: str, error: Exception) -> None:
        """Tried again later, and no attempt: what is in the way is not the container's fault."""
        reason = error.reason if isinstance(error, BadContainer) else "CreateContainerError"
        self._config_errors[name] = (reason, str(error))
        self._tools.recorder.warning(part_of(pod, name), "Failed", f"Error: {error}")

    # Backward.

    async def _terminate(self) -> float | None:
        tools, pod = self._tools, self.pod
        now = tools.clock()
        running = [one for attempts in self.containers.values() for one in attempts if one.is_running]
        if running:
            again_s = self._stop(running, pod, now)
            if pod is not None and not self.is_gone and not self.is_draining:
                self._tell(pod, PodDecision(phase=self._phase(pod)), self._attempts())
            return again_s
        if pod is not None and not self.is_gone and not self._was_ended(pod):
            attempts = self._attempts()
            self._tell(pod, self._left(pod, attempts, now) or self._final(pod), attempts)
        tools.volumes.release(self.uid)
        if not tools.volumes.is_unmounted(self.uid):
            return None
        if pod is not None and not self.is_gone and not pod.is_deleting:
            if self.is_draining:
                await tools.statuses.flush(self.uid)  # the next agent may be long in coming
            self.is_done = self.is_draining
            return None
        if pod is not None and not self.is_gone:
            await tools.statuses.flush(self.uid)
        cleanup.remove_logs(tools.layout, self.uid)
        tools.cgroups.remove(self.uid)
        cleanup.remove_pod_directory(tools.layout, self.uid)  # last: by it the next agent knows of the rest
        if pod is not None and not self.is_gone:
            try:
                await tools.client.delete(Pod, pod.name, pod.namespace, uid=pod.uid, grace_s=0)
            except (NotFound, Conflict) as gone:
                log.debug("pod object is already gone", pod=self._shown, reason=str(gone))
        tools.statuses.forget(self.uid)
        self.is_done = True
        log.info("pod is gone", pod=self._shown)
        return None

    def _was_ended(self, pod: Pod) -> bool:
        """All was said and removed before, by this agent or an earlier one, and only a finalizer keeps the object."""
        return pod.is_deleting and not any(self.containers.values()) and pod.status.phase in ("Succeeded", "Failed")

    def _stop(self, running: list[RunningContainer], pod: Pod | None, now: float) -> float:
        """Ask each container to end when it is its turn, and kill it when its time is over."""
        grace_s = self._grace_s()
        if self._stop_at is None:
            self._stop_at = now + grace_s
            self._tools.volumes.hold(self.uid)
        self._stop_at = min(self._stop_at, now + grace_s)
        names = {one.name for one in running}
        turn = first_to_end(pod, names) if pod is not None and now < self._stop_at else names
        for container in running:
            if container.name in turn and container.id not in self._asked:
                self._asked[container.id] = now
                if pod is not None and self._is_left(pod):
                    _mark_drained(container)
                self._tools.runtime.stop(container)
                if pod is not None:
                    text = f"Stopping container {container.name}"
                    self._tools.recorder.normal(part_of(pod, container.name), "Killing", text)
        times = []
        for container in running:
            kill_at = max(
                self._stop_at, self._asked.get(container.id, now) + least_grace_s(container.name, pod, grace_s)
            )
            if now >= kill_at:
                self._tools.runtime.kill(container)
            times.append(kill_at - now if now < kill_at else _KILL_AGAIN_S)
        return min(times)

    def _grace_s(self) -> float:
        return 0.0 if self.is_hurried else grace_s_of(None if self.is_gone else self.pod)

    # Judging.

    def _is_over(self, pod: Pod) -> bool:
        if self._over is not None:
            return True
        if pod.status.phase in ("Succeeded", "Failed"):
            self._over = PodDecision(phase=pod.status.phase, is_over=True)
            self._over_reason = (pod.status.reason, pod.status.message)
            return True
        deadline = self._deadline(pod)
        if deadline is not None and self._tools.clock() >= deadline:
            self._over = PodDecision(phase="Failed", is_over=True)
            self._over_reason = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            self._tools.recorder.normal(pod, *self._over_reason)
            return True
        return False

    def _is_left(self, pod: Pod) -> bool:
        """Whether it is this agent that goes, and not the pod."""
        return self.is_draining and not self.is_gone and not pod.is_deleting and self._over is None

    def _left(self, pod: Pod, attempts: Mapping[str, ContainerAttempt], now: float) -> PodDecision | None:
        """What is said of a pod that the next agent goes on with; None if there is nothing to go on with."""
        if not self._is_left(pod) or pod.status.phase in ("Succeeded", "Failed"):
            return None
        decision = decide(pod, attempts, now)
        if not decision.is_over:
            return PodDecision(phase=self._phase(pod))
        self._end(decision, attempts)
        return None

    def _end(self, decision: PodDecision, attempts: Mapping[str, ContainerAttempt]) -> None:
        self._over = decision
        if decision.phase == "Failed" and any(one.is_drained for one in attempts.values()):
            self._over_reason = ("Terminated", "Pod was terminated because its node agent was stopped")

    def _deadline(self, pod: Pod) -> float | None:
        if pod.spec.active_deadline_seconds is None:
            return None
        return (seconds_of(pod.status.start_time) or self._first_seen) + pod.spec.active_deadline_seconds

    def _phase(self, pod: Pod) -> str:
        """The phase that a pod has until all of its containers have ended."""
        last = self._tools.statuses.last(self.uid)
        return str(last["phase"]) if last is not None else pod.status.phase or "Pending"

    def _final(self, pod: Pod) -> PodDecision:
        if self._over is not None:
            return self._over
        if pod.status.phase in ("Succeeded", "Failed"):  # which is never taken back
            return PodDecision(phase=pod.status.phase, is_over=True)
        attempts = self._attempts()
        codes = [attempts[one.name].exit_code for one in pod.spec.containers if one.name in attempts]
        all_well = len(codes) == len(pod.spec.containers) and not any(codes)
        return PodDecision(phase="Succeeded" if all_well else "Failed", is_over=True)

    def _attempts(self) -> dict[str, ContainerAttempt]:
        return attempts_of(self.containers, self._tools.cgroups)

    def _tell(self, pod: Pod, decision: PodDecision, attempts: Mapping[str, ContainerAttempt]) -> None:
        reason, message = self._over_reason
        if not decision.is_over or (not reason and decision.phase == pod.status.phase):
            # A reason belongs to the phase that it was set with.
            reason, message = pod.status.reason, pod.status.message
        status = status_of(
            pod,
            attempts,
            decision,
            host_ip=self._tools.host_ip,
            started_at=self._first_seen,
            now=self._tools.clock(),
            reason=reason,
            message=message,
        )
        self._tools.statuses.put(pod, steady(status, self._tools.statuses.last(pod.uid)))

    @property
    def _shown(self) -> str:
        return self.pod.key if self.pod is not None else self.uid


def _mark_drained(container: RunningContainer) -> None:
    """Before it is asked to end: how it ends must not be taken for what it had to say of its work."""
    try:
        (container.directory / DRAINED).touch()
    except OSError as error:  # full or read-only
        log.warning("it is not recorded that a container is stopped by us", container=container.id, reason=str(error))


def _container_named(pod: Pod, name: str) -> ContainerSpec:
    return next(one for one in (*pod.spec.init_containers, *pod.spec.containers) if one.name == name)
