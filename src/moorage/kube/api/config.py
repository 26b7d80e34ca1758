"""Where the API server is, and our credentials for it: a kubeconfig, the in-cluster account, or plain values.

Owns: `ApiConfig` and the ways to create one, and credentials that change: tokens, certificates, credential plugins.
Start reading at: `load`.
"""

import asyncio
import base64
import os
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moorage.errors import UsageError
from moorage.kube.api.exec_plugin import ExecPlugin, PluginFailed
from moorage.kube.errors import Unauthorized
from moorage.log import get_logger

log = get_logger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECTIONS = {"contexts": "context", "clusters": "cluster", "users": "user"}
_PAIR = ("client-certificate", "client-key")
_PATHS = {"certificate-authority", *_PAIR, "tokenFile"}
_TOKEN_REFRESH_S = 60.0
_PAIR_REFRESH_S = 60.0
_EXPIRES_EARLY_S = 10.0

TokenSource = Callable[[], Awaitable[str]]


class RenewableToken:
    """A token that is read again when it is a minute old, when it is about to expire, or when a server refused it.

    `read` returns the token and when it expires (seconds since the epoch, or None). Concurrent callers share one read.
    """

    def __init__(self, read: Callable[[], Awaitable[tuple[str, float | None]]], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._token = ""
        self._until = float("-inf")
        self._lock = asyncio.Lock()

    async def __call__(self) -> str:
        if self._clock() < self._until:
            return self._token
        async with self._lock:
            if self._clock() >= self._until:
                self._token, expires = await self._read()
                now = self._clock()
                self._until = now + _TOKEN_REFRESH_S if expires is None else expires - _EXPIRES_EARLY_S
        return self._token

    def expire(self) -> None:
        """The server did not accept it: read it again before the next request."""
        self._until = float("-inf")


class RenewablePair:
    """A client certificate and its key in files that another program rotates.

    They are read once a minute, or after a server refused them, and loaded into `tls` if they have changed. What cannot
    be loaded, such as half of a pair, is read again later; the old pair serves until then.
    """

    def __init__(
        self, tls: ssl.SSLContext, certificate: Path, key: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tls = tls
        self._files = (certificate, key)
        self._clock = clock
        self._version = 0
        self._stamps: list[tuple[int, int, int, int]] = []
        self._load_if_changed()
        self._until = clock() + _PAIR_REFRESH_S

    def version(self) -> int:
        """A number that is another one after the pair has changed: connections from before still show the old one."""
        if self._clock() >= self._until:
            self._until = self._clock() + _PAIR_REFRESH_S
            try:
                self._load_if_changed()
            except OSError as error:  # ssl.SSLError is one
                log.warning("client certificate cannot be loaded", path=str(self._files[0]), reason=str(error))
        return self._version

    def expire(self) -> None:
        """The server did not accept it: look at the files before the next request."""
        self._until = float("-inf")

    def _load_if_changed(self) -> None:
        found = [os.stat(file) for file in self._files]
        stamps = [(one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found]  # a link may lead elsewhere
        if stamps == self._stamps:
            return
        certificate, key = (file.read_bytes() for file in self._files)
        _load_pair(self._tls, certificate, key)
        self._stamps = stamps
        self._version += 1
        if self._version > 1:
            log.info("client certificate has changed", path=str(self._files[0]))


@dataclass(frozen=True)
class ApiConfig:
    """An API server's address and the credentials for it. `authority` is the one that the configuration names for the
    server's certificate (DER); None if it names none, and `tls` trusts those that the system does."""

    server: str
    tls: ssl.SSLContext | None = None
    token: TokenSource | None = None
    namespace: str = "default"
    unix_socket: str | None = None
    user_agent: str = field(default="moorage")
    authority: bytes | None = None
    pair: "RenewablePair | ExecPair | None" = None  # the client certificate in `tls`, if it may change


def load(kubeconfig: str | None = None, context: str | None = None) -> ApiConfig:
    """The configuration for a command line: the given file, KUBECONFIG, the in-cluster account, or ~/.kube/config."""
    if kubeconfig:
        return from_kubeconfig(Path(kubeconfig), context)
    if named := [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]:
        present = [path for path in named if path.exists()] or named[:1]
        return from_kubeconfig(present[0], context, *present[1:])
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (_ACCOUNT / "token").exists():
        return from_account(_ACCOUNT)
    default = Path.home() / ".kube" / "config"
    if default.exists():
        return from_kubeconfig(default, context)
    raise UsageError("no Kubernetes API to talk to: give --kubeconfig, set KUBECONFIG, or run inside a cluster")


def from_account(folder: Path) -> ApiConfig:
    """The service account of the pod we run in; its token is read again as it is rotated."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    namespace = (folder / "namespace").read_text().strip() if (folder / "namespace").exists() else "default"
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:
        raise UsageError(f"service account in {folder}: its certificate authority: {error}") from error
    return ApiConfig(
        f"https://{host}:{port}", tls, token_file(folder / "token"), namespace, authority=_authority_in(tls)
    )


def from_kubeconfig(path: Path, context: str | None = None, *more: Path) -> ApiConfig:
    """The cluster and user of a kubeconfig's current (or given) context; in several files the first word counts."""
    document = _merged([_read(one) for one in (path, *more)])
    chosen = context or str(document.get("current-context") or "")
    entry = _named(document, "contexts", chosen, path)
    cluster = _named(document, "clusters", entry.get("cluster", ""), path)
    user = _named(document, "users", entry["user"], path) if entry.get("user") else {}
    server = str(cluster.get("server") or "")
    if not server.startswith(("http://", "https://", "unix://")):
        raise UsageError(f"kubeconfig {path}: cluster {entry.get('cluster')!r} has no http, https or unix server")
    try:
        tls = _tls_from(cluster, path.parent) if server.startswith("https://") else None
        pair = _shown(tls, user, path.parent) if tls is not None else None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError, a bad base64 a ValueError
        raise UsageError(f"kubeconfig {path}: certificates of context {chosen!r}: {error}") from error
    token, exec_pair = _exec_from(user, cluster, path, tls)
    token = token or _token_from(user, path)
    namespace = str(entry.get("namespace") or "default")
    if server.startswith("unix://"):
        return ApiConfig("http://localhost", None, token, namespace, unix_socket=server.removeprefix("unix://"))
    is_named = cluster.get("certificate-authority-data") or cluster.get("certificate-authority")
    authority = _authority_in(tls) if tls is not None and is_named else None
    return ApiConfig(server.rstrip("/"), tls, token, namespace, authority=authority, pair=pair or exec_pair)


def from_values(server: str, token: str = "", ca_file: str | None = None, verify: bool = True) -> ApiConfig:
    """A configuration from plain values, for tests and for parts started by `moorage up`."""
    tls = authority = None
    if server.startswith("https://"):
        tls = ssl.create_default_context(cafile=ca_file)
        authority = _authority_in(tls) if ca_file else None
        if not verify:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return ApiConfig(server.rstrip("/"), tls, fixed_token(token) if token else None, authority=authority)


def fixed_token(token: str) -> TokenSource:
    async def get() -> str:
        return token

    return get


def token_file(path: Path, clock: Callable[[], float] = time.time) -> TokenSource:
    """Return a source of a token that another program rotates. The file is read again after a minute."""

    async def read() -> tuple[str, float | None]:
        try:
            return path.read_text().strip(), None
        except (OSError, UnicodeDecodeError) as error:
            raise Unauthorized(401, "NoToken", f"token file {path}: {error}") from error

    return RenewableToken(read, clock)


def _exec_token(plugin: ExecPlugin, pair: "ExecPair") -> TokenSource:
    """A token from a credential plugin; the certificate that it may give is loaded into the TLS context."""

    async def read() -> tuple[str, float | None]:
        try:
            given = await asyncio.to_thread(plugin.run)
            if given.certificate:
                pair.take(given.certificate, given.key)
        except (PluginFailed, OSError) as error:  # ssl.SSLError is an OSError
            raise Unauthorized(401, "NoToken", str(error)) from error
        return given.token, given.expires

    return RenewableToken(read, time.time)


class ExecPair:
    """The client certificate that a credential plugin gave."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._shown = ("", "")
        self._version = 0

    def take(self, certificate: str, key: str) -> None:
        """Load the pair, if it has changed. Raises PluginFailed if it cannot be loaded or used."""
        if (certificate, key) == self._shown:
            return
        if self._tls is None:
            raise PluginFailed("a credential plugin gave a certificate, but the server is not spoken to over TLS")
        _load_pair(self._tls, certificate.encode(), key.encode())
        self._shown = (certificate, key)
        self._version += 1

    def version(self) -> int:
        """Return a number that changes with the pair: connections from before still show the old one."""
        return self._version

    def expire(self) -> None:
        """Do nothing: the plugin runs again when its credentials expire or the server refuses them."""


def _exec_from(
    user: dict[str, Any], cluster: dict[str, Any], path: Path, tls: ssl.SSLContext | None
) -> tuple[TokenSource | None, ExecPair | None]:
    if not isinstance(user.get("exec"), dict) or user.get("tokenFile") or user.get("token"):
        return None, None
    pair = ExecPair(tls)
    return _exec_token(ExecPlugin(user["exec"], cluster, path.parent, f"kubeconfig {path}"), pair), pair


def _token_from(user: dict[str, Any], path: Path) -> TokenSource | None:
    if user.get("tokenFile"):
        return token_file(path.parent / str(user["tokenFile"]))
    if user.get("token"):
        return fixed_token(str(user["token"]))
    if user.get("auth-provider") and not user.get("exec"):
        raise UsageError(
            f"kubeconfig {path}: its user logs in through the auth provider "
            f"{user['auth-provider'].get('name')!r}; Moorage supports credential plugins (exec), tokens and "
            "certificates: replace the auth provider with the plugin that follows it, such as kubelogin for oidc"
        )
    return None


def _tls_from(cluster: dict[str, Any], folder: Path) -> ssl.SSLContext:
    data = cluster.get("certificate-authority-data")
    authority = _inline(data).decode() if data else None
    file = cluster.get("certificate-authority")
    tls = ssl.create_default_context(cafile=str(folder / file) if file and not data else None, cadata=authority)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls


def _shown(tls: ssl.SSLContext, user: dict[str, Any], folder: Path) -> RenewablePair | None:
    """Loads the user's certificate, if there is one; the pair, if it is in files."""
    if all(user.get(name) and not user.get(f"{name}-data") for name in _PAIR):
        certificate_file, key_file = (folder / str(user[name]) for name in _PAIR)
        return RenewablePair(tls, certificate_file, key_file)
    certificate, key = _pair_from(user, folder)
    if certificate and key:
        _load_pair(tls, certificate, key)
    return None


def _authority_in(tls: ssl.SSLContext) -> bytes | None:
    """What was loaded into it, which is what a configuration names if it names any."""
    return b"".join(tls.get_ca_certs(binary_form=True)) or None


def _inline(data: object) -> bytes:
    """What a `-data` field holds; ValueError when it is not base64."""
    return base64.b64decode("".join(str(data).split()), validate=True)


def _load_pair(tls: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    with tempfile.TemporaryDirectory() as scratch:  # private to us; the ssl module reads keys from files only
        for name, content in (("cert", certificate), ("key", key)):
            Path(scratch, name).write_bytes(content)
        files = (Path(scratch, "cert"), Path(scratch, "key"))
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(*files)  # one that fails would leave `tls` with neither
        tls.load_cert_chain(*files)


def _pair_from(user: dict[str, Any], folder: Path) -> tuple[bytes | None, bytes | None]:
    def content(name: str) -> bytes | None:
        if data := user.get(f"{name}-data"):
            return _inline(data)
        return (folder / str(user[name])).read_bytes() if user.get(name) else None

    return content(_PAIR[0]), content(_PAIR[1])


def _read(path: Path) -> dict[str, Any]:
    """A kubeconfig with the paths in it made absolute: they are meant relative to their own file."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"kubeconfig {path}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"kubeconfig {path}: not a mapping")
    for section, kind in _SECTIONS.items():
        for entry in document.get(section) or []:
            content: Any = entry.get(kind) if isinstance(entry, dict) else None
            if isinstance(content, dict):
                content |= {name: str(path.parent / str(content[name])) for name in _PATHS if content.get(name)}
    return document


def _merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One kubeconfig of several; an entry or a current context that was named before stays."""
    merged: dict[str, Any] = {section: [] for section in _SECTIONS}
    for document in documents:
        merged["current-context"] = merged.get("current-context") or document.get("current-context")
        for section in _SECTIONS:
            entries = document.get(section) or []
            merged[section] += entries if isinstance(entries, list) else []
    return merged


def _named(document: dict[str, Any], section: str, name: str, path: Path) -> dict[str, Any]:
    """The content of the first entry of that name."""
    for entry in document[section]:
        if isinstance(entry, dict) and entry.get("name") == name:
            content = entry.get(_SECTIONS[section]) or {}
            if isinstance(content, dict):
                return content
    raise UsageError(f"kubeconfig {path}: no entry {name!r} in {section}")
