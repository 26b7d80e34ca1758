"""The CSI contract: protocol files, generated stubs, client, server, errors, redaction.

Owns: what goes over a CSI or plugin-registration socket, in both directions.
May not touch: storage, hosts, Kubernetes objects.
Start reading at: `client.CsiClient`, `server.CsiServer`; `docs/contributing/csi.md` shows both in use.
"""

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc loads: we never fork without an exec

from moorage.csi.generated import csi_pb2, registration_pb2

if TYPE_CHECKING:
    from moorage.csi.generated import csi_pb2_grpc, registration_pb2_grpc

__all__ = ["csi_pb2", "csi_pb2_grpc", "registration_pb2", "registration_pb2_grpc"]


def __getattr__(name: str) -> ModuleType:
    """Only a server needs these: they load grpc, which takes 8 MiB of memory."""
    if name in __all__:
        return importlib.import_module(f"moorage.csi.generated.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
