"""What a call to a driver costs its caller: processor time of `CsiClient` and of gRPC's own client, in turn.

The driver is a process of its own that answers Probe. Prints the medians for calls made one after the other and for
eight at a time, and the ratio (no goal of its own; a pod with a volume takes two calls).
Run: python benchmarks/csi_calls.py [--calls 1000] [--rounds 7]
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import uvloop

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.client import CsiClient
from moorage.csi.endpoint import grpc_target

Call = Callable[[], Awaitable[object]]


class Driver(csi_pb2_grpc.IdentityServicer):
    """It is there."""

    async def Probe(self, request: pb.ProbeRequest, context: object) -> pb.ProbeResponse:
        return pb.ProbeResponse()


async def serve(path: Path) -> None:
    server = grpc.aio.server()
    csi_pb2_grpc.add_IdentityServicer_to_server(Driver(), server)
    server.add_insecure_port(grpc_target(path))
    await server.start()
    await server.wait_for_termination()


async def spent_us(call: Call, count: int, at_once: int) -> float:
    """Microseconds of this process for one call."""
    gate = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            await call()

    before = time.process_time()
    await asyncio.gather(*(one() for _ in range(count)))
    return (time.process_time() - before) / count * 1e6


async def main(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as base:
        path = Path(base, "csi.sock")
        driver = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", str(path))
        try:
            async with (
                CsiClient(str(path)) as ours,
                grpc.aio.insecure_channel(
                    grpc_target(path), options=[("grpc.default_authority", "localhost")]
                ) as theirs,
            ):
                await ours.wait_ready(30)
                probe, request = csi_pb2_grpc.IdentityStub(theirs).Probe, pb.ProbeRequest()
                calls: dict[str, Call] = {
                    "ours": lambda: ours.Probe(request),
                    "gRPC's": lambda: probe(request, timeout=60),
                }
                for at_once in (1, 8):
                    await compare(calls, count, rounds, at_once)
        finally:
            driver.kill()
            await driver.wait()


async def compare(calls: dict[str, Call], count: int, rounds: int, at_once: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(await spent_us(call, count, at_once))
    medians = {name: statistics.median(every) for name, every in times.items()}
    ratio = medians["ours"] / medians["gRPC's"]
    shown = ", ".join(f"{name} {median:.0f} us" for name, median in medians.items())
    print(f"{at_once} at a time: {shown} of processor time per call; ratio {ratio:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    uvloop.run(serve(Path(options.serve)) if options.serve else main(options.calls, options.rounds))
