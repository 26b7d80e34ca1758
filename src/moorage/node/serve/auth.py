"""Who may ask the agent for logs, exec and figures.

Owns: the endpoint's own certificate, and the judgement on a client: a certificate of the cluster's authority, or a
bearer token that the API server vouches for; then the API server's word on a subresource of the node, the same that
kubelet asks for: `nodes/metrics`, `nodes/stats`, and `nodes/proxy` for most else. A client without either is let in
only if its socket belongs to root of this machine, who could do the same without asking.
Start reading at: `Gate.refusal`.
"""

import datetime
import hmac
import ipaddress
import json
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moorage.errors import MoorageError
from moorage.kube.client import Client
from moorage.kube.config import ApiConfig

_REMEMBERED_S = 60.0
_MASTERS = "system:masters"
_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_SUBRESOURCES = {"metrics": ("metrics",), "stats": ("stats",), "pods": ("pods", "proxy")}


def server_context(directory: Path, name: str, address: str, authority: bytes | None) -> ssl.SSLContext:
    """TLS for the endpoint, with a certificate of its own; client certificates are checked against `authority`."""
    certificate, key = directory / "kubelet.crt", directory / "kubelet.key"
    if not certificate.exists() or not key.exists():
        _make_certificate(certificate, key, name, address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    if authority:
        context.load_verify_locations(cadata=authority)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def authority_of(api: ApiConfig, file: Path | None) -> bytes | None:
    """The authority whose client certificates count: the given file's, or the one that signed the API server."""
    if file is not None:
        return b"".join(
            one.public_bytes(serialization.Encoding.DER) for one in x509.load_pem_x509_certificates(file.read_bytes())
        )
    return b"".join(api.tls.get_ca_certs(binary_form=True)) or None if api.tls is not None else None


class Gate:
    """Lets requests in, or says why not."""

    def __init__(self, api: ApiConfig, client: Client, node: str) -> None:
        self._api = api
        self._client = client
        self._node = node
        self._judged: dict[tuple[str, ...], tuple[float, bool]] = {}

    async def refusal(self, request: web.Request) -> web.Response | None:
        """None when the client may go on."""
        user = await self._user(request)
        if user is None:
            text = "a client certificate of the cluster, or a bearer token, is needed"
            return web.Response(status=401, text=text)
        name, groups = user
        if _MASTERS in groups:
            return None
        verb = _VERBS.get(request.method, request.method.lower())
        subresources = _SUBRESOURCES.get(request.path.split("/")[1], ("proxy",))
        for subresource in subresources:
            if await self._may(name, groups, verb, subresource):
                return None
        wanted = " or ".join(f"nodes/{one}" for one in subresources)
        return web.Response(status=403, text=f"user {name} may not {verb} {wanted} of node {self._node}")

    async def _user(self, request: web.Request) -> tuple[str, tuple[str, ...]] | None:
        peer: Mapping[str, Any] | None = request.transport.get_extra_info("peercert") if request.transport else None
        if peer:
            names = [pair for part in peer.get("subject", ()) for pair in part]
            common = next((value for key, value in names if key == "commonName"), "")
            return common, tuple(value for key, value in names if key == "organizationName")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return ("root", (_MASTERS,)) if owner_of_peer(request) == 0 else None
        if self._api.token is not None and hmac.compare_digest(token, await self._api.token()):
            return f"system:node:{self._node}", (_MASTERS,)  # our own credentials
        return await self._reviewed(token)

    async def _reviewed(self, token: str) -> tuple[str, tuple[str, ...]] | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = await self._review("/apis/authentication.k8s.io/v1/tokenreviews", body)
        if not status.get("authenticated"):
            return None
        user = status.get("user") or {}
        return str(user.get("username") or ""), tuple(user.get("groups") or ())

    async def _may(self, user: str, groups: tuple[str, ...], verb: str, subresource: str) -> bool:
        key = (verb, subresource, user, *groups)
        known = self._judged.get(key)
        now = time.monotonic()
        if known is not None and now - known[0] < _REMEMBERED_S:
            return known[1]
        resource = {
            "verb": verb, "version": "v1", "resource": "nodes", "subresource": subresource, "name": self._node,
        }  # fmt: skip
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": list(groups), "resourceAttributes": resource},
        }
        status = await self._review("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        allowed = bool(status.get("allowed"))
        if len(self._judged) > 256:
            self._judged.clear()
        self._judged[key] = (now, allowed)
        return allowed

    async def _review(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer = json.loads(await self._client.request("POST", path, body))
        except MoorageError:
            return {}  # nobody vouches for the client
        return answer.get("status") or {}


def owner_of_peer(request: web.Request) -> int | None:
    """The user who owns the other end of a loopback connection, as the kernel's table says; None for any other."""
    if request.transport is None:
        return None
    peer, own = request.transport.get_extra_info("peername"), request.transport.get_extra_info("sockname")
    if not peer or not own or not ipaddress.ip_address(peer[0]).is_loopback:
        return None
    wanted = [_as_in_table(*peer[:2]), _as_in_table(*own[:2])]
    table = "/proc/net/tcp6" if ":" in peer[0] else "/proc/net/tcp"
    with open(table, encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            if fields[1:3] == wanted:
                return int(fields[7])
    return None


def _as_in_table(address: str, port: int) -> str:
    packed = ipaddress.ip_address(address).packed
    words = [packed[start : start + 4][::-1] for start in range(0, len(packed), 4)]
    return f"{b''.join(words).hex().upper()}:{port:04X}"


def _make_certificate(certificate: Path, key_file: Path, name: str, address: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"system:node:{name}"[:64])])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(address))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private)
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
