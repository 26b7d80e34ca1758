"""All objects of a cluster that explanations need, kept current by watches.

Owns: one informer for each kind that the account may read, the reason for each kind that it may not, and the lookups
that would otherwise go through all objects.
Start reading at: `LiveView`, `Feed`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from moorage.insight.cluster_view import ClusterView, last_seen
from moorage.insight.matching import lease_names
from moorage.insight.reader import FIELDS, Reader
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.errors import ApiError
from moorage.kube.objects import (
    CSIDriver,
    Event,
    KubeObject,
    Lease,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
)
from moorage.kube.volumes import capacity_bytes, claims_of, node_attached_to, node_of, volume_attached_by
from moorage.process import cancel_all

OnChange = Callable[[KubeObject | None, KubeObject | None], None]

_ASK_AGAIN_S = 15.0
_EVENTS_KEPT = 30  # of each object


@dataclass
class LiveView(ClusterView):
    """A cluster view whose lookups use the indexes of the informers."""

    promised: Counter[tuple[str, str]] = field(default_factory=Counter)  # bytes, by class and place
    volumes_of: Counter[str] = field(default_factory=Counter)  # by driver
    informers: dict[type[KubeObject], Informer[KubeObject]] = field(default_factory=dict)

    def pods_of(self, claim: PersistentVolumeClaim) -> list[Pod]:
        """Return the pods that use a claim and have not finished."""
        return [pod for pod in self.pods_naming(claim.key) if not pod.is_terminated]

    def pods_naming(self, claim_key: str) -> list[Pod]:
        return self._by(Pod, claims_of, claim_key)

    def pods_on(self, node: str) -> list[Pod]:
        return self._by(Pod, node_of, node)

    def attachments_on(self, node: str) -> list[VolumeAttachment]:
        return self._by(VolumeAttachment, node_attached_to, node)

    def count(self, volume: PersistentVolume, sign: int) -> None:
        """Add a volume to the sums by driver, class and place, or take it out of them."""
        size = sign * capacity_bytes(volume)
        for place in {"", *_places(volume)}:
            self.promised[volume.spec.storage_class_name or "", place] += size
        if volume.spec.csi is not None:
            self.volumes_of[volume.spec.csi.driver] += sign

    def attachments_of(self, volume: PersistentVolume) -> list[VolumeAttachment]:
        return self._by(VolumeAttachment, volume_attached_by, volume.name)

    def _by(self, kind: type[KubeObject], keys: Callable[..., Iterable[str]], value: str) -> list:  # type: ignore[type-arg]
        informer = self.informers.get(kind)
        return informer.by(keys, value) if informer is not None else []


class Feed:
    """Fills a live view and reports each change to `on_change(old, new)`. Use as `async with Feed(…).running()`."""

    def __init__(self, client: Client, on_change: OnChange) -> None:
        self._client = client
        self._informers = Informers(client)
        self._on_change = on_change
        self._leases_of: set[str] = set()
        self.view = LiveView()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read everything that may be read, then follow it until the block ends."""
        async with self._informers:
            await self._follow_readable()
            await self._informers.wait_synced()
            asking = asyncio.create_task(self._ask_again(), name="ui-ask-again")
            try:
                yield
            finally:
                await cancel_all([asking])

    async def _follow_readable(self) -> None:
        """Start an informer for each kind that a list shows to be readable; note the reason for the others."""
        kinds: tuple[type[KubeObject], ...] = (*FIELDS, Event)
        missing = [kind for kind in kinds if kind is not Lease and kind not in self.view.informers]
        await asyncio.gather(*(self._follow(kind) for kind in missing))

    async def _follow(self, kind: type[KubeObject]) -> None:
        try:
            await self._client.request("GET", kind.resource.path(), query={"limit": "1"})
        except ApiError as error:
            self.view.unreadable[kind.resource.kind] = str(error)
            return
        self.view.unreadable.pop(kind.resource.kind, None)
        informer = self._informers.of(kind)
        self.view.informers[kind] = informer
        informer.subscribe(self._on_event if kind is Event else self._keep)

    def _keep(self, old: KubeObject | None, new: KubeObject | None) -> None:
        """Put a change into the view, then report it."""
        shown = new if new is not None else old
        assert shown is not None
        objects: dict[str, KubeObject] = getattr(self.view, FIELDS[type(shown)])
        if new is not None:
            objects[new.key] = new
        else:
            objects.pop(shown.key, None)
        for volume, sign in ((old, -1), (new, 1)):
            if isinstance(volume, PersistentVolume):
                self.view.count(volume, sign)
        if isinstance(new, CSIDriver):
            self._follow_leases(new.name)
        self._on_change(old, new)

    def _follow_leases(self, driver: str) -> None:
        """Follow the leases of a driver's sidecars by name: of all leases, most belong to nodes."""
        if driver in self._leases_of:
            return
        self._leases_of.add(driver)
        for name in lease_names(driver):
            self._informers.of(Lease, fields=f"metadata.name={name}").subscribe(self._keep)

    def _on_event(self, old: KubeObject | None, new: KubeObject | None) -> None:
        shown = new if new is not None else old
        assert isinstance(shown, Event)
        uid = shown.involved_object.uid
        others = [event for event in self.view.events.get(uid, []) if event.key != shown.key]
        kept = [*others, shown] if new is not None else others
        if kept:
            self.view.events[uid] = sorted(kept, key=last_seen, reverse=True)[:_EVENTS_KEPT]
        else:
            self.view.events.pop(uid, None)
        self._on_change(old, new)

    async def _ask_again(self) -> None:
        """Ask for kinds that could not be read, and for the secrets that classes name."""
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            await self._follow_readable()
            try:
                async with Reader(self._client) as reader:
                    await asyncio.gather(*(reader.secrets(found) for found in list(self.view.classes.values())))
                    self.view.asked_secrets = reader.view.asked_secrets
            except ApiError as error:
                self.view.unreadable["Secret"] = str(error)


def _places(volume: PersistentVolume) -> set[str]:
    """Return the values that a volume's node affinity asks for: names of nodes, zones."""
    required = volume.spec.node_affinity.required if volume.spec.node_affinity is not None else None
    terms = required.node_selector_terms if required is not None else []
    return {value for term in terms for wanted in term.match_expressions for value in wanted.values}
