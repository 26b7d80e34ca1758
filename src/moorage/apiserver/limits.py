"""How much one client may ask for.

Owns: the numbers. What one body may hold is in `formats.decode`.
May not touch: how they are enforced; that is in `http`.
Start reading at: `ServerLimits`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on requests, connections and watches. Those on one account do not hold for administrators."""

    body_bytes: int = 3 << 20  # as Kubernetes
    small_body_bytes: int = 64 << 10  # of a subresource or a review, which hold a few fields
    body_s: float = 60.0
    handshake_s: float = 10.0
    headers_s: float = 15.0  # from the connection to its first whole request
    line_bytes: int = 16 << 10
    connections: int = 4000
    nameless_connections: int = 1000  # that have not said whose they are
    connections_of_peer: int = 250  # of one other machine, before it has said whose they are
    connections_of_account: int = 1000
    requests_of_account: int = 400  # at a time, beside watches
    watches: int = 5000
    watches_of_account: int = 1000
    stalled_s: float = 30.0  # after which a client that does not read is dropped
    idle_s: float = 180.0
    held_s: float = 0.05  # the longest time that one step of a request should hold the event loop
