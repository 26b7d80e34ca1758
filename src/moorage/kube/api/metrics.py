"""What the Kubernetes layer counts, under the names that client-go gives: `workqueue_*`, `rest_client_*`, election.

Owns: the metric families, in the process-wide registry (`prometheus_client.REGISTRY`), which all clients share.
The endpoint for /metrics, which is elsewhere, serves the default registry.
Start reading at: `QueueMetrics`, `observe_request`.
"""

import functools
import time
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_QUEUE_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 300.0)
_REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)

_ADDS = Counter("workqueue_adds", "Keys added", ("name",))
_RETRIES = Counter("workqueue_retries", "Keys that came back after a failure", ("name",))
_WAITED = Histogram(
    "workqueue_queue_duration_seconds", "Time a key waits for a worker", ("name",), buckets=_QUEUE_BUCKETS
)
_WORKED = Histogram(
    "workqueue_work_duration_seconds", "Time a worker spends on a key", ("name",), buckets=_QUEUE_BUCKETS
)
_REQUESTS = Counter(
    "rest_client_requests", "Requests to the API server by method and status", ("code", "method", "host")
)
_TOOK = Histogram(
    "rest_client_request_duration_seconds", "Time to an answer's head", ("verb", "host"), buckets=_REQUEST_BUCKETS
)
_REPEATED = Counter("rest_client_request_retries", "Requests sent again", ("code", "verb", "host"))
_MASTER = Gauge("leader_election_master_status", "1 while this process holds the lease", ("name",))


class _Observed(Protocol):
    """What a scrape asks of a queue."""

    @property
    def name(self) -> str: ...
    def __len__(self) -> int: ...
    def running_since(self) -> Iterable[float]: ...


class QueueMetrics:
    """The counters of one queue, looked up once."""

    __slots__ = ("_adds", "_retries", "_waited", "_worked")

    def __init__(self, queue: _Observed) -> None:
        name = queue.name
        self._adds, self._retries = _ADDS.labels(name), _RETRIES.labels(name)
        self._waited, self._worked = _WAITED.labels(name), _WORKED.labels(name)
        _LIVE.queues.add(queue)

    def added(self) -> None:
        self._adds.inc()

    def retried(self) -> None:
        self._retries.inc()

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def worked(self, seconds: float) -> None:
        self._worked.observe(seconds)


class _LiveQueues(Collector):
    """Figures that only a scrape needs are computed then: depth, and how long the present work has been going on."""

    def __init__(self) -> None:
        self.queues: WeakSet[_Observed] = WeakSet()

    def collect(self) -> Iterable[Metric]:
        depth = GaugeMetricFamily("workqueue_depth", "Keys waiting for a worker", labels=["name"])
        total = GaugeMetricFamily("workqueue_unfinished_work_seconds", "Time spent on unfinished keys", labels=["name"])
        worst = GaugeMetricFamily("workqueue_longest_running_processor_seconds", "The longest of them", labels=["name"])
        now, by_name = time.monotonic(), dict[str, tuple[int, list[float]]]()
        for queue in list(self.queues):
            waiting, running = by_name.setdefault(queue.name, (0, []))
            by_name[queue.name] = (waiting + len(queue), running + [now - since for since in queue.running_since()])
        for name, (waiting, running) in sorted(by_name.items()):
            depth.add_metric([name], waiting)
            total.add_metric([name], sum(running))
            worst.add_metric([name], max(running, default=0.0))
        return [depth, total, worst]


_LIVE = _LiveQueues()
REGISTRY.register(_LIVE)


def observe_request(method: str, host: str, code: int | str, seconds: float) -> None:
    """Count one request; `code` is the status, or `<error>` when there was no answer."""
    count, took = _request_metrics(method, host, str(code))
    count.inc()
    took.observe(seconds)


@functools.lru_cache(maxsize=256)
def _request_metrics(method: str, host: str, code: str) -> tuple[Counter, Histogram]:
    """Looked up once: finding a labelled metric costs more than counting."""
    return _REQUESTS.labels(code, method, host), _TOOK.labels(method, host)


def observe_retry(method: str, host: str, code: int | str) -> None:
    _REPEATED.labels(str(code), method, host).inc()


def set_master(lease: str, is_leader: bool) -> None:
    """Say whether this process holds the lease."""
    _MASTER.labels(lease).set(1 if is_leader else 0)
