"""Calls that a driver has not answered yet, as their caller sees them.

Owns: what is known of a call in flight, the log line of each call, and the event about one that waits.
May not touch: Kubernetes; `on_behalf_of` is given the recorder's method and the object.
Start reading at: `Calls.begin`, `on_behalf_of`.

A caller that has waited for 10 seconds writes an event about the object that the call is for, and repeats it when the
wait is six times as long. It writes another when the driver answers. The page 2026-11-calls-in-flight.md in
docs/explanation/decisions says why.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from moorage.csi.metrics import escaped
from moorage.log import get_logger

log = get_logger(__name__)

WAITING, ANSWERED = "WaitingForDriver", "DriverAnswered"
FIRST_S, GROWTH = 10.0, 6.0
_SUBJECTS = ("volume_id", "name", "snapshot_id", "group_snapshot_id")
_QUIET = ("Get", "Probe", "List", "Validate", "NodeGet", "ControllerGet")
_METRIC = "csi_operation_in_flight_seconds"

Tell = Callable[[Any, str, str, str], None]
"""Records an event: the object, Normal or Warning, the reason and the message."""

_concern: ContextVar[tuple[Tell, Any] | None] = ContextVar("moorage-csi-concern", default=None)


@contextmanager
def on_behalf_of(tell: Tell, about: Any) -> Iterator[None]:
    """Calls in this block are for an object: if a driver does not answer in time, `tell` records an event about it."""
    token = _concern.set((tell, about))
    try:
        yield
    finally:
        _concern.reset(token)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call that has been sent and not answered."""

    driver: str
    method: str
    subject: str
    concern: tuple[Tell, Any] | None
    started_at: float = field(default_factory=time.time)
    was_told: bool = False
    _timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        return time.time() - self.started_at

    def watch(self, after_s: float) -> None:
        """Tell that the call waits once it has waited for `after_s`."""
        self._timer = asyncio.get_running_loop().call_later(max(0.0, after_s - self.seconds), self._tell, after_s)

    def _tell(self, waited_s: float) -> None:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started_at))
        log.warning(
            "driver has not answered yet", driver=self.driver, method=self.method, volume=self.subject, since=since
        )
        if self.concern is not None:
            tell, about = self.concern
            tell(about, "Normal", WAITING, f"{self.method} has been waiting for driver {self.driver} since {since}")
        self.was_told = True
        self.watch(waited_s * GROWTH)

    def finish(self, code: str, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        record = log.debug if self.method.startswith(_QUIET) and not self.was_told else log.info
        fields = {"driver": self.driver, "method": self.method, "volume": self.subject, "code": code}
        record("call", **fields, seconds=round(seconds, 3))
        if self.was_told and self.concern is not None and code == "OK":  # a failure has an event of its own
            tell, about = self.concern
            tell(about, "Normal", ANSWERED, f"driver {self.driver} answered {self.method} after {seconds:.0f} s")


class Calls:
    """The calls of one client that are in flight."""

    def __init__(self) -> None:
        self.driver = ""  # callers that have not learned its name yet leave no record
        self.first_s = FIRST_S
        self.pending: set[PendingCall] = set()

    def begin(self, method: str, request: Any) -> PendingCall:
        """Note a call that is sent now."""
        subject = next((value for name in _SUBJECTS if (value := getattr(request, name, ""))), "")
        call = PendingCall(self.driver, method, str(subject), _concern.get())
        if self.driver:
            self.pending.add(call)
            call.watch(self.first_s)
        return call

    def end(self, call: PendingCall, code: str, seconds: float) -> None:
        """Note the answer to a call."""
        if call in self.pending:
            self.pending.discard(call)
            call.finish(code, seconds)


def in_flight_text(calls: list[PendingCall]) -> str:
    """Return the age of the oldest call in flight, by driver and method, in Prometheus' text format."""
    oldest: dict[tuple[str, str], float] = {}
    for call in calls:
        key = (call.driver, call.method)
        oldest[key] = max(oldest.get(key, 0.0), call.seconds)
    lines = [f"# HELP {_METRIC} Age of the oldest CSI call without an answer", f"# TYPE {_METRIC} gauge"]
    for (driver, method), seconds in sorted(oldest.items()):
        lines.append(f'{_METRIC}{{driver_name="{escaped(driver)}",method_name="{method}"}} {seconds:.3f}')
    return "\n".join(lines) + "\n"
