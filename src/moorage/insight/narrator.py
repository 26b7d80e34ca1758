"""What happens on a cluster as it happens: who did what, through which object or call, and when.

Owns: turning changes of objects and the driver's log lines into sentences with a time. It only watches.
Start reading at: `Narrator`.
"""

import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from moorage.kube.api.client import Client
from moorage.kube.cache.informer import ChangeHandler
from moorage.kube.cache.informers import Informers
from moorage.kube.names import SELECTED_NODE
from moorage.kube.objects import (
    KubeObject,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.kube.objects.snapshots import VolumeSnapshotContent

_CALL = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3}) INFO csi\.server: call method=(\w+) code=(\w+) seconds=([\d.]+)")
_KEPT = 2000
_SHOWN_CALLS = {
    "CreateVolume": "provisioner",
    "DeleteVolume": "provisioner",
    "ControllerPublishVolume": "attacher",
    "ControllerUnpublishVolume": "attacher",
    "ControllerExpandVolume": "resizer",
    "CreateSnapshot": "snapshotter",
    "DeleteSnapshot": "snapshotter",
    "NodeStageVolume": "node agent",
    "NodePublishVolume": "node agent",
    "NodeExpandVolume": "node agent",
    "NodeUnpublishVolume": "node agent",
    "NodeUnstageVolume": "node agent",
}


@dataclass(frozen=True, order=True)
class TimelineEntry:
    """One thing that happened, at a time in seconds since the epoch."""

    at: float
    who: str
    what: str
    seconds: float = 0.0


class Narrator:
    """Turns what informers report into moments. `since(t)` returns what happened after a time."""

    def __init__(
        self, driver_logs: Sequence[Path] = (), on_moment: Callable[[TimelineEntry], None] = lambda moment: None
    ) -> None:
        self._logs = driver_logs
        self._moments: deque[TimelineEntry] = deque(maxlen=_KEPT)
        self._on_moment = on_moment
        self._handlers: dict[type[KubeObject], ChangeHandler[Any]] = {
            PersistentVolumeClaim: self._claim,
            PersistentVolume: self._volume,
            VolumeAttachment: self._attachment,
            Pod: self._pod,
            VolumeSnapshot: self._snapshot,
            VolumeSnapshotContent: self._content,
        }

    @asynccontextmanager
    async def following(self, client: Client) -> AsyncIterator[Self]:
        """Follow a cluster with informers of its own until the block ends."""
        async with Informers(client) as informers:
            for kind, handler in self._handlers.items():
                informers.of(kind).subscribe(handler)
            await informers.wait_synced()
            yield self

    def take(self, old: KubeObject | None, new: KubeObject | None) -> None:
        """Note what a change means, if it means anything here."""
        shown = new if new is not None else old
        if shown is not None and type(shown) in self._handlers:
            self._handlers[type(shown)](old, new)

    def since(self, at: float) -> list[TimelineEntry]:
        """Return what happened from a time on, in order, the driver's calls among it."""
        return sorted([m for m in self._moments if m.at >= at] + [m for m in self._calls() if m.at >= at - 0.001])

    def _note(self, who: str, what: str) -> None:
        moment = TimelineEntry(time.time(), who, what)
        self._moments.append(moment)
        self._on_moment(moment)

    def _changed(self, old: KubeObject | None, new: KubeObject | None, value: Callable[[KubeObject], object]) -> bool:
        return new is not None and bool(value(new)) and (old is None or value(old) != value(new))

    def _claim(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        name = (new or old or PersistentVolumeClaim()).name
        if old is None:
            self._note("you", f"claim {name} is created")
        elif new is None:
            self._note("protection", f"claim {name} is gone")
            return
        if (
            new is not None
            and SELECTED_NODE in new.annotations
            and (old is None or SELECTED_NODE not in old.annotations)
        ):
            self._note("scheduler", f"claim {name} is to be made on {new.annotations[SELECTED_NODE]}")
        if new is not None and new.status.phase == "Bound" and (old is None or old.status.phase != "Bound"):
            self._note("binder", f"claim {name} is bound to {new.spec.volume_name}")
        if new is not None and old is not None and new.status.capacity != old.status.capacity and old.status.capacity:
            self._note("node agent", f"claim {name} now has {new.status.capacity.get('storage')}")

    def _volume(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        name = (new or old or PersistentVolume()).name
        if old is None:
            self._note("provisioner", f"volume {name} is recorded")
        elif new is None:
            self._note("provisioner", f"volume {name} is gone")
        elif new.status.phase != old.status.phase and new.status.phase in ("Released", "Available"):
            self._note("binder", f"volume {name} is {new.status.phase}")

    def _attachment(self, old: VolumeAttachment | None, new: VolumeAttachment | None) -> None:
        shown = new or old or VolumeAttachment()
        node = shown.spec.node_name
        if old is None:
            self._note("attach/detach", f"VolumeAttachment for {node} is created")
        elif new is None:
            self._note("attacher", f"detached from {node}")
            return
        if new is not None and new.status.attached and (old is None or not old.status.attached):
            self._note("attacher", f"attached to {node}")
        if new is not None and new.is_deleting and (old is None or not old.is_deleting):
            self._note("attach/detach", f"VolumeAttachment for {node} is to go")

    def _pod(self, old: Pod | None, new: Pod | None) -> None:
        name = (new or old or Pod()).name
        if old is None:
            self._note("you", f"pod {name} is created")
        elif new is None:
            self._note("node agent", f"pod {name} is gone")
            return
        if new is not None and new.spec.node_name and (old is None or not old.spec.node_name):
            self._note("scheduler", f"pod {name} goes to {new.spec.node_name}")
        if new is not None and new.status.phase == "Running" and (old is None or old.status.phase != "Running"):
            self._note("node agent", f"pod {name} runs, its volumes mounted")

    def _snapshot(self, old: VolumeSnapshot | None, new: VolumeSnapshot | None) -> None:
        name = (new or old or VolumeSnapshot()).name
        if old is None:
            self._note("you", f"snapshot {name} is created")
        elif new is None:
            self._note("snapshots", f"snapshot {name} is gone")
            return
        was_ready = old is not None and old.status is not None and bool(old.status.ready_to_use)
        if new is not None and new.status is not None and new.status.ready_to_use and not was_ready:
            self._note("snapshots", f"snapshot {name} is ready")

    def _content(self, old: VolumeSnapshotContent | None, new: VolumeSnapshotContent | None) -> None:
        if old is None and new is not None:
            self._note("snapshots", "VolumeSnapshotContent is created")

    def _calls(self) -> list[TimelineEntry]:
        found = []
        today = datetime.now().strftime("%Y-%m-%d")
        for path in self._logs:
            if not path.exists():
                continue
            for line in path.read_text(errors="replace").splitlines():
                match = _CALL.match(line)
                if match is None or match[2] not in _SHOWN_CALLS:
                    continue
                ended = datetime.fromisoformat(f"{today}T{match[1]}").timestamp()
                node = path.stem.removesuffix("-driver")
                what = f"{match[2]} → plugin on {node}" + ("" if match[3] == "OK" else f": {match[3]}")
                found.append(TimelineEntry(ended, _SHOWN_CALLS[match[2]], what, float(match[4])))
        return found
