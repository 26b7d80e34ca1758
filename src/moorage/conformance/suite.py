"""Running checks: a registry, what a check works with, and its result.

Owns: `check` (registers), `Bench` (what a check works with: client, capabilities, clean-up) and `run_checks`.
Start reading at: `run_checks`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage.conformance.leftovers import clean_up
from moorage.csi import csi_pb2 as pb
from moorage.csi.capabilities import read_capabilities
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError

CheckBody = Callable[["Bench"], Awaitable[None]]

_MIB = 1024 * 1024


class CheckFailed(Exception):
    """The driver did not do what the contract says; the message tells what was expected and what came."""


class CheckSkipped(Exception):
    """The check does not apply to this driver; the message tells why."""


@dataclass(frozen=True)
class Check:
    """One promise of the contract."""

    service: str
    title: str
    body: CheckBody
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """How one check went: passed, failed or skipped."""

    service: str
    title: str
    result: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class CheckConfig:
    """What a person may set: sizes, parameters, and where the driver may mount."""

    endpoint: str
    workdir: Path
    size_bytes: int = 64 * _MIB
    grown_bytes: int = 128 * _MIB
    parameters: dict[str, str] = field(default_factory=dict)
    snapshot_parameters: dict[str, str] = field(default_factory=dict)
    mutable_parameters: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    fs_type: str = ""
    block: bool = False
    timeout_s: float = 60.0


REGISTRY: list[Check] = []


def check(service: str, title: str, *needs: str) -> Callable[[CheckBody], CheckBody]:
    """Register a check; `needs` names capabilities without which it is skipped (`controller:CLONE_VOLUME`)."""

    def register(body: CheckBody) -> CheckBody:
        REGISTRY.append(Check(service, title, body, needs))
        return body

    return register


@dataclass
class Bench:
    """What a check works with. Whatever it makes is undone in reverse order when it ends."""

    config: CheckConfig
    client: CsiClient
    capabilities: frozenset[str]
    node: pb.NodeGetInfoResponse
    cleanup: AsyncExitStack
    folders: list[Path] = field(default_factory=list)

    def has(self, capability: str) -> bool:
        return capability in self.capabilities

    def folder(self) -> Path:
        """Make a directory for the driver's mounts, which is removed at the end."""
        made = self.config.workdir / self.fresh_name("at")
        made.mkdir(parents=True)
        self.folders.append(made)
        return made

    def fresh_name(self, prefix: str = "check") -> str:
        return f"{prefix}-{uuid.uuid4()}"

    def capability(self, mode: str = "SINGLE_NODE_WRITER") -> pb.VolumeCapability:
        access = pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.Mode.Value(mode))
        if self.config.block:
            return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=access)
        mount = pb.VolumeCapability.MountVolume(fs_type=self.config.fs_type)
        return pb.VolumeCapability(mount=mount, access_mode=access)

    def create_request(self, name: str, **changes: Any) -> pb.CreateVolumeRequest:
        request = pb.CreateVolumeRequest(
            name=name,
            capacity_range=pb.CapacityRange(required_bytes=self.config.size_bytes),
            volume_capabilities=[self.capability()],
            parameters=self.config.parameters,
            secrets=self.config.secrets,
        )
        if self.has("plugin:VOLUME_ACCESSIBILITY_CONSTRAINTS") and self.node.accessible_topology.segments:
            request.accessibility_requirements.requisite.append(self.node.accessible_topology)
        if "volume_capabilities" in changes:
            request.ClearField("volume_capabilities")  # merging would add to it
        request.MergeFrom(pb.CreateVolumeRequest(**changes))
        return request

    async def create(self, name: str = "", **changes: Any) -> pb.Volume:
        """A volume that is deleted again at the end."""
        answer = await self.client.CreateVolume(self.create_request(name or self.fresh_name(), **changes))
        self.cleanup.push_async_callback(self.delete, answer.volume.volume_id)
        require(bool(answer.volume.volume_id), "CreateVolume answered without a volume_id")
        return answer.volume

    async def delete(self, volume_id: str) -> None:
        await self.client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=volume_id, secrets=self.config.secrets))

    async def snapshot(self, volume_id: str, name: str = "") -> pb.Snapshot:
        """A snapshot that is ready, and deleted again at the end."""
        request = pb.CreateSnapshotRequest(
            source_volume_id=volume_id,
            name=name or self.fresh_name("snap"),
            parameters=self.config.snapshot_parameters,
            secrets=self.config.secrets,
        )
        answer = await self.client.CreateSnapshot(request)
        self.cleanup.push_async_callback(self.delete_snapshot, answer.snapshot.snapshot_id)
        while not answer.snapshot.ready_to_use:
            await asyncio.sleep(1)
            answer = await self.client.CreateSnapshot(request)
        return answer.snapshot

    async def delete_snapshot(self, snapshot_id: str) -> None:
        request = pb.DeleteSnapshotRequest(snapshot_id=snapshot_id, secrets=self.config.secrets)
        await self.client.DeleteSnapshot(request)


def require(holds: bool, otherwise: str) -> None:
    """Fail the check with a sentence unless the condition holds."""
    if not holds:
        raise CheckFailed(otherwise)


async def expect(code: str, call: Awaitable[Any], what: str) -> None:
    """The call must fail with exactly this code, and with a message."""
    try:
        await call
    except CsiError as error:
        require(error.code == code, f"{what}: expected {code}, got {error.code} ({error.message})")
        require(bool(error.message.strip()), f"{what}: {code} came without a message")
        return
    raise CheckFailed(f"{what}: expected {code}, got OK")


async def run_checks(config: CheckConfig, only: str = "") -> AsyncIterator[CheckResult]:
    """Run every check that applies, one after the other, telling each outcome as it comes."""
    from moorage.conformance import controller, groups, identity, node, snapshots  # fills REGISTRY

    order = [module.SERVICE for module in (identity, controller, snapshots, groups, node)]
    async with CsiClient(config.endpoint, timeout_s=config.timeout_s) as client:
        await client.wait_ready(config.timeout_s)
        capabilities = (await read_capabilities(client)).names()
        info = await _node_info(client)
        for one in sorted(REGISTRY, key=lambda one: order.index(one.service)):
            if only.lower() in f"{one.service} {one.title}".lower():
                yield await _run(one, config, client, capabilities, info)


async def _node_info(client: CsiClient) -> pb.NodeGetInfoResponse:
    try:
        return await client.NodeGetInfo(pb.NodeGetInfoRequest())
    except CsiError as error:
        if error.is_unimplemented:
            return pb.NodeGetInfoResponse()
        raise


async def _run(
    one: Check, config: CheckConfig, client: CsiClient, capabilities: frozenset[str], info: pb.NodeGetInfoResponse
) -> CheckResult:
    missing = [need for need in one.needs if need not in capabilities]
    if missing:
        return CheckResult(one.service, one.title, "skipped", 0.0, f"the driver does not have {', '.join(missing)}")
    began = time.monotonic()
    result, detail = "passed", ""
    bench = Bench(config, client, capabilities, info, AsyncExitStack())
    try:
        async with bench.cleanup:
            await one.body(bench)
    except CheckSkipped as reason:
        result, detail = "skipped", str(reason)
    except CheckFailed as failure:
        result, detail = "failed", str(failure)
    except CsiError as error:
        result, detail = "failed", f"{error.method} answered {error.code}: {error.message}"
    except TimeoutError:
        result, detail = "failed", f"no end within {config.timeout_s:g} s"
    except OSError as error:
        result, detail = "failed", f"{error.filename or 'a path of the check'}: {error.strerror or error}"
    left = [sentence for folder in bench.folders for sentence in clean_up(folder)]
    if left:
        result, detail = "failed", "; ".join([detail, *left] if detail else left)
    return CheckResult(one.service, one.title, result, time.monotonic() - began, detail)
