"""How long a group snapshot of 8 mounted, reflinked volumes holds its writers. Wanted: at most 250 ms in total."""

import asyncio
import os
import threading
import time

from plugin_common import MIB, plugin_on, pool_in_file

from moorage.csi import csi_pb2 as pb

MEMBERS = 8
ROUNDS = 5


class Writer(threading.Thread):
    """Writes through the page cache every 2 ms; remembers the longest time one write took."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.stop = False
        self.longest = 0.0

    def run(self):
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        while not self.stop:
            began = time.perf_counter()
            os.pwrite(fd, b"x" * 4096, 0)
            self.longest = max(self.longest, time.perf_counter() - began)
            time.sleep(0.002)
        os.close(fd)


async def main():
    with pool_in_file() as (base, pool):
        async with plugin_on(pool, base) as (_, caller):
            volumes = [(await caller.create(f"v{n}", size=256 * MIB)).volume_id for n in range(MEMBERS)]
            paths = [await caller.up(volume, pod=volume) for volume in volumes]
            for path in paths:
                (path / "data").write_bytes(os.urandom(32 * MIB))
                os.sync()
            worst = 0.0
            for number in range(ROUNDS):
                writers = [Writer(path / "w") for path in paths]
                for writer in writers:
                    writer.start()
                await asyncio.sleep(0.2)
                for writer in writers:
                    writer.longest = 0.0
                request = pb.CreateVolumeGroupSnapshotRequest(name=f"g{number}", source_volume_ids=volumes)
                await caller.client.CreateVolumeGroupSnapshot(request)
                for writer in writers:
                    writer.stop = True
                    writer.join()
                worst = max(worst, *(writer.longest for writer in writers))
    print(f"longest wait of a writer {worst * 1000:.0f} ms, {worst / 0.25:.2f} of the 250 ms allowed")


asyncio.run(main())
