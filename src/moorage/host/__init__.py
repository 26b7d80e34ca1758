"""Linux: mounts, loop devices, filesystems, freezing, extents, system tools.

Owns: every system call and every command that touches the machine's storage.
May not touch: pools, volumes, CSI, Kubernetes. Callers say what to do; the reasons stay with them.
Start reading at: `mountinfo` and `mounts`, then `loop`, `filesystems`, `freeze`, `extents`.

Everything is synchronous and may be called from any thread. Failures are `HostError`s that name
the path and the kernel's or the tool's own words.
"""

from moorage.host.errors import (
    CannotGrow,
    CommandFailed,
    FilesystemDamaged,
    FreezeBroken,
    HostError,
    LoopGone,
    NotEmpty,
    UnknownFilesystem,
)

__all__ = [
    "CannotGrow",
    "CommandFailed",
    "FilesystemDamaged",
    "FreezeBroken",
    "HostError",
    "LoopGone",
    "NotEmpty",
    "UnknownFilesystem",
]
