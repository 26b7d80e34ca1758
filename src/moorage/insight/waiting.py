"""What callers of drivers and the supervisor of `moorage up` tell in events: calls without answer, and crashed drivers.

Owns: reading those events. A call counts as in flight while its caller repeats the event in time and reports no end.
Start reading at: `call_in_flight`, `exits_on`.
"""

import re
from dataclasses import dataclass

from moorage.csi.pending import ANSWERED, GROWTH, WAITING
from moorage.insight.cluster_view import ClusterView, grouped, last_seen
from moorage.kube.names import DRIVER_EXITED
from moorage.kube.objects import Event, KubeObject, Node, seconds_of

_WORDS = re.compile(r"^(\w+) has been waiting for driver (\S+) since (\S+)$")
_LATE_S = 30.0
_RECENTLY_S = 900.0


@dataclass(frozen=True)
class WaitingCall:
    """A call that a driver has not answered."""

    method: str
    driver: str
    seconds: float
    event: Event

    @property
    def sentence(self) -> str:
        return f"{self.method} has been waiting for driver {self.driver} for {self.seconds:.0f} s"


def call_in_flight(view: ClusterView, obj: KubeObject) -> WaitingCall | None:
    """Return the call for an object that its caller still waits for, None if the last one has ended."""
    return _newest(view, view.events_of(obj))


def calls_on(view: ClusterView, node: Node) -> list[WaitingCall]:
    """Return the calls that the node's agent waits for, the longest wait first."""

    def by_host() -> dict[str, list[Event]]:
        return grouped((event.source.host, event) for event in view.events_with(WAITING))

    about = {event.involved_object.uid for event in view.once("waits by host", by_host).get(node.name, [])}
    found = [call for uid in about if (call := _newest(view, view.events[uid])) is not None]
    return sorted((call for call in found if call.method.startswith("Node")), key=lambda call: -call.seconds)


def exits_on(view: ClusterView, node: str) -> str:
    """Return how often the node's driver has crashed lately: `exited with code 3, 4 times`; empty if it has not."""
    lately = [event for event in view.events_with(DRIVER_EXITED) if view.now - last_seen(event) < _RECENTLY_S]
    lately = [event for event in lately if node in ("", event.involved_object.name)]  # without a name: on any node
    if not lately:
        return ""
    newest = max(lately, key=last_seen)
    return newest.message + (f", {newest.count} times" if newest.count > 1 else "")


def _newest(view: ClusterView, events: list[Event]) -> WaitingCall | None:
    newest_first = sorted(events, key=lambda event: (last_seen(event), event.reason != WAITING), reverse=True)
    for event in newest_first:  # of one second, an end comes after the wait
        match = _WORDS.match(event.message) if event.reason == WAITING else None
        if match is not None:
            since = seconds_of(match[3]) or 0.0
            is_repeated = view.now - since <= GROWTH * (last_seen(event) - since) + _LATE_S
            return WaitingCall(match[1], match[2], view.now - since, event) if is_repeated else None
        if event.reason == ANSWERED or event.type == "Warning":
            return None
    return None
