"""The class that driver authors subclass.

Owns: the hooks, and which of them a driver defines.
Start reading at: `Driver`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from moorage.sdk.model import (
    Access,
    Attachment,
    Capacity,
    CreateGroup,
    CreateSnapshot,
    CreateVolume,
    Expanded,
    Group,
    Health,
    NodeVolume,
    Secrets,
    SizeRange,
    Snapshot,
    Stats,
    StorageHealth,
    Volume,
)
from moorage.sdk.operations import Answer, Blocks, secrets_of_call
from moorage.sdk.targets import PublishTarget, StagingTarget

Hook = TypeVar("Hook", bound=Callable[..., Any])
_OPTIONAL = "_moorage_optional"


def _optional(hook: Hook) -> Hook:
    """Mark a hook of the base class: a driver that does not define it does not offer it."""
    setattr(hook, _OPTIONAL, True)
    return hook


@dataclass(frozen=True)
class Environment:
    """Where a driver runs: what its command line said."""

    node_id: str = ""
    state_dir: Path = Path()
    services: frozenset[str] = frozenset({"controller", "node"})
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def serves_controller(self) -> bool:
        return "controller" in self.services

    @property
    def serves_node(self) -> bool:
        return "node" in self.services


class Driver:
    """A CSI driver. Define the hooks that your storage can carry out; the library does the rest.

    The class has more public methods than is usual, because they are all that an author may define, in one place.

    A hook may be `async def` or `def`; the latter runs in a thread. The library checks requests before it calls a hook,
    calls no hook twice at the same time for one volume, and keeps records of volumes and snapshots in the state
    directory. A hook may be called again after a crash, so it must accept that its work was half done.
    Raise the errors of `moorage.sdk`; any other exception is reported as INTERNAL and logged with its traceback.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "0.1.0"
    default_size_bytes: ClassVar[int] = 1 << 30
    max_volumes_per_node: ClassVar[int] = 0
    supports_block: ClassVar[bool] = False
    supports_multi_node: ClassVar[bool] = False
    """Whether several nodes may write to a volume at a time."""
    supports_mount_group: ClassVar[bool] = False
    """Whether `publish` gives the files to the group `volume.access.mount_group`."""
    announces_alpha: ClassVar[bool] = False
    """Whether capabilities that are alpha in CSI 1.13 are announced; their calls are served either way."""
    supports_ephemeral: ClassVar[bool] = False
    """Whether `publish` makes volumes that live with their pod (`volume.is_ephemeral`); `unpublish` removes them."""

    environment: Environment = Environment()

    @property
    def secrets(self) -> Secrets:
        """The secrets of the request for which the running hook was called."""
        return secrets_of_call.get() or Secrets()

    # --- life --------------------------------------------------------------------------------------------------------

    def setup(self) -> Answer[None]:
        """Prepare the driver before the first call; `self.environment` says where it runs."""

    def close(self) -> Answer[None]:
        """Release what `setup` has taken, after the last call."""

    def is_ready(self) -> Answer[bool]:
        """Return whether the driver can serve now. It is asked often and must be quick."""
        return True

    # --- the controller ----------------------------------------------------------------------------------------------

    @_optional
    def create_volume(self, request: CreateVolume) -> Answer[Volume]:
        """Make a volume and return it, usually with `request.volume(size)`."""
        raise NotImplementedError

    @_optional
    def delete_volume(self, volume_id: str) -> Answer[None]:
        """Remove a volume and its data. If it does not exist, that is fine."""
        raise NotImplementedError

    @_optional
    def copy_volume(self, request: CreateVolume) -> Answer[Volume]:
        """Make a volume from `request.source`, a volume or a snapshot that exists."""
        raise NotImplementedError

    @_optional
    def find_volume(self, volume_id: str) -> Answer[Volume | None]:
        """Return a volume, None if it does not exist. Define this and `list_volumes` if your storage keeps records."""
        raise NotImplementedError

    @_optional
    def list_volumes(self) -> Answer[Iterable[Volume]]:
        """Return every volume; the library sorts and pages."""
        raise NotImplementedError

    @_optional
    def capacity(self, parameters: Mapping[str, str], segments: Mapping[str, str]) -> Answer[Capacity]:
        """Return how much can be provisioned with these parameters in this place."""
        raise NotImplementedError

    @_optional
    def expand_volume(self, volume: Volume, size: SizeRange) -> Answer[Expanded]:
        """Make a volume larger. One that is large enough already is returned as it is without calling this."""
        raise NotImplementedError

    @_optional
    def modify_volume(self, volume: Volume, parameters: Mapping[str, str]) -> Answer[None]:
        """Apply the parameters of a VolumeAttributesClass to a volume."""
        raise NotImplementedError

    @_optional
    def volume_health(self, volume: Volume) -> Answer[Sequence[Health]]:
        """Return what is wrong with a volume; nothing means that it is healthy."""
        raise NotImplementedError

    @_optional
    def attach(self, volume: Volume, node_id: str, access: Access, is_read_only: bool) -> Answer[Attachment]:
        """Make a volume available on a node. The library refuses a second node for single-node access."""
        raise NotImplementedError

    @_optional
    def detach(self, volume_id: str, node_id: str) -> Answer[None]:
        """Undo `attach`. If the volume is not attached there, that is fine."""
        raise NotImplementedError

    def has_node(self, node_id: str) -> Answer[bool]:
        """Return whether volumes can be attached to this node."""
        return bool(node_id)

    @_optional
    def create_snapshot(self, request: CreateSnapshot) -> Answer[Snapshot]:
        """Take a snapshot and return it, usually with `request.snapshot()`."""
        raise NotImplementedError

    @_optional
    def delete_snapshot(self, snapshot_id: str) -> Answer[None]:
        """Remove a snapshot. If it does not exist, that is fine."""
        raise NotImplementedError

    @_optional
    def create_group(self, request: CreateGroup) -> Answer[Group]:
        """Take snapshots of several volumes at one moment."""
        raise NotImplementedError

    @_optional
    def delete_group(self, group_id: str, snapshot_ids: Sequence[str]) -> Answer[None]:
        """Remove a group snapshot and its members."""
        raise NotImplementedError

    @_optional
    def allocated_blocks(self, snapshot: Snapshot, offset: int) -> Blocks:
        """Yield the ranges of a snapshot that hold data, from an offset on, in order."""
        raise NotImplementedError

    @_optional
    def changed_blocks(self, base: Snapshot, target: Snapshot, offset: int) -> Blocks:
        """Yield the ranges in which two snapshots of one volume differ, from an offset on, in order."""
        raise NotImplementedError

    # --- the node ----------------------------------------------------------------------------------------------------

    @_optional
    def stage(self, volume: NodeVolume, target: StagingTarget) -> Answer[None]:
        """Prepare a volume for all pods of this node. Not called while something is mounted at the target."""
        raise NotImplementedError

    @_optional
    def unstage(self, volume_id: str, path: Path) -> Answer[None]:
        """Undo `stage`. The library has unmounted the path by then and removes it afterwards."""
        raise NotImplementedError

    @_optional
    def publish(self, volume: NodeVolume, target: PublishTarget) -> Answer[None]:
        """Mount a volume at the target, usually with `target.bind(source)`."""
        raise NotImplementedError

    @_optional
    def unpublish(self, volume_id: str, path: Path) -> Answer[None]:
        """Undo what `publish` did beyond the mount, which the library removes."""
        raise NotImplementedError

    @_optional
    def node_health(self, volume_id: str, paths: Sequence[Path]) -> Answer[Sequence[Health]]:
        """Return what is wrong with a volume on this node, at the paths at which it is staged or published."""
        raise NotImplementedError

    @_optional
    def storage_health(self) -> Answer[Sequence[StorageHealth]]:
        """Return what is wrong with the storage as a whole, seen from this node."""
        raise NotImplementedError

    @_optional
    def stats(self, volume_id: str, path: Path) -> Answer[Stats]:
        """Return how full a published volume is. Without this the library asks the filesystem."""
        raise NotImplementedError

    @_optional
    def expand_on_node(self, volume_id: str, path: Path, size: SizeRange) -> Answer[int]:
        """Grow what is mounted at a path after `expand_volume`; returns the size in bytes."""
        raise NotImplementedError

    def topology(self) -> Mapping[str, str]:
        """Return where this node is. Volumes with a `topology` are used only on nodes that match it."""
        return {}

    # --- running -----------------------------------------------------------------------------------------------------

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Run the driver as a command until SIGTERM or SIGINT; see `--help`."""
        from moorage.sdk.command import main  # loads grpc

        main(self, argv)

    @classmethod
    def defines(cls, *hooks: str) -> bool:
        """Return whether the driver defines all of these hooks."""
        return not any(hasattr(getattr(cls, hook), _OPTIONAL) for hook in hooks)
