"""The cells of pods, which say in one word what many containers do.

Owns: Ready, Status, Restarts and Readiness Gates of pods.
May not touch: anything but the pod.
Start reading at: `pod_status`.
"""

from moorage.apiserver.ages import age_of
from moorage.apiserver.kinds import Object


def _statuses(pod: Object, name: str) -> list[Object]:
    found: list[Object] = (pod.get("status") or {}).get(name) or []
    return found


def pod_ready(pod: Object) -> str:
    ready = sum(bool(c.get("ready")) for c in _statuses(pod, "containerStatuses"))
    return f"{ready}/{len((pod.get('spec') or {}).get('containers') or [])}"


def pod_status(pod: Object) -> str:
    """The phase, unless a container or the pod's condition says more."""
    status = pod.get("status") or {}
    word = status.get("reason") or status.get("phase") or ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            word = "SchedulingGated"
    initializing = _initializing(pod)
    if initializing:
        word = initializing
    else:
        word = _from_containers(pod, word)
    if pod["metadata"].get("deletionTimestamp"):
        if status.get("reason") == "NodeLost":
            return "Unknown"
        if status.get("phase") not in ("Succeeded", "Failed"):
            return "Terminating"
    return str(word)


def _initializing(pod: Object) -> str:
    total = len((pod.get("spec") or {}).get("initContainers") or [])
    for at, container in enumerate(_statuses(pod, "initContainerStatuses")):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if ended is not None and ended.get("exitCode") == 0:
            continue
        if ended is not None:
            return _ending(ended, "Init:")
        if waiting and waiting.get("reason") not in (None, "", "PodInitializing"):
            return f"Init:{waiting['reason']}"
        return f"Init:{at}/{total}"
    return ""


def _ending(ended: Object, prefix: str = "") -> str:
    if ended.get("reason"):
        return prefix + str(ended["reason"])
    if ended.get("signal"):
        return f"{prefix}Signal:{ended['signal']}"
    return f"{prefix}ExitCode:{ended.get('exitCode', 0)}"


def _from_containers(pod: Object, word: str) -> str:
    has_running = False
    for container in reversed(_statuses(pod, "containerStatuses")):
        state = container.get("state") or {}
        if (state.get("waiting") or {}).get("reason"):
            word = state["waiting"]["reason"]
        elif state.get("terminated") is not None:
            word = _ending(state["terminated"])
        elif container.get("ready") and state.get("running") is not None:
            has_running = True
    if word == "Completed" and has_running:
        conditions = (pod.get("status") or {}).get("conditions") or []
        is_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
        return "Running" if is_ready else "NotReady"
    return word


def pod_restarts(pod: Object) -> str:
    containers = _statuses(pod, "containerStatuses")
    count = sum(int(c.get("restartCount") or 0) for c in containers)
    ends = [((c.get("lastState") or {}).get("terminated") or {}).get("finishedAt") for c in containers]
    last = max((end for end in ends if end), default=None)
    return f"{count} ({age_of(last)} ago)" if count and last else str(count)


def readiness_gates(pod: Object) -> str:
    gates = (pod.get("spec") or {}).get("readinessGates") or []
    if not gates:
        return "<none>"
    conditions = {c.get("type"): c.get("status") for c in (pod.get("status") or {}).get("conditions") or []}
    return f"{sum(conditions.get(g.get('conditionType')) == 'True' for g in gates)}/{len(gates)}"
