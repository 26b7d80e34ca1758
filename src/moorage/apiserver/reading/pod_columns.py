"""The cells of pods, which say in one word what many containers do.

Owns: Ready, Status, Restarts and Readiness Gates of pods.
May not touch: anything but the pod.
Start reading at: `pod_status`.
"""

from dataclasses import dataclass

from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.reading.durations import age_of


def _statuses(pod: Object, name: str) -> list[Object]:
    found: list[Object] = (pod.get("status") or {}).get(name) or []
    return found


@dataclass(slots=True)
class _Tally:
    """What has been counted of a pod's containers so far, and the word for it."""

    word: str
    total: int
    ready: int = 0
    restarts: int = 0
    last_restart: str = ""

    def add_restarts(self, container: Object) -> None:
        self.restarts += int(container.get("restartCount") or 0)
        ended = (container.get("lastState") or {}).get("terminated") or {}
        self.last_restart = max(self.last_restart, ended.get("finishedAt") or "")


def pod_ready(pod: Object) -> str:
    tally = _tally(pod)
    return f"{tally.ready}/{tally.total}"


def pod_status(pod: Object) -> str:
    """The phase, unless a container or the pod's condition says more."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        if status.get("reason") == "NodeLost":
            return "Unknown"
        if status.get("phase") not in ("Succeeded", "Failed"):
            return "Terminating"
    return _tally(pod).word


def pod_restarts(pod: Object) -> str:
    tally = _tally(pod)
    if tally.restarts and tally.last_restart:
        return f"{tally.restarts} ({age_of(tally.last_restart)} ago)"
    return str(tally.restarts)


def _tally(pod: Object) -> _Tally:
    """Init containers are told of until the pod is initialized, and then only those that stay, beside the others."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    sidecars = {c.get("name") for c in spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"}
    word = status.get("reason") or status.get("phase") or ""
    if _condition(pod, "PodScheduled").get("reason") == "SchedulingGated":
        word = "SchedulingGated"
    tally = _Tally(str(word), len(spec.get("containers") or []) + len(sidecars))
    staying = _Tally("", 0)
    for at, container in enumerate(_statuses(pod, "initContainerStatuses")):
        is_sidecar = container.get("name") in sidecars
        tally.add_restarts(container)
        if is_sidecar:
            staying.add_restarts(container)
        if is_sidecar and container.get("started"):
            tally.ready += bool(container.get("ready"))
        elif _is_waited_for(container):
            tally.word = _initializing(container, at, len(spec.get("initContainers") or []))
            if _condition(pod, "Initialized").get("status") != "True":
                return tally
            break
    tally.restarts, tally.last_restart = staying.restarts, staying.last_restart
    return _with_containers(pod, tally)


def _condition(pod: Object, kind: str) -> Object:
    conditions: list[Object] = (pod.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def _is_waited_for(container: Object) -> bool:
    ended = (container.get("state") or {}).get("terminated")
    return ended is None or ended.get("exitCode") != 0


def _initializing(container: Object, at: int, total: int) -> str:
    state = container.get("state") or {}
    if state.get("terminated") is not None:
        return _ending(state["terminated"], "Init:")
    reason = (state.get("waiting") or {}).get("reason")
    return f"Init:{reason}" if reason and reason != "PodInitializing" else f"Init:{at}/{total}"


def _ending(ended: Object, prefix: str = "") -> str:
    if ended.get("reason"):
        return prefix + str(ended["reason"])
    if ended.get("signal"):
        return f"{prefix}Signal:{ended['signal']}"
    return f"{prefix}ExitCode:{ended.get('exitCode', 0)}"


def _with_containers(pod: Object, tally: _Tally) -> _Tally:
    has_running, failure = False, ""
    for container in reversed(_statuses(pod, "containerStatuses")):
        tally.add_restarts(container)
        state = container.get("state") or {}
        if (state.get("waiting") or {}).get("reason"):
            tally.word = str(state["waiting"]["reason"])
        elif state.get("terminated") is not None:
            tally.word = _ending(state["terminated"])
            failure = tally.word if state["terminated"].get("exitCode") else failure
        elif container.get("ready") and state.get("running") is not None:
            has_running = True
            tally.ready += 1
    if tally.word == "Completed":
        if has_running and _condition(pod, "Ready").get("status") == "True":
            tally.word = "Running"
        else:
            tally.word = failure or ("NotReady" if has_running else tally.word)
    return tally


def readiness_gates(pod: Object) -> str:
    gates = (pod.get("spec") or {}).get("readinessGates") or []
    if not gates:
        return "<none>"
    return f"{sum(_condition(pod, g.get('conditionType', '')).get('status') == 'True' for g in gates)}/{len(gates)}"
