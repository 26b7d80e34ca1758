"""Volumes that are directories: the smallest driver that works. Sizes are recorded, not enforced.

Run it: python examples/drivers/folders.py --endpoint unix:///tmp/folders/csi.sock --state-dir /tmp/folders/state
"""

from pathlib import Path

from moorage.sdk import CreateVolume, Driver, Expanded, NodeVolume, PublishTarget, SizeRange, Volume
from moorage.sdk.backends import remove_directory


class Folders(Driver):
    """A CSI driver whose volumes are directories of this machine."""

    name = "folders.example.org"

    async def setup(self) -> None:
        self.root = Path(self.environment.options.get("root", self.environment.state_dir / "data"))
        self.root.mkdir(parents=True, exist_ok=True)

    def create_volume(self, request: CreateVolume) -> Volume:
        (self.root / request.volume_id).mkdir(exist_ok=True)
        return request.volume(request.size.choose(default=self.default_size_bytes), topology=[self.topology()])

    def delete_volume(self, volume_id: str) -> None:
        remove_directory(self.root / volume_id)

    def expand_volume(self, volume: Volume, size: SizeRange) -> Expanded:
        return Expanded(size.required)

    def topology(self) -> dict[str, str]:
        return {f"topology.{self.name}/node": self.environment.node_id}

    def publish(self, volume: NodeVolume, target: PublishTarget) -> None:
        target.bind(self.root / volume.id)


if __name__ == "__main__":
    Folders().main()
