"""Logs and commands go on to the node that runs the pod."""

import ssl

import aiohttp
import pytest
from aiohttp import web

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
async def node(api):
    """An agent with one pod: it knows its log, and its shell answers what it is told."""

    async def logs(request):
        certificate = request.transport.get_extra_info("peercert")
        who = dict(part[0] for part in certificate["subject"])
        if request.query.get("tailLines") == "-1":
            return web.Response(status=422, text="tailLines: must not be negative")
        return web.Response(text=f"{request.match_info['container']} {request.query_string} {who['commonName']}")

    async def run(request):
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(b"\x01" + message.data[1:].upper() + b" " + request.query_string.encode())
            await socket.send_bytes(b"\x03{}")
            break
        await socket.close()
        return socket

    async def refuse(request):
        status, text = {
            "ended": (400, "container ended is not running"),
            "spdy": (400, "unable to upgrade: missing upgrade headers in request"),
            "gone": (404, '{"kind": "Status", "message": "pod is gone: really"}'),
        }[request.match_info["container"]]
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/exec/default/q/{container}", refuse)
    app.router.add_get("/containerLogs/default/p/{container}", logs)
    app.router.add_get("/exec/default/p/{container}", run)
    runner = web.AppRunner(app)
    await runner.setup()
    identity = api.server.identity
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*identity.server)
    context.load_verify_locations(identity.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    await api.make("/api/v1/nodes", {"metadata": {"name": "n1"}})
    status = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
              "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}  # fmt: skip
    await api.merge("/api/v1/nodes/n1/status", {"status": status})
    await api.make(PODS, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "host"}]}})
    yield
    await runner.cleanup()


async def bind(api):
    body = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}}
    await api("POST", f"{PODS}/p/binding", body, expect=201)


async def test_logs_come_from_the_node_and_it_knows_who_asks(api, node):
    assert "not scheduled" in (await api("GET", f"{PODS}/p/log", expect=400))["message"]
    await bind(api)
    async with api.session.get(f"{PODS}/p/log?tailLines=5&container=a") as response:
        assert await response.text() == "a tailLines=5 moorage-apiserver"
    await api("GET", f"{PODS}/p/log?container=b", expect=400)
    await api("GET", f"{PODS}/none/log", expect=404)


@pytest.mark.parametrize("address", ["127.0.0.1:1/x?", "127.0.0.1/api", "a@127.0.0.1", "127.0.0.1#"])
async def test_an_address_that_leads_elsewhere_is_not_asked(api, node, address):
    await bind(api)
    status = {"addresses": [{"type": "InternalIP", "address": address}]}
    await api.merge("/api/v1/nodes/n1/status", {"status": status})
    assert "no address" in (await api("GET", f"{PODS}/p/log", expect=500))["message"]


async def test_a_command_is_a_websocket_through_to_the_node(api, node):
    await bind(api)
    url = f"{PODS}/p/exec?container=a&command=sh&command=true&stdin=true&stdout=true&stderr=false&tty=true"
    async with api.session.ws_connect(url, protocols=("v5.channel.k8s.io", "v4.channel.k8s.io")) as socket:
        assert socket.protocol == "v5.channel.k8s.io"
        await socket.send_bytes(b"\x00echo")
        assert (await socket.receive_bytes(timeout=10)) == b"\x01ECHO command=sh&command=true&input=1&output=1&tty=1"
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await api.session.ws_connect(url, protocols=("v1.other",))


@pytest.mark.parametrize("is_web_socket", [True, False])
@pytest.mark.parametrize(
    ("container", "status", "words"),
    [
        ("ended", 400, "container ended is not running"),
        ("spdy", 400, "kubectl 1.31 or later"),
        ("gone", 404, "pod is gone: really"),
    ],
)
async def test_why_a_node_takes_no_command_is_told_in_its_words(api, node, container, status, words, is_web_socket):
    """A kubectl whose WebSocket was refused tries SPDY next, and shows only the answer to that."""
    pod = {"metadata": {"name": "q"}, "spec": {"nodeName": "n1", "containers": [{"name": container, "image": "host"}]}}
    await api.make(PODS, pod)
    headers = {"Upgrade": "SPDY/3.1", "Connection": "Upgrade"}
    if is_web_socket:
        headers = {
            "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Protocol": "v5.channel.k8s.io",
            "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }  # fmt: skip
    async with api.session.get(f"{PODS}/q/exec?command=true&stdout=true", headers=headers) as answer:
        body = await answer.json()
    assert answer.status == body["code"] == status
    assert words in body["message"]
    assert "{" not in body["message"]


async def test_what_is_not_served_is_said_in_words(api, node):
    await bind(api)
    answer = await api("POST", f"{PODS}/p/portforward", expect=501)
    assert "network of their node" in answer["message"]
    async with api.session.get(f"{PODS}/p/log?tailLines=-1") as response:
        assert (response.status, (await response.json())["reason"]) == (422, "Invalid")
