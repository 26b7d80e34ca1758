"""What an earlier agent left of volumes: found after a restart, and removed if no pod uses it.

Start reading at: `sweep`, `found_for`.
"""

from collections.abc import Iterable
from pathlib import Path

from moorage.host.threads import in_thread
from moorage.kube.volumes import VolumeName
from moorage.log import get_logger
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.volumes import leftovers
from moorage.node.volumes.observe import has_begun, staged_without_data
from moorage.node.volumes.state import CsiSource, VolumeState

log = get_logger(__name__)


async def sweep(layout: NodeLayout, world: VolumeState) -> None:
    """Remove what is staged for no pod and without data: a driver may stage late what was given up meanwhile.

    A failure is logged, because the next sweep tries again.
    """
    try:
        found = await in_thread(staged_without_data, layout)
        if found:
            await in_thread(leftovers.release_staged, layout, found, _staging_known(layout, world))
    except OSError as error:
        log.warning("staged volumes cannot be looked through", reason=str(error))
    except Exception:
        log.exception("looking through staged volumes failed unexpectedly")


def _staging_known(layout: NodeLayout, world: VolumeState) -> set[Path]:
    uses = (use.source for uses in world.desired.values() for use in uses.values())
    sources = [*uses, *(volume.source for volume in world.actual.values())]
    known = [source for source in sources if isinstance(source, CsiSource)]
    block = {layout.block_data(source.spec_name) for source in known if source.is_block}
    return block | {layout.staging(source.driver, source.handle) for source in known}


def found_for(
    layout: NodeLayout, world: VolumeState, uid: PodUid, touched: Iterable[VolumeName]
) -> dict[VolumeName, CsiSource]:
    """Return what an earlier agent has mounted for a pod that has begun, if this agent does not know better."""
    found: dict[VolumeName, CsiSource] = {}
    for name in touched:
        actual = world.actual.get(name)
        if actual is None or uid not in actual.pods or uid in world.desired.get(name, ()):
            continue
        source = actual.source_of(uid)
        if actual.pods[uid].is_reconstructed and isinstance(source, CsiSource) and not source.is_ephemeral:
            found[name] = source
    return found if found and has_begun(layout, uid) else {}
