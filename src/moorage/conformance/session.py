"""What the checks of one run share: the connection, the claims of the driver, and what is proven to be ours.

Owns: which objects the run made, what the driver had before, whether it has crashed, and what its answers have shown.
Start reading at: `Session`.
"""

import asyncio
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from moorage.conformance.listing import existing_snapshots, existing_volumes
from moorage.conformance.model import CheckConfig, CheckFailed, CheckResult
from moorage.conformance.process import Control
from moorage.csi import csi_pb2 as pb
from moorage.csi.capabilities import read_capabilities
from moorage.csi.client import CsiClient
from moorage.csi.endpoint import is_live, socket_path_from
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError

_CRASH_IS_SEEN_S = 0.5
_SHORTEST_SECRET = 4  # a shorter one would be found in any text
_MOST_VIOLATIONS = 20
_ENOUGH_HANGS = 3


class NoDriver(MoorageError):
    """Nothing answers at the endpoint, so that there is nothing to check."""

    code = "UNAVAILABLE"


@dataclass
class Session:
    """One run of checks against one driver."""

    config: CheckConfig
    client: CsiClient
    capabilities: frozenset[str] = frozenset()
    node: pb.NodeGetInfoResponse = field(default_factory=pb.NodeGetInfoResponse)
    control: Control | None = None
    existing_volumes: frozenset[str] = frozenset()
    existing_snapshots: frozenset[str] = frozenset()
    owned: dict[str, str] = field(default_factory=dict)  # id of each object that the run made, and its name
    sizes: dict[str, int] = field(default_factory=dict)  # of the volumes and snapshots that the run made
    broken: dict[str, CheckResult] = field(default_factory=dict)  # the failed checks by id
    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    loop_devices: dict[int, str] = field(default_factory=dict)  # number and backing file of those seen at our paths
    unfinished: list[Callable[[], Awaitable[Any]]] = field(default_factory=list)  # clean-ups that a crash interrupted
    deferred: list[tuple[str, str]] = field(default_factory=list)  # clean-ups that failed, and the checks about them
    hangs: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by method, the checks that met it
    losses: int = 0  # how often the connection was lost
    token: str = field(default_factory=lambda: secrets.token_hex(6))

    def note_hang(self, method: str, check_id: str, is_basic: bool) -> None:
        """Take note of a call that did not return. A method that hangs always is not waited for in every check."""
        self.hangs[method] += [check_id] * (_ENOUGH_HANGS if is_basic else 1)

    def always_hangs(self, method: str) -> str:
        """Return the check that reports that a method hangs, if it is not worth waiting for it again."""
        known = self.hangs[method]
        return known[0] if len(known) >= _ENOUGH_HANGS else ""

    def note_loss(self) -> None:
        self.losses += 1

    @property
    def is_alive(self) -> bool:
        try:
            return is_live(self.client.path)
        except (OSError, MoorageError):
            return False

    async def has_crashed_since(self, losses: int) -> bool:
        """Return whether the connection was lost after `losses` was read. The loss may be noticed a little later."""
        deadline = time.monotonic() + _CRASH_IS_SEEN_S
        while True:
            if self.losses != losses or not self.is_alive:
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)

    def own(self, kind: str, object_id: str, name: str) -> None:
        """Take note of an object that the run made. Raises CheckFailed if the driver answered with another one."""
        existing = self.existing_volumes if kind == "volume" else self.existing_snapshots
        if not object_id:
            raise CheckFailed(f"the answer has no id for the new {kind}")
        if object_id in existing:
            raise CheckFailed(f"the answer for a new name is {kind} {object_id!r}, which was there before the run")
        if self.owned.setdefault(object_id, name) != name:
            raise CheckFailed(f"{kind} {object_id!r} is the answer for two names, {self.owned[object_id]} and {name}")

    def refuse_others(self, method: str, request: Message) -> None:
        """Raise CheckFailed before a call about an object that was there before the run: it may hold data."""
        for name, existing in (
            ("volume_id", self.existing_volumes),
            ("source_volume_id", self.existing_volumes),
            ("snapshot_id", self.existing_snapshots),
        ):
            if name in request.DESCRIPTOR.fields_by_name and (found := getattr(request, name)) in existing:
                raise CheckFailed(
                    f"{method} is not sent for {found!r}, which was there before the run", "an id of its own"
                )

    def violate(self, check_id: str, sentence: str) -> None:
        """Take note of an answer that breaks a rule for all answers."""
        found = self.violations[check_id]
        if sentence not in found and len(found) < _MOST_VIOLATIONS:
            found.append(sentence)

    def secret_in(self, text: str) -> str:
        """Return the name of a secret whose value is in the text, or an empty string."""
        given = {**self.config.secrets, "moorage-check": self.sentinel}
        return next((name for name, value in given.items() if len(value) >= _SHORTEST_SECRET and value in text), "")

    @property
    def sentinel(self) -> str:
        """A value that is sent as a secret and must never come back."""
        return f"secret-of-{self.token}"

    def without_secrets(self, text: str) -> str:
        for value in (*self.config.secrets.values(), self.sentinel):
            if len(value) >= _SHORTEST_SECRET:
                text = text.replace(value, "***stripped***")
        return text


@asynccontextmanager
async def opened(config: CheckConfig, control: Control | None) -> AsyncIterator[Session]:
    """Connect to the driver and read what it claims. Raises NoDriver, at once if nothing listens."""
    path = socket_path_from(config.endpoint)
    if not os.path.lexists(path):
        raise NoDriver(f"there is no socket at {path}; start the driver first, or give its --endpoint")
    if not is_live(path):
        raise NoDriver(f"no process listens on {path}; the driver that made this socket has ended")
    async with CsiClient(config.endpoint, timeout_s=config.timeout_s) as client:
        session = Session(config, client, control=control)
    client = CsiClient(config.endpoint, timeout_s=config.timeout_s, on_connection_lost=session.note_loss)
    session.client = client
    async with client:
        try:
            await client.wait_ready(config.timeout_s)
        except TimeoutError:
            raise NoDriver(f"the driver at {path} does not answer Probe within {config.timeout_s:g} s") from None
        session.capabilities = (await read_capabilities(client)).names() | _conditions(config, control)
        session.node = await _node_info(client)
        session.existing_volumes = await existing_volumes(session)
        session.existing_snapshots = await existing_snapshots(session)
        yield session


def _conditions(config: CheckConfig, control: Control | None) -> frozenset[str]:
    """Return what the run itself allows, as further capabilities."""
    found = {"run:block" if config.block else "run:mount"}
    if control is not None:
        found.add("run:restart")
    if config.mutable_parameters:
        found.add("run:mutable-parameters")
    if config.fs_type:
        found.add("run:fs-type")
    return frozenset(found)


async def _node_info(client: CsiClient) -> pb.NodeGetInfoResponse:
    try:
        return await client.NodeGetInfo(pb.NodeGetInfoRequest())
    except CsiError as error:
        if error.is_unimplemented:
            return pb.NodeGetInfoResponse()
        raise
