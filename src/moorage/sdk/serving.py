"""The services behind a driver's socket, put together, started and stopped in order.

Owns: the wiring, for drivers and for the Moorage plugin. It decides nothing.
Start reading at: `serving`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable

from moorage.csi import csi_pb2_grpc
from moorage.csi.http_endpoint import HttpEndpoint
from moorage.csi.inflight import InFlight
from moorage.csi.server import CsiServer
from moorage.sdk.controller import ControllerService
from moorage.sdk.groups import GroupService, MetadataService
from moorage.sdk.identity import Identity, IdentityService
from moorage.sdk.node import NodeService
from moorage.sdk.operations import BlockingCalls, ControllerOperations, NodeOperations


@contextlib.asynccontextmanager
async def serving(
    server: CsiServer,
    identity: Identity,
    controller: ControllerOperations | None,
    node: NodeOperations | None,
    *,
    in_flight: InFlight,
    work: BlockingCalls,
    metrics: Callable[[], str],
    http_endpoint: str = "",
    stop_grace_s: float = 30.0,
) -> AsyncIterator[IdentityService]:
    """Serve operations for the length of the block; Probe says not ready until `is_started` is set."""
    service = IdentityService(identity)
    csi_pb2_grpc.add_IdentityServicer_to_server(service, server.grpc)
    if controller is not None:
        parts = (controller, in_flight, work)
        csi_pb2_grpc.add_ControllerServicer_to_server(ControllerService(*parts), server.grpc)
        if controller.serves("create_group"):
            csi_pb2_grpc.add_GroupControllerServicer_to_server(GroupService(*parts), server.grpc)
        if controller.serves("allocated_blocks"):
            csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(MetadataService(*parts), server.grpc)
    if node is not None:
        csi_pb2_grpc.add_NodeServicer_to_server(NodeService(node, in_flight, work), server.grpc)
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop, stop_grace_s)
        if http_endpoint:
            await stack.enter_async_context(HttpEndpoint(http_endpoint, metrics, lambda: service.is_started))
        yield service
