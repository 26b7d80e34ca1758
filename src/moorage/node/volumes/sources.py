"""The API objects that volumes depend on, as informers hold them.

Owns: nothing; it only answers `populate.py`'s questions.
"""

from moorage.kube.cache.informer import Informer
from moorage.kube.objects.core import Node
from moorage.kube.objects.storage import CSIDriver, CsiDriverSpec
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim


class Sources:
    """Claims, volumes, drivers and this node."""

    def __init__(
        self,
        claims: Informer[PersistentVolumeClaim],
        volumes: Informer[PersistentVolume],
        drivers: Informer[CSIDriver],
        nodes: Informer[Node],
        node_name: str,
        *,
        has_se_linux: bool = False,
    ) -> None:
        self._claims = claims
        self._volumes = volumes
        self._drivers = drivers
        self._nodes = nodes
        self._node_name = node_name
        self._has_se_linux = has_se_linux

    def claim(self, key: str) -> PersistentVolumeClaim | None:
        return self._claims.get(key)

    def volume(self, name: str) -> PersistentVolume | None:
        return self._volumes.get(name)

    def driver(self, name: str) -> CsiDriverSpec | None:
        found = self._drivers.get(name)
        return found.spec if found else None

    def node(self) -> Node | None:
        return self._nodes.get(self._node_name)

    def has_se_linux(self) -> bool:
        """Whether this host labels files: on any other, a mount with a label fails."""
        return self._has_se_linux
