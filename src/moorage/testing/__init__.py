"""The public test kit: an embedded API server and a scripted CSI driver. No product module imports it.

- `serve(data_dir)` runs an API server in this event loop; `.url`, `.token` and `.kubeconfig` say how to reach it.
- `ScriptedDriver(socket)` is a CSI driver on a real socket. It keeps volumes, snapshots and attachments in `.backend`;
  with `data=` it also mounts volumes for real, and with `registry=` it registers at a kubelet. Its faults are scripted:
  `.fail(method, code)`, `.hold(method)`, `.chooser`; `HANG`, `GARBAGE`, `LIE` and `DIE` stand beside the gRPC codes.
- `until(condition)` waits for what a controller, a node or a driver does.

Owns: these names; the modules below may change.
Start reading at: `driver.ScriptedDriver`, `server.serve`.
"""

from moorage.testing.controller_service import Backend
from moorage.testing.driver import DIE, GARBAGE, HANG, LIE, Abilities, Fault, ScriptedDriver
from moorage.testing.server import serve
from moorage.testing.waiting import until

__all__ = [
    "DIE",
    "GARBAGE",
    "HANG",
    "LIE",
    "Abilities",
    "Backend",
    "Fault",
    "ScriptedDriver",
    "serve",
    "until",
]
