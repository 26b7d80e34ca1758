"""The sidecars: registrar, provisioner, attacher, resizer, snapshotter, capacity, health, liveness."""
