"""The group content worker: snapshots of several volumes at one point in time.

Owns: CreateVolumeGroupSnapshot, GetVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, and what of their answers is kept.
Start reading at: `GroupWorker.sync`.
"""

from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.objects import VolumeGroupSnapshotClass, VolumeGroupSnapshotContent
from moorage.kube.objects.meta import timestamp_text
from moorage.log import get_logger
from moorage.sidecars import names, templates
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.secrets import read_secret
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.content_writer import ContentTerms, ContentWriter, SnapshotNotReady
from moorage.sidecars.snapshotter.decide import ContentStep
from moorage.sidecars.snapshotter.versions import members_field, members_of

log = get_logger(__name__)

_FIRST_FAILED, _LATER_FAILED = "GroupSnapshotCreationFailed", "GroupSnapshotContentCheckandUpdateFailed"


def _words(context: RoleContext) -> ContentTerms:
    # With one process per node, whose a content is must still be known when its volumes are gone.
    own = {names.SNAPSHOT_MANAGED_BY: context.around.node_name} if context.settings.node_deployment else {}
    return ContentTerms(
        noun="group snapshot",
        being_created=names.GROUP_BEING_CREATED,
        finalizer=names.GROUP_CONTENT_FINALIZER,
        secret_name=names.GROUP_SECRET_NAME,
        secret_namespace=names.GROUP_SECRET_NAMESPACE,
        deletion_failed="GroupSnapshotDeleteError",
        labels=own,
    )


class GroupWorker:
    """Makes and deletes group snapshots; `sync` is the work of the group contents' queue."""

    def __init__(
        self,
        context: RoleContext,
        contents: Informer[VolumeGroupSnapshotContent],
        classes: Informer[VolumeGroupSnapshotClass],
        events: Recorder,
    ) -> None:
        self._context = context
        self._contents = contents
        self._classes = classes
        self._keeper = ContentWriter(context, contents, events, _words(context))

    async def sync(self, name: str) -> float | None:
        """Take one group content a step further."""
        content = self._contents.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        match decide.next_group_step(content):
            case ContentStep.DELETE:
                await self._delete(content)
            case ContentStep.CREATE:
                await self._create(content, _FIRST_FAILED if content.status is None else _LATER_FAILED)
            case ContentStep.CHECK:
                await self._check(content)
            case ContentStep.TIDY:
                return await self._keeper.tidy(content)
            case ContentStep.NOTHING:
                pass
        return None

    async def _create(self, content: VolumeGroupSnapshotContent, reason: str) -> None:
        call = self._context.driver.client.CreateVolumeGroupSnapshot
        content, answer = await self._keeper.make(content, reason, self._request, call)
        made = answer.group_snapshot
        content = await self._record(content, made)
        await self._keeper.mark(content, False)
        if not made.ready_to_use:
            raise SnapshotNotReady(f"group snapshot {made.group_snapshot_id} is not ready yet")
        log.info("group snapshot made", content=content.name, members=len(made.snapshots))

    async def _request(self, content: VolumeGroupSnapshotContent) -> pb.CreateVolumeGroupSnapshotRequest:
        settings, used = self._context.settings, self._class_of(content)
        self._check_together(content)
        if used is None:
            raise SidecarError(f"group content {content.name}: its class is missing")
        parameters = decide.driver_parameters(used.parameters)
        reference = content.spec.volume_group_snapshot_ref
        if settings.extra_create_metadata:
            parameters |= decide.metadata_parameters("volumegroupsnapshot", reference, content.name)
        name = decide.snapshot_name(
            settings.groupsnapshot_name_prefix, settings.groupsnapshot_name_uuid_length, reference.uid
        )
        return pb.CreateVolumeGroupSnapshotRequest(
            name=name,
            source_volume_ids=content.spec.source.volume_handles or [],
            parameters=parameters,
            secrets=await self._keeper.secrets(content),
        )

    def _check_together(self, content: VolumeGroupSnapshotContent) -> None:
        """With one process per node, a group can only be made of volumes of one node."""
        context = self._context
        if not context.settings.node_deployment:
            return
        for handle in content.spec.source.volume_handles or []:
            if not any(context.is_local(volume) for volume in context.volumes.at("handle", handle)):
                raise SidecarError(
                    f"volume {handle} is not on node {context.around.node_name}, where the group's first volume is; "
                    "choose volumes of one node"
                )

    async def _check(self, content: VolumeGroupSnapshotContent) -> None:
        handles = content.spec.source.group_snapshot_handles
        if handles is None:
            return

        async def request(of: VolumeGroupSnapshotContent) -> pb.GetVolumeGroupSnapshotRequest:
            return pb.GetVolumeGroupSnapshotRequest(
                group_snapshot_id=handles.volume_group_snapshot_handle,
                snapshot_ids=handles.volume_snapshot_handles,
                secrets=await self._get_secrets(of),
            )

        call = self._context.driver.client.GetVolumeGroupSnapshot
        found = (await self._keeper.ask(content, _LATER_FAILED, request, call)).group_snapshot
        await self._record(content, found)
        if not found.ready_to_use:
            raise SnapshotNotReady(f"group snapshot {handles.volume_group_snapshot_handle} is not ready yet")

    async def _delete(self, content: VolumeGroupSnapshotContent) -> None:
        status, handles = content.status, content.spec.source.group_snapshot_handles
        handle = (status.volume_group_snapshot_handle if status else None) or (
            handles.volume_group_snapshot_handle if handles else None
        )
        members = [info.snapshot_handle for info in members_of(status)]
        members = members or (handles.volume_snapshot_handles if handles else [])
        if handle and content.spec.deletion_policy == "Delete":

            async def request(of: VolumeGroupSnapshotContent) -> pb.DeleteVolumeGroupSnapshotRequest:
                if not members:
                    raise SidecarError("its members are not known, and the driver must be told them")
                return pb.DeleteVolumeGroupSnapshotRequest(
                    group_snapshot_id=handle, snapshot_ids=members, secrets=await self._keeper.secrets(of)
                )

            await self._keeper.remove(content, handle, request, self._context.driver.client.DeleteVolumeGroupSnapshot)
        await self._keeper.let_go(content)

    async def _record(
        self, content: VolumeGroupSnapshotContent, made: pb.VolumeGroupSnapshot
    ) -> VolumeGroupSnapshotContent:
        known = content.status
        status: dict[str, Any] = {"readyToUse": made.ready_to_use, "error": None}
        if known is None or not known.volume_group_snapshot_handle:
            status["volumeGroupSnapshotHandle"] = made.group_snapshot_id
        if known is None or not known.creation_time:
            status["creationTime"] = timestamp_text(decide.nanoseconds(made) / 1e9)
        if not members_of(known):
            status |= members_field(content, made.snapshots)
        return await self._keeper.record(content, status)

    async def _get_secrets(self, content: VolumeGroupSnapshotContent) -> dict[str, str]:
        used = self._class_of(content)
        tokens = {"volumegroupsnapshotcontent.name": content.name}
        keys = templates.GROUP_SNAPSHOT_GET
        found = templates.reference_from(used.parameters, keys, tokens, tokens) if used else None
        return await read_secret(self._context.client, found)

    def _class_of(self, content: VolumeGroupSnapshotContent) -> VolumeGroupSnapshotClass | None:
        name = content.spec.volume_group_snapshot_class_name
        return self._classes.get(name) if name else None
