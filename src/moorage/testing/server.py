"""A server for tests: in this event loop, up in milliseconds.

Owns: `serve`. It is the real server; only the limits and ports differ.
Start reading at: `serve`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from moorage.apiserver.run import ApiServer, Config


@asynccontextmanager
async def serve(data_dir: Path, **settings: Any) -> AsyncIterator[ApiServer]:
    """Run a server; `.url`, `.token`, `.kubeconfig` and `.insecure_url` say how to reach it.

    Settings are the fields of `Config`. By default nothing is fsynced (the state is kept in memory), and plain HTTP is
    open beside TLS.
    """
    settings = {"in_memory": True, "insecure_port": 0, **settings}
    server = ApiServer(Config(data_dir=data_dir, **settings))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
