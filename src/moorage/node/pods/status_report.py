"""pod.status as a kubelet would write it, from what is known of a pod's containers: pure functions.

Owns: states of containers, phases and conditions with their reasons and messages, exactly as kubectl prints them.
May not touch: processes, the API, a clock. What happens next is decided in `lifecycle.py`.
Start reading at: `status_of`.

The quality of service class is left out: the API server has set it when the pod was made, and refuses a status that
says anything else.
"""

from collections.abc import Mapping
from typing import Any

from moorage.kube.objects.meta import timestamp_text
from moorage.kube.objects.pods import Container, Pod
from moorage.node.pods.lifecycle import ContainerAttempt, PodDecision, is_sidecar
from moorage.node.pods.unsupported import NO_EPHEMERAL

_NOT_FOUND = "The container could not be located when the pod was terminated"

ContainerStateDict = dict[str, Any]


def status_of(
    pod: Pod,
    attempts: Mapping[str, ContainerAttempt],
    decision: PodDecision,
    *,
    host_ip: str,
    started_at: float,
    now: float,
    reason: str = "",
    message: str = "",
) -> ContainerStateDict:
    """pod.status as the API server is to have it; conditions keep their time of change."""
    init = [_container_status(one, pod, attempts, decision, is_init=True) for one in pod.spec.init_containers]
    main = [_container_status(one, pod, attempts, decision, is_init=False) for one in pod.spec.containers]
    if decision.is_over:
        _keep_ends(pod, init, main, attempts)
        _end_all(pod, init, main, attempts)
    phase = _phase(pod, attempts, decision)
    status: ContainerStateDict = {
        "phase": phase,
        "conditions": _conditions(pod, phase, init, main, decision, now=now),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "podIP": host_ip,
        "podIPs": [{"ip": host_ip}],
        "startTime": pod.status.start_time or timestamp_text(started_at),
        "containerStatuses": main,
    }
    if pod.metadata.generation:
        status["observedGeneration"] = pod.metadata.generation
    if init:
        status["initContainerStatuses"] = init
    if pod.spec.ephemeral_containers:
        status["ephemeralContainerStatuses"] = [_not_run(one) for one in pod.spec.ephemeral_containers]
    if reason or pod.status.reason:
        status["reason"] = reason or None
        status["message"] = message or None
    return status


def _not_run(container: Mapping[str, Any]) -> ContainerStateDict:
    """So that `kubectl debug`, which waits for it, says why."""
    waiting = {"reason": "CreateContainerError", "message": NO_EPHEMERAL}
    name, image = str(container.get("name")), str(container.get("image"))
    found = {"name": name, "image": image, "imageID": "", "restartCount": 0, "ready": False}
    return {**found, "state": {"waiting": waiting}}


def _phase(pod: Pod, attempts: Mapping[str, ContainerAttempt], decision: PodDecision) -> str:
    """A pod runs once each of its containers has been started, however that went."""
    lasting = [*(one for one in pod.spec.init_containers if is_sidecar(one)), *pod.spec.containers]
    if decision.phase == "Running" and not all(one.name in attempts for one in lasting):
        return "Pending"
    return decision.phase


def _container_status(
    container: Container, pod: Pod, attempts: Mapping[str, ContainerAttempt], decision: PodDecision, *, is_init: bool
) -> ContainerStateDict:
    attempt = attempts.get(container.name)
    status: ContainerStateDict = {
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
    # Of a container that has ended well an API server does not believe that it runs again.
    goes_on = attempt is not None and attempt.is_drained and attempt.exit_code == 0 and not decision.is_over
    if attempt is None or goes_on:
        reason, message = held or ("PodInitializing" if pod.spec.init_containers else "ContainerCreating", "")
        status["state"] = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        if attempt is not None:
            status["lastState"] = _terminated(attempt)
    elif attempt.is_running:
        status["state"] = {"running": {"startedAt": timestamp_text(attempt.started)}}
        status["ready"] = not is_init or is_sidecar(container)
    elif held is not None:
        status["state"] = {"waiting": {"reason": held[0], "message": held[1]}}
        status["lastState"] = _terminated(attempt)
    else:
        status["state"] = _terminated(attempt)
        status["ready"] = is_init and not is_sidecar(container) and attempt.exit_code == 0
    return status


def _terminated(attempt: ContainerAttempt) -> ContainerStateDict:
    code = attempt.exit_code if attempt.exit_code is not None else 137
    reason = attempt.reason or ("Completed" if code == 0 else "Error")
    body: ContainerStateDict = {
        "exitCode": code,
        "reason": reason,
        "startedAt": timestamp_text(attempt.started),
        "finishedAt": timestamp_text(attempt.finished or attempt.started),
        "containerID": f"moorage://{attempt.id}",
    }
    if attempt.message:
        body["message"] = attempt.message
    return {"terminated": body}


def _keep_ends(
    pod: Pod, init: list[ContainerStateDict], main: list[ContainerStateDict], attempts: Mapping[str, ContainerAttempt]
) -> None:
    """How a container has ended is not taken back when nothing else than the status knows of it any more."""
    known = {one.name: one for one in (*pod.status.init_container_statuses, *pod.status.container_statuses)}
    for status in (*init, *main):
        last = known.get(status["name"])
        if last is not None and last.state.get("terminated") and status["name"] not in attempts:
            status["state"], status["lastState"] = last.state, last.last_state
            status["ready"], status["restartCount"] = last.ready, last.restart_count
            if last.container_id:
                status["containerID"] = last.container_id


def _end_all(
    pod: Pod, init: list[ContainerStateDict], main: list[ContainerStateDict], attempts: Mapping[str, ContainerAttempt]
) -> None:
    """In a pod that is over nothing waits any more: what was never started counts as failed. Containers that were not
    yet to be started are left: main ones as long as the pod was not initialized, and those that follow the last init
    container that was."""
    begun = [number for number, one in enumerate(pod.spec.init_containers) if one.name in attempts]
    lost = init[: max(begun, default=0) + 1]
    if not init or _is_initialized(init[-1], pod) or any(one.name in attempts for one in pod.spec.containers):
        lost += main
    for status in lost:
        if "waiting" in status["state"]:
            status["state"] = {
                "terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": _NOT_FOUND}
            }


def _is_initialized(status: ContainerStateDict, pod: Pod) -> bool:
    """An init container that lets the next one begin: a sidecar that runs, any other that has ended well."""
    container = next(one for one in pod.spec.init_containers if one.name == status["name"])
    return bool(status["started"] if is_sidecar(container) else status["ready"])


def _conditions(
    pod: Pod,
    phase: str,
    init: list[ContainerStateDict],
    main: list[ContainerStateDict],
    decision: PodDecision,
    *,
    now: float,
) -> list[ContainerStateDict]:
    is_over = phase in ("Succeeded", "Failed")
    has_begun = bool(decision.waiting) or any("containerID" in one for one in (*init, *main))
    unready = _readiness(pod, phase, init, main)
    gated = unready or _gates(pod)
    found = [
        ("PodReadyToStartContainers", has_begun and not is_over, _no_sandbox(has_begun, is_over)),
        ("Initialized", *_initialization(pod, phase, init, main)),
        ("Ready", not gated, gated),
        ("ContainersReady", not unready, unready),
        ("PodScheduled", True, {}),
    ]
    return [condition_of(pod, *one, now=now) for one in found]


def _no_sandbox(has_begun: bool, is_over: bool) -> Mapping[str, str]:
    """There are no sandboxes here, but this is how it is said that a pod has not begun, or does not go on."""
    if has_begun and not is_over:
        return {}
    text = "pod sandbox is not ready" if has_begun else "no pod sandbox exists"
    return {"reason": "PodSandboxNotReady", "message": text}


def _initialization(
    pod: Pod, phase: str, init: list[ContainerStateDict], main: list[ContainerStateDict]
) -> tuple[bool, Mapping[str, str]]:
    if phase == "Succeeded":
        return True, {"reason": "PodCompleted"}
    if any("waiting" not in one["state"] for one in main):
        return True, {}  # a sidecar that is being started again takes nothing back
    left = [one["name"] for one in init if not _is_initialized(one, pod)]
    if not left:
        return True, {}
    text = f"containers with incomplete status: [{' '.join(left)}]"
    return False, {"reason": "ContainersNotInitialized", "message": text}


def _readiness(
    pod: Pod, phase: str, init: list[ContainerStateDict], main: list[ContainerStateDict]
) -> Mapping[str, str]:
    """Why the pod is not ready; empty when it is."""
    if phase in ("Succeeded", "Failed"):
        return {"reason": "PodCompleted" if phase == "Succeeded" else "PodFailed"}
    sidecars = {one.name for one in pod.spec.init_containers if is_sidecar(one)}
    lasting = [*(one for one in init if one["name"] in sidecars), *main]
    unready = [one["name"] for one in lasting if not one["ready"]]
    if not unready:
        return {}
    return {"reason": "ContainersNotReady", "message": f"containers with unready status: [{' '.join(unready)}]"}


def _gates(pod: Pod) -> Mapping[str, str]:
    """Which conditions that others are to set keep the pod from being ready; empty when none does."""
    held = {one.type: one.status for one in pod.status.conditions}
    said = []
    for gate in pod.spec.readiness_gates:
        kind = str(gate.get("conditionType"))
        if kind not in held:
            said.append(f'corresponding condition of pod readiness gate "{kind}" does not exist.')
        elif held[kind] != "True":
            said.append(f'the status of pod readiness gate "{kind}" is not "True", but {held[kind]}')
    return {"reason": "ReadinessGatesNotReady", "message": ", ".join(said)} if said else {}


def condition_of(pod: Pod, kind: str, holds: bool, why: Mapping[str, str], *, now: float) -> ContainerStateDict:
    """One condition; it keeps its time as long as it says the same."""
    wanted = "True" if holds else "False"
    known = next((one for one in pod.status.conditions if one.type == kind), None)
    since = known.last_transition_time if known is not None and known.status == wanted else None
    condition: ContainerStateDict = {
        "type": kind,
        "status": wanted,
        "lastProbeTime": None,
        "lastTransitionTime": since or timestamp_text(now),
        "reason": why.get("reason"),  # None: a strategic patch would keep the old one
        "message": why.get("message"),
    }
    if pod.metadata.generation:
        condition["observedGeneration"] = pod.metadata.generation
    return condition


def steady(status: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any]:
    """Conditions that say what they said before keep their time, whatever the watch has told us so far."""
    if last is None:
        return status
    times = {(one["type"], one["status"]): one["lastTransitionTime"] for one in last["conditions"]}
    for one in status["conditions"]:
        one["lastTransitionTime"] = times.get((one["type"], one["status"]), one["lastTransitionTime"])
    status["startTime"] = last["startTime"]
    return status
