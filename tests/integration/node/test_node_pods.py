"""Pods as processes: what they see, how they end, how they are restarted, what kubectl gets to know."""

import json
import os
import resource
import select
import signal
import ssl
import subprocess
import time

import aiohttp
import pytest

from moorage.kube.objects.core import ConfigMap, Event, Namespace, Secret
from moorage.kube.objects.pods import Pod
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.node.runtime.container_state import read_state
from moorage.node.serve import auth

pytestmark = pytest.mark.root


async def logs(lab, name, **query):
    path = f"/api/v1/namespaces/default/pods/{name}/log"
    return (await lab.client.request("GET", path, query={key: str(value) for key, value in query.items()})).decode()


async def run_to_end(lab, command, phase="Succeeded", **pod):
    await lab.pod(claim="", command=command, restartPolicy="Never", **pod)
    found = await lab.phase("p1", phase)
    text = await logs(lab, "p1")
    await lab.delete("p1")
    await lab.gone("p1")
    return found, text


async def test_a_container_has_its_own_world_over_the_hosts_root(lab):
    await lab.start_agent()
    command = f"""
      echo pid $$$$; hostname; ls {lab.root} 2>/dev/null | wc -l; echo x > /usr/written-here; ls /usr/written-here
      ps ax | wc -l; cat /proc/self/mountinfo | grep -c '{lab.root}/pods'; ls /bin/sh
    """
    _, text = await run_to_end(lab, command)
    pid, hostname, entries, written, processes, mounts, shell = text.splitlines()
    assert (pid, hostname) == ("pid 1", "p1")
    assert entries == "0"  # the agent's own directory is hidden
    assert written == "/usr/written-here"
    assert int(processes) < 8
    assert mounts == "0"
    assert shell == "/bin/sh"
    from pathlib import Path

    assert not Path("/usr/written-here").exists()
    await lab.stop_agent()


async def test_a_container_has_namespaces_of_its_own_but_the_network_of_the_host(lab):
    await lab.start_agent()
    _, text = await run_to_end(lab, "for kind in mnt pid ipc uts net; do readlink /proc/self/ns/$kind; done")
    here = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "ipc", "uts", "net")]
    inside = text.split()
    assert [a == b for a, b in zip(inside, here, strict=True)] == [False, False, False, False, True]
    _, text = await run_to_end(
        lab, "for kind in pid ipc; do readlink /proc/self/ns/$kind; done", hostPID=True, hostIPC=True
    )
    assert text.split() == here[1:3]
    await lab.stop_agent()


async def test_exit_codes_and_reasons_are_in_the_status(lab):
    await lab.start_agent()
    found, _ = await run_to_end(lab, "exit 3", "Failed")
    terminated = found.status.container_statuses[0].state["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (3, "Error")
    found, _ = await run_to_end(lab, "exit 0")
    assert found.status.container_statuses[0].state["terminated"]["reason"] == "Completed"
    found, _ = await run_to_end(lab, "unused", "Failed", container={"command": ["/no/such/program"]})
    terminated = found.status.container_statuses[0].state["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (128, "StartError")
    assert "/no/such/program" in terminated["message"]
    await lab.stop_agent()


async def test_a_failing_container_is_restarted_and_its_last_words_are_kept(lab):
    await lab.start_agent()
    await lab.pod(claim="", command="echo attempt; exit 9")

    async def backing_off():
        pod = await lab.client.get(Pod, "p1", "default")
        (status,) = pod.status.container_statuses or [None]
        return status and status.state.get("waiting", {}).get("reason") == "CrashLoopBackOff" and status

    status = await lab.until(backing_off, what="CrashLoopBackOff")
    assert status.restart_count == 1
    assert status.last_state["terminated"]["exitCode"] == 9
    assert await logs(lab, "p1", previous="true") == "attempt\n"
    await lab.end("p1")


async def test_init_containers_run_first_one_after_the_other(lab):
    await lab.start_agent()
    volumes = [{"name": "data", "emptyDir": {}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    init = [
        {"name": name, "image": "host", "command": ["sh", "-c", f"echo {name} >> /data/order"], "volumeMounts": mounts}
        for name in ("first", "second")
    ]
    found, text = await run_to_end(lab, "cat /data/order", volumes=volumes, mounts=mounts, initContainers=init)
    assert text == "first\nsecond\n"
    assert [one.state["terminated"]["exitCode"] for one in found.status.init_container_statuses] == [0, 0]
    await lab.stop_agent()


async def test_environment_user_and_files_come_from_the_pod(lab):
    await lab.client.create(ConfigMap, {"metadata": {"name": "cfg"}, "data": {"K": "v", "file": "text"}}, "default")
    await lab.client.create(Secret, {"metadata": {"name": "sec"}, "data": {"p": "cGFzcw=="}}, "default")
    await lab.start_agent()
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)2"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "PASS", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "p"}}},
    ]
    volumes = [
        {"name": "cfg", "configMap": {"name": "cfg"}},
        {"name": "sec", "secret": {"secretName": "sec", "defaultMode": 0o440}},
        {"name": "all", "projected": {"sources": [{"configMap": {"name": "cfg"}}, {"secret": {"name": "sec"}}]}},
        {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    mounts = [{"name": one["name"], "mountPath": f"/v/{one['name']}"} for one in volumes]
    command = """
      echo $B $NAME $PASS $K; id -u; id -G; cat /v/cfg/file /v/sec/p /v/all/K; echo; pwd
      touch /v/tmp/f && stat -f -c %T /v/tmp; test -w /v/cfg/file || echo cannot write
    """
    _, text = await run_to_end(
        lab,
        command,
        volumes=volumes,
        mounts=mounts,
        securityContext={"runAsUser": 1234, "fsGroup": 77},
        container={"env": env, "envFrom": [{"configMapRef": {"name": "cfg"}}], "workingDir": "/v"},
    )
    assert text.splitlines() == ["12 p1 pass v", "1234", "0 77", "textpassv", "/v", "tmpfs", "cannot write"]
    await lab.until(lambda: not lab.mounted())
    await lab.stop_agent()


@pytest.mark.parametrize("name", ["../../other/secrets/sec", "%2e%2e/%2e%2e/other/secrets/sec"])
async def test_a_secret_of_another_namespace_cannot_be_named(lab, name):
    await lab.client.create(Namespace, {"metadata": {"name": "other"}})
    await lab.client.create(Secret, {"metadata": {"name": "sec"}, "data": {"p": "cGFzcw=="}}, "other")
    await lab.start_agent()
    env = [{"name": "PASS", "valueFrom": {"secretKeyRef": {"name": name, "key": "p"}}}]
    files = [{"name": "sec", "secret": {"secretName": name}}]
    mounts = [{"name": "sec", "mountPath": "/sec"}]
    await lab.pod("p1", claim="", volumes=files, mounts=mounts)
    await lab.pod("p2", claim="", container={"env": env})

    async def refused():
        status = (await lab.client.get(Pod, "p2", "default")).status.container_statuses
        waiting = status[0].state.get("waiting", {}) if status else {}
        mounting = await lab.messages("FailedMount")
        return mounting and waiting.get("reason") == "CreateContainerError" and [*mounting, waiting["message"]]

    assert all("is no name" in text for text in await lab.until(refused, what="both pods refused"))
    assert list(lab.root.glob("pods/*/volumes/kubernetes.io~secret/sec/p")) == []
    await lab.end("p1", "p2")


async def test_sub_paths_stay_inside_their_volume(lab):
    await lab.start_agent()
    volumes = [{"name": "data", "emptyDir": {}}]
    whole = {"name": "data", "mountPath": "/data"}
    init = [
        {
            "name": "trap",
            "image": "host",
            "command": ["sh", "-c", "ln -s /etc /data/escape; mkdir /data/in; ln -s in /data/alias"],
            "volumeMounts": [whole],
        }
    ]
    good = [whole, {"name": "data", "mountPath": "/sub", "subPath": "a/b"},
            {"name": "data", "mountPath": "/alias", "subPath": "alias"}]  # fmt: skip
    _, text = await run_to_end(
        lab, "touch /sub/x /alias/y; ls /data/a/b /data/in", volumes=volumes, mounts=good, initContainers=init
    )
    assert text.split() == ["/data/a/b:", "x", "/data/in:", "y"]
    bad = [{"name": "data", "mountPath": "/sub", "subPath": "escape/ssh"}]
    await lab.pod(claim="", command="ls /sub", restartPolicy="Never", volumes=volumes, mounts=bad, initContainers=init)

    async def refused():
        (status,) = (await lab.client.get(Pod, "p1", "default")).status.container_statuses or [None]
        return status and status.state.get("waiting", {}).get("reason") == "CreateContainerError" and status

    status = await lab.until(refused, what="CreateContainerError")
    assert "it leads out of the volume" in status.state["waiting"]["message"]
    assert (await lab.client.get(Pod, "p1", "default")).status.phase == "Pending"  # the volume may yet become right
    await lab.end("p1")


@pytest.mark.parametrize("kind", ["emptyDir", "csi"])
async def test_a_sub_path_that_is_made_can_be_written_by_the_pods_user(lab, kind):
    await lab.driver_object(fsGroupPolicy="File")
    await lab.volume()
    async with lab.driver():
        await lab.start_agent()
        body = {"emptyDir": {}} if kind == "emptyDir" else {"persistentVolumeClaim": {"claimName": "c1"}}
        security = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000}
        mounts = [{"name": "data", "mountPath": "/sub", "subPath": "a/b"}]
        _, text = await run_to_end(
            lab, "touch /sub/x && stat -c '%u %g' /sub/x",
            volumes=[{"name": "data", **body}], mounts=mounts, securityContext=security,
        )  # fmt: skip
        assert text == "1000 2000\n"
        await lab.end()


async def test_a_long_name_is_cut_alike_for_the_host_and_for_programs(lab):
    await lab.start_agent()
    name = "a" * 62 + "-" + "b" * 20
    await lab.pod(name, claim="", command="hostname; echo $HOSTNAME", restartPolicy="Never")
    await lab.phase(name, "Succeeded")
    assert (await logs(lab, name)).split() == ["a" * 62, "a" * 62]
    await lab.end(name)


async def test_a_file_of_a_volume_is_mounted_where_a_file_is_or_where_nothing_is(lab):
    await lab.start_agent()
    volumes = [{"name": "data", "emptyDir": {}}]
    whole = {"name": "data", "mountPath": "/data"}
    init = [{"name": "make", "image": "host", "command": ["sh", "-c", "echo mine > /data/file"],
             "volumeMounts": [whole]}]  # fmt: skip
    mounts = [{"name": "data", "mountPath": path, "subPath": "file"} for path in ("/new/deep/file", "/etc/hostname")]
    _, text = await run_to_end(
        lab, "cat /new/deep/file /etc/hostname; echo more >> /new/deep/file; stat -c %A /new/deep; cat /etc/hostname",
        volumes=volumes, mounts=mounts, initContainers=init,
    )  # fmt: skip
    assert text.split() == ["mine", "mine", "drwxr-xr-x", "mine", "more"]
    await lab.pod(claim="", command="true", restartPolicy="Never", volumes=volumes, initContainers=init,
                  mounts=[{"name": "data", "mountPath": "/usr", "subPath": "file"}])  # fmt: skip

    async def refused():
        (status,) = (await lab.client.get(Pod, "p1", "default")).status.container_statuses or [None]
        return status and status.state.get("waiting", {}).get("reason") == "CreateContainerError" and status

    status = await lab.until(refused, what="CreateContainerError")
    assert "mount volume at /usr" in status.state["waiting"]["message"]
    await lab.end("p1")


async def test_an_image_that_is_not_host_gets_a_clear_event(lab):
    await lab.start_agent()
    await lab.pod(claim="", container={"image": "nginx:1.27", "livenessProbe": {"exec": {"command": ["true"]}}})

    async def told():
        events = await lab.client.list(Event, "default")
        return {event.reason: event.message for event in events.items if event.involved_object.name == "p1"}

    async def both():
        found = await told()
        return found if {"Failed", "Unsupported"} <= set(found) else None

    found = await lab.until(both)
    assert "nginx:1.27" in found["Failed"]
    assert "livenessProbe" in found["Unsupported"]
    pod = await lab.phase("p1", "Pending")

    async def waits():
        pod = await lab.client.get(Pod, "p1", "default")
        return pod.status.container_statuses and pod.status.container_statuses[0].state["waiting"]["reason"]

    assert await lab.until(waits) == "ErrImagePull"
    assert pod.uid
    await lab.end("p1")


async def test_a_container_that_ignores_the_signal_is_killed_after_its_grace(lab):
    agent = await lab.start_agent()
    pod = await lab.pod(claim="", container={"command": ["sleep", "1000"]})
    await lab.phase("p1", "Running")
    container = agent.pods.workers[pod.uid].containers["main"][-1]
    await lab.delete("p1")
    await lab.gone("p1")
    assert (container.is_running, container.exit_code) == (False, 128 + signal.SIGKILL)
    await lab.stop_agent()


async def test_a_force_deleted_pod_is_stopped_and_forgotten(lab):
    agent = await lab.start_agent()
    pod = await lab.pod(claim="")
    await lab.phase("p1", "Running")
    container = agent.pods.workers[pod.uid].containers["main"][-1]
    await lab.delete("p1", grace_s=0)
    await lab.until(lambda: not container.is_running)
    await lab.until(lambda: pod.uid not in agent.pods.workers)
    assert not (lab.root / "pods" / pod.uid).exists()
    await lab.stop_agent()


async def test_commands_run_inside_over_a_web_socket(lab, monkeypatch):
    agent = await lab.start_agent()
    await lab.pod(claim="", container={"env": [{"name": "WHO", "value": "me"}]})
    await lab.phase("p1", "Running")
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    base = f"https://127.0.0.1:{agent.endpoint.port}"
    headers = {"Authorization": f"Bearer {lab.server.token}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        async with session.get(f"{base}/pods") as from_root:
            assert from_root.status == 200
        with monkeypatch.context() as someone_else:
            someone_else.setattr(auth, "roots_outside_of_pods", lambda connections: [False] * len(connections))
            async with session.get(f"{base}/pods") as refused:
                assert refused.status == 401
        async with session.get(f"{base}/healthz") as healthy:
            assert await healthy.text() == "ok"
        query = [("command", "sh"), ("command", "-c"), ("command", "echo $WHO; cat; echo bad >&2; exit 4"),
                 ("stdin", "1"), ("stdout", "1"), ("stderr", "1")]  # fmt: skip
        async with session.ws_connect(
            f"{base}/exec/default/p1/main", params=query, headers=headers, protocols=("v5.channel.k8s.io",)
        ) as socket:
            assert socket.protocol == "v5.channel.k8s.io"
            await socket.send_bytes(b"\x00typed\n")
            await socket.send_bytes(b"\xff\x00")  # no more input
            received = {1: b"", 2: b"", 3: b""}
            async for message in socket:
                received[message.data[0]] += message.data[1:]
        assert received[1] == b"me\ntyped\n"
        assert received[2] == b"bad\n"
        status = json.loads(received[3])
        assert status["reason"] == "NonZeroExitCode"
        assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "4"}]
        async with session.post(f"{base}/exec/default/p1/main", params=query, headers=headers) as old:
            assert old.status == 400
            assert "WebSocket" in await old.text()
    await lab.end("p1")


async def test_logs_can_be_followed_to_the_end(lab):
    await lab.start_agent()
    await lab.pod(claim="", command="for i in 1 2 3; do echo line $i; sleep 0.1; done", restartPolicy="Never")

    async def started():
        pod = await lab.client.get(Pod, "p1", "default")
        return pod.status.container_statuses and "waiting" not in pod.status.container_statuses[0].state

    await lab.until(started)
    assert await logs(lab, "p1", follow="true") == "line 1\nline 2\nline 3\n"
    await lab.end("p1")


async def test_volume_figures_are_served(lab):
    async with lab.one_pod():
        agent = lab.agent
        (usage,) = await agent.stats.read()
        assert (usage.claim, usage.capacity, usage.used, usage.inodes_free) == ("c1", 100, 40, 6)
        await lab.end("p1")


async def test_a_pods_processes_are_in_cgroups_named_after_it(lab):
    await lab.start_agent()
    pod = await lab.pod(claim="", container={"resources": {"limits": {"memory": "64Mi", "cpu": "500m"}}})
    await lab.phase("p1", "Running")
    directories = ContainerCgroups("n1").of(pod.uid, "main")
    if directories:  # a machine without cgroups runs pods all the same
        from pathlib import Path

        for directory in directories:
            assert f"pod{pod.uid}" in directory
            assert Path(directory, "cgroup.procs").read_text().strip()
            for name, expected in (("cpu.shares", "512"), ("cpu.weight", "59")):  # for want of a request, the limit
                weight = Path(directory, name)
                assert not weight.exists() or weight.read_text().strip() == expected
    await lab.delete("p1")
    await lab.gone("p1")
    assert ContainerCgroups("n1").of(pod.uid, "main") == []
    await lab.stop_agent()


async def test_without_mount_propagation_later_mounts_of_the_host_stay_outside(lab):
    from moorage.host import mounts

    await lab.driver_object()
    await lab.volume()
    async with lab.driver():
        await lab.start_agent()
        command = "while [ ! -e /data/go ]; do sleep 0.05; done; ls /data/sub"
        pod = await lab.pod(command=command, restartPolicy="Never")
        await lab.phase("p1", "Running")
        sub = lab.target(pod) / "sub"
        sub.mkdir()
        (sub / "inside").touch()
        source = lab.base / "late"
        source.mkdir()
        (source / "outside").touch()
        mounts.bind(source, sub)
        try:
            (lab.target(pod) / "go").touch()
            await lab.phase("p1", "Succeeded")
            assert await logs(lab, "p1") == "inside\n"
        finally:
            mounts.unmount(sub)
        await lab.end("p1")


@pytest.mark.parametrize(("recursive", "seen"), [(None, "written"), ("Disabled", "written"), ("Enabled", "refused")])
async def test_what_is_mounted_below_a_read_only_volume_is_read_only_if_asked_for(lab, recursive, seen):
    from moorage.host import mounts

    await lab.start_agent()
    (lab.base / "h" / "below").mkdir(parents=True)
    (lab.base / "other").mkdir()
    mounts.bind(lab.base / "other", lab.base / "h" / "below")
    try:
        mount = {"name": "h", "mountPath": "/h", "readOnly": True, "recursiveReadOnly": recursive}
        command = "touch /h/x 2>/dev/null && echo wrong; touch /h/below/x 2>/dev/null && echo written || echo refused"
        volumes = [{"name": "h", "hostPath": {"path": str(lab.base / "h")}}]
        _, text = await run_to_end(lab, command, volumes=volumes, mounts=[mount])
        assert text.split() == [seen]
    finally:
        mounts.unmount(lab.base / "h" / "below")
    await lab.stop_agent()


async def test_mount_propagation_reaches_where_it_was_asked_to(lab):
    from moorage.host import mounts

    await lab.driver_object()
    await lab.volume()
    async with lab.driver():
        await lab.start_agent()
        command = "while [ ! -e /data/sub/seen ]; do sleep 0.05; done; echo seen; touch /data/told; sleep 1000"
        follow = [{"name": "data", "mountPath": "/data", "mountPropagation": "HostToContainer"}]
        pod = await lab.pod(command=command, mounts=follow)
        await lab.phase("p1", "Running")
        sub = lab.target(pod) / "sub"
        sub.mkdir()
        source = lab.base / "late"
        source.mkdir()
        (source / "seen").touch()
        mounts.bind(source, sub)
        try:
            await lab.until((lab.target(pod) / "told").exists, what="the late mount seen inside")
            assert (sub / "seen").exists()
        finally:
            mounts.unmount(sub)
        await lab.end("p1")


async def test_a_container_that_ends_before_the_agent_looks_has_its_own_exit_code(lab, monkeypatch):
    agent = await lab.start_agent()
    follow = agent.runtime._follow

    def late(container):
        while "exit_code" not in read_state(container.directory):
            time.sleep(0.01)
        follow(container)

    monkeypatch.setattr(agent.runtime, "_follow", late)
    found, text = await run_to_end(lab, "echo short; exit 3", "Failed")
    terminated = found.status.container_statuses[0].state["terminated"]
    assert (terminated["exitCode"], terminated["reason"], text) == (3, "Error", "short\n")
    await lab.stop_agent()


async def test_a_container_copies_no_mount_of_the_host_but_its_own_volumes(lab):
    """A copy of the host's mounts would hold volumes of other pods, and cost more with each of them."""
    await lab.driver_object()
    await lab.volume("c1")
    await lab.volume("c2")
    async with lab.driver():
        await lab.start_agent()
        await lab.pod("other", "c1")
        await lab.phase("other", "Running")
        await lab.pod("p1", "c2", command="cut -d' ' -f5 /proc/self/mountinfo", restartPolicy="Never")
        await lab.phase("p1", "Succeeded")
        seen = [line for line in (await logs(lab, "p1")).splitlines() if not line.startswith(("/sys", "/proc/"))]
        assert sorted(seen) == ["/", "/data", "/dev", "/dev/pts", "/proc"]
        await lab.end("p1", "other")


async def test_a_container_has_devices_terminals_and_empty_places_of_its_own(lab):
    await lab.start_agent()
    command = """
      echo lost > /dev/null && head -c 3 /dev/zero | wc -c; test -c /dev/urandom && echo urandom
      ls -A /tmp /var/tmp /run | grep -v : | grep -c .; stat -c %a /tmp /run /dev/shm; ls /dev/pts
      touch /tmp/a /dev/shm/b /run/c && echo written; script -qec 'tty' /dev/null
    """
    _, text = await run_to_end(lab, command)
    lines = text.replace("\r", "").splitlines()
    assert lines[:6] == ["3", "urandom", "0", "1777", "755", "1777"]
    assert lines[-2] == "written"
    assert lines[-1].startswith("/dev/pts/")
    await lab.stop_agent()


async def test_a_container_whose_supervisor_is_killed_dies_with_it_and_is_started_again(lab):
    agent = await lab.start_agent()
    pod = await lab.pod(claim="")
    await lab.phase("p1", "Running")
    container = agent.pods.workers[pod.uid].containers["main"][-1]
    first = os.pidfd_open(container.state["pid"])
    os.kill(container.state["shim"], signal.SIGKILL)

    async def restarted():
        found = await lab.client.get(Pod, "p1", "default")
        (status,) = found.status.container_statuses
        return status if status.restart_count == 1 and "running" in status.state else None

    status = await lab.until(restarted, what="started again")
    assert status.last_state["terminated"]["exitCode"] == 137
    assert select.select([first], [], [], 0)[0]  # a descriptor of a process is readable once it has ended
    os.close(first)
    await lab.end("p1")


def may_lower_oom_score():
    """Some machines keep it from their root."""
    return subprocess.run(["sh", "-c", "echo -999 > /proc/self/oom_score_adj"], capture_output=True).returncode == 0


@pytest.fixture
def few_files():
    """The limits of open files, as an agent is started with them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    yield hard - 1, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_container_has_the_limits_that_the_agent_was_started_with(lab, few_files):
    agent = await lab.start_agent()
    command = "ulimit -Sn; ulimit -Hn; cat /proc/self/oom_score_adj; ls /proc/self/fd"
    _, text = await run_to_end(lab, command)
    soft, hard = few_files
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)  # the agent has one open for each container
    with open("/proc/self/oom_score_adj") as file:
        score = file.read().strip()
    assert text.split() == [str(soft), str(hard), score, "0", "1", "2", "3"]  # three streams, and what is being listed
    with open(f"/proc/{agent.runtime._supervisors.current.pid}/oom_score_adj") as file:
        assert file.read().strip() == ("-999" if may_lower_oom_score() else score)
    await lab.stop_agent()


async def test_a_working_directory_is_made_whoever_the_program_runs_as(lab):
    await lab.start_agent()
    security = {"runAsUser": 65534, "readOnlyRootFilesystem": True}
    container = {"workingDir": "/made/for/it", "securityContext": security}
    _, text = await run_to_end(
        lab, "pwd; stat -c '%a %u' .; touch x 2>/dev/null || echo cannot write", container=container
    )
    assert text.splitlines() == ["/made/for/it", "755 0", "cannot write"]
    await lab.stop_agent()


async def said_inside(lab, agent, *words):
    """What a command prints that is run in the container."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{agent.endpoint.port}/exec/default/p1/main"
    query = [*(("command", word) for word in words), ("stdout", "1")]
    headers = {"Authorization": f"Bearer {lab.server.token}"}
    text = b""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
        session.ws_connect(url, params=query, headers=headers, protocols=("v5.channel.k8s.io",)) as socket,
    ):
        async for message in socket:
            text += message.data[1:] if message.data[0] == 1 else b""
    return text.decode()


async def test_a_container_has_the_rights_that_it_asks_for_also_in_exec(lab):
    agent = await lab.start_agent()
    security = {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}
    await lab.pod(
        claim="", command="grep CapEff /proc/self/status; sleep 1000", container={"securityContext": security}
    )
    await lab.phase("p1", "Running")
    only_chown = "CapEff:\t0000000000000001\n"
    assert await lab.until(lambda: logs(lab, "p1"), what="log") == only_chown
    assert await said_inside(lab, agent, "grep", "CapEff", "/proc/self/status") == only_chown
    await lab.end("p1")


async def test_a_volume_is_mounted_inside_one_that_is_read_only_to_its_pod(lab):
    await lab.client.create(ConfigMap, {"metadata": {"name": "m"}, "data": {"key": "value"}}, "default")
    await lab.start_agent()
    await lab.pod(
        "p1",
        claim="",
        command="cd /etc/app; cat key; echo made > data/x && cat data/x; touch y || echo not here",
        restartPolicy="Never",
        volumes=[{"name": "outer", "configMap": {"name": "m"}}, {"name": "inner", "emptyDir": {}}],
        mounts=[
            {"name": "outer", "mountPath": "/etc/app", "readOnly": True},
            {"name": "inner", "mountPath": "/etc/app/data"},
        ],
    )
    await lab.phase("p1", "Succeeded")
    said = await logs(lab, "p1")
    assert "valuemade" in said
    assert "not here" in said
    await lab.end("p1")


async def test_a_pod_that_cannot_run_here_gets_no_volume_from_the_next_agent_either(lab):
    await lab.driver_object()
    async with lab.driver() as driver:
        await lab.volume()
        await lab.start_agent()
        await lab.pod("p1", container={"image": "nginx"})

        async def told():
            statuses = (await lab.client.get(Pod, "p1", "default")).status.container_statuses
            return statuses and statuses[0].state["waiting"]["reason"] == "ErrImagePull"

        await lab.until(told, what="the image refused")
        await lab.crash_agent()
        agent = await lab.start_agent()  # it returns when the agent is ready, and so has said what it wants
        assert agent.volumes.world.desired == {}
        assert driver.requests("NodeStageVolume") == []
        await lab.end("p1")
