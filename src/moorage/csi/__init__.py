"""The CSI contract: protocol files, generated stubs, client, server, errors, redaction.

Owns: what goes over a CSI or plugin-registration socket, in both directions.
Start reading at: `client.CsiClient`, `server.CsiServer`; `docs/contributing/csi.md` shows both in use.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # grpc reads it when it loads; we never fork without an exec

from moorage.csi.generated import csi_pb2, csi_pb2_grpc, registration_pb2, registration_pb2_grpc

__all__ = ["csi_pb2", "csi_pb2_grpc", "registration_pb2", "registration_pb2_grpc"]
