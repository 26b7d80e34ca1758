"""Whose turn it is: how many steps of one pod may be under way at a time.

Owns: the steps that wait for others of their pod. The bound is for each pod: volumes that hang hold up no other pod.
Start reading at: `Turns.take`.
"""

from collections import Counter
from collections.abc import Iterator

from moorage.kube.volumes import VolumeName
from moorage.node.layout import PodUid


class Turns:
    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[PodUid] = Counter()
        self._waiting: dict[PodUid, dict[VolumeName, None]] = {}
        self._freed: set[PodUid] = set()

    def take(self, uid: PodUid, name: VolumeName) -> bool:
        """Whether a step of the volume may begin; if not, `due` returns it when there is room."""
        if self._taken[uid] >= self._most:
            self._waiting.setdefault(uid, {})[name] = None
            return False
        self._taken[uid] += 1
        return True

    def give_back(self, uid: PodUid) -> None:
        self._taken[uid] -= 1
        if not self._taken[uid]:
            del self._taken[uid]
        self._freed.add(uid)

    def due(self) -> Iterator[VolumeName]:
        """Volumes to plan again, in the order in which they came, for as long as there is room when the next is asked
        for: what has waited may need no step any more."""
        while self._freed:
            uid = self._freed.pop()
            waiting = self._waiting.get(uid, {})
            while waiting and self._taken[uid] < self._most:
                name = next(iter(waiting))
                del waiting[name]
                yield name
            if not waiting:
                self._waiting.pop(uid, None)
