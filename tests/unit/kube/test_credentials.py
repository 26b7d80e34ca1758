"""Where the API is and who we are: kubeconfigs, accounts, tokens that change, certificates, plugins and sockets."""

import asyncio
import base64
import datetime
import ipaddress
import json
import ssl
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moorage.errors import UsageError
from moorage.kube.api import config
from moorage.kube.api.client import Client
from moorage.kube.errors import Unauthorized, Unavailable
from moorage.kube.objects.core import ConfigMap


def write(path, server, user, **cluster):
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "work"}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


class Authority:
    """A certificate authority and what it signed, as PEM."""

    def __init__(self):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.certificate = self._sign(self.key, self.name, x509.BasicConstraints(ca=True, path_length=None))

    def _sign(self, key, name, *extensions):
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder(self.name, name, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(hours=1)
        )
        for extension in extensions:
            made = made.add_extension(extension, critical=False)
        return made.sign(self.key, hashes.SHA256())

    def pair(self, common_name):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        where = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._sign(key, name, where).public_bytes(serialization.Encoding.PEM), pem

    @property
    def pem(self):
        return self.certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def authority():
    return Authority()


def serving(authority, tmp_path, demand=False):
    certificate, key = authority.pair("server")
    (tmp_path / "s.crt").write_bytes(certificate)
    (tmp_path / "s.key").write_bytes(key)
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    tls.load_cert_chain(tmp_path / "s.crt", tmp_path / "s.key")
    tls.verify_mode = ssl.CERT_REQUIRED if demand else ssl.CERT_NONE
    return tls


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def text(pem):
    return base64.b64encode(pem).decode()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_certificate_is_shown(fake, authority, tmp_path, inline):
    api = await fake().start(tls=serving(authority, tmp_path, demand=True))
    certificate, key = authority.pair("client")
    if inline:
        user = {"client-certificate-data": text(certificate), "client-key-data": text(key)}
        cluster = {"certificate-authority-data": text(authority.pem)}
    else:
        (tmp_path / "c.crt").write_bytes(certificate)
        (tmp_path / "c.key").write_bytes(key)
        user, cluster = {"client-certificate": "c.crt", "client-key": "c.key"}, {"certificate-authority": "ca.crt"}
    path = write(tmp_path / "config", f"https://127.0.0.1:{api.port}", user, **cluster)
    async with Client(config.load(str(path))) as client:
        assert client.namespace == "work"
        assert (await client.list(ConfigMap)).items == []
    await api.stop()


class Rotated:
    """A kubeconfig whose user has a certificate and a key in files, which somebody rotates."""

    def __init__(self, folder, port):
        self.crt, self.key = folder / "c.crt", folder / "c.key"
        user, cluster = {"client-certificate": "c.crt", "client-key": "c.key"}, {"certificate-authority": "ca.crt"}
        self._path = (folder / "config", f"https://127.0.0.1:{port}", user, cluster)

    def put(self, certificate, key):
        for file, content in ((self.crt, certificate), (self.key, key)):
            file.with_suffix(".new").write_bytes(content)
            file.with_suffix(".new").rename(file)

    def load(self):
        path, server, user, cluster = self._path
        return config.load(str(write(path, server, user, **cluster)))


async def test_a_rotated_certificate_is_used_when_the_server_refuses_the_old_one(fake, authority, tmp_path):
    api = await fake().start(tls=serving(authority, tmp_path, demand=True))
    rotated = Rotated(tmp_path, api.port)
    rotated.put(*authority.pair("first"))
    async with Client(rotated.load()) as client:
        await client.list(ConfigMap)
        rotated.put(*authority.pair("second"))
        await client.list(ConfigMap)
        api.accept_name = "second"
        await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
        assert api.names == ["first", "first", "first", "second"]  # the last on a connection of its own
        api.accept_name, connections = "third", len(api.transports)
        with pytest.raises(Unauthorized):
            await client.list(ConfigMap)
        assert len(api.seen) == 6
        assert len(api.transports) == connections + 1  # a connection that was refused is not asked twice
    await api.stop()


async def test_half_of_a_rotated_certificate_changes_nothing(fake, authority, tmp_path, caplog):
    api = await fake().start(tls=serving(authority, tmp_path, demand=True))
    rotated, first, second = Rotated(tmp_path, api.port), authority.pair("first"), authority.pair("second")
    rotated.put(*first)
    async with Client(rotated.load()) as client:
        api.accept_name = "second"
        for half in ((second[0], first[1]), (second[0], second[1][:50]), (b"", second[1])):
            rotated.put(*half)
            with pytest.raises(Unauthorized):
                await client.list(ConfigMap)
            assert set(api.names) == {"first"}
        rotated.key.unlink()
        with pytest.raises(Unauthorized):
            await client.list(ConfigMap)
        assert "cannot be loaded" in caplog.text
        rotated.put(*second)
        await client.list(ConfigMap)
        assert api.names[-1] == "second"
    await api.stop()


async def test_a_rotated_certificate_is_found_within_a_minute_and_costs_nothing_under_way(fake, authority, tmp_path):
    api = await fake().start(tls=serving(authority, tmp_path, demand=True))
    rotated, clock = Rotated(tmp_path, api.port), [0.0]
    rotated.put(*authority.pair("first"))
    loaded = rotated.load()
    pair = config.RenewablePair(loaded.tls, rotated.crt, rotated.key, clock=lambda: clock[0])
    async with Client(replace(loaded, pair=pair)) as client, aclosing(client.watch(ConfigMap)) as changes:
        heard = asyncio.create_task(anext(changes))
        await until(lambda: api.watchers)
        rotated.put(*authority.pair("second"))
        for seconds, name in ((59, "first"), (61, "second")):
            clock[0] = seconds
            await client.list(ConfigMap)
            assert api.names[-1] == name
        assert len(api.seen) == 3  # nothing was refused
        api.put("/api/v1/namespaces/ns/configmaps/a")
        assert (await heard).object.name == "a"
    await api.stop()


async def test_a_server_that_hangs_up_on_the_old_certificate_gets_the_new_one(fake, authority, tmp_path):
    api, other = fake(), Authority()
    await api.start(tls=serving(authority, tmp_path, demand=True))
    rotated = Rotated(tmp_path, api.port)
    rotated.put(*authority.pair("first"))
    async with Client(rotated.load()) as client:
        await client.list(ConfigMap)
        await api.stop()
        (tmp_path / "other.crt").write_bytes(other.pem)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "other.crt"))
        tls.load_cert_chain(tmp_path / "s.crt", tmp_path / "s.key")
        tls.verify_mode = ssl.CERT_REQUIRED
        await api.start(tls=tls)
        rotated.put(*other.pair("second"))
        await client.list(ConfigMap)
        assert api.names == ["first", "second"]
    await api.stop()


async def test_a_server_of_another_authority_is_refused_at_once(fake, authority, tmp_path):
    api = await fake().start(tls=serving(authority, tmp_path))
    stranger = {"certificate-authority-data": text(Authority().pem)}
    path = write(tmp_path / "config", f"https://127.0.0.1:{api.port}", {"token": "t"}, **stranger)
    async with Client(config.load(str(path))) as client:
        with pytest.raises(Unavailable, match="certificate"):
            await client.list(ConfigMap)
    assert api.seen == []
    path = write(tmp_path / "config", f"https://127.0.0.1:{api.port}", {}, **{"insecure-skip-tls-verify": True})
    async with Client(config.load(str(path))) as client:
        assert (await client.list(ConfigMap)).items == []
    await api.stop()


def test_an_authority_counts_as_the_clusters_only_if_it_is_named(authority, tmp_path, monkeypatch):
    (tmp_path / "web.crt").write_bytes(Authority().pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "web.crt"))  # what this machine trusts
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    cluster_ca = authority.certificate.public_bytes(serialization.Encoding.DER)
    for cluster, expected in (
        ({}, None),
        ({"certificate-authority-data": "", "certificate-authority": ""}, None),
        ({"insecure-skip-tls-verify": True}, None),
        ({"certificate-authority": "ca.crt"}, cluster_ca),
        ({"certificate-authority-data": text(authority.pem)}, cluster_ca),
    ):
        found = config.from_kubeconfig(write(tmp_path / "config", "https://127.0.0.1:1", {}, **cluster))
        assert found.authority == expected
        assert found.tls is not None
        assert found.tls.get_ca_certs()  # the server is checked, or could be, in either case
    assert config.from_values("https://127.0.0.1:1").authority is None
    assert config.from_values("https://127.0.0.1:1", ca_file=str(tmp_path / "ca.crt")).authority == cluster_ca
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    assert config.from_account(tmp_path).authority == cluster_ca


async def test_a_unix_socket_is_spoken_to(fake, tmp_path):
    api = await fake().start(unix=str(tmp_path / "api.sock"))
    path = write(tmp_path / "config", f"unix://{tmp_path / 'api.sock'}", {"token": "secret"})
    api.accept_token = "secret"
    async with Client(config.load(str(path))) as client:
        await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
        api.cut_idle()
        await asyncio.sleep(0)
        await client.create(ConfigMap, {"metadata": {"name": "b"}}, "ns")
        assert len((await client.list(ConfigMap)).items) == 2
    await api.stop()


def test_a_token_file_is_read_again_each_minute_and_after_a_refusal(virtual, fake, tmp_path):
    async def story():
        clock = [0.0]
        async with fake() as api:
            (tmp_path / "token").write_text("first\n")
            source = config.token_file(tmp_path / "token", clock=lambda: clock[0])
            api.accept_token = "first"
            async with Client(config.ApiConfig(api.config.server, token=source)) as client:
                await client.list(ConfigMap)
                (tmp_path / "token").write_text("second")
                await client.list(ConfigMap)  # the old one is good until the server says otherwise
                clock[0] = 61
                api.accept_token = "second"
                await client.list(ConfigMap)
                assert len(api.seen) == 3
                (tmp_path / "token").write_text("third")
                api.accept_token = "third"
                await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
                assert len(api.seen) == 5  # refused once, then with the new token
                api.accept_token = "unknown"
                with pytest.raises(Unauthorized):
                    await client.list(ConfigMap)
                assert len(api.seen) == 7
                (tmp_path / "token").unlink()
                clock[0] = 200
                with pytest.raises(Unauthorized, match="token"):
                    await client.list(ConfigMap)

    virtual(story)


PLUGIN = """
import json, os, sys, pathlib
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
status = {"token": f"token-{number}-{os.environ['EXTRA']}"}
if len(sys.argv) > 2:
    status["expirationTimestamp"] = sys.argv[2]
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def exec_user(tmp_path, *arguments):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(tmp_path / "plugin.py"), str(tmp_path / "count"), *arguments],
            "env": [{"name": "EXTRA", "value": "x"}],
        }
    }


async def test_a_credential_plugin_is_run_once_for_many_requests_and_again_when_refused(fake, tmp_path):
    async with fake() as api:
        path = write(tmp_path / "config", api.config.server, exec_user(tmp_path, "2999-01-01T00:00:00Z"))
        api.accept_token = "token-1-x"
        async with Client(config.load(str(path))) as client:
            await asyncio.gather(*(client.list(ConfigMap) for _ in range(5)))
            assert (tmp_path / "count").read_text() == "1"
            api.accept_token = "token-2-x"
            await client.list(ConfigMap)
            assert (tmp_path / "count").read_text() == "2"


async def test_an_expired_plugin_token_is_replaced_before_it_is_used(fake, tmp_path):
    async with fake() as api:
        path = write(tmp_path / "config", api.config.server, exec_user(tmp_path, "2001-01-01T00:00:00Z"))
        async with Client(config.load(str(path))) as client:
            await client.list(ConfigMap)
            await client.list(ConfigMap)
        assert [headers["Authorization"] for headers in api.headers] == ["Bearer token-1-x", "Bearer token-2-x"]


@pytest.mark.parametrize("script", ["import sys; sys.exit(3)", "print('no json')", "print('{}')"])
async def test_a_plugin_that_fails_is_named(fake, tmp_path, script):
    async with fake() as api:
        user = exec_user(tmp_path)
        (tmp_path / "plugin.py").write_text(script)
        path = write(tmp_path / "config", api.config.server, user)
        async with Client(config.load(str(path))) as client:
            with pytest.raises(Unauthorized, match="credential plugin"):
                await client.list(ConfigMap)


async def test_a_plugin_may_give_a_certificate(fake, authority, tmp_path):
    api = await fake().start(tls=serving(authority, tmp_path, demand=True))
    certificate, key = authority.pair("from-plugin")
    status = {"clientCertificateData": certificate.decode(), "clientKeyData": key.decode()}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    user = exec_user(tmp_path)
    (tmp_path / "plugin.py").write_text(f"print({json.dumps(answer)!r})")
    where = {"certificate-authority": "ca.crt"}
    path = write(tmp_path / "config", f"https://127.0.0.1:{api.port}", user, **where)
    async with Client(config.load(str(path))) as client:
        assert (await client.list(ConfigMap)).items == []
    await api.stop()


ASKED = """
import json, os, sys, pathlib
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
pathlib.Path(sys.argv[1]).write_text(json.dumps({"info": info, "stdin": sys.stdin.read()}))
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": "t"}}))
"""


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
@pytest.mark.parametrize("provides", [True, False])
async def test_a_plugin_learns_of_the_cluster_if_asked_to_and_gets_no_input(
    fake, authority, tmp_path, version, provides
):
    api = await fake().start(tls=serving(authority, tmp_path))
    user = exec_user(tmp_path)
    api_version = f"client.authentication.k8s.io/{version}"
    user["exec"] |= {"apiVersion": api_version, "provideClusterInfo": provides, "interactiveMode": "IfAvailable"}
    (tmp_path / "plugin.py").write_text(ASKED)
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    cluster = {"certificate-authority": "ca.crt", "extensions": [extension, {"name": "other", "extension": 1}]}
    server = f"https://127.0.0.1:{api.port}"
    async with Client(config.load(str(write(tmp_path / "config", server, user, **cluster)))) as client:
        await client.list(ConfigMap)
    asked = json.loads((tmp_path / "count").read_text())
    expected: dict[str, Any] = {"interactive": False}
    if provides:
        info = {"server": server, "certificate-authority-data": text(authority.pem), "config": {"audience": "x"}}
        expected["cluster"] = info
    assert asked == {"info": {"apiVersion": api_version, "kind": "ExecCredential", "spec": expected}, "stdin": ""}
    await api.stop()


async def test_a_plugin_without_an_expiry_runs_again_only_when_refused(fake, tmp_path):
    async with fake() as api:
        path = write(tmp_path / "config", api.config.server, exec_user(tmp_path))
        loaded: Any = config.load(str(path))
        await loaded.token()
        loaded.token._clock = lambda: 1e12  # much later
        await loaded.token()
        assert (tmp_path / "count").read_text() == "1"
        loaded.token.expire()
        assert await loaded.token() == "token-2-x"


async def test_a_plugin_is_found_beside_its_kubeconfig(fake, tmp_path):
    async with fake() as api:
        user = exec_user(tmp_path)
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "plugin"
        script.write_text(f"#!{sys.executable}\n{PLUGIN}")
        script.chmod(0o755)
        user["exec"] |= {"command": "bin/plugin", "args": [str(tmp_path / "count")]}
        loaded: Any = config.load(str(write(tmp_path / "config", api.config.server, user)))
        assert await loaded.token() == "token-1-x"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"command": "surely-not-installed", "installHint": "Get it at the shop."}, "is not installed. Get it at the"),
        ({"args": ["-c", "import sys; sys.exit('no login')"]}, "ended with code 1: no login"),
        ({"args": ["-c", 'print(\'{"kind": "ExecCredential", "apiVersion": "other"}\')']}, "another version"),
    ],
)
async def test_what_is_wrong_with_a_plugin_is_said(tmp_path, change, complaint):
    user = exec_user(tmp_path)
    user["exec"] |= change
    loaded: Any = config.load(str(write(tmp_path / "config", "https://127.0.0.1:1", user)))
    with pytest.raises(Unauthorized, match=complaint):
        await loaded.token()


async def test_what_a_plugin_printed_is_in_no_error(tmp_path):
    for printed in ("secret-token", '{"kind": "ExecCredential", "status": {"token": "secret-token"}}'):
        user = exec_user(tmp_path)
        user["exec"]["args"] = ["-c", f"print({printed!r})"]
        loaded: Any = config.load(str(write(tmp_path / "config", "https://127.0.0.1:1", user)))
        with pytest.raises(Unauthorized) as caught:
            await loaded.token()
        assert "secret-token" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"interactiveMode": "Always"}, "always needs a terminal"),
        ({"apiVersion": "client.authentication.k8s.io/v1alpha1"}, "supported are"),
        ({"command": ""}, "names no command"),
        ({"env": {"A": "b"}}, "is no list of names"),
        ({"env": [{"value": "b"}]}, "is no list of names"),
    ],
)
def test_a_plugin_that_cannot_work_here_is_refused_at_once(tmp_path, change, complaint):
    user = exec_user(tmp_path)
    user["exec"] |= change
    with pytest.raises(UsageError, match=complaint):
        config.load(str(write(tmp_path / "config", "https://127.0.0.1:1", user)))


async def test_a_new_certificate_of_a_plugin_is_shown_on_new_connections(fake, authority, tmp_path):
    api = await fake().start(tls=serving(authority, tmp_path, demand=True))
    user = exec_user(tmp_path)
    user["exec"]["args"] = ["-c", f"print(open({str(tmp_path / 'answer')!r}).read())"]

    def answer(name):
        certificate, key = authority.pair(name)
        status = {"clientCertificateData": certificate.decode(), "clientKeyData": key.decode()}
        document = {"apiVersion": user["exec"]["apiVersion"], "kind": "ExecCredential", "status": status}
        (tmp_path / "answer").write_text(json.dumps(document))

    answer("first")
    where = {"certificate-authority": "ca.crt"}
    path = write(tmp_path / "config", f"https://127.0.0.1:{api.port}", user, **where)
    async with Client(config.load(str(path))) as client:
        await client.list(ConfigMap)
        answer("second")
        api.accept_name = "second"
        await client.list(ConfigMap)
    assert api.names == ["first", "first", "second"]
    await api.stop()


async def test_several_kubeconfigs_are_one_and_each_has_its_own_paths(fake, tmp_path, monkeypatch):
    async with fake() as api:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        (tmp_path / "two" / "token").write_text("from-two")
        first = {"current-context": "x", "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]}
        (tmp_path / "one" / "config").write_text(yaml.safe_dump(first))
        second = write(tmp_path / "two" / "config", api.config.server, {"tokenFile": "token"})
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/missing:{tmp_path}/one/config:{second}")
        async with Client(config.load()) as client:
            await client.list(ConfigMap)
        assert api.headers[-1]["Authorization"] == "Bearer from-two"


def test_the_account_of_a_pod_is_found(monkeypatch, tmp_path, authority):
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    (tmp_path / "token").write_text("account-token")
    (tmp_path / "namespace").write_text("storage\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    found: Any = config.from_account(tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:6443", "storage")
    assert asyncio.run(found.token()) == "account-token"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no entry"),
        ("- a list", "not a mapping"),
        ("a: [", "kubeconfig"),
        ("current-context: x", "no entry 'x' in contexts"),
        ("current-context: x\ncontexts: [{name: x, context: text}]", "no entry 'x' in contexts"),
        ("current-context: x\ncontexts: [7]", "no entry 'x' in contexts"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: y}}]", "no entry 'y' in clusters"),
    ],
)
def test_a_broken_kubeconfig_is_explained(tmp_path, content, complaint):
    (tmp_path / "config").write_text(content)
    with pytest.raises(UsageError, match=complaint):
        config.from_kubeconfig(tmp_path / "config")


@pytest.mark.parametrize("cluster", [{"certificate-authority": "missing"}, {"certificate-authority-data": "!!"}])
def test_certificates_that_cannot_be_read_are_explained(tmp_path, cluster):
    with pytest.raises(UsageError, match="certificates of context 'here'"):
        config.from_kubeconfig(write(tmp_path / "config", "https://127.0.0.1:1", {}, **cluster))


def test_the_official_package_is_not_imported_by_the_layer():
    code = (
        "import sys, moorage.kube.api.client, moorage.kube.cache.informer, "
        "moorage.kube.control.queue, moorage.kube.control.events, "
        "moorage.kube.control.election, moorage.kube.selectors, moorage.kube.quantity, moorage.kube.objects; "
        "sys.exit('kubernetes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
