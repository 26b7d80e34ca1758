"""Which run of the machine this is.

With the standard library only: used by the process whose children containers are.
Owns: nothing.
"""

from functools import cache


@cache
def boot_id() -> str:
    """Another one after each boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
