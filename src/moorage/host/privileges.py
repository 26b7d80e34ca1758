"""What this process may do, as the kernel sees it.

Owns: reading the effective capabilities. Root is not enough: some machines and containers take single ones away.
"""

from pathlib import Path

_CAP_SYS_RESOURCE = 24


def may_grow_mounted_ext4() -> bool:
    """The kernel asks for CAP_SYS_RESOURCE to grow a mounted ext4; XFS and btrfs need CAP_SYS_ADMIN only."""
    return has_capability(_CAP_SYS_RESOURCE)


def has_capability(number: int) -> bool:
    """Whether the capability is in the effective set of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
