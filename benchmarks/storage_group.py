"""How long a group snapshot of 8 mounted volumes holds their writers.

One writer per volume appends all the time; the longest gap between two of its writes during a group
snapshot is the hold that an application feels. Wanted: at most 250 ms in total.
"""

import argparse
import contextlib
import threading
import time
from pathlib import Path

from figures import record
from storage_filesystem import scratch

from moorage.host import filesystems, freeze, loop, mounts
from moorage.storage import CreateVolume, Pool, PoolConfig

MIB = 1 << 20
MEMBERS = 8


class Writer(threading.Thread):
    """Appends 4 KiB blocks and remembers its longest pause."""

    def __init__(self, place: Path) -> None:
        super().__init__(daemon=True)
        self.place, self.longest, self.stopping = place, 0.0, False

    def run(self) -> None:
        block = b"x" * 4096
        with open(self.place / "log", "wb", buffering=0) as log:
            last = time.perf_counter()
            while not self.stopping:
                log.write(block)
                now = time.perf_counter()
                self.longest, last = max(self.longest, now - last), now
                if log.tell() > 8 * MIB:
                    log.seek(0)
                time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with scratch() as base, contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool.open(PoolConfig("b", base / "pool", background=False)))
        volumes = [pool.create_volume(CreateVolume(f"v{n}", 256 * MIB)) for n in range(MEMBERS)]
        places = []
        for n, volume in enumerate(volumes):
            place = base / f"m{n}"
            place.mkdir()
            device = loop.attach(volume.data)
            stack.callback(loop.detach, device)
            filesystems.format_blank(device.path, "ext4")
            mounts.mount(device.path, place, "ext4")
            stack.callback(mounts.unmount, place)
            places.append(place)
        writers = [Writer(place) for place in places]
        for writer in writers:
            writer.start()
        pauses = []
        for n in range(rounds):
            for writer in writers:
                writer.longest = 0.0
            group = pool.create_group(f"g{n}", [volume.id for volume in volumes])
            longest = max(writer.longest for writer in writers)
            pauses.append(longest * 1000)
            print(f"group of {MEMBERS}: held for {group.held_ms:.1f} ms, ", end="")
            print(f"longest pause of a writer {longest * 1000:.1f} ms (wanted: at most 250)")
        spread = f"{min(pauses):.0f} to {max(pauses):.0f} ms"
        record("group snapshot of 8 volumes: longest pause of a writer", spread, max(pauses) <= 250)
        for writer in writers:
            writer.stopping = True
            writer.join()
        freeze.stop_guard()


if __name__ == "__main__":
    main()
