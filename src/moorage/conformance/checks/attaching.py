"""ControllerPublishVolume and ControllerUnpublishVolume.

Owns: repetition, conflicts, and what may not happen to an attached volume.
"""

from moorage.conformance.bench import Bench, expect
from moorage.conformance.checks.basics import CREATE, unplaced
from moorage.conformance.model import check, require
from moorage.conformance.place import ATTACHES, Placed
from moorage.csi import csi_pb2 as pb

_READONLY = "controller:PUBLISH_READONLY"


async def _attached(bench: Bench) -> Placed:
    placed = unplaced(bench, await bench.create())
    with bench.given("ControllerPublishVolume.works"):
        await placed.attach()
    return placed


@check(
    "ControllerPublishVolume.repeated",
    "ControllerPublishVolume of an attached volume succeeds with the same publish_context.",
    CREATE,
    ATTACHES,
)
async def repeated(bench: Bench) -> None:
    placed = await _attached(bench)
    again = await bench.client.ControllerPublishVolume(placed.attach_request())
    require(dict(again.publish_context) == placed.context, "publish_context differs between two answers")


@check(
    "ControllerPublishVolume.unknown-node",
    "ControllerPublishVolume to a node that does not exist is NOT_FOUND.",
    CREATE,
    ATTACHES,
)
async def unknown_node(bench: Bench) -> None:
    request = unplaced(bench, await bench.create()).attach_request()
    request.node_id = bench.unknown_id("node")
    detach = pb.ControllerUnpublishVolumeRequest(
        volume_id=request.volume_id, node_id=request.node_id, secrets=bench.config.secrets
    )
    await expect(_attached_and_detached(bench, request, detach), "NOT_FOUND")


async def _attached_and_detached(
    bench: Bench, request: pb.ControllerPublishVolumeRequest, detach: pb.ControllerUnpublishVolumeRequest
) -> None:
    await bench.client.ControllerPublishVolume(request)
    await bench.client.ControllerUnpublishVolume(detach)


@check(
    "ControllerPublishVolume.other-way",
    "ControllerPublishVolume of an attached volume in another way (read-only) is ALREADY_EXISTS.",
    CREATE,
    ATTACHES,
    _READONLY,
)
async def other_way(bench: Bench) -> None:
    request = (await _attached(bench)).attach_request()
    request.readonly = True
    await expect(bench.client.ControllerPublishVolume(request), "ALREADY_EXISTS")


@check(
    "ControllerUnpublishVolume.repeated",
    "ControllerUnpublishVolume of a volume that is not attached succeeds, also of one that never was.",
    CREATE,
    ATTACHES,
)
async def detach_repeated(bench: Bench) -> None:
    placed = await _attached(bench)
    with bench.given("ControllerUnpublishVolume.works"):
        await placed.detach()
    await placed.detach()
    await unplaced(bench, await bench.create()).detach()


@check(
    "ControllerUnpublishVolume.all-nodes",
    "ControllerUnpublishVolume without a node_id detaches the volume from all nodes.",
    CREATE,
    ATTACHES,
)
async def all_nodes(bench: Bench) -> None:
    placed = await _attached(bench)
    request = pb.ControllerUnpublishVolumeRequest(volume_id=placed.volume.volume_id, secrets=bench.config.secrets)
    await bench.client.ControllerUnpublishVolume(request)
    with bench.given("DeleteVolume.works"):
        await bench.delete(placed.volume.volume_id)


@check(
    "DeleteVolume.attached",
    "DeleteVolume of an attached volume is FAILED_PRECONDITION, and the volume stays.",
    CREATE,
    ATTACHES,
)
async def delete_attached(bench: Bench) -> None:
    placed = await _attached(bench)
    await expect(bench.delete(placed.volume.volume_id), "FAILED_PRECONDITION")
    request = pb.ValidateVolumeCapabilitiesRequest(
        volume_id=placed.volume.volume_id,
        volume_context=placed.volume.volume_context,
        volume_capabilities=[bench.capability()],
        secrets=bench.config.secrets,
    )
    await bench.client.ValidateVolumeCapabilities(request)
