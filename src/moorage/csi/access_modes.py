"""Kubernetes access modes and volume modes as CSI volume capabilities.

Owns: the mapping table and its errors. The provisioner sends one capability per mode of the claim. The attacher and the
resizer send one for the whole set of the volume, and the node agent sends one for the first mode of the volume.
Start reading at: `mode_of`, `capability_of`, `capabilities_per_mode`.
"""

from collections.abc import Iterable, Sequence

from moorage.csi.errors import InvalidAccessModes
from moorage.csi.generated import csi_pb2 as pb

_Mode = pb.VolumeCapability.AccessMode

RWO, RWX, ROX, RWOP = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"


def mode_of(modes: Iterable[str], single_node_multi_writer: bool) -> "_Mode.Mode.ValueType":
    """Return the CSI access mode of a set of Kubernetes access modes. Raises InvalidAccessModes if it has none."""
    wanted = set(modes)
    unknown = wanted - {RWO, RWX, ROX, RWOP}
    if unknown or not wanted:
        raise InvalidAccessModes(f"access modes {sorted(wanted)}: want one or more of {RWO}, {RWX}, {ROX}, {RWOP}")
    if RWOP in wanted:
        if len(wanted) > 1:
            raise InvalidAccessModes(f"access mode {RWOP} cannot be combined with {sorted(wanted - {RWOP})}")
        return _Mode.SINGLE_NODE_SINGLE_WRITER if single_node_multi_writer else _Mode.SINGLE_NODE_WRITER
    if RWX in wanted:
        return _Mode.MULTI_NODE_MULTI_WRITER
    if wanted == {ROX, RWO}:
        raise InvalidAccessModes(f"access modes {ROX} and {RWO} together have no CSI access mode")
    if ROX in wanted:
        return _Mode.MULTI_NODE_READER_ONLY
    return _Mode.SINGLE_NODE_MULTI_WRITER if single_node_multi_writer else _Mode.SINGLE_NODE_WRITER


def capabilities_per_mode(
    modes: Sequence[str], is_block: bool, fs_type: str, mount_flags: Sequence[str], single_node_multi_writer: bool
) -> list[pb.VolumeCapability]:
    """Return one capability per access mode of a claim, in the claim's order."""
    if RWOP in modes and len(set(modes)) > 1:
        raise InvalidAccessModes(f"access mode {RWOP} cannot be combined with others, and the claim has {list(modes)}")
    return [
        capability_of([mode], is_block, fs_type, mount_flags, single_node_multi_writer) for mode in dict.fromkeys(modes)
    ]


def capability_of(
    modes: Iterable[str], is_block: bool, fs_type: str, mount_flags: Sequence[str], single_node_multi_writer: bool
) -> pb.VolumeCapability:
    """Return the one capability of a volume with these access modes."""
    access = _Mode(mode=mode_of(modes, single_node_multi_writer))
    if is_block:
        return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=access)
    mount = pb.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=list(mount_flags))
    return pb.VolumeCapability(mount=mount, access_mode=access)
