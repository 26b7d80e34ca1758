"""What controllers that share a process also share: the caches, and a writer that fills them.

Owns: creating them at first use.
Start reading at: `Shared`.
"""

from functools import cached_property

from moorage.kube.api.client import Client
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informers import Informers
from moorage.kube.control.writer import Writer


class Shared:
    """A base of the contexts that controllers and sidecars receive."""

    client: Client
    informers: Informers

    @cached_property
    def caches(self) -> Caches:
        return Caches(self.informers)

    @cached_property
    def writer(self) -> Writer:
        return Writer(self.client, self.informers)
