"""The cluster-side controllers: the volume parts of kube-controller-manager, kube-scheduler and snapshot-controller.

Owns: binder, attach/detach, protection, expansion, scheduler, snapshots, generic ephemeral claims.
May not touch: CSI sockets, the host. Controllers meet each other and everybody else only at the Kubernetes API.
Start reading at: `run.py` (the table of names), `context.py` (what each is given), then a controller's `run.py`.
"""
