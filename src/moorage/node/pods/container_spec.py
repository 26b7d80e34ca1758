"""A container's specification for the runtime, from the pod and its mounted volumes.

Owns: environment, arguments, identity, mounts and devices of a container.
Start reading at: `SpecMaker.make`.
"""

import base64
import os
import re
import stat
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from moorage.host import libc, mountinfo
from moorage.host.hung_paths import DoesNotAnswer, probe
from moorage.kube.objects.core import ConfigMap, Secret
from moorage.kube.objects.pods import Container, Pod, VolumeMount
from moorage.kube.quantity import BadQuantity
from moorage.node import downward
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.pods.errors import BadContainer
from moorage.node.pods.identity import _account, capabilities, identity
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.manager import VolumeManager
from moorage.node.volumes.mounters.builtin import OF_OBJECTS, PlainBody
from moorage.node.volumes.mounters.csi_filesystem import is_dead
from moorage.node.volumes.state import CsiSource, PlainSource, VolumeUse

R = TypeVar("R")

_MS_SHARED = 1 << 20
_HOSTNAME_MAX = 63
_LONGEST_TEXT = 1 << 17  # the kernel's MAX_ARG_STRLEN, the zero at the end included
_LONGEST_TEXTS = 6 << 20  # the most that execve takes, however large the stack may become
_POINTER = 8
_LONGEST_PATH = 4095  # without the zero at the end
_SHOWN = 63  # characters of a name or text in a message
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` is replaced where NAME is known, `$$` is a dollar. A text that becomes too long for the kernel is not
    even made: a few variables of ten references each to the one before would fill the memory."""
    length = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal length
        found = "$" if match[0] == "$$" else values.get(match[1], match[0])
        length += len(found)
        if length > _LONGEST_TEXT:
            raise _too_long(f"the expansion of {_shortened(text)!r}")
        return found

    closed, rest = _parted(text)
    return _REFERENCE.sub(replaced, closed) + rest.replace("$$", "$")


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """`expand` for a path, where a name that is not known, or is empty, would lead somewhere else."""
    missing = {name for name in _REFERENCE.findall(_parted(text)[0]) if name and not values.get(name)}
    if missing:
        named = _shortened(", ".join(sorted(missing)))
        raise BadContainer("CreateContainerConfigError", f"missing value for {named}")
    return expand(text, values)


def _parted(text: str) -> tuple[str, str]:
    """Up to the last bracket that closes, and what follows, where nothing is a reference: a search for the end of each
    that begins there would go through all of it every time."""
    end = text.rfind(")") + 1
    return text[:end], text[end:]


def _path(what: str, path: str) -> str:
    """One that the kernel takes. Where it is made, its parts are walked through one by one, so that any other would be
    made as far as it goes."""
    if len(path.encode(errors="replace")) > _LONGEST_PATH:
        raise BadContainer("CreateContainerError", f"{what} is longer than {_LONGEST_PATH} bytes")
    return path


def _too_long(what: str) -> BadContainer:
    return BadContainer("CreateContainerConfigError", f"{what} is longer than {_LONGEST_TEXT >> 10} KiB")


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Room:
    """What is left of what the kernel takes of arguments and variables. It is counted while they are made: no pod has
    the agent make more than that."""

    def __init__(self) -> None:
        self._left = _LONGEST_TEXTS

    def take(self, what: str, text: str) -> None:
        """For an argument, or a variable with its name, and the place of each in the list of them. The text may be
        secret, and is not shown."""
        size = len(text.encode(errors="replace")) + 1
        if size > _LONGEST_TEXT:
            raise _too_long(what)
        self._left -= size + _POINTER
        if self._left < 0:
            shown = f"arguments and variables are longer than {_LONGEST_TEXTS >> 20} MiB together"
            raise BadContainer("CreateContainerConfigError", shown)


def api_variables(server: str) -> dict[str, str]:
    """How programs in a pod are told of the API server. They have the host's network, so for them it is where it is for
    the agent; the names promise a server with TLS at the root of a host."""
    url = urlsplit(server)
    if url.scheme != "https" or not url.hostname or url.path.strip("/"):
        return {}
    port = str(url.port or 443)
    return {"KUBERNETES_SERVICE_HOST": url.hostname, "KUBERNETES_SERVICE_PORT": port,
            "KUBERNETES_SERVICE_PORT_HTTPS": port}  # fmt: skip


class SpecMaker:
    """Makes specifications for one node."""

    def __init__(
        self, layout: NodeLayout, fetch: Fetch, volumes: VolumeManager, host_ip: str, server: str = ""
    ) -> None:
        self._api_variables = api_variables(server)
        self._layout = layout
        self._fetch = fetch
        self._volumes = volumes
        self._host_ip = host_ip

    async def make(self, pod: Pod, container: Container, cgroups: list[str]) -> dict[str, Any]:
        """Everything the runtime needs; BadContainer says what is wrong."""
        room = _Room()
        env = await self._environment(pod, container, room)
        argv = []
        for word in (*container.command, *container.args):
            argv.append(expand(word, env))
            room.take(f"argument {len(argv) - 1}", argv[-1])
        if not argv:
            raise BadContainer("CreateContainerError", f"container {container.name}: no command specified")
        security = container.security_context or {}
        privileged = bool(security.get("privileged"))
        read_only = _read_only_names(pod)
        mounts = [await self._mount(pod, one, env, privileged, read_only) for one in container.volume_mounts]
        mounts.sort(key=lambda one: str(one["target"]).rstrip("/").count("/"))
        who = identity(pod.spec.security_context, security, container.name)
        hostname = hostname_of(pod)
        return {
            "argv": argv,
            "env": {"HOSTNAME": hostname, "HOME": _account(who["uid"]).home, **env},
            "cwd": _path("workingDir", container.working_dir),
            "hostname": hostname,
            "mounts": mounts,
            "devices": self._devices(pod, container, read_only),
            "cgroups": cgroups,
            "privileged": privileged,
            "read_only_root": bool(security.get("readOnlyRootFilesystem")),
            "no_new_privileges": security.get("allowPrivilegeEscalation") is False,
            "host_pid": pod.spec.host_pid,
            "host_ipc": pod.spec.host_ipc,
            **capabilities(security),
            **who,
        }

    async def _environment(self, pod: Pod, container: Container, room: _Room) -> dict[str, str]:
        """What the pod says, and the variables of the API server where it says nothing of them; what a runtime adds to
        it is not for `$(NAME)`."""
        env = dict(self._api_variables)

        def say(name: str, value: str) -> None:
            room.take(f"variable {_shortened(name)}", f"{name}={value}")
            env[name] = value

        for source in container.env_from:
            prefix = str(source.get("prefix") or "")
            for key, value in (await self._bulk(pod, source)).items():
                say(prefix + key, value)
        for one in container.env:
            name = str(one.get("name") or "")
            held = one.get("valueFrom")
            if held:
                found = await self._value_from(pod, container, held)
                if found is not None:
                    say(name, found)
            else:
                say(name, expand(str(one.get("value") or ""), env))
        return env

    async def _mount(
        self, pod: Pod, mount: VolumeMount, env: Mapping[str, str], privileged: bool, read_only: Set[str]
    ) -> dict[str, Any]:
        use = self._volumes.use_named(PodUid(pod.uid), mount.name)
        if use is None:
            raise BadContainer("CreateContainerConfigError", f"volume {mount.name} is not there")
        propagation = mount.mount_propagation or "None"
        if propagation == "Bidirectional" and not privileged:
            raise BadContainer(
                "CreateContainerError", f"volume {mount.name}: Bidirectional is only for privileged containers"
            )
        sub_path = _expanded(mount.sub_path_expr, env) if mount.sub_path_expr else mount.sub_path
        if sub_path.startswith("/") or ".." in sub_path.split("/"):
            raise BadContainer(
                "CreateContainerConfigError", f"volume {mount.name}: subPath {sub_path!r} is not allowed"
            )
        _path(f"volume {mount.name}: subPath", sub_path)
        path = self.path_of(use)
        if propagation != "None":
            await _asked(path, f"does it propagate {propagation}", lambda: _ensure_propagates(path, propagation))
        is_filled = _is_written_by_agent(use)
        found = {
            "source": str(path),
            "target": _path(f"volume {mount.name}: mountPath", "/" + mount.mount_path.strip("/")),
            "read_only": not is_filled and (mount.read_only or mount.name in read_only),
            "read_only_last": is_filled,
            "recursive_read_only": mount.recursive_read_only in ("Enabled", "IfPossible"),
            "sub_path": sub_path,
            "propagation": propagation,
            "has_devices": privileged or _is_of_host(use),
        }
        if sub_path:  # a missing one is made as open as the volume; the group is inherited, if the volume says so
            found["sub_path_mode"] = await _asked(path, "its mode", lambda: os.stat(path).st_mode & 0o777)
        return found

    def path_of(self, use: VolumeUse) -> Path:
        """Where a volume is on the host."""
        source = use.source
        if isinstance(source, CsiSource):
            return self._layout.publish_target(use.pod.uid, source.spec_name)
        assert isinstance(source, PlainSource)
        body: PlainBody = source.body
        if body.volume.host_path is not None:
            return Path(body.volume.host_path.path)
        return self._layout.plain_volume(use.pod.uid, source.plugin, source.spec_name)

    async def is_lost(self, use: VolumeUse) -> bool:
        """Nothing is mounted any more, or nothing that lives, where a driver has published a filesystem."""
        if not isinstance(use.source, CsiSource) or use.source.is_block:
            return False
        path = self.path_of(use)
        return mountinfo.mount_at(path) is None or await is_dead(path, "pod")

    def _devices(self, pod: Pod, container: Container, read_only: Set[str]) -> list[dict[str, Any]]:
        found = []
        for one in container.volume_devices:
            use = self._volumes.use_named(PodUid(pod.uid), one.name)
            if use is None or not isinstance(use.source, CsiSource):
                raise BadContainer("CreateContainerConfigError", f"volume {one.name} is not there")
            place = _path(f"volume {one.name}: devicePath", one.device_path)
            path = self._layout.block_map(use.source.spec_name, use.pod.uid)
            status, is_read_only = os.stat(path), one.name in read_only
            if not stat.S_ISBLK(status.st_mode):
                raise BadContainer("CreateContainerError", f"volume {one.name}: no block device is at {path} any more")
            found.append({"path": place, "number": status.st_rdev, "read_only": is_read_only, "gid": use.fs_group})
        return found

    async def _bulk(self, pod: Pod, source: Mapping[str, Any]) -> dict[str, str]:
        for key, kind in (("configMapRef", ConfigMap), ("secretRef", Secret)):
            reference = source.get(key)
            if reference:
                data = await self._data(pod, kind, str(reference.get("name")), bool(reference.get("optional")))
                return {name: _text(kind, held) for name, held in data.items()}
        raise _unknown("envFrom", source)

    async def _value_from(self, pod: Pod, container: Container, held: Mapping[str, Any]) -> str | None:
        try:
            if held.get("fieldRef"):
                return downward.field_of(pod, str(held["fieldRef"].get("fieldPath")), self._host_ip)
            if held.get("resourceFieldRef"):
                return downward.resource_of(pod, held["resourceFieldRef"], container)
        except (downward.UnknownField, BadQuantity) as error:
            raise BadContainer("CreateContainerConfigError", str(error)) from error
        for key, kind in (("configMapKeyRef", ConfigMap), ("secretKeyRef", Secret)):
            reference = held.get(key)
            if reference:
                optional = bool(reference.get("optional"))
                data = await self._data(pod, kind, str(reference.get("name")), optional)
                name = str(reference.get("key"))
                if name not in data and not optional:
                    raise BadContainer(
                        "CreateContainerConfigError",
                        f"couldn't find key {name} in {kind.__name__} {pod.namespace}/{reference.get('name')}",
                    )
                return _text(kind, data[name]) if name in data else None
        raise _unknown("valueFrom", held)

    async def _data(
        self, pod: Pod, kind: type[ConfigMap] | type[Secret], name: str, optional: bool
    ) -> Mapping[str, str]:
        """As the object has it. Thousands of variables may be of one object: each takes no more than its own of it."""
        found = await self._fetch.shared(kind, name, pod)
        if found is None:
            if optional:
                return {}
            shown = kind.__name__.lower()
            raise BadContainer("CreateContainerConfigError", f'{shown} "{name}" not found')
        data: Mapping[str, str] = found.data
        return data


def _text(kind: type[ConfigMap] | type[Secret], held: str) -> str:
    return base64.b64decode(held).decode(errors="replace") if kind is Secret else held


def _unknown(where: str, source: Mapping[str, Any]) -> BadContainer:
    """Nothing runs with a part of its configuration."""
    named = ", ".join(sorted(name for name in source if name != "prefix")) or "nothing"
    return BadContainer("CreateContainerConfigError", f"{where}: {named} is not read by this node agent")


async def _asked(path: Path, what: str, question: Callable[[], R]) -> R:
    try:
        return await probe(path, what, question)
    except DoesNotAnswer as error:
        raise BadContainer("CreateContainerError", str(error)) from None


def _is_written_by_agent(use: VolumeUse) -> bool:
    """Secrets and the like: a process that could write there would direct the agent's own writes. But other volumes may
    be mounted in them, for which the container's first process makes the places."""
    return isinstance(use.source, PlainSource) and use.source.plugin in OF_OBJECTS


def _is_of_host(use: VolumeUse) -> bool:
    """A pod that may mount a directory of the host, such as /dev, finds the devices that are there. In any other
    volume they are of no use: they could be the disks of other pods."""
    return isinstance(use.source, PlainSource) and use.source.body.volume.host_path is not None


def _read_only_names(pod: Pod) -> Set[str]:
    """As the pod says of a volume under each name, for it may have another one."""
    held = {one.name: one.persistent_volume_claim or one.csi for one in pod.spec.volumes}
    return {name for name, source in held.items() if source is not None and source.read_only}


def hostname_of(pod: Pod) -> str:
    """A pod may have a longer name than a host; what is left of it must be a host's name as well."""
    return (pod.spec.hostname_override or pod.spec.hostname or pod.name)[:_HOSTNAME_MAX].rstrip("-.")


def _ensure_propagates(path: Path, wanted: str) -> None:
    """Mounts travel between host and container only through a shared mount. A volume's own mount is made one; a
    directory of the host depends on the mount that it lies on, which is not ours to change."""
    real = os.path.realpath(path)
    top = mountinfo.mount_at(real)
    if top is not None:
        if not any(word.startswith("shared:") for word in top.propagation):
            libc.mount("none", real, "", _MS_SHARED, "")
        return
    around = mountinfo.mount_containing(real)
    shared = any(word.startswith("shared:") for word in around.propagation)
    followed = any(word.startswith("master:") for word in around.propagation)
    if not shared and not (followed and wanted == "HostToContainer"):
        raise BadContainer(
            "CreateContainerError", f"path {path} is mounted on {around.target}, which is not a shared mount"
        )
