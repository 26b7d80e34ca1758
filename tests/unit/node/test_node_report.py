"""pod.status for the usual stories of a pod, field by field as a kubelet writes it."""

from dataclasses import replace

import msgspec
import pytest

from moorage.kube.objects.pods import Pod, PodStatus
from moorage.node.pods.lifecycle import ContainerAttempt, PodDecision, decide
from moorage.node.pods.status_report import condition_of, status_of

SIDE = {"name": "s", "image": "host", "restartPolicy": "Always"}


def pod(policy="Always", init=(), main=("a",), status=None, **metadata):
    def container(one):
        return one if isinstance(one, dict) else {"name": one, "image": "host", "command": ["true"]}

    return msgspec.convert(
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", **metadata},
            "spec": {
                "restartPolicy": policy,
                "initContainers": [container(one) for one in init],
                "containers": [container(one) for one in main],
            },
            "status": status or {},
        },
        Pod,
    )


def running(number=0, previous=None):
    return ContainerAttempt(number, is_running=True, started=100.0, id="u-x-0", previous=previous)


def ended(code, streak=0, number=0, reason="", message="", previous=None):
    return ContainerAttempt(
        number, started=100.0, finished=101.0, exit_code=code, streak=streak, reason=reason, message=message,
        id=f"u-x-{number}", previous=previous,
    )  # fmt: skip


def told(found, attempts, decision=None, **more):
    decision = decision or decide(found, attempts, now=102.0)
    return status_of(found, attempts, decision, host_ip="127.0.0.1", started_at=1.0, now=102.0, **more)


def over(phase):
    return PodDecision(phase=phase, is_over=True)


def states(status):
    """Each container's state, in short: `waiting/ContainerCreating`, `running`, `terminated/Error/3`."""
    found = {}
    for one in (*status.get("initContainerStatuses", ()), *status["containerStatuses"]):
        ((kind, body),) = one["state"].items()
        words = (kind, body.get("reason"), body.get("exitCode"))
        found[one["name"]] = "/".join(str(word) for word in words if word is not None)
    return found


def conditions(status):
    return {one["type"]: (one["status"], one["reason"], one["message"]) for one in status["conditions"]}


YES = ("True", None, None)
UNREADY = ("False", "ContainersNotReady", "containers with unready status: [a]")
DONE = ("False", "PodCompleted", None)
FAILED = ("False", "PodFailed", None)


@pytest.mark.parametrize(
    ("found", "attempts", "decision", "phase", "shown", "initialized", "ready"),
    [
        pytest.param(
            pod(), {}, PodDecision(), "Pending", {"a": "waiting/ContainerCreating"}, YES, UNREADY, id="creating"
        ),
        pytest.param(pod(), {"a": running()}, None, "Running", {"a": "running"}, YES, YES, id="running"),
        pytest.param(
            pod("Never"), {"a": ended(0)}, None, "Succeeded", {"a": "terminated/Completed/0"},
            ("True", "PodCompleted", None), DONE, id="completed",
        ),
        pytest.param(
            pod("Never"), {"a": ended(3)}, None, "Failed", {"a": "terminated/Error/3"}, YES, FAILED, id="failed"
        ),
        pytest.param(
            pod(), {"a": ended(3)}, None, "Running", {"a": "terminated/Error/3"}, YES, UNREADY, id="about to restart"
        ),
        pytest.param(
            pod(), {"a": ended(3, streak=2)}, None, "Running", {"a": "waiting/CrashLoopBackOff"}, YES, UNREADY,
            id="crash loop",
        ),
        pytest.param(
            pod(), {"a": ended(128, reason="StartError", message="no such file")}, None, "Running",
            {"a": "waiting/RunContainerError"}, YES, UNREADY, id="program cannot be executed",
        ),
        pytest.param(
            pod("Never"), {"a": ended(128, reason="StartError")}, None, "Failed", {"a": "terminated/StartError/128"},
            YES, FAILED, id="program cannot be executed, once",
        ),
        pytest.param(
            pod(), {}, PodDecision(phase="Running", waiting={"a": ("CreateContainerConfigError", "none")}), "Pending",
            {"a": "waiting/CreateContainerConfigError"}, YES, UNREADY, id="configuration missing",
        ),
        pytest.param(
            pod(), {"a": ended(0)}, PodDecision(phase="Running", waiting={"a": ("CreateContainerConfigError", "none")}),
            "Running", {"a": "waiting/CreateContainerConfigError"}, YES, UNREADY, id="configuration gone at a restart",
        ),
        pytest.param(
            pod(init=("i", "j")), {}, PodDecision(), "Pending",
            {"i": "waiting/PodInitializing", "j": "waiting/PodInitializing", "a": "waiting/PodInitializing"},
            ("False", "ContainersNotInitialized", "containers with incomplete status: [i j]"), UNREADY,
            id="init containers to come",
        ),
        pytest.param(
            pod(init=("i", "j")), {"i": ended(0), "j": running()}, None, "Pending",
            {"i": "terminated/Completed/0", "j": "running", "a": "waiting/PodInitializing"},
            ("False", "ContainersNotInitialized", "containers with incomplete status: [j]"), UNREADY,
            id="second init container runs",
        ),
        pytest.param(
            pod(init=("i",)), {"i": ended(0)}, None, "Pending",
            {"i": "terminated/Completed/0", "a": "waiting/PodInitializing"}, YES, UNREADY, id="init containers done",
        ),
        pytest.param(
            pod(init=("i",)), {"i": ended(2, streak=1)}, None, "Pending",
            {"i": "waiting/CrashLoopBackOff", "a": "waiting/PodInitializing"},
            ("False", "ContainersNotInitialized", "containers with incomplete status: [i]"), UNREADY,
            id="init crash loop",
        ),
        pytest.param(
            pod("Never", init=("i",)), {"i": ended(2)}, None, "Failed",
            {"i": "terminated/Error/2", "a": "waiting/PodInitializing"},
            ("False", "ContainersNotInitialized", "containers with incomplete status: [i]"), FAILED, id="init failed",
        ),
        pytest.param(
            pod(init=(SIDE,)), {"s": running()}, None, "Pending", {"s": "running", "a": "waiting/PodInitializing"},
            YES, UNREADY, id="sidecar up",
        ),
        pytest.param(
            pod(init=(SIDE,)), {"s": ended(1, streak=2), "a": running()}, None, "Running",
            {"s": "waiting/CrashLoopBackOff", "a": "running"}, YES,
            ("False", "ContainersNotReady", "containers with unready status: [s]"), id="sidecar in a crash loop",
        ),
        pytest.param(
            pod("Never"), {}, over("Failed"), "Failed", {"a": "terminated/ContainerStatusUnknown/137"}, YES, FAILED,
            id="over before it began",
        ),
        pytest.param(
            pod("Never", init=("i", "j")), {"i": ended(0)}, over("Failed"), "Failed",
            {"i": "terminated/Completed/0", "j": "waiting/PodInitializing", "a": "waiting/PodInitializing"},
            ("False", "ContainersNotInitialized", "containers with incomplete status: [j]"), FAILED,
            id="over between init containers",
        ),
    ],
)  # fmt: skip
def test_states_phase_and_conditions(found, attempts, decision, phase, shown, initialized, ready):
    status = told(found, attempts, decision)
    assert (status["phase"], states(status)) == (phase, shown)
    assert conditions(status)["Initialized"] == initialized
    assert conditions(status)["Ready"] == conditions(status)["ContainersReady"] == ready
    assert conditions(status)["PodScheduled"] == YES


def test_a_crash_loop_shows_the_last_exit_and_for_how_long_it_is_held_back():
    (one,) = told(pod(), {"a": ended(7, streak=3, number=4)})["containerStatuses"]
    assert one == {
        "name": "a", "image": "host", "imageID": "", "containerID": "moorage://u-x-4", "restartCount": 4,
        "ready": False, "started": False,
        "state": {"waiting": {
            "reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=a pod=p_ns(u)",
        }},
        "lastState": {"terminated": {
            "exitCode": 7, "reason": "Error", "startedAt": "1970-01-01T00:01:40Z",
            "finishedAt": "1970-01-01T00:01:41Z", "containerID": "moorage://u-x-4",
        }},
    }  # fmt: skip


def test_a_restarted_container_shows_how_the_one_before_ended():
    killed = ended(137, reason="OOMKilled")
    (one,) = told(pod(), {"a": running(1, previous=killed)})["containerStatuses"]
    assert one["state"] == {"running": {"startedAt": "1970-01-01T00:01:40Z"}}
    assert (one["ready"], one["started"], one["restartCount"]) == (True, True, 1)
    assert one["lastState"]["terminated"]["reason"] == "OOMKilled"


@pytest.mark.parametrize(("init", "name", "reason"), [((), "a", "ContainerCreating"), (("i",), "i", "PodInitializing")])
def test_one_that_a_drain_has_ended_well_is_not_said_to_be_over_if_it_goes_on(init, name, reason):
    """An API server would not believe that it runs again."""
    drained = replace(ended(0), is_drained=True)
    found = pod("OnFailure", init=init)
    status = told(found, {name: drained}, PodDecision(phase="Running"))
    (one,) = (
        one for one in (*status.get("initContainerStatuses", ()), *status["containerStatuses"]) if one["name"] == name
    )
    assert one["state"] == {"waiting": {"reason": reason}}
    assert one["lastState"]["terminated"]["exitCode"] == 0
    assert not one["ready"]
    assert states(told(found, {name: drained}, over("Failed")))[name] == "terminated/Completed/0"


def test_ready_means_done_for_an_init_container_and_up_for_a_sidecar():
    def ready(attempts):
        status = told(pod(init=("i", SIDE)), attempts, PodDecision(phase="Running"))
        return [one["ready"] for one in status["initContainerStatuses"]]

    assert ready({"i": running()}) == [False, False]
    assert ready({"i": ended(0), "s": running()}) == [True, True]
    assert ready({"i": ended(0), "s": ended(0)}) == [True, False]


def test_containers_may_start_as_soon_as_one_was_tried():
    def may(attempts, decision):
        return conditions(told(pod(), attempts, decision))["PodReadyToStartContainers"]

    assert may({}, PodDecision()) == ("False", "PodSandboxNotReady", "no pod sandbox exists")
    assert may({}, PodDecision(waiting={"a": ("CreateContainerConfigError", "none")})) == YES
    assert may({"a": running()}, PodDecision(phase="Running")) == YES
    assert may({"a": ended(0)}, over("Succeeded")) == ("False", "PodSandboxNotReady", "pod sandbox is not ready")


def test_a_pods_own_reason_comes_and_goes():
    status = told(pod(), {"a": ended(137)}, over("Failed"), reason="DeadlineExceeded", message="too long")
    assert (status["phase"], status["reason"], status["message"]) == ("Failed", "DeadlineExceeded", "too long")
    assert "reason" not in told(pod(), {"a": running()})
    again = told(pod(status={"reason": "NodeLost", "message": "gone"}), {"a": running()})
    assert (again["reason"], again["message"]) == (None, None)  # a patch takes it away


def test_the_class_of_service_is_left_to_the_api_server():
    assert "qosClass" not in told(
        pod(), {"a": running()}
    )  # it is immutable: another word would refuse the whole status


def test_the_generation_that_was_acted_on_is_named():
    status = told(pod(generation=3), {"a": running()})
    assert status["observedGeneration"] == 3
    assert {one["observedGeneration"] for one in status["conditions"]} == {3}
    assert "observedGeneration" not in told(pod(), {"a": running()})  # an API server that does not count


def test_a_condition_keeps_its_time_until_it_changes_and_takes_old_words_away():
    known = {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2020-01-01T00:00:00Z"}]}
    still = condition_of(pod(status=known), "Ready", False, {"reason": "ContainersNotReady"}, now=0.0)
    assert (still["lastTransitionTime"], still["reason"]) == ("2020-01-01T00:00:00Z", "ContainersNotReady")
    holds = condition_of(pod(status=known), "Ready", True, {}, now=0.0)
    assert (holds["lastTransitionTime"], holds["reason"], holds["message"]) == ("1970-01-01T00:00:00Z", None, None)


@pytest.mark.parametrize(
    ("known", "ready"),
    [
        ([], ("False", 'corresponding condition of pod readiness gate "example.com/g" does not exist.')),
        (["False"], ("False", 'the status of pod readiness gate "example.com/g" is not "True", but False')),
        (["True"], ("True", None)),
    ],
)
def test_a_gate_keeps_the_pod_from_being_ready_but_not_its_containers(known, ready):
    found = pod(status={"conditions": [{"type": "example.com/g", "status": one} for one in known]})
    found = msgspec.structs.replace(
        found, spec=msgspec.structs.replace(found.spec, readiness_gates=[{"conditionType": "example.com/g"}])
    )
    said = conditions(told(found, {"a": running()}))
    assert (said["Ready"][0], said["Ready"][2]) == ready
    assert said["ContainersReady"] == YES


def by_api(status):
    """The status as the API server gives it back."""
    return {
        key: value for key, value in status.items() if key in ("phase", "containerStatuses", "initContainerStatuses")
    }


@pytest.mark.parametrize(
    ("found", "attempts"),
    [
        pytest.param(pod("Never"), {"a": ended(0)}, id="ended well"),
        pytest.param(pod("OnFailure"), {"a": ended(0, number=3, previous=ended(7))}, id="ended well in the end"),
        pytest.param(pod("Never", init=("i", SIDE)), {"i": ended(0), "s": ended(143), "a": ended(5)}, id="with init"),
        pytest.param(pod("Never", init=("i", "j")), {"i": ended(0), "j": ended(2)}, id="not begun"),
    ],
)
def test_how_containers_ended_is_still_told_when_their_records_are_lost(found, attempts):
    first = told(found, attempts, decide(found, attempts, now=102.0))
    known = msgspec.structs.replace(found, status=msgspec.convert(by_api(first), PodStatus))
    again = told(known, {}, over(first["phase"]))
    assert by_api(again) == by_api(first)
    assert conditions(again) == conditions(first)


def test_a_container_that_ran_when_its_record_was_lost_has_an_unknown_end():
    status = told(pod(main=("a", "b")), {"a": ended(0), "b": running()}, PodDecision(phase="Running"))
    known = pod(main=("a", "b"), status=by_api(status))
    assert states(told(known, {}, over("Failed"))) == {
        "a": "terminated/Completed/0",
        "b": "terminated/ContainerStatusUnknown/137",
    }
