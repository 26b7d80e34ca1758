"""What the pages show, kept current: a card for each claim, and every object that is not well.

Owns: which cards a change affects, when they are judged again, and the version that open pages wait for. A change costs
what it affects; the rest is judged again slowly, because some causes are only about time.
Start reading at: `Board.running`, `Board.next_version`.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from moorage.insight.explain import KINDS, Story, is_harmless, story_of
from moorage.insight.narrator import Narrator, TimelineEntry
from moorage.insight.reader import FIELDS
from moorage.kube.api.client import Client
from moorage.kube.objects import (
    CSINode,
    Event,
    KubeObject,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from moorage.kube.volumes import claims_of, reference_key
from moorage.log import get_logger
from moorage.process import cancel_all
from moorage.ui.live_view import Feed
from moorage.ui.stages import ClaimStage, place_of

log = get_logger(__name__)

Key = tuple[type[KubeObject], str]

_JUDGED = tuple(dict.fromkeys(KINDS.values()))
_GATHER_S = 0.05  # changes that come together are judged together
_SETTLED_S = 0.5  # what is not well for a shorter time is only on its way
_RECHECK_S = 1.0
_AT_ONCE = 100  # objects judged without a pause for other tasks
_UNWELL_EACH_S = 300
_WELL_EACH_S = 10
_ACTIVITY_KEPT = 300


@dataclass(frozen=True)
class Card:
    """One claim: where it is, and when it was seen to reach each stage; empty for what was there before the board."""

    claim: PersistentVolumeClaim
    stage: ClaimStage
    reached: dict[ClaimStage, float] = field(default_factory=dict)


@dataclass
class Trouble:
    """An object that is not well, since when, and why."""

    key: Key
    story: Story
    since: float


class Board:
    """The state behind all pages. One process has one."""

    def __init__(self, client: Client, logs: Path | None = None) -> None:
        self.client = client
        self.logs = logs
        self.cards: dict[str, Card] = {}
        self.activity: deque[TimelineEntry] = deque(maxlen=_ACTIVITY_KEPT)
        self.version = 0
        self._feed = Feed(client, self._on_change)
        self._narrator = Narrator(on_moment=self.activity.appendleft)
        self._troubles: OrderedDict[Key, Trouble] = OrderedDict()
        self._in_stage: dict[ClaimStage, OrderedDict[str, None]] = {stage: OrderedDict() for stage in ClaimStage}
        self._dirty: OrderedDict[Key, None] = OrderedDict()
        self._woken = asyncio.Event()
        self._changed = asyncio.Condition()
        self._settled: set[Key] = set()
        self._is_live = self._is_news = False
        self._sweep: Iterator[Key] = iter(())
        self.view = self._feed.view

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the board current until the block ends."""
        async with self._feed.running():
            await self._judge_dirty()
            self._is_live = True
            judging = asyncio.create_task(self._judge_forever(), name="ui-judge")
            try:
                yield
            finally:
                await cancel_all([judging])

    async def next_version(self, seen: int, timeout_s: float) -> int:
        """Wait until the board is newer than `seen`, or for `timeout_s`. Returns its version."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.version != seen)
        except TimeoutError:
            pass  # nothing changed: the caller has other work to do now and then
        return self.version

    def in_stage(self, stage: ClaimStage) -> Iterable[Card]:
        """Return the claims of a stage, the newest arrival first."""
        return (self.cards[key] for key in reversed(self._in_stage[stage]))

    def count(self, stage: ClaimStage) -> int:
        return len(self._in_stage[stage])

    def troubles(self) -> list[Trouble]:
        """Return what is not well for longer than a moment, without objects that only wait for another one listed."""
        now = time.time()
        settled = [each for each in self._troubles.values() if now - each.since >= _SETTLED_S]
        told = {link.object for each in settled for link in each.story.chain[1:]}
        return [each for each in settled if each.story.object not in told]

    def story(self, obj: KubeObject) -> Story:
        """Explain one object now."""
        self.view.now = time.time()
        return story_of(self.view, obj)

    # Changes

    def _on_change(self, old: KubeObject | None, new: KubeObject | None) -> None:
        shown = new if new is not None else old
        assert shown is not None
        if isinstance(shown, Lease):
            return  # renewals come every few seconds; what waits for a leader is judged again each second
        if self._is_live:
            self._narrator.take(old, new)
        if isinstance(shown, Node) and not _says_more(old, new):
            return
        for key in self._affected_by(shown):
            self._dirty[key] = None
        self._is_news = True
        self._woken.set()

    def _affected_by(self, obj: KubeObject) -> Iterator[Key]:
        """Yield the objects whose explanation can change with this one."""
        match obj:
            case Event():
                kind = obj.involved_object.kind
                for judged in _JUDGED:
                    if judged.resource.kind == kind:
                        yield (
                            judged,
                            reference_key(obj.involved_object)
                            if judged.resource.namespaced
                            else (obj.involved_object.name),
                        )
            case PersistentVolumeClaim():
                yield from self._around_claim(obj.key)
            case Pod():
                yield Pod, obj.key
                for key in claims_of(obj):
                    yield from self._around_claim(key)
            case PersistentVolume():
                yield PersistentVolume, obj.key
                if obj.spec.claim_ref is not None:
                    yield from self._around_claim(reference_key(obj.spec.claim_ref))
            case VolumeAttachment():
                yield VolumeAttachment, obj.key
                volume = self.view.volumes.get(obj.spec.source.persistent_volume_name or "")
                if volume is not None:
                    yield from self._affected_by(volume)
            case VolumeSnapshotContent():
                yield VolumeSnapshot, reference_key(obj.spec.volume_snapshot_ref)
            case VolumeSnapshot():
                yield VolumeSnapshot, obj.key
            case Node() | CSINode():
                yield Node, obj.name
                for pod in self.view.pods_on(obj.name):
                    yield from self._affected_by(pod)
            case _:
                yield from list(self._troubles)

    def _around_claim(self, key: str) -> Iterator[Key]:
        yield PersistentVolumeClaim, key
        claim = self.view.claims.get(key)
        if claim is not None and claim.spec.volume_name:
            yield PersistentVolume, claim.spec.volume_name
        for pod in self.view.pods_naming(key):
            yield Pod, pod.key

    # Judging

    async def _judge_forever(self) -> None:
        due = 0.0
        while True:
            await self._wait_for_work()
            if time.monotonic() >= due:
                due = time.monotonic() + _RECHECK_S
                self._add_due()
            await self._judge_dirty()
            settled = {key for key, each in self._troubles.items() if time.time() - each.since >= _SETTLED_S}
            if settled != self._settled:
                self._settled, self._is_news = settled, True
            if self._is_news:
                self._is_news = False
                async with self._changed:
                    self.version += 1
                    self._changed.notify_all()

    async def _wait_for_work(self) -> None:
        """Wait for a change and what comes with it, or until time alone may have changed something."""
        is_settling = len(self._settled) != len(self._troubles)
        try:
            async with asyncio.timeout(_SETTLED_S / 2 if is_settling else _RECHECK_S):
                await self._woken.wait()
            await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass  # nothing changed, but some causes are about time
        self._woken.clear()

    async def _judge_dirty(self) -> None:
        self.view.now = time.time()
        for done, key in enumerate(list(self._dirty), 1):
            del self._dirty[key]
            try:
                self._judge(*key)
            except Exception:  # one object that an explanation cannot take must not stop the page for all others
                log.exception("cannot judge", kind=key[0].resource.kind, object=key[1])
            if done % _AT_ONCE == 0:
                await asyncio.sleep(0)

    def _judge(self, kind: type[KubeObject], key: str) -> None:
        obj = getattr(self.view, FIELDS[kind]).get(key)
        if kind is PersistentVolumeClaim:
            self._place(key, obj)
        story = story_of(self.view, obj) if obj is not None else None
        known = self._troubles.get((kind, key))
        if story is None or not story.stuck or is_harmless(story):
            if known is not None:
                del self._troubles[kind, key]
                self._is_news = True
            return
        if known is None:
            self._troubles[kind, key] = Trouble((kind, key), story, time.time())
        elif known.story != story:
            known.story, self._is_news = story, True

    def _place(self, key: str, claim: PersistentVolumeClaim | None) -> None:
        """Move a claim's card to its stage."""
        old = self.cards.get(key)
        if claim is None:
            if old is not None:
                del self.cards[key], self._in_stage[old.stage][key]
            return
        stage = place_of(self.view, claim).stage
        if old is None or old.claim.uid != claim.uid:
            reached = {stage: time.time()} if self._is_live else {}
        else:
            reached = old.reached if stage is old.stage else {**old.reached, stage: time.time()}
        self.cards[key] = Card(claim, stage, reached)
        if old is None or old.stage is not stage:
            if old is not None:
                del self._in_stage[old.stage][key]
            self._in_stage[stage][key] = None

    def _add_due(self) -> None:
        """Judge again what is not well, and a few of all others, in turn."""
        for key in list(islice(self._troubles, _UNWELL_EACH_S)):
            self._troubles.move_to_end(key)
            self._dirty[key] = None
        for _ in range(_WELL_EACH_S):
            key_or_none = next(self._sweep, None)
            if key_or_none is None:
                self._sweep = iter([(kind, key) for kind in _JUDGED for key in getattr(self.view, FIELDS[kind])])
                return
            self._dirty[key_or_none] = None


def _says_more(old: KubeObject | None, new: KubeObject | None) -> bool:
    """Whether a change of a node is more than a sign of life."""
    if not isinstance(old, Node) or not isinstance(new, Node):
        return True
    return _facts(old) != _facts(new)


def _facts(node: Node) -> tuple[object, ...]:
    status = node.status
    conditions = [(each.type, each.status) for each in status.conditions]
    return node.spec, node.labels, conditions, status.volumes_in_use, status.volumes_attached, status.allocatable
