"""Pools, volumes and snapshots, durable on disk. Knows no gRPC and no Kubernetes."""
