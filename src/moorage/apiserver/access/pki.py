"""Keys, certificates and the token of a server that belongs to one machine: where they are.

Owns: the `pki` directory's layout, the token, and knowing when something must be made.
May not touch: cryptography; that library is loaded only when `certs` has something to make.
Start reading at: `known_identity`.
"""

import asyncio
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moorage.errors import MoorageError

NODE_CLIENT = "moorage-apiserver"  # the user as which this server talks to the agents of nodes
_RENEW_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Where the files are, and the token that they go with."""

    directory: Path
    token: str

    @property
    def ca(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def server(self) -> tuple[Path, Path]:
        return self.directory / "server.crt", self.directory / "server.key"

    @property
    def admin(self) -> tuple[Path, Path]:
        return self.directory / "admin.crt", self.directory / "admin.key"

    @property
    def node_client(self) -> tuple[Path, Path]:
        """What this server shows to the agents of nodes."""
        return self.directory / "node-client.crt", self.directory / "node-client.key"

    @property
    def signing_key(self) -> Path:
        return self.directory / "tokens.key"

    @property
    def note(self) -> Path:
        """What the server's certificate covers, so that it need not be parsed at every start."""
        return self.directory / "server.json"


class CertificateFacts(msgspec.Struct):
    """The hosts a server certificate is for, and when it ends."""

    hosts: list[str]
    until: float


def known_identity(data_dir: Path, hosts: tuple[str, ...] = ()) -> tuple[ServerIdentity, bool]:
    """The identity, and whether it is whole; the server's certificate must cover the hosts and last a while."""
    directory = data_dir / "pki"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_path = directory / "token"
    if not token_path.exists():
        write_private(token_path, secrets.token_urlsafe(32).encode())
    identity = ServerIdentity(directory, token_path.read_text().strip())
    needed = (
        identity.ca,
        directory / "ca.key",
        *identity.server,
        *identity.admin,
        *identity.node_client,
        identity.signing_key,
    )
    return identity, all(path.exists() for path in needed) and _covers(identity, hosts)


async def make_apart(identity: ServerIdentity, hosts: tuple[str, ...]) -> None:
    """Make what is missing in a process of its own: the library for that would stay in memory for good."""
    command = (sys.executable, "-m", "moorage.apiserver.access.certs", str(identity.directory), *hosts)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode != 0:
        raise KeysNotMade(f"certificates for {identity.directory} were not made: {said.decode()[-500:].strip()}")


class KeysNotMade(MoorageError):
    """The process that makes keys and certificates has failed."""


def _covers(identity: ServerIdentity, hosts: tuple[str, ...]) -> bool:
    try:
        note = msgspec.json.decode(identity.note.read_bytes(), type=CertificateFacts)
    except (OSError, msgspec.MsgspecError):
        return False
    return set(hosts) <= set(note.hosts) and note.until > time.time() + _RENEW_S


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
