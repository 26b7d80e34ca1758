"""What the pools say about themselves to Prometheus, read when they are asked.

Owns: gauges of room and reclaimable bytes per pool.
Start reading at: `PoolMetrics`.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moorage.errors import MoorageError
from moorage.log import get_logger
from moorage.storage import Pools

log = get_logger(__name__)

_GAUGES = {
    "total_bytes": "Size of the pool's filesystem",
    "free_bytes": "Free bytes of the pool's filesystem",
    "reserve_bytes": "Bytes that are kept free",
    "promised_bytes": "Bytes that thin volumes may still take",
    "reclaimable_bytes": "Bytes that deleted volumes and snapshots hold",
    "available_bytes": "Bytes that a new volume can have",
}


class PoolMetrics(Collector):
    """Registers itself; a pool that cannot answer is left out of one scrape and logged."""

    def __init__(self, pools: Pools, registry: CollectorRegistry) -> None:
        self._pools = pools
        registry.register(self)

    def describe(self) -> list[Metric]:
        return []  # the names are known from the first scrape; asking pools at registration would be early

    def collect(self) -> Iterator[Metric]:
        families = {
            name: GaugeMetricFamily(f"moorage_pool_{name}", text, labels=["pool"]) for name, text in _GAUGES.items()
        }
        for pool in self._pools:
            try:
                room = pool.capacity()
            except MoorageError as error:
                log.warning("a pool did not tell its capacity", pool=pool.name, error=str(error))
                continue
            for name, family in families.items():
                family.add_metric([pool.name], getattr(room, name))
        yield from families.values()
