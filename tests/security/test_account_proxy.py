"""An account that may create Nodes leads the API server's requests for logs and commands to a server of its own."""

import asyncio
import base64
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from tests.support.accounts import MERGE, rule, serve_accounts

from moorage.apiserver.handlers import node_proxy
from moorage.kube.names import SERVING_CERTIFICATE
from moorage.node.serve.auth import published_certificate, server_context

NS = "/api/v1/namespaces/default"
PROTOCOL = "v5.channel.k8s.io"


@pytest.fixture
async def cluster(tmp_path):
    async with serve_accounts(tmp_path / "api") as accounts:
        yield accounts


@pytest.fixture
async def attacker(cluster):
    """May do what an operator of nodes may do, and read logs."""
    await cluster.admin.make(f"{NS}/secrets", {"metadata": {"name": "s"}, "stringData": {"password": "hunter2"}})
    nodes = rule("create get update patch delete", "nodes nodes/status")
    pods = rule("create get", "pods pods/log pods/exec pods/binding")
    return await cluster.account("attacker", nodes, pods, cluster=True)


@asynccontextmanager
async def agent_at(directory, answer):
    """A server with a certificate of its own; it counts the requests that reach it."""
    directory.mkdir()
    seen = []

    async def handle(request):
        seen.append((request.method, request.path))
        return await answer(request)

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    context = server_context(directory, "n", "127.0.0.1", None)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield runner.addresses[0][1], published_certificate(directory), seen
    finally:
        await runner.cleanup()


def status_at(port, address="127.0.0.1"):
    endpoint = {"kubeletEndpoint": {"Port": port}}
    return {"status": {"addresses": [{"type": "InternalIP", "address": address}], "daemonEndpoints": endpoint}}


async def register(caller, port, certificate="", name="n"):
    annotations = {SERVING_CERTIFICATE: certificate} if certificate else {}
    status, answer = await caller("POST", "/api/v1/nodes", {"metadata": {"name": name, "annotations": annotations}})
    assert status == 201, answer
    status, answer = await caller("PATCH", f"/api/v1/nodes/{name}/status", status_at(port), MERGE)
    assert status == 200, answer


async def place_pod(caller, node="n"):
    spec = {"nodeName": node, "containers": [{"name": "c", "image": "x"}]}
    await caller.make(f"{NS}/pods", {"metadata": {"name": "p"}, "spec": spec})


def redirect_to_secrets(cluster):
    async def answer(_request):
        raise web.HTTPFound(f"{cluster.server.url}{NS}/secrets/s")

    return answer


async def run(caller, path=f"{NS}/pods/p/exec?command=id&stdout=true"):
    try:
        async with caller.session.ws_connect(path, protocols=(PROTOCOL,)) as socket:
            message = await socket.receive(timeout=20)
            return 101, message
    except aiohttp.WSServerHandshakeError as error:
        return error.status, ""


async def test_a_node_of_the_attackers_making_is_sent_nothing(cluster, attacker, tmp_path):
    async with agent_at(tmp_path / "evil", redirect_to_secrets(cluster)) as (port, certificate, seen):
        await register(attacker, port)
        await place_pod(attacker)
        status, answer = await attacker("GET", f"{NS}/pods/p/log")
        assert status == 500
        assert "hunter2" not in str(answer)
        assert (await run(attacker))[0] == 500
        assert seen == [], "the certificate was not that of a registered agent"
        mine = {"metadata": {"annotations": {SERVING_CERTIFICATE: certificate}}}
        for path in ("/api/v1/nodes/n", "/api/v1/nodes/n/status"):
            status, answer = await attacker("PATCH", path, mine, MERGE)
            assert status == 403
            assert "cannot attest" in answer["message"]
        made = {"metadata": {"name": "m", **mine["metadata"]}}
        assert (await attacker("POST", "/api/v1/nodes", made))[0] == 403
        assert (await attacker("GET", f"{NS}/pods/p/log"))[0] == 500
        assert seen == []


async def test_a_certificate_of_another_node_is_not_the_attackers(cluster, attacker, tmp_path):
    async def log(_request):
        return web.Response(text="a line")

    async with (
        agent_at(tmp_path / "good", log) as (port, certificate, _),
        agent_at(tmp_path / "evil", redirect_to_secrets(cluster)) as (evil_port, _, seen),
    ):
        await register(cluster.admin, port, certificate)
        await place_pod(cluster.admin)
        assert await attacker("GET", f"{NS}/pods/p/log") == (200, "a line")
        assert (await attacker("PATCH", "/api/v1/nodes/n/status", status_at(evil_port), MERGE))[0] == 200
        assert (await attacker("GET", f"{NS}/pods/p/log"))[0] == 500
        assert seen == []


async def test_a_registered_node_gets_no_redirect_followed(cluster, attacker, tmp_path):
    async with agent_at(tmp_path / "evil", redirect_to_secrets(cluster)) as (port, certificate, seen):
        await register(cluster.admin, port, certificate)
        await place_pod(attacker)
        status, answer = await attacker("GET", f"{NS}/pods/p/log")
        assert status == 500
        assert "hunter2" not in str(answer)
        assert (await run(attacker))[0] == 500
        async with attacker.session.post(f"{NS}/pods/p/exec?command=id") as response:
            assert response.status == 400
            assert "hunter2" not in await response.text()
        assert {path for _, path in seen} == {"/containerLogs/default/p/c", "/exec/default/p/c"}


async def test_a_node_is_shown_no_administrators_certificate(cluster):
    certificate = x509.load_pem_x509_certificate(Path(cluster.server.identity.node_client[0]).read_bytes())
    assert certificate.subject.rfc4514_string() == "CN=moorage-apiserver"
    context = ssl.create_default_context(cafile=str(cluster.server.identity.ca))
    context.load_cert_chain(*map(str, cluster.server.identity.node_client))
    async with aiohttp.ClientSession(cluster.server.url) as session:
        async with session.get(f"{NS}/secrets", ssl=context) as response:
            assert response.status == 403
        async with session.get("/api/v1/nodes", ssl=context) as response:
            assert response.status == 200


async def test_what_a_node_answers_is_bounded(cluster, attacker, tmp_path, monkeypatch):
    monkeypatch.setattr(node_proxy, "_LARGEST_MESSAGE", 1 << 20)
    sent = 0

    async def answer(request):
        nonlocal sent
        if request.headers.get("Upgrade"):
            socket = web.WebSocketResponse(protocols=(PROTOCOL,))
            await socket.prepare(request)
            await socket.send_bytes(b"x" * (2 << 20))
            await socket.close()
            return socket
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        try:
            while sent < 256 << 20:
                await response.write(b"x" * (1 << 20))
                sent += 1 << 20
        except ConnectionError:
            pass
        return response

    async with agent_at(tmp_path / "evil", answer) as (port, certificate, _):
        await register(cluster.admin, port, certificate)
        await place_pod(attacker)
        status, error = await attacker("GET", f"{NS}/pods/p/log")
        assert status == 500
        assert len(error["message"]) <= 2000
        assert sent < 64 << 20, "the rest of an endless answer is not read"
        status, message = await run(attacker)
        assert status == 101
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_a_node_that_never_answers_is_given_up(cluster, attacker, tmp_path, monkeypatch):
    monkeypatch.setattr(node_proxy, "_ANSWER_S", 0.2)

    async def silent(_request):
        await asyncio.sleep(3600)

    async with agent_at(tmp_path / "evil", silent) as (port, certificate, _):
        await register(cluster.admin, port, certificate)
        await place_pod(attacker)
        async with asyncio.timeout(20):
            assert (await attacker("GET", f"{NS}/pods/p/log"))[0] == 500
            assert (await run(attacker))[0] == 500


@pytest.mark.parametrize("recorded", ["nonsense", base64.b64encode(b"no certificate").decode(), "é"])
async def test_an_unreadable_certificate_is_no_certificate(cluster, attacker, recorded):
    await register(cluster.admin, 1, recorded)
    await place_pod(attacker)
    status, answer = await attacker("GET", f"{NS}/pods/p/log")
    assert (status, answer["message"].endswith("is unreadable")) == (500, True)
