"""The sidecars of a CSI driver: registrar, provisioner, attacher, resizer, snapshotter, capacity, health, liveness.

Owns: everything between the Kubernetes API and one driver's socket, for any CSI driver, in one process or apart.
May not touch: the driver's insides, the controllers, the node agent; they are met at the API server and the socket.
Start reading at: `run.run`, then `roles.py` for which parts start, then the folder of a part.
"""
