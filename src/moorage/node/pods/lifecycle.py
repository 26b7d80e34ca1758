"""What to do next for a pod's containers: pure functions.

Owns: restart policies, back-off, the order of init containers and sidecars, and when a pod has come to its end.
May not touch: processes, the API, a clock. `status_report.py` writes the status.
Start reading at: `decide`.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from moorage.kube.objects.pods import Container, Pod
from moorage.node.runtime import START_ERROR

_ORPHAN_GRACE_S = 2.0
_DEFAULT_GRACE_S = 30.0
_LEAST_GRACE_S = 2.0

BACKOFF_START_S = 10.0
BACKOFF_MAX_S = 300.0
STEADY_S = 600.0  # a container that ran this long has its back-off forgotten
START_RETRY_S = 10.0
CRASH_LOOP = "CrashLoopBackOff"
IMAGE_ERROR = "ErrImagePull"
IMAGE = "host"


@dataclass(frozen=True, slots=True)
class ContainerAttempt:
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
    is_of_this_boot: bool = True
    is_drained: bool = False  # ended by an agent that was stopped: its exit code says nothing of its work
    id: str = ""
    previous: "ContainerAttempt | None" = None


@dataclass(frozen=True, slots=True)
class PodDecision:
    """Which containers to start now, when to decide again, and the pod's phase."""

    start: tuple[str, ...] = ()
    look_again_at: float | None = None
    phase: str = "Pending"
    waiting: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # container -> reason, message
    is_over: bool = False  # nothing of it will ever run again


def is_host_image(image: str) -> bool:
    """`host`, with or without a tag: the only image there is without a container runtime."""
    return image.partition(":")[0] == IMAGE


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
    attempts: Mapping[str, ContainerAttempt]
    now: float
    start: list[str] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    waiting: dict[str, tuple[str, str]] = field(default_factory=dict)

    def begin(self, container: Container) -> None:
        """Start a container that does not run, now or when its back-off is over; one of another image never."""
        if not is_host_image(container.image):
            self.waiting[container.name] = (IMAGE_ERROR, foreign_images(self.pod)[container.name])
            return
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

    def decision(self, phase: str) -> PodDecision:
        return PodDecision(tuple(self.start), min(self.again, default=None), phase, self.waiting)


def decide(pod: Pod, attempts: Mapping[str, ContainerAttempt], now: float) -> PodDecision:
    """The next step for a pod whose volumes are there."""
    policy = pod.spec.restart_policy or "Always"
    found = _Round(pod, attempts, now)
    has_run = any(one.name in attempts and attempts[one.name].is_of_this_boot for one in pod.spec.containers)
    if not has_run and any(not one.is_of_this_boot for one in attempts.values()):
        main = _decide_main(_Round(pod, attempts, now), policy)
        if main.is_over:
            return main
    for container in pod.spec.init_containers:
        attempt = attempts.get(container.name)
        is_once = not is_sidecar(container) and (container.restart_policy or policy) == "Never"
        if attempt is not None and not attempt.is_of_this_boot and not has_run and not is_once:
            found.begin(container)  # what it has prepared may be gone with the machine's memory
            return found.decision("Pending")
        if is_sidecar(container):
            if attempt is None or not attempt.is_running:
                found.begin(container)
                if not has_run:  # the first time, nothing that follows begins without it
                    return found.decision("Pending")
            continue
        if attempt is not None and attempt.exit_code == 0 and not attempt.is_drained:
            continue
        if attempt is not None and not attempt.is_running and not _restarts(container, policy, attempt):
            return PodDecision(phase="Failed", is_over=True)
        if attempt is None or not attempt.is_running:
            found.begin(container)
        return found.decision("Running" if has_run else "Pending")
    return _decide_main(found, policy)


def _decide_main(found: _Round, policy: str) -> PodDecision:
    ended: list[ContainerAttempt] = []
    for container in found.pod.spec.containers:
        attempt = found.attempts.get(container.name)
        if attempt is not None and attempt.is_running:
            continue
        if attempt is not None and attempt.exit_code is not None and not _restarts(container, policy, attempt):
            ended.append(attempt)
            continue
        found.begin(container)
    if len(ended) == len(found.pod.spec.containers):
        is_failed = any(one.exit_code or one.is_drained for one in ended)
        return PodDecision(phase="Failed" if is_failed else "Succeeded", is_over=True)
    return found.decision("Running")


def _restarts(container: Container, of_pod: str, attempt: ContainerAttempt) -> bool:
    """A container's own rules count before its own policy, and that before its pod's."""
    for rule in container.restart_policy_rules:
        codes = rule.get("exitCodes") or {}
        is_listed = attempt.exit_code in (codes.get("values") or ())
        if rule.get("action") == "Restart" and is_listed == (codes.get("operator") == "In"):
            return True
    policy = container.restart_policy or of_pod
    return policy == "Always" or (policy == "OnFailure" and (attempt.exit_code != 0 or attempt.is_drained))


def next_streak(attempt: ContainerAttempt | None) -> int:
    """The streak of the attempt that follows."""
    if attempt is None or attempt.is_drained:
        return 0
    return 1 if attempt.finished - attempt.started >= STEADY_S else attempt.streak + 1


def _due(attempt: ContainerAttempt | None) -> float:
    """When the next attempt may begin: at once the first two times, then later and later."""
    streak = next_streak(attempt)
    if attempt is not None and _is_first_failed_start(attempt):
        return attempt.finished + START_RETRY_S
    if attempt is None or streak < 2:
        return 0.0
    delay_s: float = min(BACKOFF_START_S * 2.0 ** (streak - 2), BACKOFF_MAX_S)
    return attempt.finished + delay_s


def _is_first_failed_start(attempt: ContainerAttempt) -> bool:
    """A program that was not executed is not tried again at once: what is in the way seldom goes by itself."""
    return attempt.reason == START_ERROR and next_streak(attempt) < 2


def _crash_loop(container: Container, pod: Pod, attempt: ContainerAttempt | None) -> tuple[str, str]:
    seconds = int(_due(attempt) - attempt.finished) if attempt else 0
    shown = f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"
    text = f"back-off {shown} restarting failed container={container.name} pod={pod.name}_{pod.namespace}({pod.uid})"
    return (CRASH_LOOP, text)


def first_to_end(pod: Pod, running: Set[str]) -> Set[str]:
    """Which of the running containers are to end first: all but sidecars, and then these, the last one first, so that
    each finds what it was started beside as long as it runs."""
    sidecars = [one.name for one in pod.spec.init_containers if is_sidecar(one) and one.name in running]
    return running - set(sidecars) or set(sidecars[-1:])


def grace_s_of(pod: Pod | None) -> float:
    """How long the containers of a pod may take to end; None if the pod is gone from the API."""
    if pod is None:
        return _ORPHAN_GRACE_S
    asked = pod.metadata.deletion_grace_period_seconds
    if asked == 0:  # by force
        return 0.0
    if asked is None:
        asked = pod.spec.termination_grace_period_seconds
    return max(float(asked), _LEAST_GRACE_S) if asked is not None else _DEFAULT_GRACE_S


def least_grace_s(container: str, pod: Pod | None, grace_s: float) -> float:
    """A sidecar whose turn comes when the others have used up the time still gets a moment."""
    is_last = pod is not None and any(one.name == container for one in pod.spec.init_containers)
    return min(_LEAST_GRACE_S, grace_s) if is_last else 0.0
