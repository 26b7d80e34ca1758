"""A fair token bucket: waiters are served in the order they came.

Owns: the rate of requests that one client may send; a rate of 0 means no limit.
"""

import asyncio


class Limiter:
    """`qps` tokens a second, at most `burst` saved up."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps = qps
        self._burst = max(1, burst)
        self._next_at = 0.0

    async def take(self) -> None:
        """Return when the caller may go on; each caller's turn is fixed when it asks, so the order is fair."""
        if self._qps <= 0:
            return
        now = asyncio.get_running_loop().time()
        step = 1.0 / self._qps
        turn = max(self._next_at, now - step * (self._burst - 1))
        self._next_at = turn + step
        if turn > now:
            await asyncio.sleep(turn - now)
