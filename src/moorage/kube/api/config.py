"""Where the API server is and how to prove who we are: kubeconfig, in-cluster account, or plain values.

Owns: `ApiConfig` and the ways to make one. The `kubernetes` package is imported only for a kubeconfig user that
needs an exec plugin.
Start reading at: `load`.
"""

import asyncio
import base64
import importlib.util
import os
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from moorage.errors import UsageError
from moorage.kube.errors import Unauthorized
from moorage.kube.objects.meta import seconds_of
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
    """A client certificate and its key in files that somebody rotates. They are looked at once a minute, or after a
    server refused them, and loaded into `tls` if they have changed. What cannot be loaded, such as half of a pair, is
    looked at again later; until then the old pair serves."""

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
    pair: RenewablePair | None = None  # what `tls` shows of us, if that is in files


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
    token = _token_from(user, cluster, path, chosen, tls)
    namespace = str(entry.get("namespace") or "default")
    if server.startswith("unix://"):
        return ApiConfig("http://localhost", None, token, namespace, unix_socket=server.removeprefix("unix://"))
    is_named = cluster.get("certificate-authority-data") or cluster.get("certificate-authority")
    authority = _authority_in(tls) if tls is not None and is_named else None
    return ApiConfig(server.rstrip("/"), tls, token, namespace, authority=authority, pair=pair)


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
    """A token that somebody rotates: the file is read again when the last read is a minute old."""

    async def read() -> tuple[str, float | None]:
        try:
            return path.read_text().strip(), None
        except (OSError, UnicodeDecodeError) as error:
            raise Unauthorized(401, "NoToken", f"token file {path}: {error}") from error

    return RenewableToken(read, clock)


def _exec_token(user: dict[str, Any], cluster: dict[str, Any], folder: Path, tls: ssl.SSLContext | None) -> TokenSource:
    """Credentials from a plugin program, run through the official package; a certificate goes into `tls`."""

    def ask() -> dict[str, Any]:
        from kubernetes.config import exec_provider, kube_config  # heavy: only those who need it pay for it

        run, node = cast(Any, exec_provider.ExecProvider), cast(Any, kube_config.ConfigNode)
        provider = run(node("exec", user["exec"]), str(folder), node("cluster", dict(cluster)))
        return dict(provider.run())

    async def read() -> tuple[str, float | None]:
        try:
            status = await asyncio.to_thread(ask)
        except Exception as error:  # the program, its output and the package may fail in any way
            raise Unauthorized(401, "NoToken", f"credential plugin {user['exec'].get('command')!r}: {error}") from error
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if certificate and key and tls is not None:
            _load_pair(tls, certificate.encode(), key.encode())
        elif not status.get("token"):
            raise Unauthorized(401, "NoToken", f"credential plugin {user['exec'].get('command')!r} gave no credentials")
        return str(status.get("token") or ""), seconds_of(status.get("expirationTimestamp"))

    return RenewableToken(read, time.time)


def _provider_token(path: Path, context: str) -> TokenSource:
    """A token from one of the old built-in providers, through the official package."""

    def ask() -> str:
        from kubernetes import config as official  # heavy, as above

        make_loader: Any = official.kube_config._get_kube_config_loader
        loader = make_loader(filename=str(path), active_context=context)
        if not loader._load_auth_provider_token():
            raise ValueError("no token")
        return str(loader.token).removeprefix("Bearer ").strip()

    async def read() -> tuple[str, float | None]:
        try:
            return await asyncio.to_thread(ask), None
        except Exception as error:  # as above
            raise Unauthorized(401, "NoToken", f"kubeconfig {path}: auth provider of {context!r}: {error}") from error

    return RenewableToken(read, time.time)


def _token_from(
    user: dict[str, Any], cluster: dict[str, Any], path: Path, context: str, tls: ssl.SSLContext | None
) -> TokenSource | None:
    if user.get("tokenFile"):
        return token_file(path.parent / str(user["tokenFile"]))
    if user.get("token"):
        return fixed_token(str(user["token"]))
    if user.get("exec"):
        _check_official_client(path, f"runs {user['exec'].get('command')!r} to log in")
        return _exec_token(user, cluster, path.parent, tls)
    if user.get("auth-provider"):
        _check_official_client(path, f"logs in through {user['auth-provider'].get('name')!r}")
        return _provider_token(path, context)
    return None


def _check_official_client(path: Path, what: str) -> None:
    """Only such logins need the official package, and the container image leaves it out."""
    if importlib.util.find_spec("kubernetes") is None:
        raise UsageError(
            f"kubeconfig {path}: its user {what}, which needs the Python package `kubernetes`, and that is not "
            "installed here (the container image has none): use a kubeconfig with a token or certificate, or the "
            "account of the pod"
        )


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
