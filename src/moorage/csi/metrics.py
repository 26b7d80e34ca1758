"""How long CSI calls take, by method and code: `csi_operations_seconds`.

Owns: the histogram that the server and the client fill, with the label names that dashboards
for the official sidecars expect.
Start reading at: `CallMetrics.observe`.
"""

from prometheus_client import CollectorRegistry, Histogram

_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0)


class CallMetrics:
    """One histogram in its own registry, or in the one that the process serves."""

    def __init__(self, registry: CollectorRegistry | None = None, subsystem: str = "plugin") -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        name = f"csi_{subsystem}_operations_seconds" if subsystem else "csi_operations_seconds"
        self._seconds = Histogram(
            name,
            "Duration of CSI calls in seconds",
            ("driver_name", "method_name", "grpc_status_code"),
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def observe(self, driver: str, method: str, code: str, seconds: float) -> None:
        """Count one finished call; `method` is the full name, as `/csi.v1.Node/NodeGetInfo`."""
        self._seconds.labels(driver, method, code).observe(seconds)
