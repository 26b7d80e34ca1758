"""Kubernetes access modes and volume modes as CSI volume capabilities.

Owns: the mapping table and its errors. The provisioner sends one capability per mode of the claim; attacher and
resizer send a single one for the whole set of the volume.
Start reading at: `capability_of`, `capabilities_per_mode`.
"""

from collections.abc import Iterable, Sequence

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import VolumeSpec
from moorage.sidecars.errors import BadParameters

_Mode = pb.VolumeCapability.AccessMode

RWO, RWX, ROX, RWOP = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"


def mode_of(modes: Iterable[str], single_node_multi_writer: bool) -> int:
    """The one CSI access mode for a set of Kubernetes access modes."""
    wanted = set(modes)
    unknown = wanted - {RWO, RWX, ROX, RWOP}
    if unknown or not wanted:
        raise BadParameters(f"access modes {sorted(wanted)}: want one or more of {RWO}, {RWX}, {ROX}, {RWOP}")
    if RWOP in wanted:
        if len(wanted) > 1:
            raise BadParameters(f"access mode {RWOP} cannot be combined with {sorted(wanted - {RWOP})}")
        return _Mode.SINGLE_NODE_SINGLE_WRITER if single_node_multi_writer else _Mode.SINGLE_NODE_WRITER
    if RWX in wanted:
        return _Mode.MULTI_NODE_MULTI_WRITER
    if wanted == {ROX, RWO}:
        raise BadParameters(f"access modes {ROX} and {RWO} together have no CSI access mode")
    if ROX in wanted:
        return _Mode.MULTI_NODE_READER_ONLY
    return _Mode.SINGLE_NODE_MULTI_WRITER if single_node_multi_writer else _Mode.SINGLE_NODE_WRITER


def capabilities_per_mode(
    modes: Sequence[str], is_block: bool, fs_type: str, mount_flags: Sequence[str], single_node_multi_writer: bool
) -> list[pb.VolumeCapability]:
    """One capability per access mode of a claim, in the claim's order."""
    if RWOP in modes and len(set(modes)) > 1:
        raise BadParameters(f"access mode {RWOP} cannot be combined with others, and the claim has {list(modes)}")
    return [
        _capability(mode_of([mode], single_node_multi_writer), is_block, fs_type, mount_flags)
        for mode in dict.fromkeys(modes)
    ]


def capability_of(spec: VolumeSpec, default_fs_type: str, single_node_multi_writer: bool) -> pb.VolumeCapability:
    """The single capability that a volume's spec amounts to."""
    fs_type = (spec.csi.fs_type if spec.csi is not None else "") or default_fs_type
    mode = mode_of(spec.access_modes, single_node_multi_writer)
    return _capability(mode, spec.volume_mode == "Block", fs_type, spec.mount_options)


def _capability(mode: int, is_block: bool, fs_type: str, mount_flags: Sequence[str]) -> pb.VolumeCapability:
    access = pb.VolumeCapability.AccessMode(mode=mode)  # type: ignore[arg-type]
    if is_block:
        return pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=access)
    mount = pb.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=list(mount_flags))
    return pb.VolumeCapability(mount=mount, access_mode=access)
