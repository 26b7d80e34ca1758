"""Where things lie below the agent's root directory: the same paths that a kubelet uses.

Owns: every path, as pure functions of names. A name that would lead elsewhere raises UnsafeName.
Start reading at: `NodeLayout`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from moorage.kube.names import CSI_PLUGIN
from moorage.kube.volumes import VolumeName
from moorage.node.safe_names import component

PodUid = NewType("PodUid", str)

_ESCAPED_CSI = "kubernetes.io~csi"


def escaped(plugin: str) -> str:
    """A plugin's name as a directory name."""
    return plugin.replace("/", "~")


def unescaped(directory: str) -> str:
    return directory.replace("~", "/")


def pod_volume_name(plugin: str, uid: str, spec_name: str) -> VolumeName:
    """The unique name of a volume that lives and dies with one pod."""
    return VolumeName(f"{plugin}/{uid}-{spec_name}")


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """All paths of one agent; two agents on one machine have two roots and share nothing."""

    root: Path

    @property
    def registry(self) -> Path:
        """Plugins announce themselves with a socket in here."""
        return self.root / "plugins_registry"

    @property
    def plugins(self) -> Path:
        return self.root / "plugins"

    @property
    def pods(self) -> Path:
        return self.root / "pods"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Files of the running agent: its certificate, its lock."""
        return self.root / "agent"

    def pod(self, uid: str) -> Path:
        return self.root.joinpath("pods", component(uid))

    def volumes_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", component(uid), "volumes")

    def devices_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", component(uid), "volumeDevices")

    def subpaths_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", component(uid), "volume-subpaths")

    def containers_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", component(uid), "containers")

    def attempt(self, uid: str, container: str, number: int) -> Path:
        """Holds the specification and the state of one attempt at a container."""
        return self.containers_of(uid).joinpath(component(container), str(number))

    def log_file(self, namespace: str, pod: str, uid: str, container: str, number: int) -> Path:
        return self.logs.joinpath(component(f"{namespace}_{pod}_{uid}"), component(container), f"{number}.log")

    def plain_volume(self, uid: str, plugin: str, name: str) -> Path:
        """The directory of a secret, configMap, emptyDir and so on."""
        return self.volumes_of(uid) / component(escaped(plugin)) / component(name)

    def csi_volume(self, uid: str, spec_name: str) -> Path:
        """Holds `mount` and `vol_data.json` of one pod's CSI volume."""
        return self.root.joinpath("pods", component(uid), "volumes", _ESCAPED_CSI, component(spec_name))

    def publish_target(self, uid: str, spec_name: str) -> Path:
        return self.root.joinpath("pods", component(uid), "volumes", _ESCAPED_CSI, component(spec_name), "mount")

    def staging(self, driver: str, handle: str) -> Path:
        """Holds `globalmount` and `vol_data.json` of a staged volume."""
        handle_hash = hashlib.sha256(handle.encode()).hexdigest()
        return self.root.joinpath("plugins", CSI_PLUGIN, component(driver), handle_hash)

    def staging_target(self, driver: str, handle: str) -> Path:
        return self.staging(driver, handle) / "globalmount"

    @property
    def block_devices(self) -> Path:
        return self.plugins / CSI_PLUGIN / "volumeDevices"

    def block_data(self, spec_name: str) -> Path:
        """Holds `vol_data.json` of a block volume."""
        return self.block_devices / component(spec_name) / "data"

    def block_map(self, spec_name: str, uid: str) -> Path:
        """The device as a file, one for each pod."""
        return self.block_devices / component(spec_name) / "dev" / component(uid)

    def block_staging(self, spec_name: str) -> Path:
        return self.block_devices / "staging" / component(spec_name)

    def block_publish(self, spec_name: str, uid: str) -> Path:
        return self.block_devices / "publish" / component(spec_name) / component(uid)

    def block_link(self, uid: str, spec_name: str) -> Path:
        return self.devices_of(uid) / _ESCAPED_CSI / component(spec_name)
