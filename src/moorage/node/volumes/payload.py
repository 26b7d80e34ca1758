"""Files of a secret, configMap or projected volume, replaced all at once.

Owns: the `..data` link that makes an update atomic for readers.
Start reading at: `write_payload`.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from moorage.errors import InvalidRequest
from moorage.node.removal import remove_tree

_DATA = "..data"


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    mode: int


def write_payload(directory: Path, files: dict[str, File], gid: int | None = None) -> bool:
    """Make the directory show exactly these files; False when it already did. Readers see old or new, never both."""
    for path in files:
        if not path or path.startswith(("/", "..")) or ".." in path.split("/"):
            raise InvalidRequest(f"{path!r} is no path that a volume's file can have")
    link = directory / _DATA
    if _holds(link, files):
        return False
    fresh = directory / f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.monotonic_ns()}"
    fresh.mkdir(mode=0o755)
    for path, file in files.items():
        target = fresh / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(file.mode | (0o040 if gid is not None else 0))
        if gid is not None:
            os.chown(target, -1, gid)
    before = os.readlink(link) if link.is_symlink() else ""
    temporary = directory / "..data_tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(fresh.name)
    os.replace(temporary, link)
    _link_names(directory, {path.split("/")[0] for path in files})
    for left in directory.iterdir():
        if left.name.startswith("..2") and left.name != fresh.name and (left.name == before or left.is_dir()):
            remove_tree(left)
    return True


def _link_names(directory: Path, names: set[str]) -> None:
    for entry in directory.iterdir():
        if not entry.name.startswith("..") and entry.name not in names and entry.is_symlink():
            entry.unlink()
    for name in names:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"{_DATA}/{name}")


def _holds(link: Path, files: dict[str, File]) -> bool:
    if not link.is_symlink() or not link.exists():
        return False
    present = {str(path.relative_to(link)) for path in link.rglob("*") if path.is_file()}
    if present != set(files):
        return False
    return all((link / path).read_bytes() == file.content for path, file in files.items())
