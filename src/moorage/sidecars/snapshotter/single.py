"""Snapshots of one volume: CreateSnapshot, ListSnapshots and DeleteSnapshot.

Owns: what the driver is asked for a VolumeSnapshotContent, and what of its answer goes into the status.
Start reading at: `SingleWorker`.
"""

import time
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import VolumeSnapshotContent
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.contents import ContentWorker
from moorage.sidecars.snapshotter.flavour import SINGLE, is_group_member


class SingleWorker(ContentWorker[VolumeSnapshotContent, pb.Snapshot]):
    """Takes and deletes snapshots of one volume."""

    flavour = SINGLE

    async def find(self, content: VolumeSnapshotContent, handle: str) -> pb.Snapshot | None:
        """Return what the driver here knows of a snapshot, None if it knows nothing or cannot be asked."""
        if not self._can_list:
            return None
        request = pb.ListSnapshotsRequest(snapshot_id=handle, secrets=await self._secrets_for_asking(content))
        answer = await self._context.driver.client.ListSnapshots(request, timeout_s=self._timeout_s)
        return next((each.snapshot for each in answer.entries if each.snapshot.snapshot_id == handle), None)

    @property
    def _can_list(self) -> bool:
        return self._context.driver.capabilities.controller("LIST_SNAPSHOTS")

    async def _create_request(self, content: VolumeSnapshotContent) -> pb.CreateSnapshotRequest:
        settings = self._context.settings
        terms = await self._create_terms(content, settings.snapshot_name_prefix, settings.snapshot_name_uuid_length)
        return pb.CreateSnapshotRequest(
            source_volume_id=content.spec.source.volume_handle or "",
            name=terms.name,
            parameters=terms.parameters,
            secrets=terms.secrets,
        )

    async def _call_create(self, request: pb.CreateSnapshotRequest, timeout_s: float) -> pb.Snapshot:
        return (await self._context.driver.client.CreateSnapshot(request, timeout_s=timeout_s)).snapshot

    async def _ask(self, content: VolumeSnapshotContent, handle: str) -> pb.Snapshot:
        """Ask with ListSnapshots. A driver that lacks it is taken to have the snapshot, ready since now."""
        if not self._can_list:
            taken = pb.Snapshot(snapshot_id=handle, ready_to_use=True)
            taken.creation_time.FromNanoseconds(time.time_ns())
            return taken
        found = await self.find(content, handle)
        if found is None:
            raise SidecarError(f"the driver does not know snapshot {handle}")
        return found

    async def _call_delete(self, content: VolumeSnapshotContent, handle: str) -> None:
        request = pb.DeleteSnapshotRequest(snapshot_id=handle, secrets=await self._writer.secrets(content))
        await self._context.driver.client.DeleteSnapshot(request, timeout_s=self._timeout_s)

    def _handle_of(self, content: VolumeSnapshotContent) -> str:
        known = content.status.snapshot_handle if content.status else None
        return content.spec.source.snapshot_handle or known or ""

    def _handle_to_delete(self, content: VolumeSnapshotContent) -> str:
        known = content.status.snapshot_handle if content.status else None
        return "" if is_group_member(content) else known or ""

    def _status(self, content: VolumeSnapshotContent, made: pb.Snapshot) -> dict[str, Any]:
        known = content.status
        status: dict[str, Any] = {"readyToUse": made.ready_to_use, "error": None}
        if known is None or not known.snapshot_handle:
            status["snapshotHandle"] = made.snapshot_id
        if known is None or not known.creation_time:
            status["creationTime"] = decide.nanoseconds(made)
        if made.size_bytes > 0 and (known is None or not known.restore_size):
            status["restoreSize"] = made.size_bytes
        if made.group_snapshot_id and (known is None or not known.volume_group_snapshot_handle):
            status["volumeGroupSnapshotHandle"] = made.group_snapshot_id
        return status
