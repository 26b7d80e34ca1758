"""What pods weigh against each other, and against all else, where processors are busy.

Owns: the shares of pods' control groups, and of the levels above them that hold nothing but pods.
May not touch: groups that a kubelet has made.
Start reading at: `Weights.set`.

A pod weighs what its containers request: one processor is 1024 shares, as much as a group has by itself, and a pod
without a request has the fewest that there are, as in any cluster. All pods together weigh what they request, and never
less than `_LEAST`: pods that request nothing yield to the machine's own work, such as drivers, and are not starved.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

from moorage.kube.objects.pods import Container, Pod
from moorage.kube.requests import Amounts, requests_of, requests_of_container

_FEWEST, _MOST = 2, 262_144
_NONE, _LEAST = Decimal(0), Decimal("0.25")  # of a processor
_OF_KUBELET = ("besteffort", "burstable")


class Weights:
    """Of the pods of one agent, in one hierarchy that has the processor's controller."""

    def __init__(self, version: int, root: Path, node: str) -> None:
        self._file = "cpu.shares" if version == 1 else "cpu.weight"
        self._scale = shares if version == 1 else weight
        self._top = root / "kubepods"
        self._own = self._top / node
        self._requested: dict[str, Decimal] = {}
        self._told: Decimal | None = None

    def set(self, pod: Pod, group: str, containers: Mapping[str, Container]) -> None:
        """For a pod, whose group is there, and for those of its containers that have groups of their own."""
        self._requested[pod.uid] = _processors(requests_of(pod))
        self._write(group, self._scale(self._requested[pod.uid]))
        for directory, container in containers.items():
            self._write(directory, self._scale(_processors(requests_of_container(container))))
        self._weigh_all()

    def forget(self, uid: str) -> None:
        if self._requested.pop(uid, _NONE):
            self._weigh_all()

    def _weigh_all(self) -> None:
        total = sum(self._requested.values(), _NONE)
        if total == self._told:
            return
        self._write(self._own, self._scale(max(total, _LEAST)))
        if not any((self._top / name).is_dir() for name in _OF_KUBELET):  # several agents may share that level
            levels = [int(path.read_text()) for path in self._top.glob(f"*/{self._file}")]
            self._write(self._top, min(sum(levels), self._scale(Decimal(_MOST))))
        self._told = total

    def _write(self, directory: Path | str, value: int) -> None:
        Path(directory, self._file).write_text(str(value))


def _processors(amounts: Amounts) -> Decimal:
    return amounts.get("cpu", _NONE)


def shares(processors: Decimal) -> int:
    """Of version 1."""
    return min(max(int(processors * 1024), _FEWEST), _MOST)


def weight(processors: Decimal) -> int:
    """Of version 2: 1 to 10000 for all shares that there are, and for one processor 100, which is what a group has by
    itself; as the runtimes of containers have it."""
    exponent = math.log2(shares(processors))
    return math.ceil(round(10 ** ((exponent**2 + 125 * exponent) / 612 - 7 / 34), 6))
