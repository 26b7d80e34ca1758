"""Removing what no one owns, one finding at a time, each looked at again before.

Owns: the removals. The kernel and the API have the last word: what is busy, in use or changed since stays.
May not touch: what `plan` holds back.
Start reading at: `remove_all`.
"""

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moorage.errors import MoorageError
from moorage.host import loop, mounts
from moorage.host.safe_remove import remove_tree
from moorage.kube.api.client import Client
from moorage.kube.objects import PersistentVolume, VolumeAttachment
from moorage.log import get_logger
from moorage.storage import Pool
from moorage.storage.guests import discard_snapshot
from moorage.storage.leftovers import is_abandoned
from moorage.storage.transfer.unfinished import discard_unfinished
from moorage.storage.trash import Trash
from moorage.upkeep.gc.observe import look_at_cluster, mounts_of_all_namespaces, shows
from moorage.upkeep.gc.plan import Inventory, Orphan

log = get_logger(__name__)

KEPT_IN_TRASH = "24h"


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of a finding; `error` is empty when it is gone."""

    finding: Orphan
    error: str = ""


class Vanished(MoorageError):
    """It went, or got an owner, while we looked."""

    code = "ABORTED"


async def remove_all(
    findings: Iterable[Orphan], world: Inventory, pools: Sequence[Pool], client: Client | None
) -> list[Removal]:
    """Remove what may be removed. A failure is reported and does not stop the others.

    Devices come after mounts, and volumes last: each may free the next.
    """
    order = ("mount", "loop-device", "attachment", "pool-attachment", "pv")
    wanted = sorted(
        (finding for finding in findings if not finding.held),
        key=lambda finding: order.index(finding.kind) if finding.kind in order else len(order),
    )
    by_path = {str(pool.directory): pool for pool in pools}
    owned: frozenset[str] = frozenset()
    if client is not None and world.cluster is not None and any(finding.kind == "volume" for finding in wanted):
        owned = (await look_at_cluster(client, world.cluster.driver)).handles
    results = []
    for finding in wanted:
        try:
            if finding.kind == "volume" and finding.id in owned:
                raise Vanished(f"volume {finding.id} has a PersistentVolume now")
            if finding.kind in ("attachment", "pv"):
                await _delete_object(finding, world, client)
            else:
                await asyncio.to_thread(_remove, finding, by_path[finding.pool])
        except (MoorageError, OSError) as error:
            results.append(Removal(finding, str(error)))
        else:
            log.info("removed", what=finding.kind, id=finding.id, why=finding.why)
            results.append(Removal(finding))
    return results


async def _delete_object(finding: Orphan, world: Inventory, client: Client | None) -> None:
    if client is None or world.cluster is None:
        raise Vanished("there is no cluster to ask")
    if finding.kind == "pv":
        uid = next(pv.uid for pv in world.cluster.pvs if pv.name == finding.id)
        await client.delete(PersistentVolume, finding.id, uid=uid)
    else:
        uid = next(va.uid for va in world.cluster.attachments if va.name == finding.id)
        await client.delete(VolumeAttachment, finding.id, uid=uid)


def _remove(finding: Orphan, pool: Pool) -> None:
    match finding.kind:
        case "volume":
            _remove_volume(pool, finding.id)
        case "loop-device":
            _detach(pool, finding.id)
        case "mount":
            # Not lazily: the kernel refuses while a process is in there. A dead mount has no process that could answer.
            mounts.unmount(finding.id, lazy=mounts.is_corrupted(finding.id))
        case "temporary":
            path = os.path.join(pool.context.layout.tmp, finding.id)
            if not is_abandoned(path, 0.0):
                raise Vanished(f"{path} is in use or gone")
            remove_tree(path)
        case "import":
            if not discard_unfinished(pool, finding.id):
                raise Vanished(f"the import of {finding.id} goes on, or is gone")
        case "export-snapshot":
            discard_snapshot(pool, finding.id)
        case "trash":
            Trash(pool.context).reclaim(finding.id)
        case "pool-attachment":
            volume, _, node = finding.id.partition(" ")
            pool.attachments.detach(volume, node)
        case other:
            raise Vanished(f"nothing is known about a {other}")


def _remove_volume(pool: Pool, ident: str) -> None:
    """To the trash, for a day at least: the cluster may have been the wrong one."""
    pool.volumes.modify(ident, {"trashRetention": KEPT_IN_TRASH})
    if not pool.delete_volume(ident):
        raise Vanished(f"volume {ident} is gone")


def _detach(pool: Pool, path: str) -> None:
    device = loop.at(path)
    if not device.backing_file.startswith(f"{os.path.realpath(pool.directory)}/"):
        raise Vanished(f"{path} has another file now")
    # The kernel would not refuse: it detaches a mounted device as soon as it is unmounted.
    used = [mount.target for mount in mounts_of_all_namespaces() if shows(mount, device)]
    if used:
        raise Vanished(f"{path} is mounted at {', '.join(used)}")
    loop.detach(device)
