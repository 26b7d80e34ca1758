"""The cluster-side controllers: what kube-controller-manager, kube-scheduler and the snapshot controller do for volumes.

Owns: binder, attach/detach, protection, expansion, scheduler, snapshots, generic ephemeral claims, garbage.
May not touch: CSI sockets, the host. Controllers meet each other and everybody else only at the Kubernetes API.
Start reading at: `run.py` (the table of names), `context.py` (what each is given), then `<name>/run.py` and its `plan.py`.
"""
