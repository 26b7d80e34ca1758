"""The liveness probe: asks over a new connection each time whether the driver answers.

Owns: one check. An open connection could stay usable while new ones are refused, so none is kept.
"""

import time

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError


class LivenessProbe:
    """Stands for livenessprobe."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s

    async def check(self) -> tuple[int, str]:
        """Return 200 and `ok`, or 500 and the reason."""
        deadline = time.monotonic() + self._timeout_s  # of both together: the caller has a limit of its own
        try:
            async with CsiClient(self._address, timeout_s=self._timeout_s) as client:
                await client.wait_connected(self._timeout_s)
                left_s = max(0.01, deadline - time.monotonic())
                answer = await client.Probe(pb.ProbeRequest(), timeout_s=left_s)
        except CsiError as error:
            return 500, f"the driver does not answer: {error}"
        if answer.HasField("ready") and not answer.ready.value:
            return 500, "the driver says that it is not ready"
        return 200, "ok"
