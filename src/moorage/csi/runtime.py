"""The gRPC runtime of this process: started once, never stopped.

Owns: one reference to the runtime. Without it, gRPC stops the runtime with its last channel or server, also from a
garbage collection, and joins a thread. That join can block for ever.
"""

from functools import cache

import grpc.aio


@cache
def keep_running() -> None:
    """Start the runtime. Call before the first channel or server; later calls have no effect."""
    grpc.aio.init_grpc_aio()
