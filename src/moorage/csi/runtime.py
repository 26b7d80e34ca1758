"""gRPC's own machinery: started once, never stopped.

Owns: one reference to the machinery for the life of the process. gRPC stops it when its last server goes,
also from a garbage collection, and joins a thread for that; that join was seen to hang for ever.
"""

from functools import cache

import grpc.aio


@cache
def keep_running() -> None:
    """Call before the first server; once is enough, more does no harm."""
    grpc.aio.init_grpc_aio()
