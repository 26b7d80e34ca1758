"""Where an object can be made, when a caller says where it must be usable.

Owns: the decision for a pool that belongs to one node. A shared pool is everywhere.
Start reading at: `check_place`.
"""

from collections.abc import Mapping, Sequence

from moorage.errors import MoorageError
from moorage.plugin.settings import TOPOLOGY_KEY, PluginSettings


class WrongPlace(MoorageError):
    """A volume is wanted somewhere else; the scheduler may choose again."""

    code = "RESOURCE_EXHAUSTED"


class WrongPlaceForSnapshot(MoorageError):
    """A snapshot is wanted somewhere else. Asking again does not move the volume."""

    code = "INVALID_ARGUMENT"
    retryable = False


def is_here(segments: Mapping[str, str], settings: PluginSettings) -> bool:
    """Whether a topology includes this node; keys are compared without regard to case."""
    lowered = {key.lower(): value for key, value in segments.items()}
    return lowered.get(TOPOLOGY_KEY) == settings.node_id


def check_place(requisite: Sequence[Mapping[str, str]], settings: PluginSettings) -> None:
    """Raise WrongPlace when none of the required places is this node."""
    if _is_elsewhere(requisite, settings):
        raise WrongPlace(f"the volume must be elsewhere than on node {settings.node_id}, where this pool is")


def check_snapshot_place(requisite: Sequence[Mapping[str, str]], settings: PluginSettings) -> None:
    if _is_elsewhere(requisite, settings):
        raise WrongPlaceForSnapshot(
            f"accessibility_requirements: a snapshot is usable only where its volume is, "
            f"on node {settings.node_id}, which is not among the required places"
        )


def _is_elsewhere(requisite: Sequence[Mapping[str, str]], settings: PluginSettings) -> bool:
    if settings.is_shared or not requisite:
        return False
    return not any(is_here(segments, settings) for segments in requisite)
