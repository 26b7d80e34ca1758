"""The metrics of the sidecars, with the official names and labels.

Owns: the histogram of CSI calls and the counts of the provisioner. Queues, requests and leases are counted by
`moorage.kube.api.metrics`.
Start reading at: `Metrics`.
"""

import time

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_CALL_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0)
_GO_CODES = {
    "OK": "OK",
    "CANCELLED": "Canceled",
    "UNKNOWN": "Unknown",
    "INVALID_ARGUMENT": "InvalidArgument",
    "DEADLINE_EXCEEDED": "DeadlineExceeded",
    "NOT_FOUND": "NotFound",
    "ALREADY_EXISTS": "AlreadyExists",
    "PERMISSION_DENIED": "PermissionDenied",
    "RESOURCE_EXHAUSTED": "ResourceExhausted",
    "FAILED_PRECONDITION": "FailedPrecondition",
    "ABORTED": "Aborted",
    "OUT_OF_RANGE": "OutOfRange",
    "UNIMPLEMENTED": "Unimplemented",
    "INTERNAL": "Internal",
    "UNAVAILABLE": "Unavailable",
    "DATA_LOSS": "DataLoss",
    "UNAUTHENTICATED": "Unauthenticated",
}


def code_name(code: str) -> str:
    """A gRPC code as Go spells it, which is what dashboards for the official sidecars filter on."""
    return _GO_CODES.get(code, "unknown-non-grpc")


class Metrics:
    """Everything that /metrics shows for one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Histogram(
            "csi_sidecar_operations_seconds",
            "Container Storage Interface operation duration with gRPC error code status total",
            ("driver_name", "method_name", "grpc_status_code"),
            buckets=_CALL_BUCKETS,
            registry=self.registry,
        )
        self.provisioned = self._outcomes("persistentvolumeclaim_provision", ("class", "source"))
        self.deleted = self._outcomes("persistentvolume_delete", ("class",))
        self.capacity_goal = self._gauge("csistoragecapacities_desired_goal", "Capacity objects there should be.")
        self.capacity_current = self._gauge("csistoragecapacities_desired_current", "Capacity objects there are.")
        self.capacity_obsolete = self._gauge("csistoragecapacities_obsolete", "Capacity objects to be removed.")

    def observe_call(self, driver: str, path: str, code: str, seconds: float) -> None:
        """One finished CSI call; `path` is the full gRPC path."""
        self._calls.labels(driver, path, code_name(code)).observe(seconds)

    def page(self) -> bytes:
        """The text that a scrape gets: our own figures, and those of the Kubernetes layer and the process."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(name, help, registry=self.registry)

    def _outcomes(self, what: str, labels: tuple[str, ...]) -> "Outcomes":
        return Outcomes(self.registry, f"controller_{what}", labels)


class Outcomes:
    """How often something succeeded and failed, and how long success took."""

    def __init__(self, registry: CollectorRegistry, name: str, labels: tuple[str, ...]) -> None:
        self._total = Counter(name, "Successes.", labels, registry=registry)
        self._failed = Counter(f"{name}_failed", "Failures.", labels, registry=registry)
        self._seconds = Histogram(f"{name}_duration_seconds", "Duration of successes.", labels, registry=registry)

    def succeeded(self, started: float, *labels: str) -> None:
        """`started` is from time.monotonic()."""
        self._total.labels(*labels).inc()
        self._seconds.labels(*labels).observe(time.monotonic() - started)

    def failed(self, *labels: str) -> None:
        self._failed.labels(*labels).inc()
