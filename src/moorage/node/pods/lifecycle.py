"""What to do next for a pod's containers: pure functions.

Owns: restart policies, back-off, the order of init containers and sidecars, and when a pod has come to its end.
May not touch: processes, the API, a clock. How it is told is in `report.py`.
Start reading at: `decide`.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from moorage.kube.objects.core import Container, Pod

BACKOFF_START_S = 10.0
BACKOFF_MAX_S = 300.0
STEADY_S = 600.0  # a container that ran this long has its back-off forgotten
START_RETRY_S = 10.0
CRASH_LOOP = "CrashLoopBackOff"
START_ERROR = "StartError"  # the reason of an attempt whose program was never executed
IMAGE = "host"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The newest attempt at one container, and how the one before ended."""

    number: int
    is_running: bool = False
    started: float = 0.0
    finished: float = 0.0
    exit_code: int | None = None
    signal: int = 0
    reason: str = ""
    message: str = ""
    streak: int = 0  # attempts in a row that ended too soon
    id: str = ""
    previous: "Attempt | None" = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Which containers to start now, when to look again, and what the pod has come to."""

    start: tuple[str, ...] = ()
    look_again_at: float | None = None
    phase: str = "Pending"
    waiting: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # container -> reason, message
    is_over: bool = False  # nothing of it will ever run again


def is_host_image(image: str) -> bool:
    """`host`, with or without a tag: the only image there is without a container runtime."""
    return image.partition(":")[0] == IMAGE


def unsupported(pod: Pod) -> list[str]:
    """What the pod asks for that this agent does not do, in words; it runs all the same."""
    found = []
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        probes = [
            name
            for name, probe in (
                ("livenessProbe", container.liveness_probe),
                ("readinessProbe", container.readiness_probe),
                ("startupProbe", container.startup_probe),
            )
            if probe
        ]
        if probes:
            found.append(f"container {container.name}: {', '.join(probes)} not run by this node agent")
        if container.stdin or container.tty:
            found.append(f"container {container.name}: stdin and tty are empty, this node agent serves no attach")
        if container.lifecycle:
            found.append(f"container {container.name}: lifecycle hooks are not run by this node agent")
    return found


def foreign_images(pod: Pod) -> dict[str, str]:
    """Containers whose image is not `host`, with the message that says so."""
    return {
        one.name: f'image "{one.image}" cannot be run: this node has no container runtime, only image "{IMAGE}"'
        for one in (*pod.spec.init_containers, *pod.spec.containers)
        if not is_host_image(one.image)
    }


def is_sidecar(container: Container) -> bool:
    """An init container that is to run as long as the pod does."""
    return container.restart_policy == "Always"


@dataclass(slots=True)
class _Round:
    """What one look at a pod's containers has found so far."""

    pod: Pod
    attempts: Mapping[str, Attempt]
    now: float
    start: list[str] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    waiting: dict[str, tuple[str, str]] = field(default_factory=dict)

    def begin(self, container: Container) -> None:
        """Start a container that does not run, now or when its back-off is over."""
        attempt = self.attempts.get(container.name)
        due = _due(attempt)
        if due <= self.now:
            self.start.append(container.name)
            return
        self.again.append(due)
        if attempt is not None and _is_first_failed_start(attempt):
            self.waiting[container.name] = ("RunContainerError", attempt.message)
        else:
            self.waiting[container.name] = _crash_loop(container, self.pod, attempt)

    def decision(self, phase: str) -> Decision:
        return Decision(tuple(self.start), min(self.again, default=None), phase, self.waiting)


def decide(pod: Pod, attempts: Mapping[str, Attempt], now: float) -> Decision:
    """The next step for a pod whose volumes are there."""
    policy = pod.spec.restart_policy or "Always"
    found = _Round(pod, attempts, now)
    has_run = any(one.name in attempts for one in pod.spec.containers)
    for container in pod.spec.init_containers:
        attempt = attempts.get(container.name)
        if is_sidecar(container):
            if attempt is None or not attempt.is_running:
                found.begin(container)
                if not has_run:  # the first time, nothing that follows begins without it
                    return found.decision("Pending")
            continue
        if attempt is not None and attempt.exit_code == 0:
            continue
        if attempt is not None and not attempt.is_running and (container.restart_policy or policy) == "Never":
            return Decision(phase="Failed", is_over=True)
        if attempt is None or not attempt.is_running:
            found.begin(container)
        return found.decision("Running" if has_run else "Pending")
    return _decide_main(found, policy)


def _decide_main(found: _Round, policy: str) -> Decision:
    codes: list[int] = []
    for container in found.pod.spec.containers:
        attempt = found.attempts.get(container.name)
        if attempt is not None and attempt.is_running:
            continue
        if (
            attempt is not None
            and attempt.exit_code is not None
            and not _restarts(container.restart_policy or policy, attempt)
        ):
            codes.append(attempt.exit_code)
            continue
        found.begin(container)
    if len(codes) == len(found.pod.spec.containers):
        return Decision(phase="Failed" if any(codes) else "Succeeded", is_over=True)
    return found.decision("Running")


def _restarts(policy: str, attempt: Attempt) -> bool:
    return policy == "Always" or (policy == "OnFailure" and attempt.exit_code != 0)


def next_streak(attempt: Attempt | None) -> int:
    """The streak of the attempt that follows."""
    if attempt is None:
        return 0
    return 1 if attempt.finished - attempt.started >= STEADY_S else attempt.streak + 1


def _due(attempt: Attempt | None) -> float:
    """When the next attempt may begin: at once the first two times, then later and later."""
    streak = next_streak(attempt)
    if attempt is not None and _is_first_failed_start(attempt):
        return attempt.finished + START_RETRY_S
    if attempt is None or streak < 2:
        return 0.0
    delay_s: float = min(BACKOFF_START_S * 2.0 ** (streak - 2), BACKOFF_MAX_S)
    return attempt.finished + delay_s


def _is_first_failed_start(attempt: Attempt) -> bool:
    """A program that was not executed is not tried again at once: what is in the way seldom goes by itself."""
    return attempt.reason == START_ERROR and next_streak(attempt) < 2


def _crash_loop(container: Container, pod: Pod, attempt: Attempt | None) -> tuple[str, str]:
    seconds = int(_due(attempt) - attempt.finished) if attempt else 0
    shown = f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"
    text = f"back-off {shown} restarting failed container={container.name} pod={pod.name}_{pod.namespace}({pod.uid})"
    return (CRASH_LOOP, text)


def first_to_end(pod: Pod, running: Set[str]) -> Set[str]:
    """Which of the running containers are to end first: all but sidecars, and then these, the last one first, so that
    each finds what it was started beside as long as it runs."""
    sidecars = [one.name for one in pod.spec.init_containers if is_sidecar(one) and one.name in running]
    return running - set(sidecars) or set(sidecars[-1:])
