"""Moorage: persistent volumes for containers, from the CSI specification to the pod's mount.

Start reading at: docs/explanation/architecture.md, then `moorage.cli.main`.
"""

__version__ = "0.1.0"
