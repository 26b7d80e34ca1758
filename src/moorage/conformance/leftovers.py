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

_MOST_SHOWN = 5
_NAMED = {"staging": "NodeUnstageVolume.works", "target": "NodeUnpublishVolume.works"}


def clean_up(folder: Path) -> list[tuple[str, str]]:
    """Remove a directory of a check. Returns a sentence for each thing that the driver left, and the check about it."""
    found = []
    folder = folder.resolve()
    for mount in reversed(mountinfo.mounts_below(folder)):
        target = Path(mount.target)
        owner = _owner_of(target)
        if target.parent != folder:
            found.append((owner, f"the driver left a mount at {target}; it stays, unmount it by hand"))
            continue
        try:
            mounts.unmount(target)
            found.append((owner, f"the driver left its mount at {target}"))
        except (HostError, OSError) as error:
            found.append((owner, f"the driver left its mount at {target}, which cannot be unmounted: {error}"))
    if not found:
        found = [(_owner_of(path), f"the driver left {path}") for path in _left_files(folder)]
    try:
        remove_tree(folder)
    except (MoorageError, OSError) as error:
        found = found or [("Leaks.files", f"{folder} is not removed: {error}")]
    return found


def _left_files(folder: Path) -> list[Path]:
    """Return what should not be there: anything but empty staging directories, which are the caller's."""
    left: list[Path] = []
    for entry in sorted(folder.iterdir()):
        is_ours = entry.name.startswith("staging") and entry.is_dir() and not entry.is_symlink()
        left += [] if is_ours else [entry]
        left += sorted(entry.iterdir()) if is_ours else []
        if len(left) >= _MOST_SHOWN:
            break
    return left[:_MOST_SHOWN]


def _owner_of(path: Path) -> str:
    """Return the check about the call that should have removed a path."""
    for part in reversed(path.parts):
        for start, owner in _NAMED.items():
            if part.startswith(start):
                return owner
    return "Leaks.files"
