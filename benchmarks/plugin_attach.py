"""ControllerPublish and ControllerUnpublish as a pair, against two fsynced renames. Wanted: at most 3 times."""

import asyncio
import os
import statistics
import time

from figures import record
from plugin_common import mounted, plugin_on, pool_in_file

from moorage.csi import csi_pb2 as pb

ROUNDS = 200


def two_renames(directory):
    """What no durable attach and detach can do without."""
    began = time.perf_counter()
    for _ in range(2):
        with (directory / "new").open("wb") as file:
            file.write(b"x" * 200)
            file.flush()
            os.fsync(file.fileno())
        os.rename(directory / "new", directory / "state")
        fd = os.open(directory, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - began


async def main():
    with pool_in_file() as (base, pool):
        async with plugin_on(pool, base, ["--scope=shared"]) as (_, caller):
            volume = (await caller.create("v")).volume_id
            attach = pb.ControllerPublishVolumeRequest(volume_id=volume, node_id="node-1", volume_capability=mounted())
            detach = pb.ControllerUnpublishVolumeRequest(volume_id=volume, node_id="node-1")
            bare_directory = pool / "bare"
            bare_directory.mkdir()
            bare, ours = [], []
            for _ in range(ROUNDS):
                bare.append(two_renames(bare_directory))
                began = time.perf_counter()
                await caller.client.ControllerPublishVolume(attach)
                await caller.client.ControllerUnpublishVolume(detach)
                ours.append(time.perf_counter() - began)
    a, b = statistics.median(bare), statistics.median(ours)
    record("ControllerPublish and ControllerUnpublish over two fsynced renames", f"{b / a:.2f}", b / a <= 3)
    print(f"two renames {a * 1000:.2f} ms, attach and detach {b * 1000:.2f} ms, ratio {b / a:.2f} (wanted <= 3)")


asyncio.run(main())
