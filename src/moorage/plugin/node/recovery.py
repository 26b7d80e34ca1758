"""What a crash may have left on the node, put right at start.

Owns: loop devices that nothing uses. Half-done mounts are finished or removed by the calls that are
repeated after a crash; a device whose call never comes again would stay for ever.
May not touch: devices of others, or of block volumes (attached is all that staging does to those).
Start reading at: `release_loops`.
"""

from moorage.errors import MoorageError
from moorage.host import loop, mountinfo
from moorage.log import get_logger
from moorage.plugin.context import PluginContext
from moorage.plugin.node.observe import shows_loop
from moorage.plugin.node.tuning import volume_id_behind
from moorage.storage import Pool

log = get_logger(__name__)


def release_loops(parts: PluginContext) -> int:
    """Detach the devices of filesystem volumes that are mounted nowhere, and of volumes that are gone."""
    table = mountinfo.mounts()
    count = 0
    for pool in parts.pools:
        for device in loop.attached(pool.directory):
            volume_id = volume_id_behind(pool, device.backing_file)
            in_use = any(shows_loop(mount, device) for mount in table)
            if volume_id and not in_use and not _may_be_staged(pool, volume_id, device.is_deleted):
                loop.detach(device)
                log.info("an unused loop device was released", volume=volume_id, device=str(device.path))
                count += 1
    return count


def _may_be_staged(pool: Pool, volume_id: str, is_deleted: bool) -> bool:
    if is_deleted:
        return False
    try:
        volume = pool.volumes.find(volume_id)
    except MoorageError as error:
        log.warning("a loop device was left alone", volume=volume_id, error=str(error))
        return True
    return volume is not None and not volume.filesystem
