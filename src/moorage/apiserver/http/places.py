"""How many connections there may be, and of whom.

Owns: the places for connections: few for peers that have not said who they are, a share for each account.
May not touch: sockets.
Start reading at: `Places.take`, `Place.give`.

A connection has no user until its first request. Peers without one cannot keep users out: when there are too many of
them, the oldest of their connections is cut for a new one. So a flood of silent connections pushes out itself.
"""

import resource
from collections import Counter
from collections.abc import Callable

from moorage.apiserver.limits import ServerLimits

_OTHER_DESCRIPTORS = 200  # that the process needs beside its connections
_LOCAL = ("", "::1")


class Place:
    """The place of one connection; `cut` ends the connection."""

    __slots__ = ("_places", "account", "cut", "is_bounded", "peer")

    def __init__(self, places: "Places", peer: str) -> None:
        self._places = places
        self.peer = peer
        self.account = ""
        self.is_bounded = False
        self.cut: Callable[[], object] = bool

    def give(self, account: str, is_bounded: bool) -> bool:
        """Make this the place of an account; False if the account has its share of places already."""
        return bool(self.account) or self._places.give(self, account, is_bounded)

    def leave(self) -> None:
        self._places.leave(self)


class Places:
    """The places of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.total = max(10, min(limits.connections, soft - _OTHER_DESCRIPTORS))
        self.nameless = min(limits.nameless_connections, self.total // 4)
        self._limits = limits
        self._nameless: dict[Place, None] = {}  # the oldest first
        self._of_peer: Counter[str] = Counter()
        self._of_account: Counter[str] = Counter()
        self._bounded = 0

    @property
    def taken(self) -> int:
        return len(self._nameless) + self._of_account.total()

    def take(self, peer: str) -> Place | None:
        """Return a place for a new connection; None if there is none."""
        is_remote = peer not in _LOCAL and not peer.startswith("127.")
        if is_remote and self._of_peer[peer] >= self._limits.connections_of_peer:
            return None
        if len(self._nameless) >= self.nameless or self.taken >= self.total:
            self.evict()
        if self.taken >= self.total:
            return None
        place = Place(self, peer if is_remote else "")
        self._nameless[place] = None
        self._of_peer[place.peer] += 1
        return place

    def evict(self) -> None:
        """Cut the oldest connection that has no user."""
        oldest = next(iter(self._nameless), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.cut()

    def give(self, place: Place, account: str, is_bounded: bool) -> bool:
        if place not in self._nameless:
            return True  # it is being cut
        is_full = self._bounded >= self.total * 3 // 4  # the rest is kept for administrators
        if is_bounded and (is_full or self._of_account[account] >= self._limits.connections_of_account):
            return False
        del self._nameless[place]
        place.account, place.is_bounded = account, is_bounded
        self._bounded += is_bounded
        self._of_account[account] += 1
        self._forget_peer(place)
        return True

    def leave(self, place: Place) -> None:
        if place in self._nameless:
            del self._nameless[place]
            self._forget_peer(place)
        elif place.account:
            self._count_down(self._of_account, place.account)
            self._bounded -= place.is_bounded
            place.account = ""

    def _forget_peer(self, place: Place) -> None:
        self._count_down(self._of_peer, place.peer)

    @staticmethod
    def _count_down(counter: Counter[str], key: str) -> None:
        counter[key] -= 1
        if counter[key] <= 0:
            del counter[key]
