"""GetCapacity, against what creating volumes then shows.

Owns: the comparison of the claim with what happens. The checks run alone, because other volumes would change the figure.
"""

from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE
from moorage.conformance.model import Stage, check, require
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

_CAPACITY = "controller:GET_CAPACITY"


async def _asked(bench: Bench) -> pb.GetCapacityResponse:
    request = pb.GetCapacityRequest(parameters=bench.config.parameters, volume_capabilities=[bench.capability()])
    if bench.node.accessible_topology.segments and bench.has("plugin:VOLUME_ACCESSIBILITY_CONSTRAINTS"):
        request.accessible_topology.CopyFrom(bench.node.accessible_topology)
    return await bench.client.GetCapacity(request)


@check("GetCapacity.works", "GetCapacity answers, also without any filter.", _CAPACITY, stage=Stage.QUICK)
async def works(bench: Bench) -> None:
    for answer in (await bench.client.GetCapacity(pb.GetCapacityRequest()), await _asked(bench)):
        require(answer.available_capacity >= 0, f"available_capacity is {answer.available_capacity}")


@check(
    "GetCapacity.no-room",
    "If GetCapacity says that a volume does not fit, CreateVolume does not make it.",
    CREATE,
    _CAPACITY,
    stage=Stage.ALONE,
)
async def no_room(bench: Bench) -> None:
    available = (await _asked(bench)).available_capacity
    if available >= bench.config.size_bytes:
        return
    await expect(bench.make(bench.create_request()), "RESOURCE_EXHAUSTED", "OUT_OF_RANGE")


@check(
    "GetCapacity.follows",
    "available_capacity does not rise by a new volume, and a deleted volume's room comes back.",
    CREATE,
    _CAPACITY,
    stage=Stage.ALONE,
)
async def follows(bench: Bench) -> None:
    slack = bench.config.size_bytes // 2
    before = (await _asked(bench)).available_capacity
    volume = await bench.create()
    during = (await _asked(bench)).available_capacity
    require(during <= before + slack, f"{before} bytes before a volume was made, {during} after", "no more than before")
    with bench.given("DeleteVolume.works"):
        await bench.delete(volume.volume_id)
    after = (await _asked(bench)).available_capacity
    require(after >= before - slack, f"{before} bytes before a volume was made, {after} after its end", "as before")


@check(
    "GetCapacity.largest",
    "A volume larger than maximum_volume_size, or limited below minimum_volume_size, is not made.",
    CREATE,
    _CAPACITY,
    stage=Stage.ALONE,
)
async def largest(bench: Bench) -> None:
    answer = await _asked(bench)
    if most := answer.maximum_volume_size.value:
        request = bench.create_request(capacity_range=pb.CapacityRange(required_bytes=most + 1))
        await expect(bench.make(request), "OUT_OF_RANGE", "RESOURCE_EXHAUSTED")
    if (least := answer.minimum_volume_size.value) > 1:
        try:
            volume = await bench.make(bench.create_request(capacity_range=pb.CapacityRange(limit_bytes=least - 1)))
        except CsiError as error:
            require(error.code == "OUT_OF_RANGE", f"{error.code}: {error.message}", "OUT_OF_RANGE")
        else:
            require(volume.capacity_bytes == 0, f"a volume of {volume.capacity_bytes} bytes was made")
