"""READY, STATUS and RESTARTS of `kubectl get pods`, for the pods that a kubelet reports."""

import pytest

from moorage.apiserver.reading.pod_columns import pod_ready, pod_restarts, pod_status

LONG_AGO = "1999-01-01T00:00:00Z"


def waiting(name, reason, restarts=0):
    last = {"terminated": {"exitCode": 1, "finishedAt": LONG_AGO}} if restarts else {}
    return {"name": name, "state": {"waiting": {"reason": reason}}, "restartCount": restarts, "lastState": last}


def running(name, ready=True, restarts=0):
    last = {"terminated": {"exitCode": 1, "finishedAt": LONG_AGO}} if restarts else {}
    state = {"running": {"startedAt": LONG_AGO}}
    return {"name": name, "state": state, "ready": ready, "started": True, "restartCount": restarts, "lastState": last}


def ended(name, code=0, reason=None, **more):
    body = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), **more}
    return {"name": name, "state": {"terminated": body}, "restartCount": 0}


def pod(main, init=(), phase="Running", initialized=None, ready=None, reason="", deleting=False):
    conditions = {"Initialized": initialized, "Ready": ready}
    return {
        "metadata": {"name": "p", **({"deletionTimestamp": LONG_AGO} if deleting else {})},
        "spec": {
            "containers": [{"name": one["name"]} for one in main],
            "initContainers": [
                {"name": one["name"], **({"restartPolicy": "Always"} if one["name"].startswith("side") else {})}
                for one in init
            ],
        },
        "status": {
            "phase": phase,
            "reason": reason,
            "conditions": [
                {"type": kind, "status": str(holds)} for kind, holds in conditions.items() if holds is not None
            ],
            "containerStatuses": list(main),
            "initContainerStatuses": list(init),
        },
    }


IDLE = waiting("a", "PodInitializing")


@pytest.mark.parametrize(
    ("found", "ready", "word", "restarts"),
    [
        (pod([waiting("a", "ContainerCreating")], phase="Pending"), "0/1", "ContainerCreating", 0),
        (pod([running("a"), running("b", ready=False)]), "1/2", "Running", 0),
        (pod([ended("a")], phase="Succeeded"), "0/1", "Completed", 0),
        (pod([ended("a", 3)], phase="Failed", reason="DeadlineExceeded"), "0/1", "Error", 0),
        (pod([ended("a"), ended("b", 3)], phase="Failed"), "0/2", "Error", 0),
        (pod([ended("a"), running("b")], ready=True), "1/2", "Running", 0),
        (pod([ended("a"), running("b")], ready=False), "1/2", "NotReady", 0),
        (pod([waiting("a", "CrashLoopBackOff", 4)]), "0/1", "CrashLoopBackOff", 4),
        (pod([running("a", restarts=2)]), "1/1", "Running", 2),
        (pod([ended("a", 137, "OOMKilled")], phase="Failed"), "0/1", "OOMKilled", 0),
        (pod([IDLE], [waiting(name, "PodInitializing") for name in "ij"], "Pending"), "0/1", "Init:0/2", 0),
        (pod([IDLE], [ended("i"), running("j", ready=False)], "Pending"), "0/1", "Init:1/2", 0),
        (pod([IDLE], [ended("i", 3)], "Failed"), "0/1", "Init:Error", 0),
        (pod([IDLE], [waiting("i", "CrashLoopBackOff", 3)], "Pending"), "0/1", "Init:CrashLoopBackOff", 3),
        (pod([IDLE], [ended("i")], "Pending"), "0/1", "PodInitializing", 0),
        (pod([running("a")], [{**ended("i"), "restartCount": 5}]), "1/1", "Running", 0),
        (pod([IDLE], [running("side")], "Pending"), "1/2", "PodInitializing", 0),
        (pod([running("a")], [running("side", restarts=1)], initialized=True), "2/2", "Running", 1),
        (pod([running("a", restarts=1)], [waiting("side", "CrashLoopBackOff", 2)], initialized=True),
         "1/2", "Init:CrashLoopBackOff", 3),
        (pod([IDLE], [waiting("side", "CrashLoopBackOff", 2)], "Pending", initialized=False),
         "0/2", "Init:CrashLoopBackOff", 2),
        (pod([ended("a")], [ended("side", 143)], "Succeeded", initialized=True), "0/2", "Completed", 0),
        (pod([running("a")], deleting=True), "1/1", "Terminating", 0),
        (pod([ended("a")], phase="Succeeded", deleting=True), "0/1", "Completed", 0),
        (pod([running("a")], reason="NodeLost", deleting=True), "1/1", "Unknown", 0),
        (pod([], phase="Failed", reason="Evicted"), "0/0", "Evicted", 0),
    ],
)  # fmt: skip
def test_many_containers_in_three_words(found, ready, word, restarts):
    assert (pod_ready(found), pod_status(found)) == (ready, word)
    count, _, age = pod_restarts(found).partition(" ")
    assert int(count) == restarts
    assert bool(age) == bool(restarts)


def test_a_pod_that_nobody_has_reported_on_is_pending():
    bare = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a"}]}, "status": {"phase": "Pending"}}
    assert (pod_ready(bare), pod_status(bare), pod_restarts(bare)) == ("0/1", "Pending", "0")
