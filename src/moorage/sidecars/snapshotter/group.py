"""Snapshots of several volumes at one point in time: Create-, Get- and DeleteVolumeGroupSnapshot.

Owns: what the driver is asked for a VolumeGroupSnapshotContent, and what of its answer goes into the status.
Start reading at: `GroupWorker`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import VolumeGroupSnapshotContent
from moorage.kube.objects.meta import timestamp_text
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.contents import ContentWorker
from moorage.sidecars.snapshotter.flavour import GROUP
from moorage.sidecars.snapshotter.versions import members_field, members_of


class GroupWorker(ContentWorker[VolumeGroupSnapshotContent, pb.VolumeGroupSnapshot]):
    """Takes and deletes group snapshots."""

    flavour = GROUP

    async def _create_request(self, content: VolumeGroupSnapshotContent) -> pb.CreateVolumeGroupSnapshotRequest:
        self._check_together(content)
        settings = self._context.settings
        terms = await self._create_terms(
            content, settings.groupsnapshot_name_prefix, settings.groupsnapshot_name_uuid_length
        )
        return pb.CreateVolumeGroupSnapshotRequest(
            name=terms.name,
            source_volume_ids=content.spec.source.volume_handles or [],
            parameters=terms.parameters,
            secrets=terms.secrets,
        )

    def _check_together(self, content: VolumeGroupSnapshotContent) -> None:
        """Raise SidecarError if there is one process per node and a volume of the group is on another node."""
        context = self._context
        if not context.settings.node_deployment:
            return
        for handle in content.spec.source.volume_handles or []:
            volume = context.caches.volume_with_handle(context.driver.name, handle)
            if volume is None or not context.is_local(volume):
                raise SidecarError(
                    f"volume {handle} is not on node {context.around.node_name}, where the group's first volume is; "
                    "choose volumes of one node"
                )

    async def _call_create(
        self, request: pb.CreateVolumeGroupSnapshotRequest, timeout_s: float
    ) -> pb.VolumeGroupSnapshot:
        return (
            await self._context.driver.client.CreateVolumeGroupSnapshot(request, timeout_s=timeout_s)
        ).group_snapshot

    async def _ask(self, content: VolumeGroupSnapshotContent, handle: str) -> pb.VolumeGroupSnapshot:
        handles = content.spec.source.group_snapshot_handles
        request = pb.GetVolumeGroupSnapshotRequest(
            group_snapshot_id=handle,
            snapshot_ids=handles.volume_snapshot_handles if handles else [],
            secrets=await self._secrets_for_asking(content),
        )
        return (
            await self._context.driver.client.GetVolumeGroupSnapshot(request, timeout_s=self._timeout_s)
        ).group_snapshot

    async def _call_delete(self, content: VolumeGroupSnapshotContent, handle: str) -> None:
        handles = content.spec.source.group_snapshot_handles
        members = [info.snapshot_handle for info in members_of(content.status)]
        members = members or (handles.volume_snapshot_handles if handles else [])
        if not members:
            raise SidecarError("its members are not known, and the driver must be told them")
        request = pb.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=handle, snapshot_ids=members, secrets=await self._writer.secrets(content)
        )
        await self._context.driver.client.DeleteVolumeGroupSnapshot(request, timeout_s=self._timeout_s)

    def _handle_of(self, content: VolumeGroupSnapshotContent) -> str:
        handles = content.spec.source.group_snapshot_handles
        return handles.volume_group_snapshot_handle if handles else ""

    def _handle_to_delete(self, content: VolumeGroupSnapshotContent) -> str:
        known = content.status.volume_group_snapshot_handle if content.status else None
        return known or self._handle_of(content)

    def _status(self, content: VolumeGroupSnapshotContent, made: pb.VolumeGroupSnapshot) -> dict[str, Any]:
        known = content.status
        status: dict[str, Any] = {"readyToUse": made.ready_to_use, "error": None}
        if known is None or not known.volume_group_snapshot_handle:
            status["volumeGroupSnapshotHandle"] = made.group_snapshot_id
        if known is None or not known.creation_time:
            status["creationTime"] = timestamp_text(decide.nanoseconds(made) / 1e9)
        if not members_of(known):
            status |= members_field(content, made.snapshots)
        return status
