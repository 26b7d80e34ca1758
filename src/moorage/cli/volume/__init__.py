"""`moorage volume`: work with the volumes of a pool, without any cluster.

Importing this package registers every command with `app`.
"""

from moorage.cli.volume import volumes  # isort: skip
from moorage.cli.volume import copies, manifest, transfer  # isort: skip
from moorage.cli.volume.group import app

__all__ = ["app", "copies", "manifest", "transfer", "volumes"]
