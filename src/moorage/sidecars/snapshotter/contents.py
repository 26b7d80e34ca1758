"""The content worker: CreateSnapshot, DeleteSnapshot, ListSnapshots, and the content's status.

Owns: the status of contents, the being-created annotation, and the removal of the content's finalizer.
Start reading at: `ContentWorker.sync`.
"""

import time
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.errors import MoorageError
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.events import Recorder
from moorage.kube.informer import Informer
from moorage.kube.objects import SecretReference, VolumeSnapshotClass, VolumeSnapshotContent
from moorage.kube.objects.meta import timestamp_text
from moorage.log import get_logger
from moorage.sidecars import names, templates
from moorage.sidecars.context import Context
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.secrets import read_secret
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.decide import Step

log = get_logger(__name__)


class NotReady(SidecarError):
    """The driver has taken the snapshot and is still busy with it; asked again with growing pauses."""


class ContentWorker:
    """Makes and deletes snapshots; `sync` is the work of the contents' queue."""

    def __init__(
        self,
        context: Context,
        contents: Informer[VolumeSnapshotContent],
        classes: Informer[VolumeSnapshotClass],
        events: Recorder,
    ) -> None:
        self._context = context
        self._contents = contents
        self._classes = classes
        self._events = events

    async def sync(self, name: str) -> float | None:
        """Take one content a step further."""
        content = self._contents.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        known = self._class_of(content)
        if known is not None and known.driver != content.spec.driver:
            return None
        match decide.next_step(content):
            case Step.DELETE:
                await self._delete(content)
            case Step.CREATE:
                await self._create(content, "SnapshotCreationFailed")
            case Step.CHECK if content.spec.source.volume_handle and not decide.is_group_member(content):
                await self._create(content, "SnapshotContentCheckandUpdateFailed")
            case Step.CHECK:
                await self._check(content)
            case Step.TIDY:
                await self._mark(content, False)
                return 0.0 if content.is_deleting else None  # now it may be deleted, and no event will say so
            case Step.NOTHING:
                pass
        return None

    async def _create(self, content: VolumeSnapshotContent, reason: str) -> None:
        was_open = names.SNAPSHOT_BEING_CREATED in content.annotations
        try:
            request = await self._request(content)
            content = await self._mark(content, True)
            timeout_s = self._context.settings.timeout_for("snapshotter")
            answer = await self._context.driver.client.CreateSnapshot(request, timeout_s=timeout_s)
        except MoorageError as error:
            await self._failed(content, reason, error, unmark=decide.is_over(error, was_open))
            raise
        content = await self._record(content, answer.snapshot)
        content = await self._mark(content, False)
        if not answer.snapshot.ready_to_use:
            raise NotReady(f"snapshot {answer.snapshot.snapshot_id} is not ready yet")
        log.info("snapshot made", content=content.name, snapshot=answer.snapshot.snapshot_id)

    async def _request(self, content: VolumeSnapshotContent) -> pb.CreateSnapshotRequest:
        settings, used = self._context.settings, self._class_of(content)
        if used is None:
            raise SidecarError(
                f"content {content.name}: its class {content.spec.volume_snapshot_class_name} is missing"
            )
        parameters = decide.driver_parameters(used.parameters)
        reference = content.spec.volume_snapshot_ref
        if settings.extra_create_metadata:
            prefix = names.RESERVED_PREFIX
            parameters |= {
                f"{prefix}volumesnapshot/name": reference.name,
                f"{prefix}volumesnapshot/namespace": reference.namespace,
                f"{prefix}volumesnapshotcontent/name": content.name,
            }
        return pb.CreateSnapshotRequest(
            source_volume_id=content.spec.source.volume_handle or "",
            name=decide.snapshot_name(settings.snapshot_name_prefix, settings.snapshot_name_uuid_length, reference.uid),
            parameters=parameters,
            secrets=await self._secrets(content),
        )

    async def _check(self, content: VolumeSnapshotContent) -> None:
        """A snapshot that was not made here: ask the driver about it, if it can be asked."""
        handle = content.spec.source.snapshot_handle or (content.status.snapshot_handle if content.status else None)
        if not handle:
            return  # a group member whose handle the snapshot controller has not written yet
        if not self._context.driver.capabilities.controller("LIST_SNAPSHOTS"):
            await self._record(content, pb.Snapshot(snapshot_id=handle, ready_to_use=True), now=True)
            return
        try:
            secrets = await read_secret(self._context.client, self._list_secret(content))
            request = pb.ListSnapshotsRequest(snapshot_id=handle, secrets=secrets)
            timeout_s = self._context.settings.timeout_for("snapshotter")
            answer = await self._context.driver.client.ListSnapshots(request, timeout_s=timeout_s)
            found = [entry.snapshot for entry in answer.entries if entry.snapshot.snapshot_id == handle]
            if not found:
                raise SidecarError(f"the driver does not know snapshot {handle}")
        except MoorageError as error:
            await self._failed(content, "SnapshotContentCheckandUpdateFailed", error, unmark=False)
            raise
        await self._record(content, found[0])
        if not found[0].ready_to_use:
            raise NotReady(f"snapshot {handle} is not ready yet")

    async def _delete(self, content: VolumeSnapshotContent) -> None:
        handle = content.status.snapshot_handle if content.status else None
        deletes = content.spec.deletion_policy == "Delete" and not decide.is_group_member(content)
        if deletes and handle:
            try:
                request = pb.DeleteSnapshotRequest(snapshot_id=handle, secrets=await self._secrets(content))
                timeout_s = self._context.settings.timeout_for("snapshotter")
                await self._context.driver.client.DeleteSnapshot(request, timeout_s=timeout_s)
            except MoorageError as error:
                message = f"snapshot {handle} could not be deleted: {error}; retried with growing pauses"
                self._events.warning(content, "SnapshotDeleteError", message)
                raise
            log.info("snapshot deleted", content=content.name, snapshot=handle)
        if names.CONTENT_FINALIZER in content.finalizers:
            left = [each for each in content.finalizers if each != names.CONTENT_FINALIZER]
            await self._patch(content, {"metadata": {"finalizers": left or None}}, content.metadata.resource_version)

    async def _record(
        self, content: VolumeSnapshotContent, made: pb.Snapshot, now: bool = False
    ) -> VolumeSnapshotContent:
        """Handle, time and size are written once; readiness follows the driver."""
        known = content.status
        status: dict[str, Any] = {"readyToUse": made.ready_to_use, "error": None}
        if known is None or not known.snapshot_handle:
            status["snapshotHandle"] = made.snapshot_id
        if known is None or not known.creation_time:
            status["creationTime"] = time.time_ns() if now else decide.nanoseconds(made)
        if made.size_bytes > 0 and (known is None or not known.restore_size):
            status["restoreSize"] = made.size_bytes
        if made.group_snapshot_id and (known is None or not known.volume_group_snapshot_handle):
            status["volumeGroupSnapshotHandle"] = made.group_snapshot_id
        return await self._patch_status(content, status)

    async def _failed(self, content: VolumeSnapshotContent, reason: str, error: MoorageError, *, unmark: bool) -> None:
        message = f"{error}; retried with growing pauses"
        self._events.warning(content, reason, message)
        log.warning("snapshot failed", content=content.name, reason=str(error))
        try:
            if unmark:
                content = await self._mark(content, False)
            known = content.status.error.message if content.status and content.status.error else None
            if known != str(error):
                note = {"time": timestamp_text(time.time()), "message": str(error)}
                await self._patch_status(content, {"readyToUse": False, "error": note})
        except ApiError as failure:
            log.warning("failure could not be noted", content=content.name, reason=str(failure))

    async def _mark(self, content: VolumeSnapshotContent, is_creating: bool) -> VolumeSnapshotContent:
        """While marked, the content is not deleted: a snapshot may be about to appear."""
        if (names.SNAPSHOT_BEING_CREATED in content.annotations) == is_creating:
            return content
        value = "yes" if is_creating else None
        return await self._patch(content, {"metadata": {"annotations": {names.SNAPSHOT_BEING_CREATED: value}}})

    async def _patch(
        self, content: VolumeSnapshotContent, patch: dict[str, Any], version: str = ""
    ) -> VolumeSnapshotContent:
        try:
            changed = await self._context.client.patch(VolumeSnapshotContent, content.name, patch, version=version)
        except NotFound:
            raise SidecarError(f"content {content.name} is gone") from None
        if not (changed.is_deleting and not changed.finalizers):
            self._contents.remember(changed)
        return changed

    async def _patch_status(self, content: VolumeSnapshotContent, status: dict[str, Any]) -> VolumeSnapshotContent:
        changed = await self._context.client.patch(
            VolumeSnapshotContent, content.name, {"status": status}, subresource="status"
        )
        self._contents.remember(changed)
        return changed

    async def _secrets(self, content: VolumeSnapshotContent) -> dict[str, str]:
        reference = decide.annotated_secret(content, names.SNAPSHOT_SECRET_NAME, names.SNAPSHOT_SECRET_NAMESPACE)
        return await read_secret(self._context.client, reference)

    def _list_secret(self, content: VolumeSnapshotContent) -> SecretReference | None:
        used = self._class_of(content)
        tokens = {"volumesnapshotcontent.name": content.name}
        return templates.reference_from(used.parameters, templates.SNAPSHOT_LIST, tokens, tokens) if used else None

    def _class_of(self, content: VolumeSnapshotContent) -> VolumeSnapshotClass | None:
        name = content.spec.volume_snapshot_class_name
        return self._classes.get(name) if name else None
