"""Containers of a pod: what starts when, and what kubectl will print."""

from dataclasses import replace

import msgspec
import pytest

from moorage.kube.objects.core import Pod
from moorage.node.pods.lifecycle import Attempt, decide, first_to_end, foreign_images, next_streak, unsupported


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


SIDE = {"name": "s", "image": "host", "restartPolicy": "Always"}


def test_a_sidecar_is_started_before_and_runs_beside_the_others():
    assert decide(pod(init=(SIDE,)), {}, 0.0).start == ("s",)
    assert decide(pod(init=(SIDE, "i")), {"s": running()}, 0.0).start == ("i",)
    assert decide(pod(init=(SIDE,)), {"s": running()}, 0.0).start == ("a",)


def test_nothing_begins_before_a_sidecar_that_has_not_come_up():
    looping = {"s": ended(1, streak=3)}
    decision = decide(pod(init=(SIDE,)), looping, 102.0)
    assert (decision.start, decision.phase, decision.waiting["s"][0]) == ((), "Pending", "CrashLoopBackOff")


@pytest.mark.parametrize("policy", ["Always", "OnFailure", "Never"])
def test_a_sidecar_that_ends_is_started_again_beside_what_goes_on(policy):
    attempts = {"s": ended(0), "a": running()}
    decision = decide(pod(policy, init=(SIDE,), main=("a", "b")), attempts, 102.0)
    assert (decision.start, decision.phase) == (("s", "b"), "Running")


def test_a_pod_is_over_although_its_sidecar_runs_or_failed():
    for side in (running(), ended(1), ended(1, streak=9)):
        decision = decide(pod("Never", init=(SIDE,)), {"s": side, "a": ended(0)}, 102.0)
        assert (decision.phase, decision.is_over, decision.start) == ("Succeeded", True, ())


def test_an_init_container_that_keeps_failing_holds_the_others_back():
    decision = decide(pod("OnFailure", init=("i", "j")), {"i": ended(3, streak=4)}, now=102.0)
    assert (decision.start, decision.look_again_at) == ((), 181.0)
    assert decision.waiting == {
        "i": ("CrashLoopBackOff", "back-off 1m20s restarting failed container=i pod=p_ns(u)"),
    }


def test_a_program_that_cannot_be_executed_is_tried_again_and_said_to_be_waiting():
    failed = Attempt(0, started=100.0, finished=100.0, exit_code=128, reason="StartError", message="no such file")
    decision = decide(pod(), {"a": failed}, now=101.0)
    assert (decision.start, decision.look_again_at) == ((), 110.0)
    assert decision.waiting == {"a": ("RunContainerError", "no such file")}
    assert decide(pod(), {"a": failed}, now=110.0).start == ("a",)
    again = replace(failed, streak=1)
    assert decide(pod(), {"a": again}, now=101.0).waiting["a"][0] == "CrashLoopBackOff"
    assert decide(pod("Never"), {"a": failed}, now=101.0).waiting == {}


def test_a_container_that_keeps_failing_is_started_later_and_later():
    waits = []
    for streak in range(1, 8):
        decision = decide(pod(), {"a": ended(1, streak)}, now=101.0)
        waits.append((decision.look_again_at or 101.0) - 101.0)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert decide(pod(), {"a": ended(1, 0)}, now=101.0).start == ("a",)


def test_a_long_run_forgives_earlier_failures():
    long = ended(1, 5, started=0.0, finished=601.0)
    assert decide(pod(), {"a": long}, now=601.0).start == ("a",)
    short_again = ended(1, next_streak(long), started=601.0, finished=602.0)
    assert decide(pod(), {"a": short_again}, now=602.0).look_again_at == 612.0
    assert next_streak(ended(1, 5, started=0.0, finished=5.0)) == 6


def test_other_images_and_probes_are_named():
    foreign = pod(main=({"name": "a", "image": "nginx:1", "livenessProbe": {"exec": {}}},))
    assert "nginx:1" in foreign_images(foreign)["a"]
    assert "livenessProbe" in unsupported(foreign)[0]
    odd = pod(main=({"name": "a", "image": "host", "stdin": True, "lifecycle": {"preStop": {}}},))
    assert [text.partition(": ")[2].split()[0] for text in unsupported(odd)] == ["stdin", "lifecycle"]
    assert foreign_images(pod(main=({"name": "a", "image": "host:latest"},))) == {}


def test_sidecars_end_after_the_others_and_the_last_one_first():
    found = pod(init=(SIDE, "i", {**SIDE, "name": "t"}), main=("a", "b"))
    assert first_to_end(found, {"s", "t", "a", "b"}) == {"a", "b"}
    assert first_to_end(found, {"s", "i"}) == {"i"}
    assert first_to_end(found, {"s", "t"}) == {"t"}
    assert first_to_end(found, {"s"}) == {"s"}


def test_a_containers_own_policy_counts_before_the_pods():
    own = {"name": "b", "image": "host", "restartPolicy": "OnFailure"}
    attempts = {"a": ended(1), "b": ended(1)}
    assert decide(pod("Never", main=("a", own)), attempts, 1000.0).start == ("b",)
    assert decide(pod("Never", main=("a", own)), {"a": ended(0), "b": ended(0)}, 1000.0).phase == "Succeeded"
    init = {"name": "i", "image": "host", "restartPolicy": "Never"}
    assert decide(pod("Always", init=(init,)), {"i": ended(1)}, 1000.0).phase == "Failed"
