"""Who a container runs as: user, groups, capabilities, and the account of that user.

Start reading at: `identity`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moorage.kube.objects.pods import PodSecurityContext
from moorage.node.pods.errors import BadContainer
from moorage.node.runtime import KEPT_CAPABILITIES

_LARGEST_ID = (1 << 31) - 1
_PASSWD = "/etc/passwd"
# By number, from linux/capability.h.
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
_ALL = frozenset(range(len(_CAPABILITIES)))


def capabilities(security: Mapping[str, Any]) -> dict[str, list[int]]:
    """What a container keeps of root's rights, where it says more than nothing about them. As runtimes have it, ALL is
    what single names are added to and dropped from, and what is dropped stays dropped."""
    asked = security.get("capabilities") or {}
    if not asked:
        return {}
    dropped, added = _words(asked.get("drop")), _words(asked.get("add"))
    base = _ALL if "ALL" in added else KEPT_CAPABILITIES
    if "ALL" in dropped:
        base = frozenset()
    return {"capabilities": sorted((base | _numbers(added)) - _numbers(dropped))}


def _words(names: list[str] | None) -> set[str]:
    words = {str(name).upper().removeprefix("CAP_") for name in names or ()}
    unknown = words - {"ALL", *_CAPABILITIES}
    if unknown:
        shown = ", ".join(sorted(unknown))
        raise BadContainer("CreateContainerError", f"unknown capabilities: {shown}")
    return words


def _numbers(words: set[str]) -> set[int]:
    return {number for number, name in enumerate(_CAPABILITIES) if name in words}


@dataclass(frozen=True, slots=True)
class _Account:
    """What a user is to have according to the image, here the host."""

    gid: int = 0
    home: str = "/"


def _account(uid: int) -> _Account:
    try:
        return _accounts(os.stat(_PASSWD).st_mtime_ns).get(uid, _Account())
    except OSError:
        return _Account()


@lru_cache(maxsize=1)
def _accounts(_changed: int) -> dict[int, _Account]:
    found: dict[int, _Account] = {}
    for line in Path(_PASSWD).read_text(errors="replace").splitlines():
        words = line.split(":")
        if len(words) == 7 and words[2].isdecimal() and words[3].isdecimal():
            found.setdefault(int(words[2]), _Account(int(words[3]), words[5] or "/"))
    return found


def identity(pod: PodSecurityContext | None, container: Mapping[str, Any], name: str) -> dict[str, Any]:
    """User and groups; the container's word counts before the pod's."""
    uid = _number("runAsUser", container.get("runAsUser", pod.run_as_user if pod else None))
    gid = _number("runAsGroup", container.get("runAsGroup", pod.run_as_group if pod else None))
    if gid is None and uid:
        gid = _account(uid).gid
    groups = {_number("supplementalGroups", one) or 0 for one in (pod.supplemental_groups if pod else ())}
    fs_group = _number("fsGroup", pod.fs_group if pod else None)
    if fs_group is not None:
        groups.add(fs_group)
    must_not_be_root = container.get("runAsNonRoot", pod.run_as_non_root if pod else None)
    if must_not_be_root and not uid:
        raise BadContainer(
            "CreateContainerConfigError", f"container has runAsNonRoot and image will run as root (container: {name})"
        )
    return {"uid": uid or 0, "gid": gid or 0, "groups": sorted({gid or 0, *groups})}


def _number(what: str, number: object) -> int | None:
    """Of a user or group, in Kubernetes' own range. Not every API server checks it, and the kernel takes 2**32 for 0,
    which is root."""
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST_ID:
        raise BadContainer("CreateContainerConfigError", f"{what}: {number!r:.40} is not from 0 to {_LARGEST_ID}")
    return number
