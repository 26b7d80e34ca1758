"""The real kubectl against a node agent: logs, logs as they come, logs of the container before, commands inside."""

import asyncio
import os
import shutil
import signal
import socket

import pytest

from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]
NODE = "e2e-node"


class Kubectl:
    """The program on PATH, for one cluster."""

    def __init__(self, kubeconfig):
        self._words = ("kubectl", f"--kubeconfig={kubeconfig}", "--request-timeout=60s")

    async def start(self, *words, stdin=asyncio.subprocess.DEVNULL, **env):
        return await asyncio.create_subprocess_exec(
            *self._words, *words, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **env},
        )  # fmt: skip

    async def __call__(self, *words, given=None, **env):
        process = await self.start(
            *words, stdin=asyncio.subprocess.PIPE if given else asyncio.subprocess.DEVNULL, **env
        )
        out, err = await asyncio.wait_for(process.communicate(given), 90)
        return process.returncode, out.decode(), err.decode()


async def make_pod(client, command, host_path):
    container = {"name": "main", "image": "host", "command": ["sh", "-c", command],
                 "volumeMounts": [{"name": "h", "mountPath": "/h"}]}  # fmt: skip
    spec = {"nodeName": NODE, "terminationGracePeriodSeconds": 1, "containers": [container],
            "volumes": [{"name": "h", "hostPath": {"path": str(host_path)}}]}  # fmt: skip
    return await client.create(Pod, {"metadata": {"name": "p1"}, "spec": spec}, "default")


async def status_of(client):
    pod = await client.get(Pod, "p1", "default")
    return pod.status.container_statuses[0] if pod.status.container_statuses else None


async def end(client, process, until):
    await client.delete(Pod, "p1", "default")

    async def gone():
        return await client.find(Pod, "p1", "default") is None

    await until(gone, what="pod gone")
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_logs_are_followed_to_the_end_of_a_container_and_kept_for_previous(base, tmp_path, agent, cluster, until):
    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client)
        kubectl = Kubectl(server.kubeconfig)
        command = "echo begun; while [ ! -e /h/go ]; do sleep 0.05; done; rm /h/go; echo over >&2; exit 3"
        await make_pod(client, command, base)

        async def begun():
            return (await kubectl("logs", "p1"))[1] == "begun\n"

        await until(begun, what="first line")
        following = await kubectl.start("logs", "-f", "p1")
        assert await asyncio.wait_for(following.stdout.readline(), 60) == b"begun\n"
        (base / "go").touch()
        rest, _ = await asyncio.wait_for(following.communicate(), 60)
        assert (rest, following.returncode) == (b"over\n", 0)

        async def restarted():
            status = await status_of(client)
            return status.restart_count == 1 and "running" in status.state

        await until(restarted, what="started again")
        assert (await kubectl("logs", "--previous", "p1"))[:2] == (0, "begun\nover\n")
        assert (await kubectl("logs", "p1", "-c", "main", "--tail=1", "--timestamps"))[1].endswith("Z begun\n")
        code, _, said = await kubectl("logs", "p1", "-c", "other")
        assert code == 1
        assert "other" in said
        await end(client, process, until)


async def test_commands_run_inside_with_their_input_and_exit_code(base, tmp_path, agent, cluster, until):
    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client)
        kubectl = Kubectl(server.kubeconfig)
        await make_pod(client, "trap exit TERM; sleep 1000 & wait", base)

        async def running():
            status = await status_of(client)
            return status is not None and "running" in status.state

        await until(running, what="running")
        assert await kubectl("exec", "p1", "--", "sh", "-c", "hostname; exit 7") == (
            7, "p1\n", "command terminated with exit code 7\n",
        )  # fmt: skip
        assert await kubectl("exec", "-i", "p1", "--", "cat", given=b"typed\n" * 20000) == (0, "typed\n" * 20000, "")
        code, _, said = await kubectl("exec", "p1", "--", "/no/such/program")
        assert code != 0
        assert "/no/such/program" in said
        # Without WebSockets kubectl speaks SPDY, as kubectl before 1.31 does.
        code, _, said = await kubectl("exec", "p1", "--", "true", KUBECTL_REMOTE_COMMAND_WEBSOCKETS="false")
        assert code != 0
        assert "kubectl 1.31 or later is needed" in said
        code, _, said = await kubectl("attach", "p1")
        assert code != 0
        assert "attach is not served" in said
        code, _, said = await kubectl("port-forward", "pod/p1", "8080:80")
        assert code != 0
        assert "network of their node" in said
        await end(client, process, until)


async def test_a_container_that_keeps_failing_is_explained(base, tmp_path, agent, cluster, until):
    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client)
        kubectl = Kubectl(server.kubeconfig)
        await make_pod(client, "date +%s%N; exit 3", base)

        async def loops():
            status = await status_of(client)
            waiting = status is not None and (status.state.get("waiting") or {}).get("reason") == "CrashLoopBackOff"
            return waiting and status.restart_count == 1

        await until(loops, what="back-off after the second try")
        last = (await kubectl("logs", "p1"))[1]
        assert last.strip().isdigit()
        assert (await kubectl("logs", "--previous", "p1"))[1] == last  # what `kubectl describe` calls the last state
        code, _, said = await kubectl("exec", "p1", "--", "true")
        assert code != 0
        assert "container main is not running" in said
        await end(client, process, until)


async def test_a_killed_agent_comes_back_on_its_port_and_serves_its_pods(base, tmp_path, agent, cluster, until):
    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client)
        kubectl = Kubectl(server.kubeconfig)
        await make_pod(client, "echo begun; trap exit TERM; sleep 1000 & wait", base)

        async def begun():
            return (await kubectl("logs", "p1"))[1] == "begun\n"

        async def port():
            return (await client.get(Node, NODE)).status.daemon_endpoints.kubelet_endpoint.port

        await until(begun, what="first line")
        known = await port()
        for _ in range(2):
            process.kill()
            await process.wait()
            (base / "agent.log").unlink()
            process = await agent(base, server.kubeconfig, client)
            assert await kubectl("exec", "p1", "--", "echo", "inside") == (0, "inside\n", "")
            assert await port() == known

        process.kill()
        await process.wait()
        (base / "agent.log").unlink()
        with socket.create_server(("127.0.0.1", known)):  # somebody else has the port now
            process = await agent(base, server.kubeconfig, client)
            assert await port() != known
            assert await kubectl("exec", "p1", "--", "echo", "inside") == (0, "inside\n", "")
            assert (await kubectl("logs", "p1"))[1] == "begun\n"
        await end(client, process, until)


async def test_pods_are_printed_as_on_any_cluster(base, tmp_path, agent, cluster, until):
    async with cluster(tmp_path / "api") as (server, client):
        process = await agent(base, server.kubeconfig, client)
        kubectl = Kubectl(server.kubeconfig)

        async def pod(name, command, image="host", **spec):
            container = {"name": "main", "image": image, "command": ["sh", "-c", command], **spec.pop("container", {})}
            body = {"nodeName": NODE, "terminationGracePeriodSeconds": 1, "containers": [container], **spec}
            await client.create(Pod, {"metadata": {"name": name}, "spec": body}, "default")

        def first(command):
            return {"name": "i", "image": "host", "command": ["sh", "-c", command]}

        stay = "trap exit TERM; sleep 1000 & wait"
        await pod("runs", stay)
        await pod("ends", "exit 0", restartPolicy="Never")
        await pod("fails", "exit 3", restartPolicy="Never")
        await pod("loops", "exit 3")
        await pod("foreign", stay, image="nginx:1.27")
        missing = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
        await pod("waits", stay, container=missing, volumes=[{"name": "v", "configMap": {"name": "not-there"}}])
        await pod("begins", stay, initContainers=[first("sleep 1000")])
        await pod("never-begins", stay, initContainers=[first("exit 3")], restartPolicy="Never")
        await pod("keeps-trying", stay, initContainers=[first("exit 3")])
        await pod("beside", stay, initContainers=[{**first(stay), "restartPolicy": "Always"}])
        await pod("unset", stay, container={"envFrom": [{"configMapRef": {"name": "not-there"}}]})
        await pod("no-program", "", container={"command": ["/no/such/program"]}, restartPolicy="Never")
        await pod("too-long", stay, activeDeadlineSeconds=1)
        await pod("leaves", "trap '' TERM; while :; do sleep 0.1; done", terminationGracePeriodSeconds=3600)
        wanted = {
            "runs": ("1/1", "Running"),
            "ends": ("0/1", "Completed"),
            "fails": ("0/1", "Error"),
            "loops": ("0/1", "CrashLoopBackOff"),
            "foreign": ("0/1", "ErrImagePull"),
            "waits": ("0/1", "ContainerCreating"),
            "begins": ("0/1", "Init:0/1"),
            "never-begins": ("0/1", "Init:Error"),
            "keeps-trying": ("0/1", "Init:CrashLoopBackOff"),
            "beside": ("2/2", "Running"),
            "unset": ("0/1", "CreateContainerConfigError"),
            "no-program": ("0/1", "StartError"),
            "too-long": ("0/1", "Error"),
            "leaves": ("1/1", "Terminating"),
        }

        async def printed():
            _, out, _ = await kubectl("get", "pods", "--no-headers")
            return {words[0]: (words[1], words[2]) for words in map(str.split, out.splitlines())}

        async def as_wanted():
            return await printed() == wanted

        async def may_leave():
            return (await printed()).get("leaves") == ("1/1", "Running")

        await until(may_leave, what="the pod that is to be deleted")
        assert (await kubectl("delete", "pod", "leaves", "--wait=false"))[0] == 0
        await until(as_wanted, what="the table")
        assert (await kubectl("delete", "pod", "leaves", "--grace-period=1", "--timeout=60s"))[0] == 0
        _, said, _ = await kubectl("describe", "pod", "foreign")
        assert "nginx:1.27" in said
        assert (await kubectl("delete", "pods", "--all", "--timeout=60s"))[0] == 0
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
