"""What a driver leaves in the directories that a check gave to it.

Owns: removing those directories without ever reaching through a mount. A mount at a path that the check named is
unmounted, because the check asked for it. Any other mount, and everything behind it, is left and reported.
Start reading at: `clean_up`.
"""

from pathlib import Path

from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from moorage.host.errors import HostError
from moorage.host.safe_remove import remove_tree


def clean_up(folder: Path) -> list[str]:
    """Remove a directory of a check. Returns a sentence for each mount that the driver left there."""
    found = []
    folder = folder.resolve()
    for mount in reversed(mountinfo.mounts_below(folder)):
        target = Path(mount.target)
        if target.parent != folder:
            found.append(f"the driver left a mount at {target}; it stays, unmount it by hand")
            continue
        try:
            mounts.unmount(target)
            found.append(f"the driver left its mount at {target}")
        except (HostError, OSError) as error:
            found.append(f"the driver left its mount at {target}, which cannot be unmounted: {error}")
    try:
        remove_tree(folder)
    except (MoorageError, OSError) as error:
        found = found or [f"{folder} is not removed: {error}"]
    return found
