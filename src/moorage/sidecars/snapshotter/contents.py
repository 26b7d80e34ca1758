"""The content worker: takes, checks and deletes what a content stands for, one code path for both flavours.

Owns: the steps, and reading the class and the secrets of a content. What the driver is asked is in the subclasses.
Start reading at: `ContentWorker.sync`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from moorage.kube.cache.informer import Informer
from moorage.kube.control.controller import Controller
from moorage.kube.control.events import Recorder
from moorage.kube.objects import VolumeGroupSnapshotClass, VolumeSnapshotClass
from moorage.kube.secrets import read_secret, reference_from
from moorage.log import get_logger
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.roles import Role
from moorage.sidecars.snapshotter import decide
from moorage.sidecars.snapshotter.content_writer import ContentWriter
from moorage.sidecars.snapshotter.decide import ContentStep
from moorage.sidecars.snapshotter.flavour import C, ContentFlavour

log = get_logger(__name__)


class Taken(Protocol):
    """A snapshot or a group snapshot, as the driver describes it."""

    @property
    def ready_to_use(self) -> bool: ...


M = TypeVar("M", bound=Taken)


class SnapshotNotReady(SidecarError):
    """The driver has taken the snapshot and is still processing it. It is asked again with growing pauses."""


@dataclass(frozen=True, slots=True)
class CreateTerms:
    """What the requests to take a snapshot and a group snapshot have in common."""

    name: str
    parameters: dict[str, str]
    secrets: dict[str, str]


class ContentWorker(ABC, Generic[C, M]):
    """Reconciles the contents of one flavour. The keys of `controller` are their names."""

    flavour: ContentFlavour[C]

    def __init__(
        self,
        context: RoleContext,
        contents: Informer[C],
        classes: Informer[VolumeSnapshotClass] | Informer[VolumeGroupSnapshotClass],
        events: Recorder,
    ) -> None:
        self._context = context
        self._contents = contents
        self._classes = classes
        self._writer = ContentWriter(context, self.flavour, events)
        self._timeout_s = context.settings.timeout_for(Role.SNAPSHOTTER)
        workers = context.settings.workers_for(Role.SNAPSHOTTER)
        self.controller: Controller[str] = context.controller(self.flavour.queue, self.sync, workers)

    async def sync(self, name: str) -> float | None:
        """Take one content a step further."""
        content = self._contents.get(name)
        if content is None or content.spec.driver != self._context.driver.name:
            return None
        used = self._class_of(content)
        if used is not None and used.driver != content.spec.driver:
            return None
        match decide.next_step(content, self.flavour):
            case ContentStep.DELETE:
                await self._delete(content)
            case ContentStep.CREATE:
                await self._create(content)
            case ContentStep.CHECK:
                await self._check(content)
            case ContentStep.TIDY:
                return await self._writer.tidy(content)
            case ContentStep.NOTHING:
                pass
        return None

    async def _create(self, content: C) -> None:
        flavour = self.flavour
        reason = flavour.creation_failed if content.status is None else flavour.check_failed
        content, made = await self._writer.make(content, reason, self._create_request, self._call_create)
        content = await self._writer.record(content, self._status(content, made))
        await self._writer.mark(content, False)
        self._confirm_ready(content, made)
        log.info(f"{flavour.noun} made", content=content.name)

    async def _check(self, content: C) -> None:
        """Ask the driver about a snapshot that was not taken for this content."""
        handle = self._handle_of(content)
        if not handle:
            return  # a group member whose handle the snapshot controller has not written yet
        found = await self._writer.ask(content, self.flavour.check_failed, lambda of: self._ask(of, handle))
        await self._writer.record(content, self._status(content, found))
        self._confirm_ready(content, found)

    async def _delete(self, content: C) -> None:
        handle = self._handle_to_delete(content)
        if handle and content.spec.deletion_policy == "Delete":
            await self._writer.remove(content, handle, lambda of: self._call_delete(of, handle))
        await self._writer.release(content)

    def _confirm_ready(self, content: C, made: M) -> None:
        if not made.ready_to_use:
            raise SnapshotNotReady(f"the {self.flavour.noun} of content {content.name} is not ready yet")

    async def _create_terms(self, content: C, prefix: str, uid_length: int) -> CreateTerms:
        used, flavour = self._class_of(content), self.flavour
        if used is None:
            raise SidecarError(f"content {content.name}: its class {flavour.class_of(content)} is missing")
        parameters, reference = decide.driver_parameters(used.parameters), flavour.reference_of(content)
        if self._context.settings.extra_create_metadata:
            parameters |= decide.metadata_parameters(flavour.stem, reference, content.name)
        name = decide.snapshot_name(prefix, uid_length, reference.uid)
        return CreateTerms(name, parameters, await self._writer.secrets(content))

    async def _secrets_for_asking(self, content: C) -> dict[str, str]:
        used, tokens = self._class_of(content), {f"{self.flavour.stem}content.name": content.name}
        found = reference_from(used.parameters, self.flavour.secret_for_asking, tokens, tokens) if used else None
        return await read_secret(self._context.client, found)

    def _class_of(self, content: C) -> VolumeSnapshotClass | VolumeGroupSnapshotClass | None:
        return self._classes.get(self.flavour.class_of(content))

    @abstractmethod
    async def _create_request(self, content: C) -> Any: ...

    @abstractmethod
    async def _call_create(self, request: Any, timeout_s: float) -> M: ...

    @abstractmethod
    async def _ask(self, content: C, handle: str) -> M:
        """Ask the driver about a snapshot. Raises SidecarError if the driver does not know it."""

    @abstractmethod
    async def _call_delete(self, content: C, handle: str) -> None: ...

    @abstractmethod
    def _handle_of(self, content: C) -> str:
        """Return the handle of a snapshot that was not taken for this content, empty if there is none yet."""

    @abstractmethod
    def _handle_to_delete(self, content: C) -> str:
        """Return what the driver is to delete, empty if nothing is."""

    @abstractmethod
    def _status(self, content: C, made: M) -> dict[str, Any]:
        """Return the status fields to write: handle, time and size once, readiness each time."""
