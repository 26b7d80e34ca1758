"""The causes that explain recognises, by the kind of object they are about.

Importing this package fills `model.REGISTRY`. Order matters: within a kind, the first cause that holds is the answer.
"""

from moorage.insight.causes import attachments, claims, claims_bound, nodes, pods, pods_running, snapshots, volumes
from moorage.insight.causes.model import REGISTRY, Cause, Finding

__all__ = [
    "REGISTRY",
    "Cause",
    "Finding",
    "attachments",
    "claims",
    "claims_bound",
    "nodes",
    "pods",
    "pods_running",
    "snapshots",
    "volumes",
]
