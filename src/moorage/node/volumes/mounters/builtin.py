"""Volumes that the agent makes itself: emptyDir, secret, configMap, projected, downwardAPI, hostPath.

Owns: their directories below the pod, and a tmpfs for what must not reach a disk, by way of swap neither.
Start reading at: `PlainMounter.publish`.
"""

import base64
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moorage.errors import MoorageError
from moorage.host import mountinfo, mounts
from moorage.host.errors import HostError
from moorage.host.hung_paths import DoesNotAnswer, probe
from moorage.host.safe_remove import remove_empty_tree, remove_empty_up_to, remove_tree
from moorage.host.threads import in_thread
from moorage.kube.objects.core import ConfigMap, Secret
from moorage.kube.objects.pods import KeyToPath, Pod, PodVolume
from moorage.kube.quantity import Quantity
from moorage.log import get_logger
from moorage.node import downward as fields
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.mounters import ownership
from moorage.node.volumes.mounters.payload import File, write_payload
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import ActualVolume, MountState, PlainSource, StepFailure, VolumeUse

log = get_logger(__name__)

_TMPFS_SOURCE = "moorage-volume"
_IN_MEMORY = frozenset({"kubernetes.io/secret", "kubernetes.io/projected"})
_OURS = _IN_MEMORY | {"kubernetes.io/empty-dir", "kubernetes.io/configmap", "kubernetes.io/downward-api"}
_DEFAULT_MODE = 0o644
_CHECKS = {
    "Directory": stat.S_ISDIR,
    "File": stat.S_ISREG,
    "Socket": stat.S_ISSOCK,
    "CharDevice": stat.S_ISCHR,
    "BlockDevice": stat.S_ISBLK,
}


@dataclass(frozen=True, slots=True)
class PlainBody:
    """The volume as the pod has it."""

    volume: PodVolume
    pod: Pod


# What the agent fills with the content of objects, and again when they change.
OF_OBJECTS = frozenset(f"kubernetes.io/{kind}" for kind in ("secret", "configmap", "projected", "downward-api"))


def plugin_of(volume: PodVolume) -> str:
    """The plugin that makes a plain volume; empty for claims, CSI and kinds that this agent does not make."""
    kinds = (
        ("kubernetes.io/empty-dir", volume.empty_dir),
        ("kubernetes.io/secret", volume.secret),
        ("kubernetes.io/configmap", volume.config_map),
        ("kubernetes.io/projected", volume.projected),
        ("kubernetes.io/downward-api", volume.downward_api),
        ("kubernetes.io/host-path", volume.host_path),
    )
    return next((name for name, body in kinds if body is not None), "")


class PlainMounter:
    """Volumes without a driver."""

    def __init__(self, layout: NodeLayout, fetch: Fetch) -> None:
        self._layout = layout
        self._fetch = fetch
        self._no_swap = ["noswap"]  # empty once the kernel has refused it

    async def stage(self, use: VolumeUse, is_staged: bool, is_reconstructed: bool) -> None:
        """There is no device."""

    async def publish(self, use: VolumeUse, state: MountState, may_be_used: bool) -> None:
        source = _plain(use.source)
        body: PlainBody = source.body
        if source.plugin == "kubernetes.io/host-path":
            await _look_at_host_path(body.volume)
            return
        directory = self._layout.plain_volume(use.pod.uid, source.plugin, source.spec_name)
        payload = await self._payload(use, body) if source.plugin != "kubernetes.io/empty-dir" else None
        try:
            await in_thread(self._make, use, source, directory, payload)
        except (MoorageError, OSError) as error:  # a part of it may be there, and has to go with the pod
            raise StepFailed(StepFailure.UNCERTAIN, "pod", str(error)) from error

    async def unpublish(self, volume: ActualVolume, uid: PodUid) -> None:
        source = _plain(volume.source)
        self._fetch.forget_pod(uid)
        if source.plugin == "kubernetes.io/host-path":
            return
        directory = self._layout.plain_volume(uid, source.plugin, source.spec_name)
        # Of other plugins, found where a kubelet worked before, only the empty directory is removed.
        await in_thread(_remove if source.plugin in _OURS else remove_empty_tree, directory)
        remove_empty_up_to(directory.parent, self._layout.pod(uid))

    async def unstage(self, volume: ActualVolume) -> None:
        """There is no device."""

    def _make(self, use: VolumeUse, source: PlainSource, directory: Path, payload: dict[str, File] | None) -> None:
        empty = source.body.volume.empty_dir
        in_memory = source.plugin in _IN_MEMORY or (empty is not None and empty.medium == "Memory")
        if in_memory and mountinfo.mount_at(directory) is None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            limit = empty.size_limit if empty is not None else None
            size = [f"size={Quantity.parse(limit).value}"] if limit else []
            # The group at once, not in a second step: what exists is complete.
            group = ["mode=0777"] if use.fs_group is None else ["mode=02777", f"gid={use.fs_group}"]
            self._mount_tmpfs(directory, [*group, "nodev", "nosuid", *size])
        if payload is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            write_payload(directory, payload, use.fs_group)
        elif not in_memory and not directory.is_dir():
            _make_empty(directory, use.fs_group)

    def _mount_tmpfs(self, directory: Path, options: list[str]) -> None:
        """Kernels before 6.4 do not know how to keep a tmpfs from being swapped out, and none does so in a user
        namespace."""
        try:
            mounts.mount(_TMPFS_SOURCE, directory, "tmpfs", [*options, *self._no_swap])
        except HostError as error:
            if error.errno != errno.EINVAL or not self._no_swap:
                raise
            mounts.mount(_TMPFS_SOURCE, directory, "tmpfs", options)
            self._no_swap = []
            log.warning("volumes in memory may be swapped out: the kernel knows no tmpfs without swap")

    async def _payload(self, use: VolumeUse, body: PlainBody) -> dict[str, File]:
        volume, pod = body.volume, body.pod
        if volume.secret is not None:
            secret = volume.secret
            mode = _mode_or(secret.default_mode, _DEFAULT_MODE)
            return await self._secret(pod, secret.secret_name, secret.items, mode, secret.optional)
        if volume.config_map is not None:
            config = volume.config_map
            mode = _mode_or(config.default_mode, _DEFAULT_MODE)
            return await self._config_map(pod, config.name, config.items, mode, config.optional)
        if volume.downward_api is not None:
            mode = _mode_or(volume.downward_api.get("defaultMode"), _DEFAULT_MODE)
            return _downward(pod, volume.downward_api, mode)
        projected = volume.projected or {}
        mode = _mode_or(projected.get("defaultMode"), _DEFAULT_MODE)
        files: dict[str, File] = {}
        for part in projected.get("sources") or []:
            files |= await self._projected(use, pod, part, mode)
        return files

    async def _projected(self, use: VolumeUse, pod: Pod, part: dict[str, Any], mode: int) -> dict[str, File]:
        if (token := part.get("serviceAccountToken")) is not None:
            text, _ = await self._fetch.token(
                use.pod, str(token.get("audience") or ""), int(token.get("expirationSeconds") or 3600)
            )
            uid = _only_user(pod)
            is_ones_own = uid is not None or use.fs_group is not None
            return {str(token.get("path")): File(text.encode(), 0o600 if is_ones_own else mode, uid)}
        if (held := part.get("secret")) is not None:
            return await self._secret(pod, held.get("name", ""), _items(held), mode, bool(held.get("optional")))
        if (held := part.get("configMap")) is not None:
            return await self._config_map(pod, held.get("name", ""), _items(held), mode, bool(held.get("optional")))
        if (held := part.get("downwardAPI")) is not None:
            return _downward(pod, held, mode)
        others = ", ".join(kind for kind, held in part.items() if held is not None)
        if others:
            raise StepFailed(StepFailure.TRANSIENT, "pod", f"projected source {others} is not made by this node agent")
        return {}  # a source of nothing is allowed

    async def _secret(self, pod: Pod, name: str, items: list[KeyToPath], mode: int, optional: bool) -> dict[str, File]:
        found: Secret | None = await self._fetch.shared(Secret, name, pod)
        if found is None:
            return _missing(f"secret {pod.namespace}/{name}", optional)
        data = {key: base64.b64decode(value) for key, value in found.data.items()}
        return _chosen(f"secret {found.key}", data, items, mode, optional)

    async def _config_map(
        self, pod: Pod, name: str, items: list[KeyToPath], mode: int, optional: bool
    ) -> dict[str, File]:
        found: ConfigMap | None = await self._fetch.shared(ConfigMap, name, pod)
        if found is None:
            return _missing(f"configmap {pod.namespace}/{name}", optional)
        data = {key: value.encode() for key, value in found.data.items()}
        data |= {key: base64.b64decode(value) for key, value in found.binary_data.items()}
        return _chosen(f"configmap {found.key}", data, items, mode, optional)


def _missing(what: str, optional: bool) -> dict[str, File]:
    if optional:
        return {}
    raise StepFailed(StepFailure.TRANSIENT, "pod", f"{what} not found")


def _chosen(what: str, data: dict[str, bytes], items: list[KeyToPath], mode: int, optional: bool) -> dict[str, File]:
    if not items:
        return {key: File(content, mode) for key, content in data.items()}
    files = {}
    for item in items:
        if item.key not in data:
            if optional:
                continue
            raise StepFailed(StepFailure.TRANSIENT, "pod", f"{what} has no key {item.key!r}")
        files[item.path] = File(data[item.key], _mode_or(item.mode, mode))
    return files


def _downward(pod: Pod, body: dict[str, Any], mode: int) -> dict[str, File]:
    files = {}
    for item in body.get("items") or []:
        if item.get("fieldRef"):
            text = fields.field_of(pod, item["fieldRef"].get("fieldPath", ""))
        else:
            text = fields.resource_of(pod, item.get("resourceFieldRef") or {})
        files[str(item.get("path"))] = File(text.encode(), _mode_or(item.get("mode"), mode))
    return files


def _mode_or(mode: int | None, default: int) -> int:
    return default if mode is None else mode


def _only_user(pod: Pod) -> int | None:
    """The user that every container of the pod runs as; None where they differ, or where it is left to an image."""
    security = pod.spec.security_context
    of_pod = security.run_as_user if security is not None else None
    users = set()
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        own = (container.security_context or {}).get("runAsUser")
        users.add(of_pod if own is None else own)
    return users.pop() if len(users) == 1 else None


def _items(body: dict[str, Any]) -> list[KeyToPath]:
    return [
        KeyToPath(key=one.get("key", ""), path=one.get("path", ""), mode=one.get("mode"))
        for one in body.get("items") or []
    ]


def _make_empty(directory: Path, gid: int | None) -> None:
    """An emptyDir open to all, under its name only when it is complete: one that is there is the pod's own, and what
    the pod did to its mode and owner is not undone after a restart of the agent."""
    fresh = directory.with_name(f".{directory.name}.new")
    fresh.mkdir(parents=True, exist_ok=True)
    fresh.chmod(0o777)
    if gid is not None:
        ownership.apply_group(fresh, gid)
    fresh.rename(directory)


def _remove(directory: Path) -> None:
    """Take our own tmpfs away, then the directory; any other mount in it is an error and nothing is removed."""
    top = mountinfo.mount_at(directory)
    if top is not None and top.source == _TMPFS_SOURCE and top.fstype == "tmpfs":
        mounts.unmount(directory)
    remove_tree(directory)


async def _look_at_host_path(volume: PodVolume) -> None:
    assert volume.host_path is not None
    path, kind = Path(volume.host_path.path), volume.host_path.type
    try:
        await probe(path, f"is it {kind or 'there'}", lambda: _check_host_path(path, kind))
    except DoesNotAnswer as error:
        raise StepFailed(StepFailure.TRANSIENT, "pod", f"hostPath {error}") from None


def _check_host_path(path: Path, kind: str) -> None:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
    elif kind == "FileOrCreate":
        path.touch(mode=0o644, exist_ok=True)
    elif kind in _CHECKS:
        try:
            fits = _CHECKS[kind](os.stat(path).st_mode)
        except OSError:
            fits = False
        if not fits:
            raise StepFailed(StepFailure.TRANSIENT, "pod", f"hostPath type check failed: {path} is not a {kind}")
    elif not path.exists():
        path.mkdir(parents=True, mode=0o755)


def _plain(source: object) -> PlainSource:
    if not isinstance(source, PlainSource):
        raise MoorageError(f"{source!r} is no plain volume")
    return source
