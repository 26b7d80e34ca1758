"""The content worker: CreateSnapshot, DeleteSnapshot, ListSnapshots, and the content's status.

Owns: what the driver is asked for a content, and what of its answer goes into the status.
Start reading at: `ContentWorker.sync`.
"""

import time
from typing import Any

from moorage.csi import csi_pb2 as pb
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.objects import VolumeSnapshotClass, VolumeSnapshotContent
from moorage.log import get_logger
from moorage.sidecars import names, templates
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.secrets import read_secret
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.content_writer import ContentTerms, ContentWriter, SnapshotNotReady
from moorage.sidecars.snapshotter.decide import ContentStep

log = get_logger(__name__)

_WORDS = ContentTerms(
    noun="snapshot",
    being_created=names.SNAPSHOT_BEING_CREATED,
    finalizer=names.CONTENT_FINALIZER,
    secret_name=names.SNAPSHOT_SECRET_NAME,
    secret_namespace=names.SNAPSHOT_SECRET_NAMESPACE,
    deletion_failed="SnapshotDeleteError",
)
_FIRST_FAILED, _LATER_FAILED = "SnapshotCreationFailed", "SnapshotContentCheckandUpdateFailed"


class ContentWorker:
    """Makes and deletes snapshots; `sync` is the work of the contents' queue."""

    def __init__(
        self,
        context: RoleContext,
        contents: Informer[VolumeSnapshotContent],
        classes: Informer[VolumeSnapshotClass],
        events: Recorder,
    ) -> None:
        self._context = context
        self._contents = contents
        self._classes = classes
        self._keeper = ContentWriter(context, contents, events, _WORDS)

    async def sync(self, name: str) -> float | None:
        """Take one content a step further."""
        content = self._contents.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        known = self._class_of(content)
        if known is not None and known.driver != content.spec.driver:
            return None
        match decide.next_step(content):
            case ContentStep.DELETE:
                await self._delete(content)
            case ContentStep.CREATE:
                await self._create(content, _FIRST_FAILED)
            case ContentStep.CHECK if content.spec.source.volume_handle and not decide.is_group_member(content):
                await self._create(content, _LATER_FAILED)
            case ContentStep.CHECK:
                await self._check(content)
            case ContentStep.TIDY:
                return await self._keeper.tidy(content)
            case ContentStep.NOTHING:
                pass
        return None

    async def _create(self, content: VolumeSnapshotContent, reason: str) -> None:
        call = self._context.driver.client.CreateSnapshot
        content, answer = await self._keeper.make(content, reason, self._request, call)
        content = await self._record(content, answer.snapshot)
        content = await self._keeper.mark(content, False)
        if not answer.snapshot.ready_to_use:
            raise SnapshotNotReady(f"snapshot {answer.snapshot.snapshot_id} is not ready yet")
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
            parameters |= decide.metadata_parameters("volumesnapshot", reference, content.name)
        return pb.CreateSnapshotRequest(
            source_volume_id=content.spec.source.volume_handle or "",
            name=decide.snapshot_name(settings.snapshot_name_prefix, settings.snapshot_name_uuid_length, reference.uid),
            parameters=parameters,
            secrets=await self._keeper.secrets(content),
        )

    async def _check(self, content: VolumeSnapshotContent) -> None:
        """A snapshot that was not made here: ask the driver about it, if it can be asked."""
        handle = content.spec.source.snapshot_handle or (content.status.snapshot_handle if content.status else None)
        if not handle:
            return  # a group member whose handle the snapshot controller has not written yet
        if not self._context.driver.capabilities.controller("LIST_SNAPSHOTS"):
            await self._record(content, pb.Snapshot(snapshot_id=handle, ready_to_use=True), now=True)
            return

        async def request(of: VolumeSnapshotContent) -> pb.ListSnapshotsRequest:
            return pb.ListSnapshotsRequest(snapshot_id=handle, secrets=await self._list_secrets(of))

        async def listed(request: pb.ListSnapshotsRequest, timeout_s: float) -> pb.Snapshot:
            found = await self._listed(request, timeout_s)
            if found is None:
                raise SidecarError(f"the driver does not know snapshot {handle}")
            return found

        found = await self._keeper.ask(content, _LATER_FAILED, request, listed)
        await self._record(content, found)
        if not found.ready_to_use:
            raise SnapshotNotReady(f"snapshot {handle} is not ready yet")

    async def find(self, content: VolumeSnapshotContent, handle: str) -> pb.Snapshot | None:
        """What the driver here knows of a snapshot; None also where it cannot be asked."""
        if not self._context.driver.capabilities.controller("LIST_SNAPSHOTS"):
            return None
        request = pb.ListSnapshotsRequest(snapshot_id=handle, secrets=await self._list_secrets(content))
        return await self._listed(request, self._context.settings.timeout_for("snapshotter"))

    async def _listed(self, request: pb.ListSnapshotsRequest, timeout_s: float) -> pb.Snapshot | None:
        answer = await self._context.driver.client.ListSnapshots(request, timeout_s=timeout_s)
        for entry in answer.entries:
            if entry.snapshot.snapshot_id == request.snapshot_id:
                return entry.snapshot
        return None

    async def _delete(self, content: VolumeSnapshotContent) -> None:
        handle = content.status.snapshot_handle if content.status else None
        if handle and content.spec.deletion_policy == "Delete" and not decide.is_group_member(content):

            async def request(of: VolumeSnapshotContent) -> pb.DeleteSnapshotRequest:
                return pb.DeleteSnapshotRequest(snapshot_id=handle, secrets=await self._keeper.secrets(of))

            await self._keeper.remove(content, handle, request, self._context.driver.client.DeleteSnapshot)
        await self._keeper.let_go(content)

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
        return await self._keeper.record(content, status)

    async def _list_secrets(self, content: VolumeSnapshotContent) -> dict[str, str]:
        used = self._class_of(content)
        tokens = {"volumesnapshotcontent.name": content.name}
        found = templates.reference_from(used.parameters, templates.SNAPSHOT_LIST, tokens, tokens) if used else None
        return await read_secret(self._context.client, found)

    def _class_of(self, content: VolumeSnapshotContent) -> VolumeSnapshotClass | None:
        name = content.spec.volume_snapshot_class_name
        return self._classes.get(name) if name else None
