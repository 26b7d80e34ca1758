"""The causes that explain recognises, by the kind of object they are about.

Importing this package fills `model.REGISTRY`. Order matters: within a kind, the first cause that holds is the answer, so
modules are loaded in this order and not in that of their names.
"""

import importlib

from moorage.insight.causes.advice import Advice
from moorage.insight.causes.model import REGISTRY, Cause, Finding

_MODULES = (
    "driver_waits",
    "claims",
    "claims_source",
    "claims_provisioning",
    "claims_bound",
    "pods",
    "pods_placed",
    "pods_running",
    "volumes",
    "attachments",
    "snapshots",
    "nodes",
)

for _module in _MODULES:
    importlib.import_module(f"{__name__}.{_module}")

__all__ = ["REGISTRY", "Advice", "Cause", "Finding"]
