"""What a cause is: a test on the cluster, the sentence it yields, and the text that the documentation shows.

Owns: `Finding`, `Cause` and the registry that both `explain` and docs/reference/troubleshooting.md are made from.
Start reading at: `cause`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moorage.insight.causes.advice import Advice
from moorage.insight.cluster_view import ClusterView
from moorage.kube.objects import Event, KubeObject
from moorage.suggest import NOTHING, Command

T = TypeVar("T", bound=KubeObject)
Test = Callable[[ClusterView, T], "Finding | None"]

_CODES = {
    "ResourceExhausted": "RESOURCE_EXHAUSTED",
    "OutOfRange": "OUT_OF_RANGE",
    "InvalidArgument": "INVALID_ARGUMENT",
    "FailedPrecondition": "FAILED_PRECONDITION",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "Unavailable": "UNAVAILABLE",
}
_CODE = re.compile(rf"\b({'|'.join((*_CODES, *_CODES.values()))})\b")
_FRAME = re.compile(r'^failed to provision volume with StorageClass "[^"]*": ')
_NOTE = re.compile(r"; (?:retried|the volume may still appear|the request cannot be met|the scheduler is asked).*$")


@dataclass(frozen=True)
class Finding:
    """Why an object is where it is: one sentence, the evidence, what it waits for, and what to do.

    `next_step` never ends or destroys anything. What does comes in `then`, and says so.
    """

    sentence: str
    next_step: Command = NOTHING
    evidence: tuple[str, ...] = ()
    waits_for: KubeObject | None = None
    purpose: str = ""
    then: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class Cause:
    """One reason for a volume to be stuck, as explain recognises it and the documentation tells it."""

    id: str
    about: type[KubeObject]
    title: str
    remedy: str
    test: Callable[[ClusterView, Any], Finding | None] = field(repr=False)

    @property
    def why(self) -> str:
        """The paragraph for the documentation."""
        return " ".join((self.test.__doc__ or "").split())


REGISTRY: list[Cause] = []


def cause(id: str, about: type[T], title: str, remedy: str) -> Callable[[Test[T]], Test[T]]:
    """Register a cause; the order of registration is the order in which causes of a kind are tried."""

    def register(test: Test[T]) -> Test[T]:
        REGISTRY.append(Cause(id, about, title, remedy, test))
        return test

    return register


def said(event: Event | None) -> tuple[str, ...]:
    """An event as a line of evidence."""
    if event is None:
        return ()
    times = f", {event.count} times" if event.count > 1 else ""
    source = event.source.component or event.reporting_component
    return (f"{event.reason} ({source}{times}): {event.message}",)


def code_in(text: str) -> str:
    """The gRPC code that a driver's words carry, in Go's or in the protocol's spelling."""
    match = _CODE.search(text)
    return _CODES.get(match[1], match[1]) if match is not None else ""


def driver_words(message: str) -> str:
    """An event's message without what the provisioner puts around the words of the driver."""
    return _NOTE.sub("", _FRAME.sub("", message))


def names(objects: list[T], limit: int = 3) -> str:
    """Some names for a sentence: `a, b, c and 4 more`."""
    shown = [obj.name for obj in objects[:limit]]
    more = f" and {len(objects) - limit} more" if len(objects) > limit else ""
    return ", ".join(shown) + more
