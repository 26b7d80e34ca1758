"""Containers of a pod: what starts when, and what kubectl will print."""

import msgspec
import pytest

from moorage.kube.objects.core import Pod
from moorage.node.pods.lifecycle import Attempt, Decision, decide, foreign_images, next_streak, status_of, unsupported


def pod(policy="Always", init=(), main=("a",), **spec):
    def container(name):
        return {"name": name, "image": "host", "command": ["true"]}

    return msgspec.convert(
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {
                "restartPolicy": policy,
                "initContainers": [one if isinstance(one, dict) else container(one) for one in init],
                "containers": [one if isinstance(one, dict) else container(one) for one in main],
                **spec,
            },
        },
        Pod,
    )


def running(number=0):
    return Attempt(number, is_running=True, started=100.0, id="x")


def ended(code, streak=0, number=0, started=100.0, finished=101.0):
    return Attempt(number, started=started, finished=finished, exit_code=code, streak=streak, id="x")


def shown(found, attempts, decision, **more):
    return status_of(found, attempts, decision, host_ip="127.0.0.1", started_at=1.0, now=2.0, **more)


@pytest.mark.parametrize(
    ("found", "attempts", "start", "phase", "over"),
    [
        (pod(), {}, ("a",), "Running", False),
        (pod(main=("a", "b")), {"a": running()}, ("b",), "Running", False),
        (pod(), {"a": running()}, (), "Running", False),
        (pod(), {"a": ended(0)}, ("a",), "Running", False),
        (pod("OnFailure"), {"a": ended(0)}, (), "Succeeded", True),
        (pod("OnFailure"), {"a": ended(3)}, ("a",), "Running", False),
        (pod("Never"), {"a": ended(3)}, (), "Failed", True),
        (pod("Never", main=("a", "b")), {"a": ended(3), "b": running()}, (), "Running", False),
        (pod("Never", main=("a", "b")), {"a": ended(0), "b": ended(0)}, (), "Succeeded", True),
        (pod(init=("i",)), {}, ("i",), "Pending", False),
        (pod(init=("i",)), {"i": running()}, (), "Pending", False),
        (pod(init=("i", "j")), {"i": ended(0)}, ("j",), "Pending", False),
        (pod(init=("i",)), {"i": ended(0)}, ("a",), "Running", False),
        (pod("Never", init=("i",)), {"i": ended(1)}, (), "Failed", True),
        (pod(init=("i",)), {"i": ended(1)}, ("i",), "Pending", False),
    ],
)
def test_the_next_containers_follow_from_the_last_attempts(found, attempts, start, phase, over):
    decision = decide(found, attempts, now=1000.0)
    assert (decision.start, decision.phase, decision.is_over) == (start, phase, over)


def test_a_sidecar_is_started_before_and_runs_beside_the_others():
    side = {"name": "s", "image": "host", "restartPolicy": "Always"}
    assert decide(pod(init=(side,)), {}, 0.0).start == ("s",)
    assert decide(pod(init=(side,)), {"s": running()}, 0.0).start == ("a",)


def test_a_container_that_keeps_failing_is_started_later_and_later():
    waits = []
    for streak in range(1, 8):
        decision = decide(pod(), {"a": ended(1, streak)}, now=101.0)
        waits.append((decision.look_again_at or 101.0) - 101.0)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert decide(pod(), {"a": ended(1, 0)}, now=101.0).start == ("a",)


def test_a_long_run_forgives_earlier_failures():
    assert next_streak(ended(1, 5, started=0.0, finished=601.0)) == 0
    assert next_streak(ended(1, 5, started=0.0, finished=5.0)) == 6


def test_crash_loop_back_off_is_shown_with_the_last_exit():
    attempts = {"a": ended(7, streak=3, number=4)}
    decision = decide(pod(), attempts, now=102.0)
    (state,) = shown(pod(), attempts, decision)["containerStatuses"]
    assert state["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert state["lastState"]["terminated"]["exitCode"] == 7
    assert (state["restartCount"], state["ready"]) == (4, False)


def test_completed_and_error_are_the_reasons_of_an_end():
    done = shown(pod("Never"), {"a": ended(0)}, Decision(phase="Succeeded"))
    assert done["containerStatuses"][0]["state"]["terminated"]["reason"] == "Completed"
    assert {one["type"]: one.get("reason") for one in done["conditions"]}["Ready"] == "PodCompleted"
    failed = shown(pod("Never"), {"a": ended(2)}, Decision(phase="Failed"))
    assert failed["containerStatuses"][0]["state"]["terminated"]["reason"] == "Error"


def test_a_pod_whose_volumes_are_missing_shows_container_creating():
    status = shown(pod(), {}, Decision())
    assert status["phase"] == "Pending"
    assert status["containerStatuses"][0]["state"] == {"waiting": {"reason": "ContainerCreating"}}


def test_a_pod_with_init_containers_shows_pod_initializing_and_then_ready():
    waiting = shown(pod(init=("i",)), {"i": running()}, Decision())
    assert waiting["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    up = shown(pod(init=("i",)), {"i": ended(0), "a": running()}, Decision(phase="Running"))
    conditions = {one["type"]: one["status"] for one in up["conditions"]}
    assert conditions["Ready"] == conditions["Initialized"] == "True"
    assert up["containerStatuses"][0]["ready"]


def test_other_images_and_probes_are_named():
    foreign = pod(main=({"name": "a", "image": "nginx:1", "livenessProbe": {"exec": {}}},))
    assert "nginx:1" in foreign_images(foreign)["a"]
    assert "livenessProbe" in unsupported(foreign)[0]
    assert foreign_images(pod(main=({"name": "a", "image": "host:latest"},))) == {}


def test_quality_of_service_follows_from_requests_and_limits():
    def quality(resources):
        return shown(pod(main=({"name": "a", "image": "host", "resources": resources},)), {}, Decision())["qosClass"]

    assert quality({}) == "BestEffort"
    assert quality({"requests": {"cpu": "1"}}) == "Burstable"
    assert quality({"limits": {"cpu": "1", "memory": "1Gi"}}) == "Guaranteed"
