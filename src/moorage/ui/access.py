"""Who may use the page: the token, its cookie, hosts and origins, and the headers of every answer.

Owns: every decision about access. The page shows what the kubeconfig may read to everyone who holds the cookie.
Start reading at: `Access.check`.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from moorage.errors import MoorageError, UsageError

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TOKEN_BYTES = 24
_SAFE = ("GET", "HEAD")


class RequestRefused(MoorageError):
    """A request that is not answered with a page; `status` is its HTTP status."""

    code = "PERMISSION_DENIED"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Access:
    """What a request must carry. `token` is handed over once, in the printed link; a cookie takes its place."""

    token: str
    hosts: frozenset[str]  # as in the Host header, with the port
    is_tls: bool

    @property
    def cookie_name(self) -> str:
        """Cookies do not keep ports apart, so the name does."""
        port = min(self.hosts, default="").rpartition(":")[2]
        return f"{'__Host-' if self.is_tls else ''}moorage-{port}"

    @property
    def cookie(self) -> str:
        return self._derived("cookie")

    @property
    def form_key(self) -> str:
        """The value that every form must send back; a page of another site cannot read it."""
        return self._derived("form")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def has_cookie(self, request: web.Request) -> bool:
        sent = request.cookies.get(self.cookie_name, "")
        return hmac.compare_digest(sent.encode(errors="replace"), self.cookie.encode())

    def check_host(self, request: web.Request) -> None:
        """Refuse other names (DNS rebinding) and requests that another site made. Raises RequestRefused."""
        if request.headers.getall("Host", []) not in [[host] for host in self.hosts]:
            raise RequestRefused(421, "this page answers only to the address that moorage ui printed")
        origin = request.headers.get("Origin")
        if origin is not None and origin not in {
            f"{'https' if self.is_tls else 'http'}://{host}" for host in self.hosts
        }:
            raise RequestRefused(403, "this request comes from another site")

    def check(self, request: web.Request) -> None:
        """Refuse requests without the cookie. Raises RequestRefused."""
        if not self.has_cookie(request):
            raise RequestRefused(401, "open the link that moorage ui printed: it carries the key to this page")
        if request.method not in _SAFE and request.headers.get("Origin") is None:
            raise RequestRefused(403, "a form must say which page it comes from")

    def check_form(self, sent: str) -> None:
        """Refuse a form that this page did not make. Raises RequestRefused."""
        if not hmac.compare_digest(sent.encode(errors="replace"), self.form_key.encode()):
            raise RequestRefused(403, "this form is out of date: go back and load the page again")


def hosts_of(address: str, port: int) -> frozenset[str]:
    """Return the Host headers under which the page may be reached."""
    shown = f"[{address}]" if ":" in address else address
    names = {shown}
    if is_loopback(address):
        names |= {"localhost", "127.0.0.1", "[::1]"}
    return frozenset(f"{name}:{port}" for name in names)


def is_loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine. Raises UsageError if it is no IP address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise UsageError(f"--address {address!r}: want an IP address, such as 127.0.0.1") from None


def kept_token(path: Path) -> str:
    """Return the token in a file, which only its owner may read; make the file if it is missing.

    A page that is open stays open when the server is started again, because the token is the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as writing:
            writing.write(token)
        return token
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    with os.fdopen(file) as reading:
        facts = os.fstat(reading.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise UsageError(f"{path}: others may read it; remove it, and a new one is made")
        token = reading.read(1024).strip()
    if len(token) < _TOKEN_BYTES:
        raise UsageError(f"{path}: it holds no token; remove it, and a new one is made")
    return token
