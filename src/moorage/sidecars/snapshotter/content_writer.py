"""What single and group contents have in common: how an attempt is marked, recorded, reported and ended.

Owns: writes to contents (the being-created annotation, the finalizer, the status) and the events about them.
May not touch: what the driver is asked; the workers say that.
Start reading at: `Keeper.make`.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from moorage.errors import MoorageError
from moorage.kube.cache.informer import Informer
from moorage.kube.control.events import Recorder
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.objects import VolumeGroupSnapshotContent, VolumeSnapshotContent
from moorage.kube.objects.meta import timestamp_text
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.secrets import read_secret
from moorage.sidecars.snapshotter import decide

log = get_logger(__name__)

C = TypeVar("C", VolumeSnapshotContent, VolumeGroupSnapshotContent)
Request = TypeVar("Request")
DriverAnswer = TypeVar("DriverAnswer")


class SnapshotNotReady(SidecarError):
    """The driver has taken the snapshot and is still busy with it; asked again with growing pauses."""


@dataclass(frozen=True)
class ContentTerms:
    """Where the two kinds of content differ in words only."""

    noun: str
    being_created: str
    finalizer: str
    secret_name: str
    secret_namespace: str
    deletion_failed: str
    labels: dict[str, str] = field(default_factory=dict)  # put on with the being-created mark


class ContentWriter(Generic[C]):
    """Keeps one kind of content up to date with what the driver answered."""

    def __init__(self, context: RoleContext, contents: Informer[C], events: Recorder, words: ContentTerms) -> None:
        self._context = context
        self._contents: Informer[C] = contents
        self._events = events
        self._words = words
        self._timeout_s = context.settings.timeout_for("snapshotter")

    async def make(
        self,
        content: C,
        reason: str,
        build: Callable[[C], Awaitable[Request]],
        call: Callable[[Request, float], Awaitable[DriverAnswer]],
    ) -> tuple[C, DriverAnswer]:
        """Let the driver make something, with the content marked as long as the outcome is open."""
        was_open = self._words.being_created in content.annotations
        try:
            request = await build(content)
            content = await self.mark(content, True)
            answer = await call(request, self._timeout_s)
        except MoorageError as error:
            await self.failed(content, reason, error, unmark=decide.is_over(error, was_open))
            raise
        return content, answer

    async def ask(
        self,
        content: C,
        reason: str,
        build: Callable[[C], Awaitable[Request]],
        call: Callable[[Request, float], Awaitable[DriverAnswer]],
    ) -> DriverAnswer:
        """Ask the driver about something that was made elsewhere."""
        try:
            return await call(await build(content), self._timeout_s)
        except MoorageError as error:
            await self.failed(content, reason, error, unmark=False)
            raise

    async def remove(
        self,
        content: C,
        handle: str,
        build: Callable[[C], Awaitable[Request]],
        call: Callable[[Request, float], Awaitable[Any]],
    ) -> None:
        """Let the driver delete what it made."""
        try:
            await call(await build(content), self._timeout_s)
        except MoorageError as error:
            message = f"{self._words.noun} {handle} could not be deleted: {error}; {self._context.settings.retry_words}"
            self._events.warning(content, self._words.deletion_failed, message)
            raise
        log.info(f"{self._words.noun} deleted", content=content.name, handle=handle)

    async def let_go(self, content: C) -> None:
        """Nothing is left behind the content: take our finalizer off."""
        if self._words.finalizer in content.finalizers:
            left = [each for each in content.finalizers if each != self._words.finalizer]
            await self._patch(content, {"metadata": {"finalizers": left or None}}, content.metadata.resource_version)

    async def mark(self, content: C, is_creating: bool) -> C:
        """While marked, the content is not deleted: a snapshot may be about to appear."""
        key = self._words.being_created
        if (key in content.annotations) == is_creating:
            return content
        change: dict[str, Any] = {"annotations": {key: "yes" if is_creating else None}}
        if is_creating and self._words.labels:
            change["labels"] = self._words.labels
        return await self._patch(content, {"metadata": change})

    async def tidy(self, content: C) -> float | None:
        """Ready, but still marked; 0 to look again at once, because no event says that it may be deleted now."""
        await self.mark(content, False)
        return 0.0 if content.is_deleting else None

    async def failed(self, content: C, reason: str, error: MoorageError, *, unmark: bool) -> None:
        """Tell the user, and write the reason into the status once."""
        self._events.warning(content, reason, f"{error}; {self._context.settings.retry_words}")
        log.warning(f"{self._words.noun} failed", content=content.name, reason=str(error))
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
        changed = await self._context.client.patch(
            type(content), content.name, {"status": status}, subresource="status"
        )
        self._contents.remember(changed)
        return changed

    async def secrets(self, content: C) -> dict[str, str]:
        """The secret that the snapshot controller wrote down for making and deleting."""
        words = self._words
        reference = decide.annotated_secret(content, words.secret_name, words.secret_namespace)
        return await read_secret(self._context.client, reference)

    async def _patch(self, content: C, patch: dict[str, Any], version: str = "") -> C:
        try:
            changed = await self._context.client.patch(type(content), content.name, patch, version=version)
        except NotFound:
            raise SidecarError(f"content {content.name} is gone") from None
        if not (changed.is_deleting and not changed.finalizers):
            self._contents.remember(changed)
        return changed
