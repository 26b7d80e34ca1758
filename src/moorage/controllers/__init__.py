"""The cluster-side controllers: binder, attach/detach, protection, expansion, scheduler, snapshots."""
