"""Names from the API and from drivers that become parts of paths, which the agent uses as root.

An API server refuses bad names. The agent checks them again, because it cannot know which server sent an object: a
container named `../../x` must never become a path.
Owns: what each kind of name may look like.
Start reading at: `bad_names`, `component`.
"""

import os
import re

from moorage.errors import InvalidRequest
from moorage.kube.objects.pods import Pod

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_DRIVER = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]{0,61}[A-Za-z0-9])?", re.ASCII)
_UID = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]{0,127})?", re.ASCII)
_LONGEST = 255  # bytes in one part of a path
_SHOWN = 63


class UnsafeName(InvalidRequest):
    """A name that must not become part of a path."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what} {name[:_SHOWN]!r} is not a valid name")


def component(name: str) -> str:
    """Return a name that is one part of a path. Raises UnsafeName if it would lead elsewhere."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _LONGEST:
        raise UnsafeName("path component", name)
    return name


def is_driver_name(name: str) -> bool:
    """Whether a CSI driver may have this name."""
    return _DRIVER.fullmatch(name) is not None


def is_uid(uid: str) -> bool:
    return _UID.fullmatch(uid) is not None


def check_volume(what: str, name: str) -> None:
    """Raise UnsafeName if an object that is mounted cannot have this name."""
    if _SUBDOMAIN.fullmatch(name) is None:
        raise UnsafeName(what, name)


def check_driver(name: str) -> None:
    if not is_driver_name(name):
        raise UnsafeName("CSI driver", name)


def bad_names(pod: Pod) -> list[str]:
    """Say which names in a pod no valid pod has. Such a pod is not run."""
    found = []
    if _LABEL.fullmatch(pod.namespace) is None:
        found.append(str(UnsafeName("namespace", pod.namespace)))
    if _SUBDOMAIN.fullmatch(pod.name) is None:
        found.append(str(UnsafeName("pod", pod.name)))
    containers = [one.name for one in (*pod.spec.init_containers, *pod.spec.containers)]
    found += [str(UnsafeName("container", name)) for name in containers if _LABEL.fullmatch(name) is None]
    found += [
        f"two containers are named {name!r}" for name in sorted({n for n in containers if containers.count(n) > 1})
    ]
    volumes = [one.name for one in pod.spec.volumes]
    found += [str(UnsafeName("volume", name)) for name in volumes if _LABEL.fullmatch(name) is None]
    return found
