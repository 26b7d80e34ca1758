"""vol_data.json: what teardown needs to know about a volume, kept beside it.

Owns: reading and writing that file. It is written before a driver is asked and removed after it has undone its work,
so a crash at any point leaves enough to clean up with.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from moorage.errors import MoorageError
from moorage.node.volumes.state import CsiSource

NAME = "vol_data.json"
_TIMES = "publishedTimes"  # of ours: a kubelet passes over it
_MOST_TIMES = 100  # more in the file is an error


class UnreadableVolumeData(MoorageError):
    """The file is there but says nothing usable."""


def for_device(source: CsiSource, se_linux_context: str = "") -> dict[str, str]:
    data = {"volumeHandle": source.handle, "driverName": source.driver}
    return data | ({"seLinuxMountContext": se_linux_context} if se_linux_context else {})


def for_pod(source: CsiSource, node: str, attachment: str, se_linux_context: str = "") -> dict[str, str]:
    mode = {} if source.is_block else {"volumeLifecycleMode": "Ephemeral" if source.is_ephemeral else "Persistent"}
    named = {"specVolID": source.spec_name, "nodeName": node, "attachmentID": attachment}
    return for_device(source, se_linux_context) | named | mode


def times_published(data: Mapping[str, str] | None) -> int:
    """How often a driver was asked to publish what it may have published before."""
    told = (data or {}).get(_TIMES, "")
    return min(max(int(told), 1), _MOST_TIMES) if told.isdecimal() else 1


def with_times(data: dict[str, str], times: int) -> dict[str, str]:
    return {**data, _TIMES: str(times)} if times > 1 else data


def make_directory(path: Path | str) -> None:
    """With its parents; what lies below is for root and the group alone."""
    try:
        os.mkdir(path, 0o750)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_directory(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o750)


def write(directory: Path, data: dict[str, str]) -> None:
    """Whole or not at all. What is there already is not written again: a restart confirms every volume."""
    text = json.dumps(data, sort_keys=True).encode()
    path = f"{directory}/{NAME}"
    try:
        with open(path, "rb") as file:
            if file.read() == text:
                return
    except FileNotFoundError:
        make_directory(directory)
    temporary = f"{directory}/.{NAME}.new"
    try:
        with open(temporary, "wb") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)  # half a file of a full disk
        raise


def read(directory: Path) -> dict[str, str] | None:
    """The data, None when there is none, UnreadableVolumeData when it makes no sense."""
    try:
        found = json.loads((directory / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UnreadableVolumeData(f"{directory / NAME} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found.get("driverName") or not found.get("volumeHandle"):
        raise UnreadableVolumeData(f"{directory / NAME} does not name a driver and a volume")
    return {str(key): str(value) for key, value in found.items()}


def remove(directory: Path) -> None:
    (directory / NAME).unlink(missing_ok=True)
    (directory / f".{NAME}.new").unlink(missing_ok=True)


def source_from(data: dict[str, str], spec_name: str = "", *, is_block: bool = False) -> CsiSource:
    """As much of a volume as the file tells."""
    return CsiSource(
        driver=data["driverName"],
        handle=data["volumeHandle"],
        spec_name=data.get("specVolID") or spec_name,
        is_ephemeral=data.get("volumeLifecycleMode") == "Ephemeral",
        is_block=is_block,
    )
