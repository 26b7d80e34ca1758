"""The pools' objects as the values of `moorage.sdk`.

Owns: what callers see of a volume, a snapshot and a group, and the fencing token in the publish context.
Start reading at: `volume_from`.
"""

from collections.abc import Mapping, Sequence

from moorage.plugin.settings import TOPOLOGY_KEY, PluginSettings
from moorage.sdk import model
from moorage.storage import Group, HealthEntry, Snapshot, Volume, VolumeKind

TOKEN_KEY = "moorage.dev/fencing-token"


def places(settings: PluginSettings) -> list[model.Segments]:
    """Return where objects of these pools are: on one node, or everywhere, which no entry at all says."""
    return [] if settings.is_shared else [{TOPOLOGY_KEY: settings.node_id}]


def volume_from(volume: Volume, settings: PluginSettings) -> model.Volume:
    source = volume.source
    return model.Volume(
        id=volume.id,
        size_bytes=volume.size_bytes,
        context=context_of(volume),
        source=None if source is None else model.Source(model.SourceKind(source.kind), source.id),
        topology=places(settings),
    )


def context_of(volume: Volume) -> dict[str, str]:
    """Return what nodes see: facts that never change, so that every response has the same."""
    context = {"kind": volume.kind.value, "pool": volume.pool}
    if volume.kind is VolumeKind.IMAGE:
        context["filesystem"] = volume.filesystem or "block"
    if volume.copy_path:
        context["copyPath"] = volume.copy_path.value
    return context


def snapshot_from(snapshot: Snapshot, settings: PluginSettings) -> model.Snapshot:
    return model.Snapshot(
        id=snapshot.id,
        volume_id=snapshot.volume_id,
        size_bytes=snapshot.size_bytes,
        created_ns=snapshot.created_ns,
        group_id=snapshot.group_id or "",
        topology=places(settings),
    )


def group_from(group: Group, settings: PluginSettings) -> model.Group:
    members = [snapshot_from(member, settings) for member in group.snapshots]
    return model.Group(id=group.id, snapshots=members, created_ns=group.created_ns)


def health_from(entries: Sequence[HealthEntry]) -> list[model.Health]:
    return [model.Health(each.message, each.reason, model.HealthKind(each.status)) for each in entries]


def token_from(publish_context: Mapping[str, str]) -> int:
    """Return the fencing token of an attach; 0, which is never one, if it is missing or no number."""
    text = publish_context.get(TOKEN_KEY, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
