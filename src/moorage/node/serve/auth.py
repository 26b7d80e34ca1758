"""Who may ask the agent for logs, exec and figures.

Owns: the endpoint's own certificate, and the judgement on a client: a certificate of the cluster's authority, or a
bearer token that the API server vouches for; then the API server's word on a subresource of the node, the same that
kubelet asks for: `nodes/metrics`, `nodes/stats`, and `nodes/proxy` for most else. A client without either is let in
only if its socket is held by root of this machine, who could do the same without asking; root of a pod could not.
Start reading at: `Gate.refusal`.
"""

import asyncio
import base64
import contextlib
import datetime
import hmac
import ipaddress
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moorage.errors import MoorageError
from moorage.host.threads import in_thread
from moorage.kube.api.client import Client
from moorage.kube.api.config import ApiConfig
from moorage.log import get_logger
from moorage.node.serve.peers import Ends, ends_of, roots_outside_of_pods

log = get_logger(__name__)

_REMEMBERED_S = 60.0
_MASTERS, _AUTHENTICATED = "system:masters", "system:authenticated"
_WHO = "a client certificate of the cluster, a bearer token, or root of this machine outside of pods is needed"
_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_SUBRESOURCES = {"metrics": ("metrics",), "stats": ("stats",), "pods": ("pods", "proxy")}


def server_context(directory: Path, name: str, address: str, authority: bytes | None) -> ssl.SSLContext:
    """TLS for the endpoint, with a certificate of its own; client certificates are checked against `authority`."""
    certificate, key = directory / "kubelet.crt", directory / "kubelet.key"
    try:
        context = _context_from(certificate, key)
    except OSError as error:  # not there, cut short, or not of one pair; ssl.SSLError is an OSError
        if certificate.exists():
            log.warning("certificate is replaced", path=str(certificate), reason=str(error))
        _make_certificate(certificate, key, name, address)
        context = _context_from(certificate, key)
    if authority:
        context.load_verify_locations(cadata=authority)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def published_certificate(directory: Path) -> str:
    """Return the endpoint's certificate as the Node announces it: DER in base64."""
    return base64.b64encode(ssl.PEM_cert_to_DER_cert((directory / "kubelet.crt").read_text())).decode()


def _context_from(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def authority_of(api: ApiConfig, file: Path | None) -> bytes | None:
    """The authority whose client certificates count: the given file's, or the one that our configuration names for
    the API server. None without either: those that a system trusts for web sites are not trusted here."""
    if file is not None:
        return b"".join(
            one.public_bytes(serialization.Encoding.DER) for one in x509.load_pem_x509_certificates(file.read_bytes())
        )
    return api.authority


@dataclass(slots=True)
class _Look:
    """One look through all processes, for several clients."""

    connections: list[Ends] = field(default_factory=list)
    answers: list[bool] | None = None


class Gate:
    """Lets requests in, or says why not."""

    def __init__(self, api: ApiConfig, client: Client, node: str) -> None:
        self._api = api
        self._client = client
        self._node = node
        self._judged: dict[tuple[str, ...], tuple[float, bool]] = {}
        self._looking = asyncio.Lock()
        self._next_look = _Look()

    async def refusal(self, request: web.Request) -> web.Response | None:
        """None when the client may go on."""
        user = await self._user(request)
        if user is None:
            refusal = web.Response(status=401, text=_WHO)
            refusal.force_close()  # the client has to connect again before its next request
            return refusal
        name, groups = user
        if _MASTERS in groups:
            return None
        verb = _VERBS.get(request.method, request.method.lower())
        subresources = _SUBRESOURCES.get(request.path.split("/")[1], ("proxy",))
        answers = []
        for subresource in subresources:
            answers.append(await self._may(name, groups, verb, subresource))
            if answers[-1]:
                return None
        what = f"{verb} {' or '.join(f'nodes/{one}' for one in subresources)} of node {self._node}"
        if None in answers:
            text = f"the API server does not say whether user {name} may {what}; try again"
            return web.Response(status=503, text=text)
        return web.Response(status=403, text=f"user {name} may not {what}")

    async def _user(self, request: web.Request) -> tuple[str, tuple[str, ...]] | None:
        peer: Mapping[str, Any] | None = request.transport.get_extra_info("peercert") if request.transport else None
        if peer:
            names = [pair for part in peer.get("subject", ()) for pair in part]
            common = next((value for key, value in names if key == "commonName"), "")
            groups = (value for key, value in names if key == "organizationName")
            return common, (*(one for one in groups if one != _AUTHENTICATED), _AUTHENTICATED)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return ("root", (_MASTERS,)) if await self._is_root(request) else None
        if not token.isascii():
            return None
        if self._api.token is not None and hmac.compare_digest(token.encode(), (await self._api.token()).encode()):
            return f"system:node:{self._node}", (_MASTERS,)  # our own credentials
        return await self._reviewed(token)

    async def _is_root(self, request: web.Request) -> bool:
        """Looked up for each request: who held a socket a moment ago may have handed it on. All who ask during one look
        share the next: however many ask, such as a pod that does nothing else, no caller waits for more than two."""
        if request.transport is None:
            return False
        look = self._next_look
        number = len(look.connections)
        look.connections.append(ends_of(request.transport))
        async with self._looking:
            if self._next_look is look:  # it begins
                self._next_look = _Look()
            if look.answers is None:
                look.answers = await in_thread(roots_outside_of_pods, look.connections)
        return look.answers[number]

    async def _reviewed(self, token: str) -> tuple[str, tuple[str, ...]] | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = await self._review("/apis/authentication.k8s.io/v1/tokenreviews", body)
        if status is None or not status.get("authenticated"):
            return None  # the client is not authenticated
        user = status.get("user") or {}
        return str(user.get("username") or ""), tuple(user.get("groups") or ())

    async def _may(self, user: str, groups: tuple[str, ...], verb: str, subresource: str) -> bool | None:
        """None when the API server gives no answer: only what it said is remembered."""
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
        if status is None:
            return None
        allowed = bool(status.get("allowed"))
        if len(self._judged) > 256:
            self._judged.clear()
        self._judged[key] = (now, allowed)
        return allowed

    async def _review(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            answer = json.loads(await self._client.request("POST", path, body))
        except (MoorageError, ValueError) as error:
            log.info("API server does not answer who a client is", path=path, reason=str(error))
            return None
        return answer.get("status") or {}


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
    _write_whole(key_file, private)
    _write_whole(certificate, made.public_bytes(serialization.Encoding.PEM))


def _write_whole(path: Path, data: bytes) -> None:
    """For our eyes only, and whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # half a file of a full disk
        raise
