"""What to do next for a pod's containers, and what its status is: pure functions.

Owns: restart policies, back-off, order of init containers, phases, conditions, exactly as kubectl prints them.
May not touch: processes, the API, a clock.
Start reading at: `decide`, `status_of`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.kube.objects.core import Container, Pod
from moorage.kube.objects.meta import timestamp_text

BACKOFF_START_S = 10.0
BACKOFF_MAX_S = 300.0
STEADY_S = 600.0  # a container that ran this long has its back-off forgotten
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


def decide(pod: Pod, attempts: Mapping[str, Attempt], now: float) -> Decision:
    """The next step for a pod whose volumes are there."""
    policy = pod.spec.restart_policy or "Always"
    again: list[float] = []
    waiting: dict[str, tuple[str, str]] = {}
    for container in pod.spec.init_containers:
        attempt = attempts.get(container.name)
        if container.restart_policy == "Always":
            if attempt is None or not attempt.is_running:
                due = _due(attempt)
                if due <= now:
                    return _pending((container.name,), again, pod, waiting, attempts)
                again.append(due)
                waiting[container.name] = _crash_loop(container, pod, attempt)
            continue
        if attempt is not None and attempt.exit_code == 0:
            continue
        if attempt is not None and attempt.is_running:
            return _pending((), again, pod, waiting, attempts)
        if attempt is not None and policy == "Never":
            return Decision(phase="Failed", is_over=True)
        due = _due(attempt)
        if due <= now:
            return _pending((container.name,), again, pod, waiting, attempts)
        again.append(due)
        waiting[container.name] = _crash_loop(container, pod, attempt)
        return _pending((), again, pod, waiting, attempts)
    return _decide_main(pod, attempts, policy, now, again, waiting)


def _decide_main(
    pod: Pod,
    attempts: Mapping[str, Attempt],
    policy: str,
    now: float,
    again: list[float],
    waiting: dict[str, tuple[str, str]],
) -> Decision:
    start: list[str] = []
    codes: list[int] = []
    for container in pod.spec.containers:
        attempt = attempts.get(container.name)
        if attempt is not None and attempt.is_running:
            continue
        ended = attempt is not None and attempt.exit_code is not None
        if ended and attempt is not None and not _restarts(policy, attempt):
            codes.append(attempt.exit_code or 0)
            continue
        due = _due(attempt)
        if due <= now:
            start.append(container.name)
        else:
            again.append(due)
            waiting[container.name] = _crash_loop(container, pod, attempt)
    if len(codes) == len(pod.spec.containers):
        return Decision(phase="Failed" if any(codes) else "Succeeded", is_over=True)
    return Decision(tuple(start), min(again, default=None), "Running", waiting)


def _pending(
    start: tuple[str, ...],
    again: list[float],
    pod: Pod,
    waiting: dict[str, tuple[str, str]],
    attempts: Mapping[str, Attempt],
) -> Decision:
    started = any(one.name in attempts for one in pod.spec.containers)
    return Decision(start, min(again, default=None), "Running" if started else "Pending", waiting)


def _restarts(policy: str, attempt: Attempt) -> bool:
    return policy == "Always" or (policy == "OnFailure" and attempt.exit_code != 0)


def next_streak(attempt: Attempt | None) -> int:
    """The streak of the attempt that follows."""
    if attempt is None or attempt.finished - attempt.started >= STEADY_S:
        return 0
    return attempt.streak + 1


def _due(attempt: Attempt | None) -> float:
    """When the next attempt may begin: at once the first two times, then later and later."""
    streak = next_streak(attempt)
    if attempt is None or streak < 2:
        return 0.0
    delay_s: float = min(BACKOFF_START_S * 2.0 ** (streak - 2), BACKOFF_MAX_S)
    return attempt.finished + delay_s


def _crash_loop(container: Container, pod: Pod, attempt: Attempt | None) -> tuple[str, str]:
    seconds = int(_due(attempt) - attempt.finished) if attempt else 0
    shown = f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"
    text = f"back-off {shown} restarting failed container={container.name} pod={pod.name}_{pod.namespace}({pod.uid})"
    return ("CrashLoopBackOff", text)


def status_of(
    pod: Pod,
    attempts: Mapping[str, Attempt],
    decision: Decision,
    *,
    created_reason: tuple[str, str] = ("ContainerCreating", ""),
    host_ip: str,
    started_at: float,
    now: float,
    reason: str = "",
    message: str = "",
) -> dict[str, Any]:
    """pod.status as the API server is to have it; conditions keep their time of change."""
    init_waiting = created_reason
    main_waiting = created_reason
    init_done = all(
        (a := attempts.get(one.name)) is not None
        and (a.exit_code == 0 or (one.restart_policy == "Always" and a.is_running))
        for one in pod.spec.init_containers
    )
    if pod.spec.init_containers and not init_done and created_reason[0] == "ContainerCreating":
        init_waiting = main_waiting = ("PodInitializing", "")
    init = [_container_status(one, attempts, decision, init_waiting, is_init=True) for one in pod.spec.init_containers]
    main = [_container_status(one, attempts, decision, main_waiting, is_init=False) for one in pod.spec.containers]
    over = decision.phase in ("Succeeded", "Failed")
    ready = not over and all(one["ready"] for one in main) and bool(main)
    unready = {"reason": "PodCompleted"} if decision.phase == "Succeeded" else {"reason": "ContainersNotReady"}
    conditions = [
        ("PodReadyToStartContainers", bool(attempts) and not over, {}),
        ("Initialized", init_done, {} if init_done else {"reason": "ContainersNotInitialized"}),
        ("Ready", ready, {} if ready else unready),
        ("ContainersReady", ready, {} if ready else unready),
        ("PodScheduled", True, {}),
    ]
    status: dict[str, Any] = {
        "phase": decision.phase,
        "conditions": [_condition(pod, *one, now=now) for one in conditions],
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "podIP": host_ip,
        "podIPs": [{"ip": host_ip}],
        "startTime": pod.status.start_time or timestamp_text(started_at),
        "containerStatuses": main,
        "qosClass": _quality(pod),
    }
    if init:
        status["initContainerStatuses"] = init
    if reason or pod.status.reason:
        status["reason"] = reason or None
        status["message"] = message or None
    return status


def _container_status(
    container: Container,
    attempts: Mapping[str, Attempt],
    decision: Decision,
    waiting: tuple[str, str],
    *,
    is_init: bool,
) -> dict[str, Any]:
    attempt = attempts.get(container.name)
    status: dict[str, Any] = {
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "restartCount": attempt.number if attempt else 0,
        "ready": False,
        "started": bool(attempt and attempt.is_running),
        "lastState": {},
    }
    if attempt is not None:
        status["containerID"] = f"moorage://{attempt.id}"
        if attempt.previous is not None:
            status["lastState"] = _terminated(attempt.previous)
    held = decision.waiting.get(container.name)
    if attempt is None:
        text = held or waiting
        status["state"] = {"waiting": {"reason": text[0], **({"message": text[1]} if text[1] else {})}}
    elif attempt.is_running:
        status["state"] = {"running": {"startedAt": timestamp_text(attempt.started)}}
        status["ready"] = not is_init or container.restart_policy == "Always"
    elif held is not None:
        status["state"] = {"waiting": {"reason": held[0], "message": held[1]}}
        status["lastState"] = _terminated(attempt)
    else:
        status["state"] = _terminated(attempt)
        status["ready"] = is_init and attempt.exit_code == 0
    return status


def _terminated(attempt: Attempt) -> dict[str, Any]:
    code = attempt.exit_code if attempt.exit_code is not None else 137
    reason = attempt.reason or ("Completed" if code == 0 else "Error")
    body: dict[str, Any] = {
        "exitCode": code,
        "reason": reason,
        "startedAt": timestamp_text(attempt.started),
        "finishedAt": timestamp_text(attempt.finished or attempt.started),
        "containerID": f"moorage://{attempt.id}",
    }
    if attempt.message:
        body["message"] = attempt.message
    return {"terminated": body}


def _condition(pod: Pod, kind: str, holds: bool, extra: Mapping[str, str], *, now: float) -> dict[str, Any]:
    wanted = "True" if holds else "False"
    known = next((one for one in pod.status.conditions if one.type == kind), None)
    since = known.last_transition_time if known is not None and known.status == wanted else None
    return {
        "type": kind,
        "status": wanted,
        "lastProbeTime": None,
        "lastTransitionTime": since or timestamp_text(now),
        "reason": None,  # a strategic patch would keep the old one
        **extra,
    }


def _quality(pod: Pod) -> str:
    every = (*pod.spec.init_containers, *pod.spec.containers)
    limits = [one.resources.limits for one in every]
    requests = [one.resources.requests for one in every]
    if not any(limits) and not any(requests):
        return "BestEffort"
    whole = all({"cpu", "memory"} <= set(one) for one in limits)
    same = all(not r or r == lim for r, lim in zip(requests, limits, strict=True))
    return "Guaranteed" if whole and same else "Burstable"
