"""Required fields, and objects that do not exist: one check for each field of each call, from two tables.

Owns: the tables. A request has every required field set but one, and names objects that do not exist, so that nothing
is changed by a driver that takes it.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from moorage.conformance.bench import Bench, expect, of_snapshot, of_volume
from moorage.conformance.checks.basics import CLONE, CREATE, EXPAND, GROUP, NODE, SNAPSHOT
from moorage.conformance.model import Check, Stage, add, require
from moorage.conformance.place import ATTACHES, STAGES
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import method_named
from moorage.csi.errors import CsiError

_GET = "controller:GET_VOLUME"
_MODIFY = "controller:MODIFY_VOLUME"
_STATS = "node:GET_VOLUME_STATS"
_NODE_EXPAND = "node:EXPAND_VOLUME"
_METADATA = "plugin:SNAPSHOT_METADATA_SERVICE"


@dataclass(frozen=True)
class Row:
    """A method, the fields that it requires, and what it must answer for an object that does not exist."""

    method: str
    required: tuple[str, ...]
    needs: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    object: str = "volume"


_ABSENT_IS_FINE = ("OK",)
_ABSENT = ("NOT_FOUND",)
_EITHER = ("OK", "NOT_FOUND")

ROWS = (
    Row("CreateVolume", ("name", "volume_capabilities"), (CREATE,)),
    Row("DeleteVolume", ("volume_id",), (CREATE,), _ABSENT_IS_FINE),
    Row("ControllerPublishVolume", ("volume_id", "node_id", "volume_capability"), (CREATE, ATTACHES), _ABSENT),
    Row("ControllerUnpublishVolume", ("volume_id",), (CREATE, ATTACHES), _EITHER),
    Row("ValidateVolumeCapabilities", ("volume_id", "volume_capabilities"), (CREATE,), _ABSENT),
    Row("ControllerGetVolume", ("volume_id",), (_GET,), _ABSENT),
    Row("ControllerGetVolumeHealth", ("volume_id",), ("controller:GET_VOLUME_HEALTH",), _ABSENT),
    Row("NodeGetVolumeHealth", ("volume_id",), (NODE, "node:GET_VOLUME_HEALTH")),
    Row("ControllerModifyVolume", ("volume_id",), (_MODIFY, "run:mutable-parameters"), _ABSENT),
    Row("ControllerExpandVolume", ("volume_id", "capacity_range"), (CREATE, EXPAND), _ABSENT),
    Row("CreateSnapshot", ("source_volume_id", "name"), (SNAPSHOT,), _ABSENT),
    Row("DeleteSnapshot", ("snapshot_id",), (SNAPSHOT,), _ABSENT_IS_FINE, "snapshot"),
    Row("GetSnapshot", ("snapshot_id",), ("controller:GET_SNAPSHOT",), _ABSENT, "snapshot"),
    Row("CreateVolumeGroupSnapshot", ("name", "source_volume_ids"), (GROUP,), _ABSENT),
    Row("DeleteVolumeGroupSnapshot", ("group_snapshot_id",), (GROUP,), _ABSENT_IS_FINE, "group"),
    Row("GetVolumeGroupSnapshot", ("group_snapshot_id",), (GROUP,), _ABSENT, "group"),
    Row("NodeStageVolume", ("volume_id", "staging_target_path", "volume_capability"), (NODE, STAGES)),
    Row("NodeUnstageVolume", ("volume_id", "staging_target_path"), (NODE, STAGES), _EITHER),
    Row("NodePublishVolume", ("volume_id", "target_path", "volume_capability"), (NODE,)),
    Row("NodeUnpublishVolume", ("volume_id", "target_path"), (NODE,), _EITHER),
    Row("NodeGetVolumeStats", ("volume_id", "volume_path"), (NODE, _STATS), _ABSENT),
    Row("NodeExpandVolume", ("volume_id", "volume_path"), (NODE, _NODE_EXPAND), _ABSENT),
    Row("GetMetadataAllocated", ("snapshot_id",), (_METADATA,), _ABSENT, "snapshot"),
    Row("GetMetadataDelta", ("base_snapshot_id", "target_snapshot_id"), (_METADATA,), _ABSENT, "snapshot"),
)


def full_request(bench: Bench, method: str) -> Message:
    """Return a request with every required field, for objects that do not exist."""
    request: Message = method_named(method).input_type._concrete_class()
    fields = {field.name for field in request.DESCRIPTOR.fields}
    values: dict[str, Any] = {
        "name": bench.name(),
        "volume_id": bench.unknown_id(),
        "source_volume_id": bench.unknown_id(),
        "snapshot_id": bench.unknown_id("snapshot"),
        "base_snapshot_id": bench.unknown_id("snapshot"),
        "target_snapshot_id": bench.unknown_id("snapshot"),
        "group_snapshot_id": bench.unknown_id("group"),
        "node_id": bench.node.node_id or "no-such-node",
        "staging_target_path": "/no-such-directory/staging",
        "target_path": "/no-such-directory/target",
        "volume_path": "/no-such-directory/target",
        "volume_capability": bench.capability(),
        "capacity_range": pb.CapacityRange(required_bytes=bench.config.size_bytes),
        "source_volume_ids": [bench.unknown_id()],
        "volume_capabilities": [bench.capability()],
        "secrets": bench.config.secrets,
    }
    if method == "ControllerModifyVolume":
        values["mutable_parameters"] = bench.config.mutable_parameters
    request.MergeFrom(type(request)(**{key: value for key, value in values.items() if key in fields}))
    return request


async def _send(bench: Bench, method: str, request: Message) -> None:
    descriptor = method_named(method)
    if not descriptor.server_streaming:
        answer = await getattr(bench.client, descriptor.name)(request)
        if isinstance(answer, pb.CreateVolumeResponse):  # a driver that takes what it should refuse has made one
            bench.session.own("volume", answer.volume.volume_id, "")
            bench.on_end("DeleteVolume.works", lambda: bench.delete(answer.volume.volume_id))
        return
    async for _ in getattr(bench.client, descriptor.name)(request):
        pass


def _needs_check(row: Row, field: str) -> Check:
    async def body(bench: Bench) -> None:
        request = full_request(bench, row.method)
        request.ClearField(field)
        await expect(_send(bench, row.method, request), "INVALID_ARGUMENT", *also)

    also = _ABSENT if field == "volume_path" else ()  # a driver may look the volume up before the path
    rule = f"{row.method} without {field} is INVALID_ARGUMENT" + (
        ", or NOT_FOUND if the volume does not exist." if also else ", before any object is looked up."
    )
    return Check(f"{row.method}.needs-{field.replace('_', '-')}", rule, body, row.needs, Stage.QUICK)


def _unknown_check(row: Row) -> Check:
    async def body(bench: Bench) -> None:
        request = full_request(bench, row.method)
        if row.unknown == _ABSENT_IS_FINE:
            await _send(bench, row.method, request)
        elif row.unknown == _ABSENT:
            await expect(_send(bench, row.method, request), *row.unknown)
        else:
            await _ok_or_not_found(_send(bench, row.method, request))

    result = {_ABSENT_IS_FINE: "succeeds", _ABSENT: "is NOT_FOUND", _EITHER: "succeeds, or is NOT_FOUND"}[row.unknown]
    rule = f"{row.method} of a {row.object} that does not exist {result}."
    return Check(f"{row.method}.unknown-{row.object}", rule, body, row.needs, Stage.QUICK)


async def _ok_or_not_found(call: Awaitable[None]) -> None:
    try:
        await call
    except CsiError as error:
        require(error.code == "NOT_FOUND", f"{error.method} answered {error.code}: {error.message}", "OK or NOT_FOUND")


def _source_check(name: str, need: str) -> Check:
    async def body(bench: Bench) -> None:
        missing = bench.unknown_id(name)
        source = of_snapshot(missing) if name == "snapshot" else of_volume(missing)
        await expect(bench.make(bench.create_request(volume_content_source=source)), "NOT_FOUND")

    rule = f"CreateVolume from a {name} that does not exist is NOT_FOUND."
    return Check(f"CreateVolume.unknown-source-{name}", rule, body, (CREATE, need), Stage.QUICK)


for _row in ROWS:
    for _field in _row.required:
        add(_needs_check(_row, _field))
    if _row.unknown:
        add(_unknown_check(_row))
add(_source_check("snapshot", SNAPSHOT))
add(_source_check("volume", CLONE))
