"""Containers of a pod: what starts when, and what kubectl will print."""

from dataclasses import replace

import msgspec
import pytest

from moorage.kube.objects.pods import Pod
from moorage.node.pods.lifecycle import ContainerAttempt, decide, first_to_end, foreign_images, next_streak
from moorage.node.pods.unsupported import unsupported


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
    return ContainerAttempt(number, is_running=True, started=100.0, id="x")


def ended(code, streak=0, number=0, started=100.0, finished=101.0):
    return ContainerAttempt(number, started=started, finished=finished, exit_code=code, streak=streak, id="x")


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
    failed = ContainerAttempt(
        0, started=100.0, finished=100.0, exit_code=128, reason="StartError", message="no such file"
    )
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


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"hostUsers": False}, "hostUsers"),
        ({"runtimeClassName": "kata"}, "'kata'"),
        ({"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}, "seccomp"),
        ({"securityContext": {"sysctls": [{"name": "x", "value": "1"}]}}, "sysctls"),
        ({"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["x"]}]}, "hostAliases"),
        ({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}, "dnsConfig"),
        ({"shareProcessNamespace": True}, "shareProcessNamespace"),
        ({"containers": [{"name": "a", "image": "host", "restartPolicyRules": [{"action": "Else"}]}]}, "only Restart"),
        ({"ephemeralContainers": [{"name": "debug", "image": "host"}]}, "kubectl exec"),
    ],
)
def test_isolation_and_settings_that_are_not_given_are_named(asked, word):
    assert [word in text for text in unsupported(pod(**asked))] == [True]


def test_what_asks_for_no_confinement_is_given_what_it_asks_for():
    free = {"name": "a", "image": "host", "securityContext": {"seccompProfile": {"type": "Unconfined"}}}
    confined = {"name": "b", "image": "host", "securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}}
    told = unsupported(pod(main=(free, confined), hostUsers=True, securityContext={"seccompProfile": None}))
    assert [text.partition(":")[0] for text in told] == ["container b"]


def test_containers_beside_one_of_another_image_run():
    mixed = pod(main=("a", {"name": "b", "image": "nginx"}))
    found = decide(mixed, {}, now=0.0)
    assert found.start == ("a",)
    assert found.waiting["b"][0] == "ErrImagePull"
    assert "nginx" in found.waiting["b"][1]
    first = pod(init=("i", {"name": "j", "image": "nginx"}))
    assert decide(first, {}, now=0.0).start == ("i",)
    later = decide(first, {"i": ended(0)}, now=0.0)
    assert (later.start, list(later.waiting), later.is_over) == ((), ["j"], False)


def rule(operator, *codes):
    return {"action": "Restart", "exitCodes": {"operator": operator, "values": list(codes)}}


@pytest.mark.parametrize(
    ("rules", "code", "start"),
    [
        ([rule("In", 42)], 42, ("a",)),
        ([rule("In", 42)], 1, ()),
        ([rule("NotIn", 42)], 1, ("a",)),
        ([rule("NotIn", 42)], 42, ()),
        ([rule("In", 1), rule("In", 2, 3)], 3, ("a",)),
        ([{"action": "SomethingElse", "exitCodes": {"operator": "In", "values": [3]}}], 3, ()),
    ],
)
def test_rules_of_a_container_count_before_policies(rules, code, start):
    container = {"name": "a", "image": "host", "restartPolicy": "Never", "restartPolicyRules": rules}
    found = decide(pod("Never", main=(container, "b")), {"a": ended(code), "b": running()}, now=200.0)
    assert found.start == start
    of_init = decide(pod("Never", init=({**container, "name": "i"},)), {"i": ended(code)}, now=200.0)
    assert of_init.is_over == (not start)


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


def of_another_boot(attempt):
    return replace(attempt, is_of_this_boot=False)


def test_after_a_boot_everything_is_done_again_from_the_first_init_container():
    found = pod(init=("i", "j"))
    before = {"i": of_another_boot(ended(0)), "j": of_another_boot(ended(0)), "a": of_another_boot(ended(137))}
    first = decide(found, before, now=200.0)
    assert (first.start, first.phase) == (("i",), "Pending")
    assert decide(found, {**before, "i": running(1)}, now=200.0).start == ()
    assert decide(found, {**before, "i": ended(0, number=1)}, now=200.0).start == ("j",)
    initialized = {**before, "i": ended(0, number=1), "j": ended(0, number=1)}
    assert decide(found, initialized, now=200.0).start == ("a",)
    assert decide(found, {**initialized, "a": running(1)}, now=200.0).start == ()


def test_after_a_boot_main_containers_wait_for_sidecars_again():
    sidecar = {"name": "s", "image": "host", "restartPolicy": "Always"}
    before = {"s": of_another_boot(ended(137)), "a": of_another_boot(ended(137))}
    assert decide(pod(init=(sidecar,)), before, now=200.0).start == ("s",)
    assert decide(pod(init=(sidecar,)), {**before, "s": running(1)}, now=200.0).start == ("a",)


@pytest.mark.parametrize(("policy", "code"), [("Never", 137), ("Never", 0), ("OnFailure", 0)])
def test_a_pod_that_was_over_before_a_boot_stays_over(policy, code):
    before = {"i": of_another_boot(ended(0)), "a": of_another_boot(ended(code))}
    found = decide(pod(policy, init=("i",)), before, now=200.0)
    assert (found.is_over, found.start) == (True, ())


@pytest.mark.parametrize(("code", "over"), [(0, False), (1, True), (137, True)])
def test_what_is_to_run_once_is_not_run_again_after_a_boot(code, over):
    found = decide(pod("Never", init=("i",)), {"i": of_another_boot(ended(code))}, now=200.0)
    assert (found.is_over, found.start) == (over, () if over else ("a",))


def drained(code):
    return replace(ended(code), is_drained=True)


@pytest.mark.parametrize("code", [0, 137, 143])
@pytest.mark.parametrize(
    ("policy", "start", "phase", "over"),
    [
        ("Always", ("a",), "Running", False),
        ("OnFailure", ("a",), "Running", False),
        ("Never", (), "Failed", True),  # so that a Job makes another pod
    ],
)
def test_an_end_by_a_stopped_agent_says_nothing_of_the_work(policy, code, start, phase, over):
    found = decide(pod(policy), {"a": replace(drained(code), streak=5)}, now=101.0)
    assert (found.start, found.phase, found.is_over) == (start, phase, over)


def test_an_init_container_that_a_stopped_agent_ended_is_not_done():
    assert decide(pod("OnFailure", init=("i",)), {"i": drained(0)}, now=101.0).start == ("i",)
    assert decide(pod("Never", init=("i",)), {"i": drained(0)}, now=101.0).phase == "Failed"
