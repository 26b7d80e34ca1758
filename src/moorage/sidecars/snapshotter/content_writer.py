"""Writes to contents, and the calls that they surround: an attempt is marked, recorded, reported and ended.

Owns: writes to contents (the being-created annotation, the finalizer, the status) and the events about them.
Start reading at: `ContentWriter.make`.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from moorage.csi.pending import on_behalf_of
from moorage.errors import MoorageError
from moorage.kube import names
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.objects import VolumeGroupSnapshotContent
from moorage.kube.objects.meta import timestamp_text
from moorage.kube.secrets import read_secret
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.roles import Role
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.flavour import C, ContentFlavour

log = get_logger(__name__)

Request = TypeVar("Request")
DriverAnswer = TypeVar("DriverAnswer")


class ContentWriter(Generic[C]):
    """Marks, records and releases the contents of one flavour."""

    def __init__(self, context: RoleContext, flavour: ContentFlavour[C], events: Recorder) -> None:
        self._context = context
        self._flavour = flavour
        self._events = events
        self._timeout_s = context.settings.timeout_for(Role.SNAPSHOTTER)

    async def make(
        self,
        content: C,
        reason: str,
        build: Callable[[C], Awaitable[Request]],
        call: Callable[[Request, float], Awaitable[DriverAnswer]],
    ) -> tuple[C, DriverAnswer]:
        """Let the driver make something, with the content marked as long as the outcome is open."""
        was_open = self._flavour.being_created in content.annotations
        try:
            request = await build(content)
            content = await self.mark(content, True)
            with on_behalf_of(self._events.event, content):
                answer = await call(request, self._timeout_s)
        except MoorageError as error:
            await self.failed(content, reason, error, unmark=decide.is_over(error, was_open))
            raise
        return content, answer

    async def ask(self, content: C, reason: str, call: Callable[[C], Awaitable[DriverAnswer]]) -> DriverAnswer:
        """Ask the driver about something that it made earlier."""
        try:
            with on_behalf_of(self._events.event, content):
                return await call(content)
        except MoorageError as error:
            await self.failed(content, reason, error, unmark=False)
            raise

    async def remove(self, content: C, handle: str, call: Callable[[C], Awaitable[None]]) -> None:
        """Let the driver delete what it made."""
        try:
            with on_behalf_of(self._events.event, content):
                await call(content)
        except MoorageError as error:
            message = (
                f"{self._flavour.noun} {handle} could not be deleted: {error}; {self._context.settings.retry_words}"
            )
            self._events.warning(content, self._flavour.deletion_failed, message)
            raise
        log.info(f"{self._flavour.noun} deleted", content=content.name, handle=handle)

    async def release(self, content: C) -> None:
        """Take our finalizer off: nothing is left behind the content."""
        await self._context.writer.remove_finalizers(content, self._flavour.finalizer)

    async def mark(self, content: C, is_creating: bool) -> C:
        """Set or clear the mark. A marked content is not deleted, because a snapshot may be about to appear.

        With one process per node, a group content also gets the node's label, because its volumes may be gone when it
        is deleted.
        """
        key, settings = self._flavour.being_created, self._context.settings
        if (key in content.annotations) == is_creating:
            return content
        change: dict[str, Any] = {"annotations": {key: "yes" if is_creating else None}}
        if is_creating and settings.node_deployment and isinstance(content, VolumeGroupSnapshotContent):
            change["labels"] = {names.SNAPSHOT_MANAGED_BY: self._context.around.node_name}
        try:
            return await self._context.writer.patch(content, {"metadata": change}, guarded=False)
        except NotFound:
            raise SidecarError(f"content {content.name} is gone") from None

    async def tidy(self, content: C) -> float | None:
        """Unmark a content that is ready. Returns 0 if it is being deleted: no event follows, so reconcile again."""
        await self.mark(content, False)
        return 0.0 if content.is_deleting else None

    async def failed(self, content: C, reason: str, error: MoorageError, *, unmark: bool) -> None:
        """Record the failure as an event, and once in the status."""
        self._events.warning(content, reason, f"{error}; {self._context.settings.retry_words}")
        log.warning(f"{self._flavour.noun} failed", content=content.name, reason=str(error))
        try:
            if unmark:
                content = await self.mark(content, False)
            known = content.status.error.message if content.status and content.status.error else None
            if known != str(error):
                note = {"time": timestamp_text(time.time()), "message": str(error)}
                await self.record(content, {"readyToUse": False, "error": note})
        except ApiError as failure:
            log.warning("failure could not be noted", content=content.name, reason=str(failure))

    async def record(self, content: C, status: dict[str, Any]) -> C:
        """Write some fields of the status."""
        return await self._context.writer.patch_status(content, status, guarded=False)

    async def secrets(self, content: C) -> dict[str, str]:
        """Return the secrets that the snapshot controller named for taking and deleting."""
        reference = decide.annotated_secret(content, *self._flavour.secret_annotations)
        return await read_secret(self._context.client, reference)
