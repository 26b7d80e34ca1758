"""How long CSI calls take, by method and code: `csi_plugin_operations_seconds`.

Owns: one histogram and its text form, with the label names that dashboards for the official
sidecars expect. It is written out here, not taken from a library: a plugin runs on every node, and
the client library would add 4 MiB (an HTTP server, TLS and mail parsing come with it).
Start reading at: `CallMetrics.observe`.
"""

import threading
from bisect import bisect_left

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0)
_Key = tuple[str, str, str]


class CallMetrics:
    """Counts finished calls; `render` gives what Prometheus reads."""

    def __init__(self, subsystem: str = "plugin") -> None:
        self.name = f"csi_{subsystem}_operations_seconds"
        self._lock = threading.Lock()
        self._counts: dict[_Key, list[int]] = {}
        self._sums: dict[_Key, float] = {}

    def observe(self, driver: str, method: str, code: str, seconds: float) -> None:
        """Count one finished call; `method` is the full name, as `/csi.v1.Node/NodeGetInfo`."""
        key = (driver, method, code)
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(_BUCKETS) + 1))
            counts[bisect_left(_BUCKETS, seconds)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + seconds

    def count(self, driver: str, method: str, code: str) -> int:
        """How many calls ended so."""
        with self._lock:
            return sum(self._counts.get((driver, method, code), ()))

    def render(self) -> str:
        """The histogram in Prometheus' text format."""
        lines = [f"# HELP {self.name} Duration of CSI calls in seconds", f"# TYPE {self.name} histogram"]
        with self._lock:
            for key, counts in sorted(self._counts.items()):
                labels = ",".join(
                    f'{name}="{escaped(value)}"'
                    for name, value in zip(("driver_name", "method_name", "grpc_status_code"), key, strict=True)
                )
                running = 0
                for bound, count in zip((*map(str, _BUCKETS), "+Inf"), counts, strict=True):
                    running += count
                    lines.append(f'{self.name}_bucket{{{labels},le="{bound}"}} {running}')
                lines.append(f"{self.name}_sum{{{labels}}} {self._sums[key]}")
                lines.append(f"{self.name}_count{{{labels}}} {running}")
        return "\n".join(lines) + "\n"


def escaped(value: str) -> str:
    """A label's value as the text format wants it."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
