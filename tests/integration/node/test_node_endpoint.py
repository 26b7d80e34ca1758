"""The agent's own HTTPS endpoint, asked directly as monitoring and an API server ask it."""

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys

import aiohttp
import pytest

pytestmark = pytest.mark.root

PYTHON = os.path.realpath(sys.executable)
# Sends a request for /pods without credentials from a few connections, as the user that is given. With `vanish` it then
# closes all of them at once, while the agent is busy with others; else it prints the first answer.
CLIENT = """
import os, socket, ssl, sys, time
port, user, vanishes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "vanish"
os.setgroups([])
os.setgid(user)
os.setuid(user)
tls = ssl.create_default_context()
tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
tls.maximum_version = ssl.TLSVersion.TLSv1_2  # without tickets, which unread would make the close a reset
new = lambda: tls.wrap_socket(socket.create_connection(("127.0.0.1", port)))
busy, mine = [new() for _ in range(40)], [new() for _ in range(10)]
for one in busy:
    one.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
for one in mine:
    one.sendall(b"GET /pods HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    if vanishes:
        os.close(one.fileno())
if not vanishes:
    print(mine[0].recv(4096).decode(), flush=True)
os._exit(0)
"""


@contextlib.asynccontextmanager
async def endpoint(lab, agent):
    """`ask(path)` gives status and text."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    headers = {"Authorization": f"Bearer {lab.server.token}"}
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(f"https://127.0.0.1:{agent.endpoint.port}", connector=connector) as session:

        async def ask(path):
            async with session.get(path, headers=headers) as answer:
                return answer.status, await (
                    answer.json() if "json" in answer.headers["Content-Type"] else answer.text()
                )

        yield ask


async def test_volume_figures_are_served_in_both_formats(lab):
    async with lab.one_pod() as (_, pod):
        agent = lab.agent
        async with endpoint(lab, agent) as ask:
            status, text = await ask("/metrics")
            assert status == 200
            assert 'kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="c1"} 40' in text
            status, body = await ask("/stats/summary")
            assert (status, body["node"]["nodeName"]) == (200, "n1")
            (found,) = body["pods"]
            assert found["podRef"] == {"name": "p1", "namespace": "default", "uid": pod.uid}
            (volume,) = found["volume"]
            assert (volume["name"], volume["pvcRef"]["name"], volume["capacityBytes"]) == ("data", "c1", 100)
        await lab.end("p1")


async def test_a_log_that_is_not_there_is_explained(lab):
    agent = await lab.start_agent()
    await lab.pod("foreign", claim="", container={"image": "nginx:1.27"})
    missing = [{"name": "v", "configMap": {"name": "not-there"}}]
    await lab.pod("waits", claim="", volumes=missing, mounts=[{"name": "v", "mountPath": "/v"}])
    await lab.until(lambda: len([one for one in agent.pods.workers if agent.statuses.last(one)]) == 2, what="both seen")
    async with endpoint(lab, agent) as ask:
        for path, words in (
            ("/containerLogs/default/foreign/main", "is waiting to start: image can't be pulled"),
            ("/containerLogs/default/waits/main", "is waiting to start: ContainerCreating"),
            ("/containerLogs/default/waits/other", 'container "other" in pod "waits" is not available'),
            ("/containerLogs/default/nobody/main", "is not on this node"),
            ("/containerLogs/default/waits/main?previous=true", "previous terminated container"),
            ("/exec/default/waits/main?command=true", "is waiting to start"),
            ("/exec/default/waits/wrong-uid/main?command=true", "is not on this node"),
        ):
            status, text = await ask(path)
            if path.startswith("/exec"):
                assert text["kind"] == "Status"
                text = text["message"]
            assert (status, words in text) == (400, True), text
        assert (await ask("/containerLogs/default/waits/main?tailLines=-1"))[0] == 422
        status, body = await ask("/attach/default/waits/main")
        assert (status, "not served" in body["message"]) == (501, True)
        status, body = await ask("/pods")
        assert {one["metadata"]["name"] for one in body["items"]} == {"foreign", "waits"}
    await lab.end("foreign", "waits")


async def test_an_older_kubectl_is_told_what_it_takes_and_a_command_is_needed(lab):
    agent = await lab.start_agent()
    pod = await lab.pod(claim="")
    await lab.phase("p1", "Running")
    async with endpoint(lab, agent) as ask:
        status, body = await ask(f"/exec/default/p1/{pod.uid}/main?command=true&output=1")
        assert (status, "kubectl 1.31 or later" in body["message"]) == (400, True)
        status, body = await ask("/exec/default/p1/main?output=1")
        assert (status, "at least one command" in body["message"]) == (400, True)
    await lab.end("p1")


async def test_nobody_is_taken_for_root_who_is_not(lab, monkeypatch):
    agent = await lab.start_agent()
    url = f"https://127.0.0.1:{agent.endpoint.port}/pods"
    judged, asked = [], agent.endpoint._gate.refusal

    async def refusal(request):
        judged.append(await asked(request))
        return judged[-1]

    monkeypatch.setattr(agent.endpoint._gate, "refusal", refusal)

    async def answer_to(user, how):
        argv = (PYTHON, "-I", "-c", CLIENT, str(agent.endpoint.port), str(user), how)
        client = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        return (await client.communicate())[0].decode()

    assert "root of this machine outside of pods" in await answer_to(65534, "stay")
    for _ in range(5):
        await answer_to(65534, "vanish")
    async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as from_root:
        assert from_root.status == 200
    assert judged.count(None) == 1  # that of root, asked when the others had been

    # Root of a container without any privilege shares the machine's network, and nothing else.
    command = [PYTHON, "-I", "-c", CLIENT, str(agent.endpoint.port), "0", "stay"]
    await lab.pod("p1", claim="", restartPolicy="Never", container={"command": command})
    await lab.phase("p1", "Succeeded")
    text = agent.pods.find("default", "p1").newest("main").log.read_text()
    assert "401 Unauthorized" in text
    await lab.end("p1")


async def test_a_client_that_vanishes_with_its_input_unread_leaves_no_session(lab):
    agent = await lab.start_agent()
    await lab.pod("p1", claim="")
    await lab.phase("p1", "Running")

    def readers():
        return [one for one in asyncio.all_tasks() if one.get_coro().__qualname__ == "_Session._receive"]

    query = "command=sh&command=-c&command=read+_;echo;exec+sleep+600&input=1&output=1"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {lab.server.token}"}) as session:
        url = f"https://127.0.0.1:{agent.endpoint.port}/exec/default/p1/main?{query}"
        client = await session.ws_connect(url, protocols=("v5.channel.k8s.io",), ssl=False)
        await client.send_bytes(b"\x00\n")
        while (await client.receive_bytes())[1:] != b"\n":
            continue
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.5):
                    await client.send_bytes(b"\x00" + b"x" * 30_000)
        assert len(readers()) == 1
        client._response.connection.transport.abort()
        await lab.until(lambda: not readers(), what="session over")
    await lab.end("p1")
