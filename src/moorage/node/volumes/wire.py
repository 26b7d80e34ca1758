"""CSI requests of the node, built from plain data.

Owns: which field is filled with what, for stage, publish and expand.
May not touch: the driver; nothing is sent from here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from moorage.csi import csi_pb2 as pb
from moorage.kube.names import RESERVED_PREFIX
from moorage.node.volumes.rules import MOUNT_GROUP, access_mode
from moorage.node.volumes.state import CsiSource, VolumeUse

TOKENS_KEY = f"{RESERVED_PREFIX}serviceAccount.tokens"


@dataclass(frozen=True, slots=True)
class Extras:
    """What has to be fetched before a driver is called."""

    publish_context: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    context: Mapping[str, str] = field(default_factory=dict)  # pod info and tokens, beside the volume's own
    se_linux_context: str = ""


def capability(
    use: VolumeUse, source: CsiSource, capabilities: Collection[str], se_linux_context: str = ""
) -> pb.VolumeCapability:
    """How the volume is to be used."""
    mode = access_mode(source.access_modes, capabilities)
    if source.is_block:
        access = pb.VolumeCapability.AccessMode(mode=mode)
        return pb.VolumeCapability(access_mode=access, block=pb.VolumeCapability.BlockVolume())
    flags = () if source.is_ephemeral else source.mount_options
    if se_linux_context:
        flags = (*flags, f'context="{se_linux_context}"')
    group = str(use.fs_group) if use.fs_group is not None and MOUNT_GROUP in capabilities else ""
    return _of_filesystem(mode, source.fs_type, flags, group)


@lru_cache(maxsize=64)  # most volumes of a node are used alike; a request takes a copy of it
def _of_filesystem(
    mode: "pb.VolumeCapability.AccessMode.Mode.ValueType", fs_type: str, flags: tuple[str, ...], group: str
) -> pb.VolumeCapability:
    mount = pb.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=flags, volume_mount_group=group)
    return pb.VolumeCapability(access_mode=pb.VolumeCapability.AccessMode(mode=mode), mount=mount)


def stage_request(
    use: VolumeUse, source: CsiSource, staging: Path, extras: Extras, capabilities: Collection[str]
) -> pb.NodeStageVolumeRequest:
    return pb.NodeStageVolumeRequest(
        volume_id=source.handle,
        publish_context=extras.publish_context,
        staging_target_path=str(staging),
        volume_capability=capability(use, source, capabilities, extras.se_linux_context),
        secrets=extras.secrets,
        volume_context=source.attributes,
    )


def publish_request(
    use: VolumeUse, source: CsiSource, staging: Path | None, target: Path, extras: Extras, capabilities: Collection[str]
) -> pb.NodePublishVolumeRequest:
    return pb.NodePublishVolumeRequest(
        volume_id=source.handle,
        publish_context=extras.publish_context,
        staging_target_path=str(staging) if staging else "",
        target_path=str(target),
        volume_capability=capability(use, source, capabilities, extras.se_linux_context),
        readonly=use.read_only,
        secrets=extras.secrets,
        volume_context={**source.attributes, **extras.context},
    )


def expand_request(
    use: VolumeUse, source: CsiSource, path: Path, staging: Path | None, size: int, secrets: Mapping[str, str],
    capabilities: Collection[str],
) -> pb.NodeExpandVolumeRequest:  # fmt: skip
    return pb.NodeExpandVolumeRequest(
        volume_id=source.handle,
        volume_path=str(path),
        capacity_range=pb.CapacityRange(required_bytes=size),
        staging_target_path=str(staging) if staging else "",
        volume_capability=capability(use, source, capabilities),
        secrets=secrets,
    )


def pod_info(use: VolumeUse) -> dict[str, str]:
    """The keys of podInfoOnMount."""
    assert isinstance(use.source, CsiSource)
    return {
        f"{RESERVED_PREFIX}pod.name": use.pod.name,
        f"{RESERVED_PREFIX}pod.namespace": use.pod.namespace,
        f"{RESERVED_PREFIX}pod.uid": use.pod.uid,
        f"{RESERVED_PREFIX}serviceAccount.name": use.pod.service_account,
        f"{RESERVED_PREFIX}ephemeral": "true" if use.source.is_ephemeral else "false",
    }
