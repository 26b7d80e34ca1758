"""Checks of the Controller service: volumes, capacity, listing, attaching, growing, modifying."""

import asyncio

from moorage.conformance.suite import Bench, CheckSkipped, check, expect, require
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

SERVICE = "Controller"

_CREATE = "controller:CREATE_DELETE_VOLUME"
_PUBLISH = "controller:PUBLISH_UNPUBLISH_VOLUME"


@check(SERVICE, "CreateVolume without a name is refused", _CREATE)
async def create_needs_name(bench: Bench) -> None:
    await expect("INVALID_ARGUMENT", bench.client.CreateVolume(bench.create_request("")), "CreateVolume without name")


@check(SERVICE, "CreateVolume without capabilities is refused", _CREATE)
async def create_needs_capabilities(bench: Bench) -> None:
    request = bench.create_request(bench.fresh_name())
    del request.volume_capabilities[:]
    await expect("INVALID_ARGUMENT", bench.client.CreateVolume(request), "CreateVolume without volume_capabilities")


@check(SERVICE, "CreateVolume gives at least the size asked for", _CREATE)
async def create_gives_size(bench: Bench) -> None:
    volume = await bench.create()
    enough = volume.capacity_bytes == 0 or volume.capacity_bytes >= bench.config.size_bytes
    require(enough, f"asked for {bench.config.size_bytes} bytes, got {volume.capacity_bytes}")


@check(SERVICE, "CreateVolume twice with one name is one volume", _CREATE)
async def create_is_idempotent(bench: Bench) -> None:
    name = bench.fresh_name()
    first, second = await bench.create(name), await bench.create(name)
    require(first.volume_id == second.volume_id, f"{first.volume_id!r} and {second.volume_id!r} for one name")
    require(first.volume_context == second.volume_context, "volume_context differs between two answers")


@check(SERVICE, "CreateVolume of one name eight times at once is one volume", _CREATE)
async def create_races(bench: Bench) -> None:
    name, ids = bench.fresh_name(), set()
    calls = [bench.client.CreateVolume(bench.create_request(name)) for _ in range(8)]
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, CsiError):
            require(answer.code == "ABORTED", f"a concurrent create got {answer.code}, expected OK or ABORTED")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            ids.add(answer.volume.volume_id)
    final = await bench.create(name)
    require(ids <= {final.volume_id}, f"one name became several volumes: {sorted(ids | {final.volume_id})}")


@check(SERVICE, "CreateVolume with a used name and another size is ALREADY_EXISTS", _CREATE)
async def create_conflicts(bench: Bench) -> None:
    name, size = bench.fresh_name(), bench.config.size_bytes
    await bench.create(name, capacity_range=pb.CapacityRange(limit_bytes=size))
    other = bench.create_request(name)
    other.capacity_range.CopyFrom(pb.CapacityRange(required_bytes=size * 2, limit_bytes=size * 2))
    await expect("ALREADY_EXISTS", bench.client.CreateVolume(other), "CreateVolume with the same name, twice the size")


@check(SERVICE, "CreateVolume takes a name of 128 characters", _CREATE)
async def create_long_name(bench: Bench) -> None:
    await bench.create(bench.fresh_name().ljust(128, "x"))


@check(SERVICE, "CreateVolume refuses a size range that is upside down", _CREATE)
async def create_bad_range(bench: Bench) -> None:
    request = bench.create_request(bench.fresh_name())
    request.capacity_range.CopyFrom(pb.CapacityRange(required_bytes=bench.config.size_bytes, limit_bytes=1))
    try:
        answer = await bench.client.CreateVolume(request)
    except CsiError as error:
        good = error.code in ("INVALID_ARGUMENT", "OUT_OF_RANGE")
        require(good, f"limit below required: expected INVALID_ARGUMENT or OUT_OF_RANGE, got {error.code}")
        return
    bench.cleanup.push_async_callback(bench.delete, answer.volume.volume_id)
    require(False, "a volume was made although limit_bytes is below required_bytes")


@check(SERVICE, "CreateVolume from an unknown volume is NOT_FOUND", _CREATE, "controller:CLONE_VOLUME")
async def clone_of_nothing(bench: Bench) -> None:
    source = pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id="no-such-volume"))
    request = bench.create_request(bench.fresh_name(), volume_content_source=source)
    await expect("NOT_FOUND", bench.client.CreateVolume(request), "clone of an unknown volume")


@check(SERVICE, "A clone echoes its source", _CREATE, "controller:CLONE_VOLUME")
async def clone(bench: Bench) -> None:
    origin = await bench.create()
    source = pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=origin.volume_id))
    copy = await bench.create(volume_content_source=source)
    require(copy.volume_id != origin.volume_id, "the clone has its source's id")
    require(copy.content_source == source, "content_source is missing or another one in the answer")


@check(SERVICE, "DeleteVolume needs an id", _CREATE)
async def delete_needs_id(bench: Bench) -> None:
    await expect("INVALID_ARGUMENT", bench.delete(""), "DeleteVolume without volume_id")


@check(SERVICE, "DeleteVolume of an unknown volume succeeds", _CREATE)
async def delete_unknown(bench: Bench) -> None:
    await bench.delete("no-such-volume")


@check(SERVICE, "DeleteVolume twice succeeds", _CREATE)
async def delete_twice(bench: Bench) -> None:
    volume = await bench.create()
    await bench.delete(volume.volume_id)
    await bench.delete(volume.volume_id)


@check(SERVICE, "ValidateVolumeCapabilities confirms what the volume was made for", _CREATE)
async def validate(bench: Bench) -> None:
    volume = await bench.create()
    request = pb.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id, volume_context=volume.volume_context, volume_capabilities=[bench.capability()]
    )
    answer = await bench.client.ValidateVolumeCapabilities(request)
    require(bool(answer.confirmed.volume_capabilities), f"not confirmed: {answer.message}")


@check(SERVICE, "ValidateVolumeCapabilities checks its fields and the volume", _CREATE)
async def validate_bad(bench: Bench) -> None:
    call, caps = bench.client.ValidateVolumeCapabilities, [bench.capability()]
    empty = pb.ValidateVolumeCapabilitiesRequest(volume_capabilities=caps)
    await expect("INVALID_ARGUMENT", call(empty), "without volume_id")
    volume = await bench.create()
    bare = pb.ValidateVolumeCapabilitiesRequest(volume_id=volume.volume_id)
    await expect("INVALID_ARGUMENT", call(bare), "without volume_capabilities")
    unknown = pb.ValidateVolumeCapabilitiesRequest(volume_id="no-such-volume", volume_capabilities=caps)
    await expect("NOT_FOUND", call(unknown), "with an unknown volume")


@check(SERVICE, "ListVolumes shows a volume from its creation to its deletion", _CREATE, "controller:LIST_VOLUMES")
async def list_follows(bench: Bench) -> None:
    volume = await bench.create()
    require(volume.volume_id in await _listed(bench), "a created volume is not listed")
    await bench.delete(volume.volume_id)
    require(volume.volume_id not in await _listed(bench), "a deleted volume is still listed")


@check(SERVICE, "ListVolumes pages without loss or repetition", _CREATE, "controller:LIST_VOLUMES")
async def list_pages(bench: Bench) -> None:
    made = {(await bench.create()).volume_id for _ in range(3)}
    seen: list[str] = []
    token = ""
    while True:
        page = await bench.client.ListVolumes(pb.ListVolumesRequest(max_entries=2, starting_token=token))
        require(len(page.entries) <= 2, f"max_entries is 2, got {len(page.entries)}")
        seen += [entry.volume.volume_id for entry in page.entries]
        token = page.next_token
        if not token:
            break
    require(len(seen) == len(set(seen)), "a volume is on two pages")
    require(made <= set(seen), f"not on any page: {sorted(made - set(seen))}")


@check(SERVICE, "ListVolumes with a bad token is ABORTED", "controller:LIST_VOLUMES")
async def list_bad_token(bench: Bench) -> None:
    call = bench.client.ListVolumes(pb.ListVolumesRequest(starting_token="no-such-token"))
    await expect("ABORTED", call, "ListVolumes with an unknown starting_token")


@check(SERVICE, "GetCapacity answers, and not with a negative number", "controller:GET_CAPACITY")
async def capacity(bench: Bench) -> None:
    answer = await bench.client.GetCapacity(pb.GetCapacityRequest(parameters=bench.config.parameters))
    require(answer.available_capacity >= 0, f"available_capacity is {answer.available_capacity}")


@check(SERVICE, "ControllerGetVolume finds a volume, and only one that exists", _CREATE, "controller:GET_VOLUME")
async def get_volume(bench: Bench) -> None:
    volume = await bench.create()
    answer = await bench.client.ControllerGetVolume(pb.ControllerGetVolumeRequest(volume_id=volume.volume_id))
    require(answer.volume.volume_id == volume.volume_id, f"asked for {volume.volume_id}, got {answer.volume.volume_id}")
    missing = pb.ControllerGetVolumeRequest(volume_id="no-such-volume")
    await expect("NOT_FOUND", bench.client.ControllerGetVolume(missing), "ControllerGetVolume of an unknown volume")


@check(
    SERVICE,
    "ControllerExpandVolume grows, twice is once, and checks its fields",
    _CREATE,
    "controller:EXPAND_VOLUME",
)
async def expand(bench: Bench) -> None:
    volume, grown = await bench.create(), pb.CapacityRange(required_bytes=bench.config.grown_bytes)
    request = pb.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id, capacity_range=grown, volume_capability=bench.capability()
    )
    for _ in range(2):
        answer = await bench.client.ControllerExpandVolume(request)
        enough = answer.capacity_bytes >= bench.config.grown_bytes
        require(enough, f"asked for {bench.config.grown_bytes} bytes, got {answer.capacity_bytes}")
    for bad in (
        pb.ControllerExpandVolumeRequest(capacity_range=grown),
        pb.ControllerExpandVolumeRequest(volume_id=volume.volume_id),
    ):
        await expect("INVALID_ARGUMENT", bench.client.ControllerExpandVolume(bad), "expansion without a required field")


@check(SERVICE, "ControllerModifyVolume refuses what it does not know, whole", _CREATE, "controller:MODIFY_VOLUME")
async def modify(bench: Bench) -> None:
    volume = await bench.create()
    unknown = pb.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id, mutable_parameters={**bench.config.mutable_parameters, "no-such-key": "1"}
    )
    await expect("INVALID_ARGUMENT", bench.client.ControllerModifyVolume(unknown), "an unknown mutable parameter")
    if not bench.config.mutable_parameters:
        raise CheckSkipped("give --mutable-parameter to check that a known one is taken")
    known = pb.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id, mutable_parameters=bench.config.mutable_parameters
    )
    await bench.client.ControllerModifyVolume(known)


@check(SERVICE, "ControllerPublishVolume attaches, twice is once, and detaches twice", _CREATE, _PUBLISH)
async def publish(bench: Bench) -> None:
    volume = await bench.create()
    request = pb.ControllerPublishVolumeRequest(
        volume_id=volume.volume_id,
        node_id=bench.node.node_id,
        volume_capability=bench.capability(),
        volume_context=volume.volume_context,
    )
    detach = pb.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id=bench.node.node_id)
    bench.cleanup.push_async_callback(bench.client.ControllerUnpublishVolume, detach)
    first = await bench.client.ControllerPublishVolume(request)
    second = await bench.client.ControllerPublishVolume(request)
    require(first.publish_context == second.publish_context, "publish_context differs between two answers")
    for _ in range(2):
        await bench.client.ControllerUnpublishVolume(detach)


@check(SERVICE, "ControllerPublishVolume checks its fields, the volume and the node", _CREATE, _PUBLISH)
async def publish_bad(bench: Bench) -> None:
    call, cap = bench.client.ControllerPublishVolume, bench.capability()
    for bad in (
        pb.ControllerPublishVolumeRequest(node_id="n", volume_capability=cap),
        pb.ControllerPublishVolumeRequest(volume_id="v", volume_capability=cap),
        pb.ControllerPublishVolumeRequest(volume_id="v", node_id="n"),
    ):
        await expect("INVALID_ARGUMENT", call(bad), "attach without a required field")
    unknown = pb.ControllerPublishVolumeRequest(
        volume_id="no-such-volume", node_id=bench.node.node_id, volume_capability=cap
    )
    await expect("NOT_FOUND", call(unknown), "attach of an unknown volume")
    volume = await bench.create()
    nowhere = pb.ControllerPublishVolumeRequest(
        volume_id=volume.volume_id, node_id="no-such-node", volume_capability=cap, volume_context=volume.volume_context
    )
    await expect("NOT_FOUND", call(nowhere), "attach to an unknown node")


async def _listed(bench: Bench) -> set[str]:
    answer = await bench.client.ListVolumes(pb.ListVolumesRequest())
    return {entry.volume.volume_id for entry in answer.entries}
