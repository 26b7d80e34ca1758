"""The pages: which parts each has, and what every part shows.

Owns: turning the board into plain values for the templates. A part is drawn again when its board changes, and sent to
open pages if it came out different; every list is bounded.
Start reading at: `PageRenderer.parts`.
"""

import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice, pairwise
from typing import Any

import jinja2

from moorage.errors import MoorageError
from moorage.insight.explain import ObjectNotFound, Story, found, parse, state_of
from moorage.insight.matching import lease_names
from moorage.insight.trace import trace
from moorage.kube.objects import (
    KubeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.kube.quantity import bytes_text
from moorage.kube.volumes import claim_class, claims_of, readable_bytes, reference_key, requested_bytes
from moorage.printable import one_line
from moorage.ui.board import Board, Card
from moorage.ui.pictures import chain_of, family_of, gantt_of
from moorage.ui.stages import IN_FLIGHT, ClaimStage, place_of

_CARDS = 24  # of one column
_TROUBLES = 60
_ROWS = 100  # of one table
_EVENTS = 20
_BOXES = {
    "pvc": "Claim",
    "pv": "Volume",
    "va": "Attachment",
    "pod": "Mounted",
}
_NAME = re.compile(r"[^/?#\s]{1,300}")

Values = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """What a page was asked for: its path, and the filters behind it."""

    path: str
    namespace: str = ""
    words: str = ""
    start: int = 0

    def wants(self, key: str) -> bool:
        """Whether an object passes the filters, given as `namespace/name` or `name`."""
        namespace = key.rpartition("/")[0]
        if self.namespace and namespace and namespace != self.namespace:
            return False
        return all(word in key.lower() for word in self.words.lower().split())


@dataclass(frozen=True)
class PageLayout:
    """One page: its title and the parts that it is made of, by their ids."""

    title: str
    parts: Mapping[str, Callable[[Query], Awaitable[Values]]] = field(default_factory=dict)


class PageRenderer:
    """Draws pages and their parts as HTML. Every value from the cluster is escaped."""

    def __init__(self, board: Board, allows_actions: bool) -> None:
        self._board, self._view = board, board.view
        self.allows_actions = allows_actions
        self._fixed = {
            "/": PageLayout(
                "Overview", {"wrong": self._wrong, "lanes": self._lanes, "rooms": self._rooms, "drivers": self._drivers}
            ),
            "/claims": PageLayout("Claims", {"claims": self._claims}),
            "/nodes": PageLayout("Nodes and pools", {"nodes": self._nodes, "rooms": self._rooms}),
            "/snapshots": PageLayout("Snapshots", {"snapshots": self._snapshots}),
            "/drivers": PageLayout("Drivers", {"drivers": self._drivers}),
            "/activity": PageLayout("Activity", {"activity": self._activity}),
        }
        self._templates = jinja2.Environment(
            loader=jinja2.FunctionLoader(_template),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"line": one_line, "size": bytes_text, "path": path_of, "span": _span}

    def page(self, query: Query) -> PageLayout:
        """Return the page at a path. Raises ObjectNotFound if there is none."""
        fixed = self._fixed.get(query.path)
        if fixed is not None:
            return fixed
        kind_and_name = _reference(query.path)
        if kind_and_name is None:
            raise ObjectNotFound("there is no such page")
        reference, _ = kind_and_name
        return PageLayout(
            reference,
            {
                "story": self._story,
                "chain": self._chain,
                "timeline": self._timeline,
                "family": self._family,
                "events": self._events,
            },
        )

    async def whole(self, query: Query, extra: Values) -> str:
        """Return a page as HTML."""
        page = self.page(query)
        parts = await self.parts(query)
        namespaces = sorted({claim.namespace for claim in self._view.claims.values()})
        values = {"page": page, "parts": parts, "query": query, "pages": self._fixed, "namespaces": namespaces, **extra}
        return self.draw("page", values)

    async def parts(self, query: Query) -> dict[str, str]:
        """Return every part of a page as HTML, by its id."""
        return {
            name: self.draw(f"part_{name}", {"query": query, "actions": self.allows_actions, **await values(query)})
            for name, values in self.page(query).parts.items()
        }

    def draw(self, template: str, values: Values) -> str:
        return self._templates.get_template(f"{template}.html").render(values)

    # Parts of the overview

    async def _wrong(self, query: Query) -> Values:
        troubles = self._board.troubles()
        shown = [each for each in troubles if query.wants(each.key[1])]
        return {"troubles": shown[:_TROUBLES], "count": len(shown), "unreadable": self._view.unreadable}

    async def _lanes(self, query: Query) -> Values:
        lanes = []
        for stage in IN_FLIGHT:
            cards = [self._card(card) for card in islice(self._wanted(stage, query), _CARDS)]
            lanes.append({"name": stage.value, "cards": cards, "count": self._board.count(stage)})
        lately = time.time() - 600
        recent = [
            card
            for card in islice(self._wanted(ClaimStage.MOUNTED, query), 8)
            if card.reached.get(ClaimStage.MOUNTED, 0) > lately
        ]
        counts = {stage.value: self._board.count(stage) for stage in ClaimStage}
        return {"lanes": lanes, "recent": [self._card(card) for card in recent], "counts": counts}

    def _wanted(self, stage: ClaimStage, query: Query) -> Any:
        return (card for card in self._board.in_stage(stage) if query.wants(card.claim.key))

    def _card(self, card: Card) -> Values:
        claim, reached = card.claim, card.reached
        place = place_of(self._view, claim)
        times = sorted((at, stage) for stage, at in reached.items())
        took = {stage.value: after - at for (at, stage), (after, _) in pairwise(times)}
        story = self._board.story(claim) if card.stage in IN_FLIGHT else None
        pod = next((pod for pod in place.pods if pod.status.phase != "Running"), None)
        if story is not None and not story.stuck and pod is not None:
            story = self._board.story(pod)
        sentence = story.chain[-1].sentence if story is not None and story.stuck else ""
        return {
            "claim": claim,
            "size": requested_bytes(claim),
            "node": ", ".join(sorted({pod.spec.node_name for pod in place.pods} - {""})),
            "pods": [pod.name for pod in place.pods],
            "took": took,
            "sentence": sentence,
        }

    async def _rooms(self, query: Query) -> Values:
        """Pools as the provisioners report them: what is free, and what the volumes there were promised."""
        rooms: list[Values] = []
        for capacity in sorted(self._view.capacities.values(), key=lambda each: (each.storage_class_name, each.name)):
            if capacity.capacity is None or len(rooms) >= _ROWS:
                continue
            labels = capacity.node_topology.match_labels if capacity.node_topology is not None else {}
            where = ", ".join(sorted(labels.values()))
            free, promised = readable_bytes(capacity.capacity), self._view.promised[capacity.storage_class_name, where]
            percent = round(100 * promised / (promised + free)) if promised + free else 0
            room = {"storage_class": capacity.storage_class_name, "where": where or "every node"}
            rooms.append({**room, "free": free, "promised": promised, "percent": percent})
        return {"rooms": rooms}

    async def _drivers(self, query: Query) -> Values:
        view, found = self._view, []
        nodes = Counter(entry.name for each in view.node_drivers.values() for entry in each.spec.drivers)
        for driver in sorted(view.drivers.values(), key=lambda each: each.name)[:_ROWS]:
            names = lease_names(driver.name)
            leases = [lease for lease in view.leases.values() if lease.name in names]
            leaders = [
                {"name": each.name, "who": each.spec.holder_identity, "is_fresh": view.is_fresh(each)}
                for each in leases
            ]
            found.append(
                {
                    "driver": driver,
                    "nodes": nodes[driver.name],
                    "volumes": view.volumes_of[driver.name],
                    "leaders": leaders,
                }
            )
        unknown = sorted(set(nodes) - set(view.drivers))
        return {"found": found, "unknown": unknown, "node_count": len(view.nodes)}

    # Tables

    async def _claims(self, query: Query) -> Values:
        wanted = sorted(
            (card for card in self._board.cards.values() if query.wants(card.claim.key)),
            key=lambda card: card.claim.key,
        )
        rows = [
            self._card(card) | {"stage": card.stage.value, "class": claim_class(card.claim)}
            for card in wanted[query.start : query.start + _ROWS]
        ]
        return {"rows": rows, "count": len(wanted), "step": _ROWS}

    async def _nodes(self, query: Query) -> Values:
        rows = []
        for node in sorted(
            (each for each in self._view.nodes.values() if query.wants(each.key)), key=lambda each: each.name
        )[:_ROWS]:
            drivers = self._view.node_drivers.get(node.name)
            rows.append(
                {
                    "node": node,
                    "state": state_of(node),
                    "pods": len(self._view.pods_on(node.name)),
                    "attached": sum(each.status.attached for each in self._view.attachments_on(node.name)),
                    "in_use": len(node.status.volumes_in_use),
                    "drivers": [entry.name for entry in drivers.spec.drivers] if drivers else [],
                }
            )
        return {"rows": rows, "count": len(self._view.nodes)}

    async def _snapshots(self, query: Query) -> Values:
        wanted = sorted(
            (each for each in self._view.snapshots.values() if query.wants(each.key)), key=lambda each: each.key
        )
        rows = [
            {
                "snapshot": each,
                "state": state_of(each),
                "source": each.spec.source.persistent_volume_claim_name or "",
                "group": each.status.volume_group_snapshot_name if each.status is not None else None,
                "size": readable_bytes(each.status.restore_size)
                if each.status is not None and each.status.restore_size
                else 0,
            }
            for each in wanted[query.start : query.start + _ROWS]
        ]
        return {"rows": rows, "count": len(wanted), "step": _ROWS, "unreadable": self._view.unreadable}

    async def _activity(self, query: Query) -> Values:
        words = query.words.lower().split()
        moments = [
            each for each in self._board.activity if all(word in f"{each.who} {each.what}".lower() for word in words)
        ]
        return {"moments": moments[:_ROWS]}

    # One object

    def _asked(self, query: Query) -> tuple[str, KubeObject]:
        known = _reference(query.path)
        if known is None:
            raise ObjectNotFound("there is no such page")
        reference, namespace = known
        kind, name = parse(reference)
        return reference, found(self._view, kind, name, namespace)

    async def _story(self, query: Query) -> Values:
        try:
            _, obj = self._asked(query)
        except ObjectNotFound as gone:
            return {"story": None, "gone": str(gone), "obj": None}
        return {"story": self._board.story(obj), "gone": "", "obj": obj}

    def _claim_of(self, query: Query) -> PersistentVolumeClaim | None:
        """The claim that an object belongs to; for a pod, its first."""
        try:
            _, obj = self._asked(query)
        except ObjectNotFound:
            return None
        match obj:
            case PersistentVolumeClaim():
                return obj
            case Pod():
                return next((self._view.claims[key] for key in claims_of(obj) if key in self._view.claims), None)
            case VolumeSnapshot():
                return self._view.claims.get(f"{obj.namespace}/{obj.spec.source.persistent_volume_claim_name}")
            case VolumeAttachment():
                return self._holder(self._view.volumes.get(obj.spec.source.persistent_volume_name or ""))
            case PersistentVolume():
                return self._holder(obj)
        return None

    def _holder(self, volume: PersistentVolume | None) -> PersistentVolumeClaim | None:
        reference = volume.spec.claim_ref if volume is not None else None
        return self._view.claims.get(reference_key(reference)) if reference is not None else None

    async def _chain(self, query: Query) -> Values:
        claim = self._claim_of(query)
        if claim is None:
            return {"boxes": [], "claim": None}
        place = place_of(self._view, claim)
        stories: list[Story] = [self._board.story(claim), *(self._board.story(pod) for pod in place.pods)]
        wrong: dict[str, str] = {}
        for story in stories:
            for link in story.chain if story.stuck else ():
                title = _BOXES.get(link.object.partition("/")[0], "")
                if link.cause and title:
                    wrong.setdefault(title, link.sentence)
        return {"boxes": chain_of(claim, place, wrong), "claim": claim}

    async def _timeline(self, query: Query) -> Values:
        try:
            _, obj = self._asked(query)
            told = await trace(self._board.client, f"{_word(query.path)}/{obj.name}", obj.namespace, self._board.logs)
        except MoorageError as error:  # the object is gone, or may not be read
            return {"gantt": None, "why": str(error), "trace": None}
        return {"gantt": gantt_of(told, time.time()), "why": "", "trace": told}

    async def _family(self, query: Query) -> Values:
        claim = self._claim_of(query)
        return {"tree": family_of(self._view, claim) if claim is not None else None}

    async def _events(self, query: Query) -> Values:
        try:
            _, obj = self._asked(query)
        except ObjectNotFound:
            return {"events": []}
        return {"events": self._view.events_of(obj)[:_EVENTS]}


def path_of(reference: str, namespace: str = "default") -> str:
    """Return the page of an object, given as explain writes it: `pvc/data` or `pvc/data (shop)`."""
    word, _, rest = reference.partition("/")
    name, _, place = rest.partition(" ")
    return f"/o/{word}/{place.strip('()') or namespace}/{name}"


def _reference(path: str) -> tuple[str, str] | None:
    """Return `pvc/data` and `shop` for `/o/pvc/shop/data`; None for another path."""
    parts = path.split("/")
    if len(parts) != 5 or parts[1] != "o" or not all(_NAME.fullmatch(part) for part in parts[2:]):
        return None
    return f"{parts[2]}/{parts[4]}", parts[3]


def _word(path: str) -> str:
    return path.split("/")[2]


def _span(seconds: float) -> str:
    """Return a time as people read it: `51 ms`, `2.4 s`, `3 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _template(name: str) -> str:
    return (resources.files("moorage.ui") / "templates" / name).read_text()
