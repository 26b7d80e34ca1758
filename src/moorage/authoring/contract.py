"""Whether a driver keeps the contract while it is used: each answer is compared with earlier ones and with the kernel.

Owns: the sentences of the warnings. `moorage check` tries the contract; this watches it.
Start reading at: `ContractWatch.warnings_of`.
"""

import os
from collections.abc import Iterator
from typing import Any

from moorage.authoring.proxy import ObservedCall
from moorage.host import mountinfo


class ContractWatch:
    """What the driver has said so far, by volume and snapshot."""

    def __init__(self) -> None:
        self._volumes: dict[str, Any] = {}  # by name of the request
        self._deleted: set[str] = set()
        self._snapshots: dict[str, Any] = {}
        self._attached: dict[tuple[str, str], dict[str, str]] = {}
        self._places: dict[str, set[str]] = {}  # where each volume is staged or published
        self._who: Any = None

    def warnings_of(self, call: ObservedCall) -> list[str]:
        """Return what is wrong with an answer that was OK; nothing is said about errors."""
        check = getattr(self, f"_after_{call.method}", None)
        if call.code != "OK" or check is None:
            return []
        return [f"{call.method} {call.subject}: {why}" for why in check(call.request, call.response)]

    def _after_GetPluginInfo(self, request: Any, answer: Any) -> Iterator[str]:
        if self._who is not None and self._who.name != answer.name:
            yield f"the driver was called {self._who.name} before, and {answer.name} now; objects hold the old name"
        self._who = answer

    def _after_CreateVolume(self, request: Any, answer: Any) -> Iterator[str]:
        volume, wanted = answer.volume, request.capacity_range
        known = self._volumes.get(request.name)
        if not volume.volume_id:
            yield "the answer has no volume_id"
        if volume.capacity_bytes and volume.capacity_bytes < wanted.required_bytes:
            yield f"the volume has {volume.capacity_bytes} bytes, {wanted.required_bytes} were required"
        if wanted.limit_bytes and volume.capacity_bytes > wanted.limit_bytes:
            yield f"the volume has {volume.capacity_bytes} bytes, more than the limit of {wanted.limit_bytes}"
        if request.HasField("volume_content_source") and not volume.HasField("content_source"):
            yield "the request has a source, but the volume of the answer has none"
        if known is not None and known.volume_id not in self._deleted:
            yield from _differences(known, volume, ("volume_id", "volume_context", "capacity_bytes"))
        self._volumes[request.name] = volume
        self._deleted.discard(volume.volume_id)

    def _after_DeleteVolume(self, request: Any, answer: Any) -> Iterator[str]:
        places = sorted(path for path in self._places.pop(request.volume_id, ()) if mountinfo.is_mounted(path))
        if places:
            yield f"the volume was deleted while it is mounted at {', '.join(places)}"
        self._deleted.add(request.volume_id)

    def _after_ListVolumes(self, request: Any, answer: Any) -> Iterator[str]:
        for entry in answer.entries:
            if entry.volume.volume_id in self._deleted:
                yield f"volume {entry.volume.volume_id} is listed, but DeleteVolume has answered OK"

    def _after_ControllerGetVolume(self, request: Any, answer: Any) -> Iterator[str]:
        known = next((each for each in self._volumes.values() if each.volume_id == request.volume_id), None)
        if request.volume_id in self._deleted:
            yield "the volume is there, but DeleteVolume has answered OK"
        elif known is not None:
            yield from _differences(known, answer.volume, ("volume_context",))

    def _after_ControllerExpandVolume(self, request: Any, answer: Any) -> Iterator[str]:
        wanted = request.capacity_range.required_bytes
        if answer.capacity_bytes < wanted:
            yield f"the volume has {answer.capacity_bytes} bytes now, {wanted} were required"
        for known in self._volumes.values():
            if known.volume_id == request.volume_id:
                known.capacity_bytes = answer.capacity_bytes

    def _after_ControllerPublishVolume(self, request: Any, answer: Any) -> Iterator[str]:
        key, context = (request.volume_id, request.node_id), dict(answer.publish_context)
        if self._attached.setdefault(key, context) != context:
            yield f"publish_context is {context}, and was {self._attached[key]} before"

    def _after_ControllerUnpublishVolume(self, request: Any, answer: Any) -> Iterator[str]:
        self._attached.pop((request.volume_id, request.node_id), None)
        yield from ()

    def _after_CreateSnapshot(self, request: Any, answer: Any) -> Iterator[str]:
        known = self._snapshots.get(request.name)
        if answer.snapshot.source_volume_id != request.source_volume_id:
            yield f"source_volume_id is {answer.snapshot.source_volume_id!r}"
        if known is not None:
            yield from _differences(known, answer.snapshot, ("snapshot_id", "creation_time"))
        self._snapshots[request.name] = answer.snapshot

    def _after_DeleteSnapshot(self, request: Any, answer: Any) -> Iterator[str]:
        self._snapshots = {
            name: each for name, each in self._snapshots.items() if each.snapshot_id != request.snapshot_id
        }
        yield from ()

    def _after_NodeStageVolume(self, request: Any, answer: Any) -> Iterator[str]:
        self._places.setdefault(request.volume_id, set()).add(request.staging_target_path)
        yield from ()

    def _after_NodePublishVolume(self, request: Any, answer: Any) -> Iterator[str]:
        path = request.target_path
        self._places.setdefault(request.volume_id, set()).add(path)
        found = mountinfo.mount_at(os.path.realpath(path)) if os.path.lexists(path) else None
        if found is None:
            yield f"nothing is mounted at {path}"
        elif request.readonly and not found.is_read_only:
            yield f"the mount at {path} can be written, read-only was asked for"

    def _after_NodeUnpublishVolume(self, request: Any, answer: Any) -> Iterator[str]:
        yield from self._gone(request.volume_id, request.target_path, is_removed=True)

    def _after_NodeUnstageVolume(self, request: Any, answer: Any) -> Iterator[str]:
        yield from self._gone(request.volume_id, request.staging_target_path, is_removed=False)

    def _gone(self, volume_id: str, path: str, *, is_removed: bool) -> Iterator[str]:
        if os.path.lexists(path) and mountinfo.is_mounted(os.path.realpath(path)):
            yield f"a leak: {path} is still mounted"
        elif is_removed and os.path.lexists(path):
            yield f"a leak: {path} is still there"
        self._places.get(volume_id, set()).discard(path)


def _differences(known: Any, now: Any, fields: tuple[str, ...]) -> Iterator[str]:
    for field in fields:
        before, after = getattr(known, field), getattr(now, field)
        if before != after:
            yield f"{field} is {_plain(after)}, and was {_plain(before)} in an earlier answer"


def _plain(value: Any) -> str:
    text = str(dict(value)) if hasattr(value, "keys") else str(value)
    return " ".join(text.split()) or "empty"
