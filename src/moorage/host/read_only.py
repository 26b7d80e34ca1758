"""Files of the host that a container may reach through a descriptor or `/proc/self/exe`.

Owns: nothing; a mount that is mounted nowhere ends with its descriptor.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from moorage.host import libc

_ATTR_RDONLY = 1  # of mount_setattr


@contextmanager
def read_only(path: str) -> Iterator[str]:
    """Give a path at which a file can be opened or executed, but not changed: neither its content nor its mode, owner
    and times, which root in a container could change for any file that it reaches. A device can still be written to."""
    tree = libc.open_tree(path, recursive=False)
    try:
        libc.mount_setattr("", _ATTR_RDONLY, at=tree)
        yield f"/proc/self/fd/{tree}"
    finally:
        os.close(tree)
