"""What the pools say about themselves to Prometheus, read when they are asked.

Owns: gauges of room and reclaimable bytes per pool, and the count of copies by their way.
Start reading at: `pool_metrics`.
"""

from collections.abc import Mapping

from moorage.csi.metrics import escaped
from moorage.errors import MoorageError
from moorage.log import get_logger
from moorage.storage import Capacity, Pools

log = get_logger(__name__)

_GAUGES = {
    "total_bytes": "Size of the pool's filesystem",
    "free_bytes": "Free bytes of the pool's filesystem",
    "reserve_bytes": "Bytes that are kept free",
    "promised_bytes": "Bytes that thin volumes may still take",
    "reclaimable_bytes": "Bytes that deleted volumes and snapshots hold",
    "available_bytes": "Bytes that a new volume can have",
}


def copy_metrics(copies: Mapping[str, int]) -> str:
    """How snapshots, clones and restores came to be: a reflink costs nothing, a copy does."""
    name = "moorage_copies_total"
    lines = [f"# HELP {name} Snapshots, clones and restores that were answered", f"# TYPE {name} counter"]
    lines += [f'{name}{{path="{escaped(path)}"}} {count}' for path, count in sorted(copies.items())]
    return "\n".join(lines) + "\n"


def pool_metrics(pools: Pools) -> str:
    """In Prometheus' text format; a pool that cannot answer is left out of one scrape and logged."""
    rooms: dict[str, Capacity] = {}
    for pool in pools:
        try:
            rooms[pool.name] = pool.capacity()
        except MoorageError as error:
            log.warning("a pool did not tell its capacity", pool=pool.name, error=str(error))
    lines = []
    for gauge, text in _GAUGES.items():
        name = f"moorage_pool_{gauge}"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f'{name}{{pool="{escaped(pool)}"}} {getattr(room, gauge)}' for pool, room in rooms.items()]
    return "\n".join(lines) + "\n"
