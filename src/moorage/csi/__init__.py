"""The CSI contract: protocol files, generated stubs, client, server, errors, redaction.

Owns: what goes over a CSI or plugin-registration socket, in both directions.
May not touch: storage, hosts, Kubernetes objects.
Start reading at: `client.CsiClient`, `server.CsiServer`; `docs/csi.md` shows both in use.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc loads: we never fork without an exec

from moorage.csi.generated import csi_pb2, csi_pb2_grpc, registration_pb2, registration_pb2_grpc

__all__ = ["csi_pb2", "csi_pb2_grpc", "registration_pb2", "registration_pb2_grpc"]
