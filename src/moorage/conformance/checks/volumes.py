"""Volumes: sizes, names, repetition, topology, deletion, validation, modification.

Owns: what CreateVolume, DeleteVolume, ValidateVolumeCapabilities, ControllerGetVolume and ControllerModifyVolume promise.
"""

from moorage.conformance.bench import Bench, expect, of_snapshot, of_volume
from moorage.conformance.checks.basics import CLONE, CREATE, SNAPSHOT
from moorage.conformance.model import Stage, check, require
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

_TOPOLOGY = "plugin:VOLUME_ACCESSIBILITY_CONSTRAINTS"
_MODIFY = "controller:MODIFY_VOLUME"
_GET = "controller:GET_VOLUME"
_PADDING = "moorage-check-padding"


@check("CreateVolume.size", "A new volume has at least required_bytes, or an unknown size (0).", CREATE)
async def size(bench: Bench) -> None:
    volume = await bench.create()
    enough = volume.capacity_bytes == 0 or volume.capacity_bytes >= bench.config.size_bytes
    require(enough, f"capacity_bytes is {volume.capacity_bytes}", f"at least {bench.config.size_bytes}")


@check(
    "CreateVolume.limit",
    "A new volume is not larger than limit_bytes; if that cannot be, the answer is OUT_OF_RANGE.",
    CREATE,
)
async def limit(bench: Bench) -> None:
    most = bench.config.size_bytes
    try:
        both = pb.CapacityRange(required_bytes=most, limit_bytes=most)
        volume = await bench.make(bench.create_request(capacity_range=both))
    except CsiError as error:
        require(error.code == "OUT_OF_RANGE", f"{error.code}: {error.message}", "OK or OUT_OF_RANGE")
        return
    require(volume.capacity_bytes in (0, most), f"capacity_bytes is {volume.capacity_bytes}", f"exactly {most}")


@check("CreateVolume.repeated", "CreateVolume with the same name and request answers the same volume.", CREATE)
async def repeated(bench: Bench) -> None:
    request = bench.create_request()
    with bench.given("CreateVolume.works"):
        first = await bench.make(request)
    for _ in range(3):
        again = (await bench.client.CreateVolume(request)).volume
        if again.volume_id != first.volume_id:
            bench.on_end("DeleteVolume.works", lambda made=again.volume_id: bench.delete(made))  # type: ignore[misc]
        require(again.volume_id == first.volume_id, f"{first.volume_id!r} and {again.volume_id!r} for one name")
        require(again.volume_context == first.volume_context, "volume_context differs between two answers")
        same_size = again.capacity_bytes == first.capacity_bytes
        require(same_size, f"capacity_bytes was {first.capacity_bytes}, now it is {again.capacity_bytes}")


@check(
    "CreateVolume.other-size",
    "CreateVolume with a name that is used and a size that the volume does not have is ALREADY_EXISTS.",
    CREATE,
    stage=Stage.QUICK,
)
async def other_size(bench: Bench) -> None:
    most = bench.config.size_bytes
    volume = await bench.create(name := bench.name())
    twice = max(2 * most, 2 * volume.capacity_bytes)
    other = bench.create_request(name, capacity_range=pb.CapacityRange(required_bytes=twice, limit_bytes=twice))
    await expect(bench.client.CreateVolume(other), "ALREADY_EXISTS")


@check(
    "CreateVolume.other-source",
    "CreateVolume with a name that is used and another content source is ALREADY_EXISTS.",
    CREATE,
    SNAPSHOT,
)
async def other_source(bench: Bench) -> None:
    origin = await bench.create()
    snapshot = await bench.snapshot(origin.volume_id)
    await bench.create(name := bench.name())
    other = bench.create_request(name, volume_content_source=of_snapshot(snapshot.snapshot_id))
    await expect(bench.client.CreateVolume(other), "ALREADY_EXISTS")


@check("CreateVolume.long-name", "A name may have 128 characters.", CREATE, stage=Stage.QUICK)
async def long_name(bench: Bench) -> None:
    request = bench.create_request(bench.name().ljust(128, "x"))
    first = await bench.make(request)
    other = bench.create_request(request.name[:-1] + "y")
    second = await bench.make(other)
    require(first.volume_id != second.volume_id, "two names that differ in their last character have one volume")


@check(
    "CreateVolume.large-secrets",
    "The secrets of a request may have up to 4 KiB together.",
    CREATE,
    stage=Stage.QUICK,
)
async def large_secrets(bench: Bench) -> None:
    room = 4096 - sum(len(key.encode()) + len(value.encode()) for key, value in bench.config.secrets.items())
    padding = "x" * max(0, room - len(_PADDING))
    await bench.make(bench.create_request(secrets={**bench.config.secrets, _PADDING: padding}))


@check(
    "CreateVolume.any-name",
    "A name may hold any Unicode character that is no control character, also a slash, a blank and dots.",
    CREATE,
    stage=Stage.QUICK,
)
async def any_name(bench: Bench) -> None:
    for part in ("/../", " a b ", "äö漢字", "$(x);'\"", "..", "%s%n"):
        await bench.make(bench.create_request(f"{part}{bench.name()[:60]}"))


@check(
    "CreateVolume.range-upside-down",
    "CreateVolume with limit_bytes below required_bytes is INVALID_ARGUMENT or OUT_OF_RANGE.",
    CREATE,
    stage=Stage.QUICK,
)
async def upside_down(bench: Bench) -> None:
    wrong = pb.CapacityRange(required_bytes=bench.config.size_bytes, limit_bytes=1)
    await expect(bench.make(bench.create_request(capacity_range=wrong)), "INVALID_ARGUMENT", "OUT_OF_RANGE")


@check(
    "CreateVolume.negative-size",
    "CreateVolume with a negative size is INVALID_ARGUMENT or OUT_OF_RANGE.",
    CREATE,
    stage=Stage.QUICK,
)
async def negative(bench: Bench) -> None:
    wrong = pb.CapacityRange(required_bytes=-1)
    await expect(bench.make(bench.create_request(capacity_range=wrong)), "INVALID_ARGUMENT", "OUT_OF_RANGE")


@check(
    "CreateVolume.huge-size",
    "CreateVolume of more than any storage has is OUT_OF_RANGE or RESOURCE_EXHAUSTED, or the driver keeps its word.",
    CREATE,
    stage=Stage.QUICK,
)
async def huge(bench: Bench) -> None:
    most = 2**62
    try:
        volume = await bench.make(bench.create_request(capacity_range=pb.CapacityRange(required_bytes=most)))
    except CsiError as error:
        good = error.code in ("OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
        require(good, f"{error.code}: {error.message}", "OUT_OF_RANGE or RESOURCE_EXHAUSTED")
        return
    kept = volume.capacity_bytes == 0 or volume.capacity_bytes >= most
    require(kept, f"capacity_bytes is {volume.capacity_bytes}", f"at least {most}")


@check(
    "CreateVolume.no-access-type",
    "CreateVolume with a capability that is neither block nor mount is INVALID_ARGUMENT.",
    CREATE,
    stage=Stage.QUICK,
)
async def no_access_type(bench: Bench) -> None:
    bare = bench.capability()
    bare.ClearField("block" if bench.is_block else "mount")
    await expect(bench.make(bench.create_request(volume_capabilities=[bare])), "INVALID_ARGUMENT")


@check(
    "CreateVolume.no-access-mode",
    "CreateVolume with a capability whose access mode is UNKNOWN is INVALID_ARGUMENT.",
    CREATE,
    stage=Stage.QUICK,
)
async def no_access_mode(bench: Bench) -> None:
    bare = bench.capability("UNKNOWN")
    await expect(bench.make(bench.create_request(volume_capabilities=[bare])), "INVALID_ARGUMENT")


@check(
    "CreateVolume.topology",
    "A new volume can be used where the caller required it, and names places by the keys of NodeGetInfo.",
    CREATE,
    _TOPOLOGY,
    "node:SERVICE",
    stage=Stage.QUICK,
)
async def topology(bench: Bench) -> None:
    volume = await bench.create()
    here = dict(bench.node.accessible_topology.segments)
    places = [dict(place.segments) for place in volume.accessible_topology]
    for place in places:
        require(set(place) <= set(here), f"accessible_topology has the keys {sorted(place)}", f"among {sorted(here)}")
    reachable = not places or any(all(here.get(key) == value for key, value in place.items()) for place in places)
    require(reachable, f"accessible_topology is {places}", f"a place that {here} is in")


@check(
    "CreateVolume.unreachable-topology",
    "CreateVolume for a place that the driver does not reach fails.",
    CREATE,
    _TOPOLOGY,
    "node:SERVICE",
    stage=Stage.QUICK,
)
async def unreachable(bench: Bench) -> None:
    nowhere = pb.Topology(segments={key: bench.unknown_id("place") for key in bench.node.accessible_topology.segments})
    request = bench.create_request()
    request.ClearField("accessibility_requirements")
    request.accessibility_requirements.requisite.append(nowhere)
    codes = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "NOT_FOUND")
    await expect(bench.make(request), *codes)


@check("DeleteVolume.repeated", "DeleteVolume of a deleted volume succeeds.", CREATE, stage=Stage.QUICK)
async def delete_repeated(bench: Bench) -> None:
    volume = await bench.create()
    with bench.given("DeleteVolume.works"):
        await bench.delete(volume.volume_id)
    await bench.delete(volume.volume_id)


@check(
    "DeleteVolume.is-gone",
    "After DeleteVolume the volume does not exist, and its name can be used for a new one.",
    CREATE,
)
async def is_gone(bench: Bench) -> None:
    name = bench.name()
    volume = await bench.create(name)
    with bench.given("DeleteVolume.works"):
        await bench.delete(volume.volume_id)
    await expect(bench.client.ValidateVolumeCapabilities(validation(bench, volume)), "NOT_FOUND")
    doubled = pb.CapacityRange(required_bytes=bench.config.grown_bytes)
    await bench.make(bench.create_request(name, capacity_range=doubled))


@check(
    "DeleteVolume.snapshots-outlive",
    "DeleteVolume of a volume with a snapshot fails with FAILED_PRECONDITION, or leaves a snapshot that can be restored.",
    CREATE,
    SNAPSHOT,
)
async def snapshots_outlive(bench: Bench) -> None:
    volume = await bench.create()
    snapshot = await bench.snapshot(volume.volume_id)
    try:
        await bench.delete(volume.volume_id)
    except CsiError as error:
        good = error.code == "FAILED_PRECONDITION"
        require(good, f"DeleteVolume answered {error.code}: {error.message}", "OK or FAILED_PRECONDITION")
        return
    await bench.make(bench.create_request(volume_content_source=of_snapshot(snapshot.snapshot_id)))


@check("DeleteVolume.clones-outlive", "A clone is usable after its source is deleted.", CREATE, CLONE)
async def clones_outlive(bench: Bench) -> None:
    volume = await bench.create()
    copy = await bench.clone(volume.volume_id)
    try:
        await bench.delete(volume.volume_id)
    except CsiError as error:
        good = error.code == "FAILED_PRECONDITION"
        require(good, f"DeleteVolume answered {error.code}: {error.message}", "OK or FAILED_PRECONDITION")
    answer = await bench.client.ValidateVolumeCapabilities(validation(bench, copy))
    require(bool(answer.confirmed.volume_capabilities), f"the clone is not confirmed: {answer.message}")


@check(
    "CreateVolume.clone-size",
    "A clone has at least the size of its source; a limit below that is OUT_OF_RANGE.",
    CREATE,
    CLONE,
    stage=Stage.QUICK,
)
async def clone_size(bench: Bench) -> None:
    origin = await bench.create(capacity_range=pb.CapacityRange(required_bytes=bench.config.grown_bytes))
    request = bench.create_request(volume_content_source=of_volume(origin.volume_id))
    request.ClearField("capacity_range")
    try:
        copy = await bench.make(request)
    except CsiError as error:
        good = error.code in ("OUT_OF_RANGE", "INVALID_ARGUMENT")
        require(good, f"without a size: {error.code}: {error.message}", "OK, OUT_OF_RANGE or INVALID_ARGUMENT")
        return
    enough = copy.capacity_bytes == 0 or copy.capacity_bytes >= origin.capacity_bytes
    require(enough, f"the source has {origin.capacity_bytes} bytes, the clone {copy.capacity_bytes}")
    small = pb.CapacityRange(limit_bytes=bench.config.size_bytes)
    request = bench.create_request(volume_content_source=of_volume(origin.volume_id), capacity_range=small)
    await expect(bench.make(request), "OUT_OF_RANGE", "INVALID_ARGUMENT")


def validation(bench: Bench, volume: pb.Volume) -> pb.ValidateVolumeCapabilitiesRequest:
    return pb.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_context=volume.volume_context,
        volume_capabilities=[bench.capability()],
        parameters=bench.config.parameters,
        secrets=bench.config.secrets,
    )


@check(
    "ValidateVolumeCapabilities.confirms",
    "What a volume was made for is confirmed, and the confirmation repeats the capabilities.",
    CREATE,
    stage=Stage.QUICK,
)
async def validates(bench: Bench) -> None:
    request = validation(bench, await bench.create())
    answer = await bench.client.ValidateVolumeCapabilities(request)
    require(answer.HasField("confirmed"), f"not confirmed: {answer.message}")
    same = list(answer.confirmed.volume_capabilities) == list(request.volume_capabilities)
    require(same, "confirmed.volume_capabilities are not those that were asked for")


@check(
    "ControllerGetVolume.agrees",
    "ControllerGetVolume answers the volume as CreateVolume did.",
    CREATE,
    _GET,
    stage=Stage.QUICK,
)
async def get_volume(bench: Bench) -> None:
    volume = await bench.create()
    answer = await bench.client.ControllerGetVolume(pb.ControllerGetVolumeRequest(volume_id=volume.volume_id))
    found = answer.volume
    require(found.volume_id == volume.volume_id, f"volume_id is {found.volume_id!r}", volume.volume_id)
    require(found.volume_context == volume.volume_context, "volume_context differs from that of CreateVolume")
    sizes = {found.capacity_bytes, volume.capacity_bytes} - {0}
    require(len(sizes) <= 1, f"capacity_bytes is {found.capacity_bytes}", f"{volume.capacity_bytes}")
    if bench.has("controller:VOLUME_CONDITION"):
        require(answer.status.HasField("volume_condition"), "status.volume_condition is missing")


@check(
    "ControllerModifyVolume.refuses-unknown",
    "ControllerModifyVolume with a parameter that the driver does not know is INVALID_ARGUMENT.",
    CREATE,
    _MODIFY,
    stage=Stage.QUICK,
)
async def modify_unknown(bench: Bench) -> None:
    volume = await bench.create()
    wrong = {**bench.config.mutable_parameters, "no-such-key": "1"}
    request = pb.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id, mutable_parameters=wrong, secrets=bench.config.secrets
    )
    await expect(bench.client.ControllerModifyVolume(request), "INVALID_ARGUMENT")


@check(
    "ControllerModifyVolume.repeated",
    "ControllerModifyVolume takes parameters that the driver knows, also twice.",
    CREATE,
    _MODIFY,
    "run:mutable-parameters",
    stage=Stage.QUICK,
)
async def modify(bench: Bench) -> None:
    volume = await bench.create()
    request = pb.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id,
        mutable_parameters=bench.config.mutable_parameters,
        secrets=bench.config.secrets,
    )
    for _ in range(2):
        await bench.client.ControllerModifyVolume(request)


@check(
    "CreateVolume.mutable-parameters",
    "CreateVolume takes mutable parameters that the driver knows, and refuses others with INVALID_ARGUMENT.",
    CREATE,
    _MODIFY,
    "run:mutable-parameters",
    stage=Stage.QUICK,
)
async def create_mutable(bench: Bench) -> None:
    await bench.make(bench.create_request(mutable_parameters=bench.config.mutable_parameters))
    await expect(bench.make(bench.create_request(mutable_parameters={"no-such-key": "1"})), "INVALID_ARGUMENT")
