"""What a node call takes beside few volumes and beside many, and many calls at once over one after the other.

Prints, for an image that is formatted, the median of stage and publish, of its statistics, and of unpublish and
unstage, beside 20 and beside 200 others, with the growth; and for 100 volumes the time to take all of them down at once
over that one after the other. Wanted: growth well below the tenfold number, and at most 1.5 for all at once.
Run: python benchmarks/plugin_many.py
"""

import asyncio
import statistics
import time

from figures import record
from plugin_common import MIB, plugin_on, pool_on_disk

from moorage.csi import csi_pb2 as pb

FEW, MANY, HALF, ROUNDS = 20, 200, 100, 15


async def timed(call):
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


async def one(caller, volume):
    """Milliseconds of each kind of call for one volume."""
    up, asked, down = [], [], []
    for _ in range(ROUNDS):
        up.append(await timed(caller.up(volume)))
        request = pb.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=caller.target(volume))
        asked.append(await timed(caller.client.NodeGetVolumeStats(request)))
        down.append(await timed(caller.down(volume)))
    return [statistics.median(each) * 1000 for each in (up, asked, down)]


async def main():
    with pool_on_disk() as (base, pool):
        async with plugin_on(pool, base) as (_, caller):
            volumes = [(await caller.create(f"v{number}", size=64 * MIB)).volume_id for number in range(MANY + 1)]
            for volume in volumes:  # formatted
                await caller.up(volume)
                await caller.down(volume)
            measured, others = volumes[0], volumes[1:]
            for volume in others[:FEW]:
                await caller.up(volume)
            few = await one(caller, measured)
            for volume in others[FEW:]:
                await caller.up(volume)
            many = await one(caller, measured)
            for what, a, b in zip(("stage and publish", "statistics", "unpublish and unstage"), few, many, strict=True):
                if what.startswith("stage"):
                    record("stage and publish beside 200 volumes over beside 20", f"{b / a:.1f}", b / a < 10)
                print(f"{what}: {a:.1f} ms beside {FEW}, {b:.1f} ms beside {MANY}, growth {b / a:.1f}")
            began = time.perf_counter()
            for volume in others[:HALF]:
                await caller.down(volume)
            in_turn = time.perf_counter() - began
            for volume in others[:HALF]:
                await caller.up(volume)
            at_once = await timed(asyncio.gather(*(caller.down(volume) for volume in others[:HALF])))
            over = at_once / in_turn
            record("100 volumes taken down at once over one after the other", f"{over:.2f}", over <= 1.5)
            print(f"{HALF} down: in turn {in_turn:.2f} s, at once {at_once:.2f} s, ratio {at_once / in_turn:.2f}")


asyncio.run(main())
