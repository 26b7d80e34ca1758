"""How much one client may ask for.

Owns: the numbers.
May not touch: how they are enforced; that is `http` and `listen`.
Start reading at: `Limits`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on requests, connections and watches."""

    body_bytes: int = 3 << 20  # as Kubernetes
    body_s: float = 60.0
    headers_s: float = 15.0  # from the connection to its first whole request
    line_bytes: int = 16 << 10
    connections: int = 4000
    watches: int = 5000
    stalled_watch_s: float = 30.0
    idle_s: float = 180.0
