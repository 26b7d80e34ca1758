"""What somebody else's driver says about itself, asked once at the start.

Owns: the few calls that `moorage up --driver` needs before it can make the driver's objects.
"""

from pathlib import Path

from moorage.conformance.suite import capabilities_of
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError


async def driver_facts(socket: Path, timeout_s: float) -> tuple[str, bool]:
    """The driver's name, and whether its volumes are attached to nodes."""
    async with CsiClient(f"unix://{socket}", timeout_s=10) as client:
        try:
            await client.wait_ready(timeout_s)
        except TimeoutError as error:
            raise CsiError("Probe", "UNAVAILABLE", f"not ready within {timeout_s:.0f} s") from error
        info = await client.GetPluginInfo(pb.GetPluginInfoRequest())
        return info.name, "controller:PUBLISH_UNPUBLISH_VOLUME" in await capabilities_of(client)
