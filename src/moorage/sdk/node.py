"""The Node service: mount points made, checked and removed around a driver's hooks.

Owns: the order of checks of each call. What is mounted is asked of the kernel; the library remembers nothing here.
Start reading at: `NodeService.NodePublishVolume`.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.errors import NotServed
from moorage.csi.inflight import InFlight
from moorage.errors import InvalidRequest
from moorage.host import mounts
from moorage.host.targets import Target, check_path
from moorage.sdk import wire
from moorage.sdk.driver import Driver
from moorage.sdk.errors import FailedPrecondition, NotFound
from moorage.sdk.identity import node_capabilities
from moorage.sdk.model import NodeVolume, Secrets, Stats
from moorage.sdk.publications import Publications
from moorage.sdk.targets import StagingTarget, live_mount, published


class NodeService(csi_pb2_grpc.NodeServicer):
    """CSI messages in, hooks out."""

    def __init__(self, driver: Driver, publications: Publications, in_flight: InFlight) -> None:
        self._driver = driver
        self._publications = publications
        self._in_flight = in_flight

    async def NodeGetCapabilities(
        self, request: pb.NodeGetCapabilitiesRequest, context: Any
    ) -> pb.NodeGetCapabilitiesResponse:
        return pb.NodeGetCapabilitiesResponse(capabilities=node_capabilities(self._driver))

    async def NodeGetInfo(self, request: pb.NodeGetInfoRequest, context: Any) -> pb.NodeGetInfoResponse:
        segments = dict(self._driver.topology())
        return pb.NodeGetInfoResponse(
            node_id=self._driver.environment.node_id,
            max_volumes_per_node=self._driver.max_volumes_per_node,
            accessible_topology=pb.Topology(segments=segments) if segments else None,
        )

    async def NodeStageVolume(self, request: pb.NodeStageVolumeRequest, context: Any) -> pb.NodeStageVolumeResponse:
        self._need("stage")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("staging_target_path", request.staging_target_path)
        access = wire.needed_access_from(request)
        with self._in_flight.claim("NodeStageVolume", f"volume {volume_id}"):
            target = Target.from_request("staging_target_path", request.staging_target_path)
            if live_mount(target) is None:
                target.ensure_directory("staging_target_path")
                volume = NodeVolume(
                    id=volume_id,
                    access=access,
                    context=dict(request.volume_context),
                    publish_context=dict(request.publish_context),
                    secrets=Secrets(request.secrets),
                    staging=Path(target.path),
                )
                await self._driver.call("stage", volume, StagingTarget(target, access))
        return pb.NodeStageVolumeResponse()

    async def NodeUnstageVolume(
        self, request: pb.NodeUnstageVolumeRequest, context: Any
    ) -> pb.NodeUnstageVolumeResponse:
        self._need("stage")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("staging_target_path", request.staging_target_path)
        with self._in_flight.claim("NodeUnstageVolume", f"volume {volume_id}"):
            target = Target.from_request("staging_target_path", request.staging_target_path)
            target.unmount()
            if self._driver.defines("unstage"):
                await self._driver.call("unstage", volume_id, Path(target.path))
        return pb.NodeUnstageVolumeResponse()

    async def NodePublishVolume(
        self, request: pb.NodePublishVolumeRequest, context: Any
    ) -> pb.NodePublishVolumeResponse:
        self._need("publish")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("target_path", request.target_path)
        access = wire.needed_access_from(request)
        if access.is_block and not self._driver.supports_block:
            raise InvalidRequest("volume_capability: this driver has no block devices")
        staging = self._staging(request)
        is_read_only = request.readonly or access.mode.is_read_only
        with self._in_flight.claim("NodePublishVolume", f"volume {volume_id}"):
            target = Target.from_request("target_path", request.target_path)
            found = live_mount(target)
            self._publications.check(volume_id, target.path, access, is_read_only, is_mounted=found is not None)
            if found is not None:
                return pb.NodePublishVolumeResponse()
            volume = NodeVolume(
                id=volume_id,
                access=access,
                is_read_only=is_read_only,
                context=dict(request.volume_context),
                publish_context=dict(request.publish_context),
                secrets=Secrets(request.secrets),
                staging=staging,
            )
            with published(target, access, is_read_only) as where:
                await self._driver.call("publish", volume, where)
            self._publications.add(volume_id, target.path, access, is_read_only)
        return pb.NodePublishVolumeResponse()

    def _staging(self, request: pb.NodePublishVolumeRequest) -> Path | None:
        if not self._driver.defines("stage"):
            return None
        if not request.staging_target_path:
            raise FailedPrecondition("staging_target_path is missing: volumes of this driver are staged first")
        check_path("staging_target_path", request.staging_target_path)
        return Path(Target.from_request("staging_target_path", request.staging_target_path).path)

    async def NodeUnpublishVolume(
        self, request: pb.NodeUnpublishVolumeRequest, context: Any
    ) -> pb.NodeUnpublishVolumeResponse:
        self._need("publish")
        volume_id = wire.required("volume_id", request.volume_id)
        check_path("target_path", request.target_path)
        with self._in_flight.claim("NodeUnpublishVolume", f"volume {volume_id}"):
            target = Target.from_request("target_path", request.target_path)
            target.unmount()
            if self._driver.defines("unpublish"):
                await self._driver.call("unpublish", volume_id, Path(target.path))
            target.remove()
            self._publications.remove(volume_id, target.path)
        return pb.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: pb.NodeGetVolumeStatsRequest, context: Any
    ) -> pb.NodeGetVolumeStatsResponse:
        self._need("publish")
        path = self._mounted(wire.required("volume_id", request.volume_id), request.volume_path)
        if self._driver.defines("stats"):
            found: Stats = await self._driver.call("stats", request.volume_id, path)
        else:
            found = filesystem_stats(path)
        return pb.NodeGetVolumeStatsResponse(usage=_usage(found))

    async def NodeExpandVolume(self, request: pb.NodeExpandVolumeRequest, context: Any) -> pb.NodeExpandVolumeResponse:
        self._need("expand_on_node")
        volume_id = wire.required("volume_id", request.volume_id)
        path = self._mounted(volume_id, request.volume_path)
        size = wire.size_from("capacity_range", request.capacity_range)
        with self._in_flight.claim("NodeExpandVolume", f"volume {volume_id}"):
            grown: int = await self._driver.call("expand_on_node", volume_id, path, size)
        return pb.NodeExpandVolumeResponse(capacity_bytes=grown)

    async def NodeGetVolumeHealth(
        self, request: pb.NodeGetVolumeHealthRequest, context: Any
    ) -> pb.NodeGetVolumeHealthResponse:
        raise NotServed("volume health is served by the controller")

    async def NodeGetStorageHealth(
        self, request: pb.NodeGetStorageHealthRequest, context: Any
    ) -> pb.NodeGetStorageHealthResponse:
        raise NotServed("volume health is served by the controller")

    def _mounted(self, volume_id: str, path: str) -> Path:
        """Return a path at which a volume is mounted. Raises NotFound if nothing is mounted there."""
        wire.required("volume_path", path)
        with contextlib.suppress(InvalidRequest):  # nothing is mounted at a path that cannot be one
            target = Target.from_request("volume_path", path)
            if target.mounted() is not None:
                return Path(target.path)
        raise NotFound(f"volume {volume_id} is not mounted at {path}")

    def _need(self, hook: str) -> None:
        """Raise UNIMPLEMENTED unless the driver defines the hook."""
        if not self._driver.defines(hook):
            raise NotServed(f"driver {self._driver.name} does not offer this call")


def filesystem_stats(path: Path) -> Stats:
    """Return what the kernel says of a mounted filesystem or block device."""
    if stat.S_ISBLK(os.stat(path).st_mode):
        with open(path, "rb") as device:
            return Stats(device.seek(0, os.SEEK_END))
    space = mounts.space_of(path)
    return Stats(
        space.total_bytes,
        space.used_bytes,
        space.available_bytes,
        space.total_inodes,
        space.used_inodes,
        space.free_inodes,
    )


def _usage(found: Stats) -> list[pb.VolumeUsage]:
    usage = [
        pb.VolumeUsage(
            unit=pb.VolumeUsage.BYTES,
            total=found.total_bytes,
            used=found.used_bytes,
            available=found.available_bytes,
        )
    ]
    if found.total_inodes:
        usage.append(
            pb.VolumeUsage(
                unit=pb.VolumeUsage.INODES,
                total=found.total_inodes,
                used=found.used_inodes,
                available=found.available_inodes,
            )
        )
    return usage
