"""What both flavours of snapshots have in common: from a content to a status, and the end.

Owns: binding to an existing content, creating one, copying its status, deleting it, and reporting problems to users.
Start reading at: `Reconciler.sync`.

Each pass reads the latest state and does what is missing, so a pass that is interrupted anywhere is completed by the
next one.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from moorage.controllers.snapshots import status
from moorage.controllers.snapshots.flavour import C, Flavour, S, SnapshotClass
from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.control.writer import Writer
from moorage.kube.errors import AlreadyExists
from moorage.kube.names import SNAPSHOT_GROUP
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.secrets import BadSecret
from moorage.log import get_logger

log = get_logger(__name__)


class SnapshotProblem(MoorageError):
    """A problem that the user must see: an event with this reason and, unless `in_status` is False, the status."""

    code = "FAILED_PRECONDITION"

    def __init__(self, reason: str, message: str, *, in_status: bool = True, unready: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.in_status = in_status
        self.unready = unready


@dataclass(frozen=True, slots=True)
class SnapshotContext:
    """What the parts of the snapshot controller share. The caches of groups exist only if `has_groups`."""

    client: Client
    caches: Caches
    writer: Writer
    recorder: Recorder
    has_groups: bool = False
    is_distributed: bool = False  # each node's snapshotter handles the volumes that it can reach


class Reconciler(Generic[S, C]):
    """Reconciles the snapshots of one flavour."""

    def __init__(
        self, context: SnapshotContext, flavour: Flavour[S, C], snapshots: Informer[S], contents: Informer[C]
    ) -> None:
        self._context = context
        self._caches = context.caches
        self._writer = context.writer
        self._flavour = flavour
        self._snapshots = snapshots
        self._contents = contents

    async def sync(self, key: str) -> None:
        """Reconcile one snapshot. A SnapshotProblem is reported to the user and raised, so that it is retried."""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            return
        try:
            await (self._end(snapshot) if snapshot.is_deleting else self._advance(snapshot))
        except SnapshotProblem as problem:
            latest = self._snapshots.get(key)
            if latest is not None and latest.uid == snapshot.uid:
                await self._report(latest, problem)
            raise

    async def _advance(self, snapshot: S) -> None:
        raise NotImplementedError

    async def _end(self, snapshot: S) -> None:
        raise NotImplementedError

    async def _bind_existing(self, snapshot: S) -> C:
        """Bind to the content that the user named."""
        flavour, name = self._flavour, self._flavour.source_of(snapshot)
        content = self._contents.get(name)
        if content is None:
            message = f"the content {name} that the {flavour.noun} names does not exist"
            raise SnapshotProblem(f"{flavour.word}ContentMissing", message, unready=True)
        if not flavour.is_existing(content):
            message = f"the content {name} is of a {flavour.noun} that is still to be taken"
            raise SnapshotProblem(f"{flavour.word}ContentMismatch", message)
        if not flavour.points_at(content, snapshot, exactly=False):
            raise self._misbound(f"{flavour.word}ContentMisbound", name)
        if flavour.snapshot_of(content).uid != snapshot.uid:
            spec: dict[str, Any] = {f"{flavour.stem}Ref": {"uid": snapshot.uid}}
            if flavour.class_of(snapshot):
                spec[f"{flavour.stem}ClassName"] = flavour.class_of(snapshot)
            content = await self._writer.patch(content, {"spec": spec})
        return content

    async def _still_bound(self, snapshot: S, name: str) -> C:
        """Return the content of a bound snapshot. Raises SnapshotProblem if it is missing or another's."""
        flavour = self._flavour
        content = self._contents.get(name) or await self._writer.fresh(flavour.content_kind, name)
        if content is None:
            message = f"the content {name} of the {flavour.noun} is missing"
            raise SnapshotProblem(f"{flavour.word}ContentMissing", message, unready=True)
        if not flavour.points_at(content, snapshot):
            raise self._misbound(f"{flavour.word}Misbound", name, unready=True)
        return content

    def _misbound(self, reason: str, name: str, *, unready: bool = False) -> SnapshotProblem:
        return SnapshotProblem(reason, f"the content {name} belongs to another {self._flavour.noun}", unready=unready)

    async def _create_content(
        self, snapshot: S, found: SnapshotClass, spec: Mapping[str, Any], labels: Mapping[str, str]
    ) -> C:
        """Create the content of a snapshot, or return the one that exists already."""
        flavour, name = self._flavour, self._flavour.content_name(snapshot.uid)
        try:
            secrets = flavour.secrets_for(found.parameters, snapshot, name)
        except BadSecret as error:
            raise SnapshotProblem(f"Create{flavour.word}ContentFailed", str(error)) from error
        reference = {
            "apiVersion": snapshot.resource.api_version,
            "kind": snapshot.resource.kind,
            "namespace": snapshot.namespace,
            "name": snapshot.name,
            "uid": snapshot.uid,
            "resourceVersion": snapshot.metadata.resource_version,
        }
        metadata = {"name": name, "annotations": secrets, "labels": dict(labels)}
        body = {
            "metadata": {field: value for field, value in metadata.items() if value},
            "spec": {
                f"{flavour.stem}Ref": reference,
                f"{flavour.stem}ClassName": found.name,
                "deletionPolicy": found.deletion_policy,
                "driver": found.driver,
                **spec,
            },
        }
        try:
            content = await self._writer.create(flavour.content_kind, body)
        except AlreadyExists:
            existing = await self._writer.fresh(flavour.content_kind, name)
            if existing is None:
                raise
            return existing
        message = f"Waiting for a {flavour.noun} {snapshot.key} to be created by the CSI driver."
        self._context.recorder.normal(snapshot, f"Creating{flavour.word}", message)
        log.info("snapshot content created", snapshot=snapshot.key, content=name, driver=found.driver)
        return content

    async def _write_status(self, snapshot: S, fields: Mapping[str, Any]) -> S:
        """Write what was copied from the content, and tell the user about progress."""
        written = await self._writer.patch_status(snapshot, fields)
        word, recorder = self._flavour.word, self._context.recorder
        if "creationTime" in fields:
            message = f"{word} {snapshot.key} was successfully created by the CSI driver."
            recorder.normal(snapshot, f"{word}Created", message)
        if fields.get("readyToUse") is True:
            recorder.normal(snapshot, f"{word}Ready", f"{word} {snapshot.key} is ready to use.")
        return written

    async def _end_content(self, snapshot: S) -> bool:
        """Delete the content of a deleted snapshot if its policy says so. Returns False while it still exists.

        A content that is not cached is read from the API server, so that none is left behind.
        """
        flavour, name = self._flavour, self._flavour.expected_content(snapshot)
        content = self._contents.get(name)
        if content is None or not flavour.points_at(content, snapshot):
            content = await self._writer.fresh(flavour.content_kind, name)
        if content is None or not flavour.points_at(content, snapshot):
            return True
        content = await self._writer.annotate(content, {flavour.being_deleted: "yes"})
        if content.spec.deletion_policy != "Delete":
            return True
        await self._writer.delete(content)
        # Without a finalizer it is gone at once. Otherwise its DELETED event enqueues the snapshot again.
        return await self._writer.fresh(flavour.content_kind, content.name) is None

    def _refuse_while_restored(self, namespace: str, snapshots: Collection[str]) -> None:
        """Raise SnapshotProblem if a claim is being restored from one of these VolumeSnapshots."""
        for claim in self._caches.claims:
            source = claim.spec.data_source or claim.spec.data_source_ref
            if claim.namespace != namespace or claim.status.phase != "Pending" or source is None:
                continue
            if (source.kind, source.api_group) == ("VolumeSnapshot", SNAPSHOT_GROUP) and source.name in snapshots:
                message = f"claim {claim.key} is being restored from it"
                raise SnapshotProblem("SnapshotDeletePending", message, in_status=False)

    async def _report(self, snapshot: S, problem: SnapshotProblem) -> None:
        """Tell the user, once for each different message."""
        if problem.in_status and status.error_of(snapshot) == str(problem):
            return
        self._context.recorder.warning(snapshot, problem.reason, str(problem))
        if not problem.in_status:
            return
        fields: dict[str, Any] = {"error": {"time": timestamp_text(time.time()), "message": str(problem)}}
        if problem.unready or snapshot.status is None or snapshot.status.ready_to_use is None:
            fields["readyToUse"] = False
        await self._writer.patch_status(snapshot, fields)
