"""Where things lie below the agent's root directory: the same paths that a kubelet uses.

Owns: every path, as pure functions of names. Nothing here touches the disk.
Start reading at: `Layout`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

PodUid = NewType("PodUid", str)
VolumeName = NewType("VolumeName", str)

CSI_PLUGIN = "kubernetes.io/csi"
_ESCAPED_CSI = "kubernetes.io~csi"


def escaped(plugin: str) -> str:
    """A plugin's name as a directory name."""
    return plugin.replace("/", "~")


def unescaped(directory: str) -> str:
    return directory.replace("~", "/")


def csi_volume_name(driver: str, handle: str) -> VolumeName:
    """The unique name of a CSI volume that has a PersistentVolume."""
    return VolumeName(f"{CSI_PLUGIN}/{driver}^{handle}")


def pod_volume_name(plugin: str, uid: str, spec_name: str) -> VolumeName:
    """The unique name of a volume that lives and dies with one pod."""
    return VolumeName(f"{plugin}/{uid}-{spec_name}")


def attachment_name(driver: str, handle: str, node: str) -> str:
    """The VolumeAttachment that attaches a CSI volume to a node."""
    return "csi-" + hashlib.sha256(f"{handle}{driver}{node}".encode()).hexdigest()


def ephemeral_handle(uid: str, pod_volume: str) -> str:
    """The volume handle of an inline CSI volume."""
    return "csi-" + hashlib.sha256(f"{uid}{pod_volume}".encode()).hexdigest()


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
        return self.root.joinpath("pods", uid)

    def volumes_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", uid, "volumes")

    def devices_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", uid, "volumeDevices")

    def subpaths_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", uid, "volume-subpaths")

    def containers_of(self, uid: str) -> Path:
        return self.root.joinpath("pods", uid, "containers")

    def plain_volume(self, uid: str, plugin: str, name: str) -> Path:
        """The directory of a secret, configMap, emptyDir and so on."""
        return self.volumes_of(uid) / escaped(plugin) / name

    def csi_volume(self, uid: str, spec_name: str) -> Path:
        """Holds `mount` and `vol_data.json` of one pod's CSI volume."""
        return self.root.joinpath("pods", uid, "volumes", _ESCAPED_CSI, spec_name)

    def publish_target(self, uid: str, spec_name: str) -> Path:
        return self.root.joinpath("pods", uid, "volumes", _ESCAPED_CSI, spec_name, "mount")

    def staging(self, driver: str, handle: str) -> Path:
        """Holds `globalmount` and `vol_data.json` of a staged volume."""
        return self.root.joinpath("plugins", CSI_PLUGIN, driver, hashlib.sha256(handle.encode()).hexdigest())

    def staging_target(self, driver: str, handle: str) -> Path:
        return self.staging(driver, handle) / "globalmount"

    @property
    def block_devices(self) -> Path:
        return self.plugins / CSI_PLUGIN / "volumeDevices"

    def block_data(self, spec_name: str) -> Path:
        """Holds `vol_data.json` of a block volume."""
        return self.block_devices / spec_name / "data"

    def block_map(self, spec_name: str, uid: str) -> Path:
        """The device as a file, one for each pod."""
        return self.block_devices / spec_name / "dev" / uid

    def block_staging(self, spec_name: str) -> Path:
        return self.block_devices / "staging" / spec_name

    def block_publish(self, spec_name: str, uid: str) -> Path:
        return self.block_devices / "publish" / spec_name / uid

    def block_link(self, uid: str, spec_name: str) -> Path:
        return self.devices_of(uid) / _ESCAPED_CSI / spec_name
