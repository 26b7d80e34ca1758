"""Stories of pods from beginning to end: what their status and their events say on the way."""

import asyncio
import json
import os
import signal

import pytest

from moorage.kube.api.client import PatchType
from moorage.kube.objects.core import ConfigMap, Event
from moorage.kube.objects.pods import Pod
from moorage.node.pods import lifecycle, worker
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.node.volumes import live_reads

pytestmark = pytest.mark.root
STAY = "trap exit TERM; sleep 1000 & wait"


@pytest.fixture
def soon(monkeypatch):
    """What is tried again after ten seconds is tried again at once, and sees what there is now."""
    monkeypatch.setattr(worker, "_CONFIG_RETRY_S", 0.05)
    monkeypatch.setattr(live_reads, "_FRESH_S", 0.0)


async def status(lab, name="p1"):
    return (await lab.client.get(Pod, name, "default")).status


async def shown(lab, container="main", name="p1"):
    """One container: the kind of its state, its reason, and the whole status."""
    found = await status(lab, name)
    for one in (*found.init_container_statuses, *found.container_statuses):
        if one.name == container:
            ((kind, body),) = one.state.items()
            return kind, body.get("reason"), one
    return None, None, None


async def events(lab, name="p1"):
    found = (await lab.client.list(Event, "default")).items
    return {one.reason: one for one in found if one.involved_object.name == name}


async def until_shown(lab, *wanted, container="main", name="p1"):
    async def there():
        kind, reason, one = await shown(lab, container, name)
        return one if (kind, reason) == wanted else None

    return await lab.until(there, what=f"{container} {wanted}")


async def until_event(lab, reason, name="p1"):
    async def there():
        return (await events(lab, name)).get(reason)

    return await lab.until(there, what=f"event {reason}")


async def over(lab, *names):
    await lab.end(*(names or ("p1",)))


def container(name, command, **more):
    return {"name": name, "image": "host", "command": ["sh", "-c", command], **more}


async def test_a_pod_that_waits_for_its_configuration_is_pending_and_begins_when_it_comes(lab, soon):
    await lab.start_agent()
    await lab.pod(claim="", container={"envFrom": [{"configMapRef": {"name": "late"}}]})
    await until_shown(lab, "waiting", "CreateContainerConfigError")
    found = await status(lab)
    assert found.phase == "Pending"
    assert {one.type: one.status for one in found.conditions}["PodReadyToStartContainers"] == "True"
    told = await until_event(lab, "Failed")
    assert told.message == 'Error: configmap "late" not found'
    assert told.involved_object.field_path == "spec.containers{main}"
    await lab.client.create(ConfigMap, {"metadata": {"name": "late"}, "data": {"K": "v"}}, "default")
    await lab.phase("p1", "Running")
    await over(lab)


async def test_a_container_whose_configuration_is_gone_when_it_starts_again_says_so(lab, soon):
    await lab.client.create(ConfigMap, {"metadata": {"name": "early"}, "data": {"K": "v"}}, "default")
    agent = await lab.start_agent()
    pod = await lab.pod(claim="", container={"envFrom": [{"configMapRef": {"name": "early"}}]})
    await until_shown(lab, "running", None)
    await lab.client.delete(ConfigMap, "early", "default")
    os.kill(agent.pods.workers[pod.uid].newest("main").state["pid"], signal.SIGKILL)
    one = await until_shown(lab, "waiting", "CreateContainerConfigError")
    assert one.last_state["terminated"]["exitCode"] == 137
    assert (await status(lab)).phase == "Running"
    await over(lab)


async def test_a_field_that_cannot_be_shown_is_told(lab):
    await lab.start_agent()
    env = [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]
    await lab.pod(claim="", container={"env": env})
    one = await until_shown(lab, "waiting", "CreateContainerConfigError")
    assert "status.phase" in one.state["waiting"]["message"]
    assert "status.phase" in (await until_event(lab, "Failed")).message
    await over(lab)


async def test_a_program_that_is_not_there_is_a_start_that_failed_and_then_a_crash_loop(lab, monkeypatch):
    monkeypatch.setattr(lifecycle, "START_RETRY_S", 1.0)
    await lab.start_agent()
    await lab.pod(claim="", container={"command": ["/no/such/program"]})
    one = await until_shown(lab, "waiting", "RunContainerError")
    assert "/no/such/program" in one.state["waiting"]["message"]
    assert one.last_state["terminated"]["reason"] == "StartError"
    await until_shown(lab, "waiting", "CrashLoopBackOff")
    assert (await status(lab)).phase == "Running"
    await over(lab)


async def test_a_crash_loop_is_told_in_an_event_of_the_container(lab):
    await lab.start_agent()
    pod = await lab.pod(claim="", command="exit 4")
    await until_shown(lab, "waiting", "CrashLoopBackOff")
    told = await until_event(lab, "BackOff")
    assert told.message == f"Back-off restarting failed container main in pod p1_default({pod.uid})"
    assert (told.type, told.involved_object.field_path) == ("Warning", "spec.containers{main}")
    await over(lab)


async def test_an_init_container_that_fails_shows_its_exit_and_ends_a_pod_that_may_not_restart(lab):
    await lab.start_agent()
    init = [container("one", "exit 0"), container("two", "exit 5"), container("three", "exit 0")]
    await lab.pod(claim="", initContainers=init)
    one = await until_shown(lab, "waiting", "CrashLoopBackOff", container="two")
    assert one.last_state["terminated"]["exitCode"] == 5
    assert (await shown(lab, "one"))[:2] == ("terminated", "Completed")
    assert (await shown(lab, "three"))[:2] == (await shown(lab))[:2] == ("waiting", "PodInitializing")
    assert (await status(lab)).phase == "Pending"
    assert (await until_event(lab, "BackOff")).involved_object.field_path == "spec.initContainers{two}"
    await lab.delete("p1")
    await lab.gone("p1")
    await lab.pod(claim="", initContainers=init, restartPolicy="Never")
    await lab.phase("p1", "Failed")
    assert (await shown(lab, "two"))[:2] == ("terminated", "Error")
    assert (await shown(lab))[:2] == ("waiting", "PodInitializing")
    await over(lab)


async def test_a_sidecar_is_there_before_the_others_and_until_they_have_ended(lab):
    await lab.start_agent()
    order = lab.base / "order"
    order.mkdir()
    mounts = [{"name": "h", "mountPath": "/h"}]
    volumes = [{"name": "h", "hostPath": {"path": str(order)}}]

    def notes(name, last=":"):
        said = f"trap '{last}; echo {name} ends >> /h/order; exit 0' TERM; echo {name} begins >> /h/order"
        return f"{said}; while :; do sleep 0.05; done"

    sidecars = [
        container(name, notes(name), restartPolicy="Always", volumeMounts=mounts) for name in ("first", "second")
    ]
    await lab.pod(
        claim="", command=notes("main", "sleep 0.5"), mounts=mounts, volumes=volumes, initContainers=sidecars,
        terminationGracePeriodSeconds=30,
    )  # fmt: skip

    async def all_begun():
        found = (order / "order").read_text() if (order / "order").exists() else ""
        return found.count("begins") == 3

    await lab.until(all_begun, what="all three")
    await lab.delete("p1")
    await lab.gone("p1")
    lines = (order / "order").read_text().splitlines()
    assert sorted(lines[:3]) == ["first begins", "main begins", "second begins"]
    assert lines[3:] == ["main ends", "second ends", "first ends"]
    await lab.stop_agent()


async def test_a_pod_whose_work_is_done_takes_its_sidecar_along(lab):
    await lab.start_agent()
    side = container("side", STAY, restartPolicy="Always")
    await lab.pod(claim="", command="exit 0", restartPolicy="Never", initContainers=[side])
    found = await lab.phase("p1", "Succeeded")
    (one,) = found.status.init_container_statuses
    assert ("terminated" in one.state, one.ready) == (True, False)
    await over(lab)


async def test_work_that_is_done_at_once_does_not_end_the_pod_before_its_sidecar(lab, monkeypatch):
    """However fast the program is: also when it has ended before the agent has seen it run."""
    agent = await lab.start_agent()
    start = agent.runtime.start

    async def start_and_see_it_end(one, spec):
        await start(one, spec)
        while one.name == "main" and one.is_running:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(agent.runtime, "start", start_and_see_it_end)
    side = container("side", "trap 'sleep 1; exit' TERM; sleep 1000 & wait", restartPolicy="Always")
    await lab.pod(claim="", command="exit 0", restartPolicy="Never", initContainers=[side])
    found = await lab.phase("p1", "Succeeded")
    assert ["terminated" in one.state for one in found.status.init_container_statuses] == [True]
    await over(lab)


async def test_a_sidecar_that_the_others_leave_no_time_still_gets_its_signal(lab):
    agent = await lab.start_agent()
    side = container("side", "trap 'exit 7' TERM; while :; do sleep 0.05; done", restartPolicy="Always")
    pod = await lab.pod(claim="", container={"command": ["sleep", "1000"]}, initContainers=[side])
    await lab.phase("p1", "Running")
    found = agent.pods.workers[pod.uid]
    attempts = [found.newest("main"), found.newest("side")]
    await over(lab)
    assert [one.exit_code for one in attempts] == [137, 7]


async def test_while_a_pod_ends_its_status_says_which_containers_have(lab):
    await lab.start_agent()
    slow = container("slow", "trap 'while [ ! -e /h/go ]; do sleep 0.05; done; exit 3' TERM; sleep 1000 & wait; wait",
                     volumeMounts=[{"name": "h", "mountPath": "/h"}])  # fmt: skip
    volumes = [{"name": "h", "hostPath": {"path": str(lab.base)}}]
    await lab.client.create(
        Pod,
        {
            "metadata": {"name": "p1"},
            "spec": {"nodeName": "n1", "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 60,
                     "containers": [container("quick", STAY), slow], "volumes": volumes},
        },
        "default",
    )  # fmt: skip
    await lab.phase("p1", "Running")
    await lab.delete("p1")
    await until_shown(lab, "terminated", "Error", container="quick")
    assert (await shown(lab, "slow"))[0] == "running"
    assert (await status(lab)).phase == "Running"
    (lab.base / "go").touch()
    await lab.gone("p1")
    await lab.stop_agent()


async def test_a_pod_that_was_active_for_too_long_fails_with_that_reason(lab):
    await lab.start_agent()
    await lab.pod(claim="", activeDeadlineSeconds=1)
    found = (await lab.phase("p1", "Failed")).status
    text = "Pod was active on the node longer than the specified deadline"
    assert (found.reason, found.message) == ("DeadlineExceeded", text)
    assert (await shown(lab))[:2] == ("terminated", "Error")
    assert (await until_event(lab, "DeadlineExceeded")).message == text
    await over(lab)


async def test_a_pod_that_is_over_before_it_began_waits_for_nothing_any_more(lab):
    await lab.start_agent()
    missing = {"volumes": [{"name": "v", "configMap": {"name": "none"}}], "mounts": [{"name": "v", "mountPath": "/v"}]}
    await lab.pod(claim="", activeDeadlineSeconds=1, **missing)
    await lab.phase("p1", "Failed")
    assert (await shown(lab))[:2] == ("terminated", "ContainerStatusUnknown")
    await over(lab)


async def test_only_the_attempt_that_ran_out_of_memory_is_said_to_have(lab):
    if not any("memory" in str(path) for _, path in ContainerCgroups("n1")._hierarchies):
        pytest.skip("no memory control group")
    agent = await lab.start_agent()
    command = """
      if [ ! -e /h/once ]; then touch /h/once; exec python3 -c 'x = bytearray(200 << 20)'; fi
      while :; do sleep 0.05; done
    """
    pod = await lab.pod(
        claim="", command=command, mounts=[{"name": "h", "mountPath": "/h"}],
        volumes=[{"name": "h", "hostPath": {"path": str(lab.base)}}],
        container={"resources": {"limits": {"memory": "48Mi"}}},
    )  # fmt: skip

    async def second():
        kind, _, one = await shown(lab)
        return kind == "running" and one.restart_count == 1 and one

    one = await lab.until(second, what="second attempt")
    assert (one.last_state["terminated"]["reason"], one.last_state["terminated"]["exitCode"]) == ("OOMKilled", 137)
    os.kill(agent.pods.workers[pod.uid].newest("main").state["pid"], signal.SIGKILL)
    one = await until_shown(lab, "waiting", "CrashLoopBackOff")
    assert (one.last_state["terminated"]["reason"], one.last_state["terminated"]["exitCode"]) == ("Error", 137)
    await over(lab)


async def test_a_pod_that_somebody_else_declares_done_is_ended_and_stays_so(lab):
    agent = await lab.start_agent()
    pod = await lab.pod(claim="")
    await lab.phase("p1", "Running")
    attempt = agent.pods.workers[pod.uid].newest("main")
    done = {"status": {"phase": "Failed", "reason": "Evicted", "message": "somebody said so"}}
    await lab.client.patch(Pod, "p1", done, "default", how=PatchType.MERGE, subresource="status")
    await lab.until(lambda: not attempt.is_running, what="container ended")
    await until_shown(lab, "terminated", "Error")
    found = await status(lab)
    assert (found.phase, found.reason) == ("Failed", "Evicted")
    await over(lab)


async def test_a_phase_that_is_final_stays_when_the_pod_is_deleted_at_the_same_time(lab):
    agent = await lab.start_agent()
    spec = {"nodeName": "n1", "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
            "containers": [container("main", "sleep 1000 & wait; exit 3")]}  # fmt: skip
    pod = await lab.client.create(
        Pod, {"metadata": {"name": "p1", "finalizers": ["example.com/hold"]}, "spec": spec}, "default"
    )
    await lab.phase("p1", "Running")
    await lab.crash_agent()
    await lab.delete("p1", grace_s=1)
    done = {"status": {"phase": "Succeeded", "reason": "Enough", "message": "somebody said so"}}
    await lab.client.patch(Pod, "p1", done, "default", how=PatchType.MERGE, subresource="status")
    agent = await lab.start_agent()
    await lab.until(lambda: pod.uid not in agent.pods.workers, what="the pod's end")
    found = await status(lab)
    assert (found.phase, found.reason) == ("Succeeded", "Enough")
    assert (await shown(lab))[0] == "terminated"
    await lab.client.patch(Pod, "p1", {"metadata": {"finalizers": None}}, "default")
    await lab.gone("p1")
    await lab.stop_agent()


async def test_a_pod_that_was_marked_not_ready_while_its_node_was_out_of_reach_is_ready_again(lab):
    await lab.start_agent()
    await lab.pod(claim="")

    async def ready():
        return {one.type: one.status for one in (await status(lab)).conditions}.get("Ready")

    async def is_ready():
        return await ready() == "True"

    await lab.until(is_ready, what="ready")
    lost = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    written = await lab.client.patch(Pod, "p1", lost, "default", how=PatchType.STRATEGIC, subresource="status")
    assert {one.type: one.status for one in written.status.conditions}["Ready"] == "False"
    await lab.until(is_ready, what="ready again")

    async def at_rest():
        before = (await lab.client.get(Pod, "p1", "default")).version
        await asyncio.sleep(0.3)
        return (await lab.client.get(Pod, "p1", "default")).version == before

    await lab.until(at_rest, what="no further write")
    await over(lab)


async def test_a_pod_that_a_finalizer_keeps_goes_on_saying_how_it_ended(lab):
    agent = await lab.start_agent()
    spec = {"nodeName": "n1", "automountServiceAccountToken": False,
            "containers": [container("main", "trap 'exit 0' TERM; sleep 1000 & wait; exit 1")]}  # fmt: skip
    body = {"metadata": {"name": "p1", "finalizers": ["example.com/hold"]}, "spec": spec}
    pod = await lab.client.create(Pod, body, "default")
    await lab.phase("p1", "Running")
    await lab.delete("p1")
    await lab.phase("p1", "Succeeded")
    await lab.until(lambda: pod.uid not in agent.pods.workers, what="the pod's end")
    ended = await status(lab)
    for round in range(3):  # each change makes the agent look again
        before = agent.pods_informer.changes
        note = {"metadata": {"annotations": {"round": str(round)}}}
        await lab.client.patch(Pod, "p1", note, "default")
        await lab.until(lambda before=before: agent.pods_informer.changes > before, what="seen")
        await lab.until(lambda: pod.uid not in agent.pods.workers, what="nothing to do")
    found = await status(lab)
    assert (found.phase, found.container_statuses) == ("Succeeded", ended.container_statuses)
    assert (await shown(lab))[:2] == ("terminated", "Completed")
    await lab.client.patch(Pod, "p1", {"metadata": {"finalizers": None}}, "default")
    await lab.gone("p1")
    await lab.stop_agent()


async def test_a_running_pod_whose_image_is_changed_for_another_goes_on_running(lab):
    await lab.start_agent()
    await lab.pod(claim="")
    await lab.phase("p1", "Running")
    image = {"spec": {"containers": [{"name": "main", "image": "nginx"}]}}
    await lab.client.patch(Pod, "p1", image, "default", how=PatchType.STRATEGIC)

    async def seen():
        return (await shown(lab))[2].image == "nginx"

    await lab.until(seen, what="the new image in the status")
    assert ((await status(lab)).phase, (await shown(lab))[0]) == ("Running", "running")
    await over(lab)


async def test_a_pod_made_anew_runs_beside_the_old_one_that_still_ends(lab):
    agent = await lab.start_agent()
    stubborn = {"command": ["sh", "-c", "trap '' TERM; echo old; while :; do sleep 0.05; done"]}
    old = await lab.pod(claim="", container=stubborn)
    await lab.phase("p1", "Running")
    held = agent.pods.workers[old.uid]
    held._grace = lambda: 3600.0  # it takes its time
    await lab.delete("p1", grace_s=0)
    new = await lab.pod(claim="", command=f"echo new; {STAY}")
    await lab.phase("p1", "Running")
    assert held.newest("main").is_running
    assert agent.pods.find("default", "p1").uid == new.uid
    path = "/api/v1/namespaces/default/pods/p1/log"
    await lab.until(lambda: lab.client.request("GET", path), what="log")
    assert await lab.client.request("GET", path) == b"new\n"
    held._grace = lambda: 0.0
    held.wake()
    await lab.until(lambda: old.uid not in agent.pods.workers, what="the old one gone")
    assert (await status(lab)).phase == "Running"
    assert agent.pods.workers[new.uid].newest("main").is_running
    await over(lab)


async def test_the_shadow_of_a_static_pod_is_not_run_and_can_be_deleted(lab):
    agent = await lab.start_agent()
    body = {
        "metadata": {"name": "shadow", "annotations": {"kubernetes.io/config.mirror": "0"}},
        "spec": {"nodeName": "n1", "terminationGracePeriodSeconds": 1, "containers": [container("main", STAY)]},
    }
    shadow = await lab.client.create(Pod, body, "default")
    await lab.pod(claim="")
    await lab.phase("p1", "Running")
    assert shadow.uid not in agent.pods.workers
    assert (await lab.client.get(Pod, "shadow", "default")).status.phase == "Pending"
    await over(lab, "shadow", "p1")


async def whole_status(lab, name="p1"):
    return json.loads(await lab.client.request("GET", f"/api/v1/namespaces/default/pods/{name}"))["status"]


async def written_by(lab, agent, pod):
    def written():
        entry = agent.statuses._entries.get(pod.uid)
        return entry is not None and entry.written is not None

    await lab.until(written, what="status written")


async def test_a_restarted_agent_says_of_a_running_pod_what_the_one_before_said(lab):
    agent = await lab.start_agent()
    init = [container("first", "exit 0")]
    pod = await lab.pod(claim="", initContainers=init)
    await lab.phase("p1", "Running")
    before = await whole_status(lab)
    await lab.crash_agent()
    agent = await lab.start_agent()
    await written_by(lab, agent, pod)
    assert await whole_status(lab) == before
    assert before["conditions"]
    assert before["startTime"]
    await over(lab)


@pytest.mark.parametrize(("policy", "phase"), [("Never", "Failed"), ("Always", "Running")])
async def test_a_container_that_ended_while_no_agent_was_there_is_told_with_its_exit(lab, policy, phase):
    await lab.start_agent()
    command = "while [ ! -e /h/go ]; do sleep 0.05; done; rm /h/go; exit 6"
    volumes = [{"name": "h", "hostPath": {"path": str(lab.base)}}]
    pod = await lab.pod(
        claim="", command=command, mounts=[{"name": "h", "mountPath": "/h"}], volumes=volumes, restartPolicy=policy
    )
    await lab.phase("p1", "Running")
    state = lab.root / "pods" / pod.uid / "containers" / "main" / "0" / "state.json"
    await lab.crash_agent()
    (lab.base / "go").touch()
    await lab.until(lambda: "exit_code" in state.read_text(), what="the end")
    await lab.start_agent()

    async def told():
        kind, _, one = await shown(lab)
        body = one.state[kind] if policy == "Never" else one.last_state.get("terminated", {})
        return body.get("exitCode") == 6 and one

    one = await lab.until(told, what="the exit code")
    assert ((await status(lab)).phase, one.restart_count) == (phase, 1 if policy == "Always" else 0)
    await over(lab)
