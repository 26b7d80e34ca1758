"""Growing volumes, at the controller and on the node, and the sizes that the kernel then shows.

Owns: what ControllerExpandVolume and NodeExpandVolume promise, and whether sizes are real.
"""

import os

from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE, EXPAND, NODE, expand_request, grown_bytes
from moorage.conformance.model import Stage, check, require
from moorage.conformance.place import STAGES, Placed, place
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

NODE_EXPAND = "node:EXPAND_VOLUME"
_ONLINE = "expansion:ONLINE"
_FILESYSTEM_SHARE = 2  # a small filesystem may need half of its device for itself


@check(
    "ControllerExpandVolume.repeated",
    "ControllerExpandVolume of a volume that is large enough succeeds with its real size.",
    CREATE,
    EXPAND,
    stage=Stage.QUICK,
)
async def repeated(bench: Bench) -> None:
    volume = await bench.create()
    request = expand_request(bench, volume)
    with bench.given("ControllerExpandVolume.works"):
        first = await bench.client.ControllerExpandVolume(request)
    again = await bench.client.ControllerExpandVolume(request)
    same = again.capacity_bytes == first.capacity_bytes
    require(same, f"capacity_bytes was {first.capacity_bytes}, now it is {again.capacity_bytes}")
    request.capacity_range.required_bytes = bench.config.size_bytes
    smaller = await bench.client.ControllerExpandVolume(request)
    kept = smaller.capacity_bytes >= grown_bytes(bench, volume)
    require(kept, f"asked for less, capacity_bytes is {smaller.capacity_bytes}", f"{first.capacity_bytes}")


@check(
    "ControllerExpandVolume.recorded",
    "After ControllerExpandVolume the volume is listed with its new size, and its old request still finds it or conflicts.",
    CREATE,
    EXPAND,
    "controller:GET_VOLUME",
    stage=Stage.QUICK,
)
async def recorded(bench: Bench) -> None:
    volume = await bench.create()
    with bench.given("ControllerExpandVolume.works"):
        grown = await bench.client.ControllerExpandVolume(expand_request(bench, volume))
    answer = await bench.client.ControllerGetVolume(pb.ControllerGetVolumeRequest(volume_id=volume.volume_id))
    found = answer.volume.capacity_bytes
    require(found in (0, grown.capacity_bytes), f"ControllerGetVolume says {found}", f"{grown.capacity_bytes}")


@check(
    "ControllerExpandVolume.over-limit",
    "ControllerExpandVolume with a limit below the volume's size is OUT_OF_RANGE or INVALID_ARGUMENT.",
    CREATE,
    EXPAND,
    stage=Stage.QUICK,
)
async def over_limit(bench: Bench) -> None:
    volume = await bench.create(capacity_range=pb.CapacityRange(required_bytes=bench.config.grown_bytes))
    request = expand_request(bench, volume)
    request.capacity_range.CopyFrom(pb.CapacityRange(required_bytes=1, limit_bytes=bench.config.size_bytes))
    await expect(bench.client.ControllerExpandVolume(request), "OUT_OF_RANGE", "INVALID_ARGUMENT")


async def _grow(bench: Bench, placed: Placed) -> None:
    """Grow a published volume, as a resizer and a kubelet do."""
    with bench.given("ControllerExpandVolume.works"):
        answer = await bench.client.ControllerExpandVolume(expand_request(bench, placed.volume))
    if answer.node_expansion_required:
        try:
            await bench.client.NodeExpandVolume(node_expand_request(bench, placed))
        except CsiError as error:
            if error.code != "FAILED_PRECONDITION":  # this filesystem cannot grow while it is mounted
                raise
            await placed.down()
            await placed.up()


def must_have_grown(bench: Bench, placed: Placed, before: int, after: int) -> None:
    """Fail unless the kernel shows more; a directory of a larger filesystem has no size of its own."""
    is_known = bench.has(NODE_EXPAND) and before < grown_bytes(bench, placed.volume)
    require(not is_known or after > before, f"{placed.target} still shows {after} bytes", f"more than {before}")


def node_expand_request(bench: Bench, placed: Placed) -> pb.NodeExpandVolumeRequest:
    return pb.NodeExpandVolumeRequest(
        volume_id=placed.volume.volume_id,
        volume_path=placed.target,
        capacity_range=pb.CapacityRange(required_bytes=grown_bytes(bench, placed.volume)),
        staging_target_path=placed.staging if bench.has(STAGES) else "",
        volume_capability=bench.capability(),
        secrets=bench.config.secrets,
    )


@check(
    "Data.grows-while-published",
    "A published volume grows, keeps its data, and shows its new size.",
    CREATE,
    NODE,
    EXPAND,
    _ONLINE,
)
async def grows(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(1 << 18)
    await placed.write(content)
    before = await placed.size()
    await _grow(bench, placed)
    await placed.must_hold(content, "after the growth")
    must_have_grown(bench, placed, before, await placed.size())


@check(
    "Data.grows-before-publish",
    "A volume that grew while it was not on a node shows its new size, or grows with NodeExpandVolume, once it is.",
    CREATE,
    NODE,
    EXPAND,
    NODE_EXPAND,
)
async def grows_offline(bench: Bench) -> None:
    placed = await place(bench)
    content = os.urandom(1 << 18)
    await placed.write(content)
    before = await placed.size()
    await placed.down()
    with bench.given("ControllerExpandVolume.works"):
        answer = await bench.client.ControllerExpandVolume(expand_request(bench, placed.volume))
    await placed.up()
    if answer.node_expansion_required:
        await bench.client.NodeExpandVolume(node_expand_request(bench, placed))
    await placed.must_hold(content, "after the growth")
    must_have_grown(bench, placed, before, await placed.size())


@check(
    "NodeExpandVolume.repeated",
    "NodeExpandVolume of a volume that is large enough succeeds, also without a capacity_range.",
    CREATE,
    NODE,
    NODE_EXPAND,
)
async def node_repeated(bench: Bench) -> None:
    placed = await place(bench)
    request = node_expand_request(bench, placed)
    request.capacity_range.required_bytes = bench.config.size_bytes
    for _ in range(2):
        await bench.client.NodeExpandVolume(request)
    request.ClearField("capacity_range")
    await bench.client.NodeExpandVolume(request)


@check(
    "Data.size-is-real",
    "A published volume has the size that CreateVolume answered: a device exactly, a filesystem at least half of it.",
    CREATE,
    NODE,
)
async def real_size(bench: Bench) -> None:
    placed = await place(bench)
    found, told = await placed.size(), placed.volume.capacity_bytes
    if bench.is_block:
        wanted = told or bench.config.size_bytes
        good = found == wanted if told else found >= wanted
        require(good, f"the device has {found} bytes", f"{wanted}")
    else:
        wanted = (told or bench.config.size_bytes) // _FILESYSTEM_SHARE
        require(found >= wanted, f"the filesystem has {found} bytes", f"at least {wanted}")
