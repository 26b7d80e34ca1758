"""Volumes that are subdirectories of a mounted remote filesystem, usable on many nodes at a time.

The remote filesystem (NFS, CephFS, GlusterFS, JuiceFS, sshfs …) is mounted once on each node, by the driver or before.
Run it: python examples/drivers/remote.py --endpoint unix:///tmp/remote/csi.sock --state-dir /tmp/remote/state \
    --option root=/mnt/shared
or let it mount the filesystem itself, with the helper of its type:
    --option type=glusterfs --option source=server:/volume --option flags=log-level=ERROR
"""

import os
import subprocess
from pathlib import Path

from moorage.sdk import (
    Capacity,
    CreateVolume,
    Driver,
    Expanded,
    Health,
    HealthKind,
    InvalidArgument,
    NodeVolume,
    NotFound,
    PublishTarget,
    SizeRange,
    Unavailable,
    Volume,
)
from moorage.sdk.backends import remove_directory


class Remote(Driver):
    """A CSI driver whose volumes are directories of a remote filesystem."""

    name = "remote.example.org"
    supports_multi_node = True

    async def setup(self) -> None:
        options = self.environment.options
        self.root = Path(options.get("root", self.environment.state_dir / "mnt"))
        self.mounted = ""
        if "type" in options:
            self.root.mkdir(parents=True, exist_ok=True)
            if not self.root.is_mount():
                flags = ["-o", options["flags"]] if options.get("flags") else []
                subprocess.run(
                    ["mount", "-t", options["type"], *flags, options["source"], str(self.root)], check=True, timeout=60
                )
        elif not self.root.is_dir():
            raise Unavailable(f"{self.root} is not there; mount the remote filesystem first, or give --option type=…")

    async def close(self) -> None:
        if "type" in self.environment.options:
            subprocess.run(["umount", "--lazy", str(self.root)], check=False, timeout=60)

    def folder(self, volume_id: str) -> Path:
        return self.root / "volumes" / volume_id

    def create_volume(self, request: CreateVolume) -> Volume:
        mode = request.parameters.get("mode", "0770")
        try:
            bits = int(mode, 8)
        except ValueError:
            raise InvalidArgument(f"parameters: mode {mode!r} is not an octal number") from None
        folder = self.folder(request.volume_id)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(bits & 0o7777)
        return request.volume(request.size.choose(default=self.default_size_bytes))

    def delete_volume(self, volume_id: str) -> None:
        remove_directory(self.folder(volume_id))

    def expand_volume(self, volume: Volume, size: SizeRange) -> Expanded:
        return Expanded(size.required)

    def capacity(self, parameters: object, segments: object) -> Capacity:
        found = os.statvfs(self.root)
        return Capacity(found.f_bavail * found.f_frsize)

    def volume_health(self, volume: Volume) -> list[Health]:
        if self.folder(volume.id).is_dir():
            return []
        return [Health("the directory of the volume is gone", "DirectoryMissing", HealthKind.DATA_LOSS)]

    def publish(self, volume: NodeVolume, target: PublishTarget) -> None:
        folder = self.folder(volume.id)
        if not folder.is_dir():
            raise NotFound(f"there is no volume {volume.id} in {self.root}")
        target.bind(folder)


if __name__ == "__main__":
    Remote().main()
