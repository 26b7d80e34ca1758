"""Which changes of attachments and volumes matter, and what an attachment's source is. Pure.

Start reading at: `is_relevant_change`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from moorage.kube import names
from moorage.kube.names import sanitised
from moorage.kube.objects import CSINode, PersistentVolume, VolumeAttachment, VolumeSpec
from moorage.sidecars.errors import SidecarError


def finalizer_of(driver: str) -> str:
    """Our finalizer, on attachments and on volumes."""
    return f"external-attacher/{sanitised(driver)}"


def is_relevant_change(old: VolumeAttachment | None, new: VolumeAttachment) -> bool:
    """Whether something other than the errors changed. We write those, and reconciling would reset the back-off."""
    if old is None or old.metadata.resource_version == new.metadata.resource_version:
        return True
    return _without_errors(old) != _without_errors(new)


def releases_volume(volume: PersistentVolume, driver: str) -> bool:
    """Whether our finalizer on the volume may have to be removed."""
    if finalizer_of(driver) not in volume.finalizers:
        return False
    is_migrated_away = volume.spec.csi is None and volume.annotations.get(names.MIGRATED_TO) != driver
    return volume.is_deleting or is_migrated_away


def node_id_on(node: CSINode | None, driver: str) -> str:
    """The node's id as the driver registered it, or the empty string."""
    if node is None:
        return ""
    return next((d.node_id for d in node.spec.drivers if d.name == driver), "")


def source_spec(attachment: VolumeAttachment, volume: PersistentVolume | None) -> VolumeSpec:
    """Return the spec to attach: the volume's, or the one in the attachment. Raises SidecarError if there is none."""
    source = attachment.spec.source
    if source.persistent_volume_name and source.inline_volume_spec is not None:
        raise SidecarError(f"attachment {attachment.name} names both a volume and an inline spec")
    if source.inline_volume_spec is not None:
        spec = source.inline_volume_spec
    elif not source.persistent_volume_name:
        raise SidecarError(f"attachment {attachment.name} names no volume")
    elif volume is None:
        raise SidecarError(f"volume {source.persistent_volume_name} does not exist")
    else:
        spec = volume.spec
    if spec.csi is None:
        raise SidecarError(f"attachment {attachment.name} is not for a CSI volume")
    return spec


@dataclass(frozen=True, slots=True)
class Published:
    """On which nodes each volume is published, according to ListVolumes."""

    nodes_by_handle: dict[str, frozenset[str]]

    def disagrees(self, handle: str, node_id: str, is_attached: bool) -> bool:
        """Whether the driver contradicts the attachment. An unlisted volume is published nowhere."""
        return (node_id in self.nodes_by_handle.get(handle, ())) != is_attached

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Iterable[str]]]) -> "Published":
        return cls({handle: frozenset(nodes) for handle, nodes in entries})


def _without_errors(attachment: VolumeAttachment) -> VolumeAttachment:
    status = msgspec.structs.replace(attachment.status, attach_error=None, detach_error=None)
    metadata = msgspec.structs.replace(attachment.metadata, resource_version="")
    return msgspec.structs.replace(attachment, status=status, metadata=metadata)
