"""The agent's own HTTPS endpoint, asked directly as monitoring and an API server ask it."""

import contextlib
import ssl

import aiohttp
import pytest

pytestmark = pytest.mark.root


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
        await lab.delete("p1")
        await lab.gone("p1")
        await lab.stop_agent()


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
    for name in ("foreign", "waits"):
        await lab.delete(name)
        await lab.gone(name)
    await lab.stop_agent()


async def test_an_older_kubectl_is_told_what_it_takes_and_a_command_is_needed(lab):
    agent = await lab.start_agent()
    pod = await lab.pod(claim="")
    await lab.phase("p1", "Running")
    async with endpoint(lab, agent) as ask:
        status, body = await ask(f"/exec/default/p1/{pod.uid}/main?command=true&output=1")
        assert (status, "kubectl 1.31 or later" in body["message"]) == (400, True)
        status, body = await ask("/exec/default/p1/main?output=1")
        assert (status, "at least one command" in body["message"]) == (400, True)
    await lab.delete("p1")
    await lab.gone("p1")
    await lab.stop_agent()
