"""`moorage ui`, put together: the board, the site, and a socket to serve it on.

Start reading at: `serve`.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from moorage.connections import FewConnections
from moorage.errors import UsageError
from moorage.kube.api.client import Client
from moorage.log import get_logger
from moorage.ui.access import Access, hosts_of, is_loopback, kept_token
from moorage.ui.actions import Actions
from moorage.ui.board import Board
from moorage.ui.server import Site

log = get_logger(__name__)

PREFERRED_PORT = 8465
_KEEPALIVE_S = 30.0
_MOST_CONNECTIONS = 128


@dataclass(frozen=True)
class UiSettings:
    """How the page is served."""

    address: str = "127.0.0.1"
    port: int = 0
    token_file: Path = Path()
    logs: Path | None = None
    allow_actions: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    listen_fd: int = -1  # a socket that listens already, inherited from the parent

    def checked(self) -> "UiSettings":
        """Return these settings. Raises UsageError if they contradict each other or would expose the page."""
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port {self.port}: want 0 to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key go together")
        if not is_loopback(self.address) and self.tls_cert is None and not self.insecure:
            raise UsageError(
                f"--address {self.address} can be reached from other machines: give --tls-cert and --tls-key, or "
                "--insecure to send the page and its key unencrypted"
            )
        return self


def default_token_file() -> Path:
    """Return where a user's token is kept."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "moorage" / "ui-token"


async def serve(client: Client, settings: UiSettings, on_ready: Callable[[str], None]) -> None:
    """Serve the page until cancelled. `on_ready` is called with the link to open once it can be opened."""
    tls = _tls(settings)
    token = kept_token(settings.token_file)
    with _socket(settings) as sock:
        port = sock.getsockname()[1]
        access = Access(token, hosts_of(settings.address, port), tls is not None)
        board = Board(client, settings.logs)
        async with board.running():
            actions = Actions(client, board.view) if settings.allow_actions else None
            site = Site(board, access, actions)
            runner = web.AppRunner(
                site.application(),
                access_log=None,
                keepalive_timeout=_KEEPALIVE_S,
                shutdown_timeout=0.5,
                handler_cancellation=True,
            )
            await runner.setup()
            site.connections = FewConnections(runner.server, _MOST_CONNECTIONS)
            try:
                await web.SockSite(runner, sock, ssl_context=tls).start()
                on_ready(link(settings.address, port, token, tls is not None))
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()


def link(address: str, port: int, token: str, is_tls: bool) -> str:
    """Return the address that signs a browser in."""
    shown = f"[{address}]" if ":" in address else address
    return f"{'https' if is_tls else 'http'}://{shown}:{port}/?token={token}"


def listening(address: str, *ports: int) -> socket.socket:
    """Return a socket that listens on the first of the ports that is free. Raises UsageError if none is."""
    why = "no port was given"
    for port in ports:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(64)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            why = f"port {port}: {error.strerror}"
    raise UsageError(f"cannot listen on {address} {why}")


def _socket(settings: UiSettings) -> socket.socket:
    if settings.listen_fd < 0:
        return listening(settings.address, settings.port)
    try:
        sock = socket.socket(fileno=settings.listen_fd)
    except OSError as error:
        raise UsageError(f"--listen-fd {settings.listen_fd}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _tls(settings: UiSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert, --tls-key: {error}") from error
    return context
