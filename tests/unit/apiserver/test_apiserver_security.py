"""Who may connect, how much they may send, and what a slow client can do to the others."""

import asyncio
import contextlib
import io
import json
import ssl
import stat

import aiohttp
import pytest

from moorage.apiserver.limits import ServerLimits
from moorage.apiserver.run import ApiServer, Config
from moorage.errors import UsageError
from moorage.testing import serve

MAPS = "/api/v1/namespaces/default/configmaps"


def session_of(server, token=None, **more):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return aiohttp.ClientSession(server.insecure_url, headers=headers, **more)


async def test_strangers_get_401_and_the_health_check(tmp_path):
    async with serve(tmp_path) as server:
        for token in (None, "wrong", server.token + "x"):
            async with session_of(server, token) as session, session.get(MAPS) as response:
                assert response.status == 401
                assert (await response.json())["reason"] == "Unauthorized"
        async with session_of(server) as session, session.get("/readyz") as response:
            assert await response.text() == "ok"


async def test_the_kubeconfig_is_private_and_its_certificate_opens_the_door(tmp_path):
    async with serve(tmp_path) as server:
        assert stat.S_IMODE(server.kubeconfig.stat().st_mode) == 0o600
        context = ssl.create_default_context(cafile=str(server.identity.ca))
        context.load_cert_chain(*map(str, server.identity.admin))
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(server.url, connector=connector) as session, session.get(MAPS) as response:
            assert response.status == 200
        async with aiohttp.ClientSession(server.url) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(MAPS)


async def test_the_state_on_disk_is_private(tmp_path):
    tmp_path.chmod(0o755)
    async with serve(tmp_path, in_memory=False) as server:
        files = [path for path in server.config.data_dir.rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


async def test_only_loopback_unless_asked(tmp_path):
    with pytest.raises(UsageError, match="loopback"):
        ApiServer(Config(tmp_path, host="0.0.0.0"))


async def test_two_servers_cannot_share_a_directory(tmp_path):
    async with serve(tmp_path):
        second = ApiServer(Config(tmp_path))
        with pytest.raises(UsageError, match="in use"):
            await second.start()


async def test_a_body_over_the_limit_is_413_however_it_is_sent(tmp_path):
    async with serve(tmp_path) as server, session_of(server, server.token) as session:

        async def pieces():
            for _ in range(64):
                yield b" " * (64 << 10)

        for body in (io.BytesIO(b" " * (3 << 20) + b"{}"), pieces()):
            async with session.post(MAPS, data=body, headers={"Content-Type": "application/json"}) as response:
                assert response.status == 413


async def test_a_connection_that_says_nothing_is_closed(tmp_path):
    async with serve(tmp_path, limits=ServerLimits(headers_s=0.1)) as server:
        host, port = server.insecure_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /readyz HTTP/1.1\r\nHost:")  # and never more
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_more_watches_than_allowed_are_told_to_come_back(tmp_path):
    async with (
        serve(tmp_path, limits=ServerLimits(watches=1)) as server,
        session_of(server, server.token) as session,
        session.get(f"{MAPS}?watch=1") as first,
        session.get(f"{MAPS}?watch=1") as second,
    ):
        assert (first.status, second.status) == (200, 429)
        assert int(second.headers["Retry-After"]) > 0


async def count_changes(session, wanted):
    """Read a watch as fast as it comes until so many changes were seen."""
    seen, tail = 0, b""
    async with session.get(f"{MAPS}?watch=1") as response:
        async for chunk in response.content.iter_any():
            text = tail + chunk
            seen += text.count(b'{"type":"MODIFIED"')
            tail = text[-17:] if not text.endswith(b'{"type":"MODIFIED"') else b""
            if seen >= wanted:
                return seen
    return seen


async def test_a_slow_watcher_is_dropped_and_holds_nobody_back(tmp_path):
    limits = ServerLimits(stalled_s=0.5)
    async with serve(tmp_path, limits=limits) as server, session_of(server, server.token) as session:
        host, port = server.insecure_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        request = f"GET {MAPS}?watch=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n"
        writer.write(request.encode())
        await reader.readline()
        writer.transport.pause_reading()
        async with session.post(MAPS, json={"metadata": {"name": "big"}, "data": {"x": "y" * 400_000}}) as response:
            assert response.status == 201
        quick = asyncio.create_task(count_changes(session, 40))
        while server.metrics.watches < 2:
            await asyncio.sleep(0.01)
        for n in range(40):
            patch = json.dumps({"data": {"n": str(n)}})
            headers = {"Content-Type": "application/merge-patch+json"}
            async with session.patch(f"{MAPS}/big", data=patch, headers=headers) as changed:
                assert changed.status == 200
        async with asyncio.timeout(30):
            assert await quick == 40
            while server.metrics.watches:
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_rbac_holds_accounts_to_their_roles_when_switched_on(tmp_path):
    async with serve(tmp_path, enforces_rbac=True) as server, session_of(server, server.token) as admin:

        async def make(path, body):
            async with admin.post(path, json=body) as response:
                assert response.status == 201, await response.text()
                return await response.json()

        await make("/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "bob"}})
        token = (await make("/api/v1/namespaces/default/serviceaccounts/bob/token", {"spec": {}}))["status"]["token"]
        rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
        rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}
        await make(f"{rbac}/roles", {"metadata": {"name": "r"}, "rules": [rule]})
        subject = {"kind": "ServiceAccount", "name": "bob", "namespace": "default"}
        ref = {"kind": "Role", "name": "r", "apiGroup": "rbac.authorization.k8s.io"}
        await make(f"{rbac}/rolebindings", {"metadata": {"name": "b"}, "roleRef": ref, "subjects": [subject]})
        async with session_of(server, token) as bob:
            async with bob.get(MAPS) as response:
                assert response.status == 200
            for path in ("/api/v1/namespaces/default/secrets", "/api/v1/nodes", f"{MAPS}/a"):
                async with bob.get(path) as response:
                    assert response.status == 403


async def test_keys_made_by_another_process_are_the_same_keys(tmp_path):
    async with serve(tmp_path / "a", makes_keys_apart=True) as server:
        made = {path.name for path in (tmp_path / "a" / "pki").iterdir()}
        context = ssl.create_default_context(cafile=str(tmp_path / "a" / "pki" / "ca.crt"))
        async with aiohttp.ClientSession(server.url) as session:
            headers = {"Authorization": f"Bearer {server.token}"}
            async with session.get("/api/v1/namespaces", headers=headers, ssl=context) as response:
                assert response.status == 200
    async with serve(tmp_path / "b"):
        assert made == {path.name for path in (tmp_path / "b" / "pki").iterdir()}
    for path in (tmp_path / "a" / "pki").iterdir():
        assert path.suffix == ".crt" or path.stat().st_mode & 0o077 == 0
