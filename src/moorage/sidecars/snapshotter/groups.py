"""The group content worker: snapshots of several volumes at one point in time.

Owns: CreateVolumeGroupSnapshot, GetVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, and the group content's status.
Start reading at: `GroupWorker.sync`.
"""

import time
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.errors import MoorageError
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.events import Recorder
from moorage.kube.informer import Informer
from moorage.kube.objects import VolumeGroupSnapshotClass, VolumeGroupSnapshotContent
from moorage.kube.objects.meta import timestamp_text
from moorage.log import get_logger
from moorage.sidecars import names, templates
from moorage.sidecars.context import Context
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.secrets import read_secret
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.contents import NotReady
from moorage.sidecars.snapshotter.decide import Step

log = get_logger(__name__)


class GroupWorker:
    """Makes and deletes group snapshots; `sync` is the work of the group contents' queue."""

    def __init__(
        self,
        context: Context,
        contents: Informer[VolumeGroupSnapshotContent],
        classes: Informer[VolumeGroupSnapshotClass],
        events: Recorder,
    ) -> None:
        self._context = context
        self._contents = contents
        self._classes = classes
        self._events = events

    async def sync(self, name: str) -> float | None:
        """Take one group content a step further."""
        content = self._contents.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        match decide.next_group_step(content):
            case Step.DELETE:
                await self._delete(content)
            case Step.CREATE:
                is_first = content.status is None
                await self._create(
                    content, "GroupSnapshotCreationFailed" if is_first else "GroupSnapshotContentCheckandUpdateFailed"
                )
            case Step.CHECK:
                await self._check(content)
            case Step.TIDY:
                await self._mark(content, False)
                return 0.0 if content.is_deleting else None  # now it may be deleted, and no event will say so
            case Step.NOTHING:
                pass
        return None

    async def _create(self, content: VolumeGroupSnapshotContent, reason: str) -> None:
        was_open = names.GROUP_BEING_CREATED in content.annotations
        try:
            request = await self._request(content)
            content = await self._mark(content, True)
            timeout_s = self._context.settings.timeout_for("snapshotter")
            answer = await self._context.driver.client.CreateVolumeGroupSnapshot(request, timeout_s=timeout_s)
        except MoorageError as error:
            await self._failed(content, reason, error, unmark=decide.is_over(error, was_open))
            raise
        await self._record(content, answer.group_snapshot)
        await self._mark(content, False)
        if not answer.group_snapshot.ready_to_use:
            raise NotReady(f"group snapshot {answer.group_snapshot.group_snapshot_id} is not ready yet")
        log.info("group snapshot made", content=content.name, members=len(answer.group_snapshot.snapshots))

    async def _request(self, content: VolumeGroupSnapshotContent) -> pb.CreateVolumeGroupSnapshotRequest:
        settings, used = self._context.settings, self._class_of(content)
        self._check_together(content)
        if used is None:
            raise SidecarError(f"group content {content.name}: its class is missing")
        parameters = decide.driver_parameters(used.parameters)
        reference = content.spec.volume_group_snapshot_ref
        if settings.extra_create_metadata:
            prefix = names.RESERVED_PREFIX
            parameters |= {
                f"{prefix}volumegroupsnapshot/name": reference.name,
                f"{prefix}volumegroupsnapshot/namespace": reference.namespace,
                f"{prefix}volumegroupsnapshotcontent/name": content.name,
            }
        name = decide.snapshot_name(
            settings.groupsnapshot_name_prefix, settings.groupsnapshot_name_uuid_length, reference.uid
        )
        return pb.CreateVolumeGroupSnapshotRequest(
            name=name,
            source_volume_ids=content.spec.source.volume_handles or [],
            parameters=parameters,
            secrets=await self._secrets(content),
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
        try:
            used = self._class_of(content)
            tokens = {"volumegroupsnapshotcontent.name": content.name}
            keys = templates.GROUP_SNAPSHOT_GET
            reference = templates.reference_from(used.parameters, keys, tokens, tokens) if used else None
            request = pb.GetVolumeGroupSnapshotRequest(
                group_snapshot_id=handles.volume_group_snapshot_handle,
                snapshot_ids=handles.volume_snapshot_handles,
                secrets=await read_secret(self._context.client, reference),
            )
            timeout_s = self._context.settings.timeout_for("snapshotter")
            answer = await self._context.driver.client.GetVolumeGroupSnapshot(request, timeout_s=timeout_s)
        except MoorageError as error:
            await self._failed(content, "GroupSnapshotContentCheckandUpdateFailed", error, unmark=False)
            raise
        await self._record(content, answer.group_snapshot)
        if not answer.group_snapshot.ready_to_use:
            raise NotReady(f"group snapshot {handles.volume_group_snapshot_handle} is not ready yet")

    async def _delete(self, content: VolumeGroupSnapshotContent) -> None:
        status, handles = content.status, content.spec.source.group_snapshot_handles
        handle = (status.volume_group_snapshot_handle if status else None) or (
            handles.volume_group_snapshot_handle if handles else None
        )
        members = [info.snapshot_handle for info in status.volume_snapshot_info_list] if status else []
        members = members or (handles.volume_snapshot_handles if handles else [])
        if content.spec.deletion_policy == "Delete" and handle:
            try:
                if not members:
                    raise SidecarError("its members are not known, and the driver must be told them")
                request = pb.DeleteVolumeGroupSnapshotRequest(
                    group_snapshot_id=handle, snapshot_ids=members, secrets=await self._secrets(content)
                )
                timeout_s = self._context.settings.timeout_for("snapshotter")
                await self._context.driver.client.DeleteVolumeGroupSnapshot(request, timeout_s=timeout_s)
            except MoorageError as error:
                message = f"group snapshot {handle} could not be deleted: {error}; retried with growing pauses"
                self._events.warning(content, "GroupSnapshotDeleteError", message)
                raise
            log.info("group snapshot deleted", content=content.name, group=handle)
        if names.GROUP_CONTENT_FINALIZER in content.finalizers:
            left = [each for each in content.finalizers if each != names.GROUP_CONTENT_FINALIZER]
            await self._patch(content, {"metadata": {"finalizers": left or None}}, content.metadata.resource_version)

    async def _record(self, content: VolumeGroupSnapshotContent, made: pb.VolumeGroupSnapshot) -> None:
        known = content.status
        status: dict[str, Any] = {"readyToUse": made.ready_to_use, "error": None}
        if known is None or not known.volume_group_snapshot_handle:
            status["volumeGroupSnapshotHandle"] = made.group_snapshot_id
        if known is None or not known.creation_time:
            status["creationTime"] = timestamp_text(decide.nanoseconds(made) / 1e9)
        if known is None or not known.volume_snapshot_info_list:
            status["volumeSnapshotInfoList"] = [_info(member) for member in made.snapshots]
        changed = await self._context.client.patch(
            VolumeGroupSnapshotContent, content.name, {"status": status}, subresource="status"
        )
        self._contents.remember(changed)

    async def _failed(
        self, content: VolumeGroupSnapshotContent, reason: str, error: MoorageError, *, unmark: bool
    ) -> None:
        self._events.warning(content, reason, f"{error}; retried with growing pauses")
        log.warning("group snapshot failed", content=content.name, reason=str(error))
        try:
            if unmark:
                content = await self._mark(content, False)
            known = content.status.error.message if content.status and content.status.error else None
            if known != str(error):
                note = {"time": timestamp_text(time.time()), "message": str(error)}
                status = {"readyToUse": False, "error": note}
                changed = await self._context.client.patch(
                    VolumeGroupSnapshotContent, content.name, {"status": status}, subresource="status"
                )
                self._contents.remember(changed)
        except ApiError as failure:
            log.warning("failure could not be noted", content=content.name, reason=str(failure))

    async def _mark(self, content: VolumeGroupSnapshotContent, is_creating: bool) -> VolumeGroupSnapshotContent:
        if (names.GROUP_BEING_CREATED in content.annotations) == is_creating:
            return content
        change: dict[str, Any] = {"annotations": {names.GROUP_BEING_CREATED: "yes" if is_creating else None}}
        if is_creating and self._context.settings.node_deployment:
            # Whose it is must still be known when its volumes are gone.
            change["labels"] = {names.SNAPSHOT_MANAGED_BY: self._context.around.node_name}
        return await self._patch(content, {"metadata": change})

    async def _patch(
        self, content: VolumeGroupSnapshotContent, patch: dict[str, Any], version: str = ""
    ) -> VolumeGroupSnapshotContent:
        try:
            changed = await self._context.client.patch(VolumeGroupSnapshotContent, content.name, patch, version=version)
        except NotFound:
            raise SidecarError(f"content {content.name} is gone") from None
        if not (changed.is_deleting and not changed.finalizers):
            self._contents.remember(changed)
        return changed

    async def _secrets(self, content: VolumeGroupSnapshotContent) -> dict[str, str]:
        reference = decide.annotated_secret(content, names.GROUP_SECRET_NAME, names.GROUP_SECRET_NAMESPACE)
        return await read_secret(self._context.client, reference)

    def _class_of(self, content: VolumeGroupSnapshotContent) -> VolumeGroupSnapshotClass | None:
        name = content.spec.volume_group_snapshot_class_name
        return self._classes.get(name) if name else None


def _info(member: pb.Snapshot) -> dict[str, Any]:
    info: dict[str, Any] = {
        "volumeHandle": member.source_volume_id,
        "snapshotHandle": member.snapshot_id,
        "creationTime": decide.nanoseconds(member),
        "readyToUse": member.ready_to_use,
    }
    return info | ({"restoreSize": member.size_bytes} if member.size_bytes > 0 else {})
