"""What the server counts, in the form that Prometheus reads.

Owns: `ServerMetrics`.
Start reading at: `ServerMetrics.text`.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from moorage.apiserver.store.store import Store

_STALL_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class StepTimes:
    """A histogram of the processor time for which single steps of requests held the event loop."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_STALL_BOUNDS_S) + 1))
    total_s: float = 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(_STALL_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def lines(self, name: str) -> list[str]:
        lines, seen = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(str, _STALL_BOUNDS_S), "+Inf"), self.counts, strict=True):
            seen += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*lines, f"{name}_sum {self.total_s:.6f}", f"{name}_count {seen}"]


@dataclass(slots=True)
class ServerMetrics:
    """The counters of one server."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    watches: int = 0
    steps: StepTimes = field(default_factory=StepTimes)

    def count(self, method: str, http: int) -> None:
        known = method if method in _METHODS else "other"
        self.requests[known, http] = self.requests.get((known, http), 0) + 1

    def text(self, store: Store) -> bytes:
        lines = ["# TYPE apiserver_request_total counter"]
        for (method, http), count in sorted(self.requests.items()):
            lines.append(f'apiserver_request_total{{code="{http}",method="{method}"}} {count}')
        lines.append("# TYPE apiserver_storage_objects gauge")
        for resource, table in sorted(store.tables().items()):
            lines.append(f'apiserver_storage_objects{{resource="{resource}"}} {len(table.records)}')
        lines.append(f"# TYPE apiserver_longrunning_requests gauge\napiserver_longrunning_requests {self.watches}")
        lines += self.steps.lines("moorage_event_loop_held_seconds")
        lines.append(f"# TYPE moorage_store_revision counter\nmoorage_store_revision {store.revision}")
        lines.append(f"# TYPE moorage_store_commits_total counter\nmoorage_store_commits_total {store.commits}")
        return "\n".join([*lines, ""]).encode()


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
