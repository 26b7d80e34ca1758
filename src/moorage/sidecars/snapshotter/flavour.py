"""The two flavours of contents: of a snapshot of one volume, and of a snapshot of a group of volumes.

Owns: what differs between them in words and fields. The steps are shared; the calls are in `single.py` and `group.py`.
Start reading at: `ContentFlavour`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moorage.kube import names, secrets
from moorage.kube.objects import ObjectReference, VolumeGroupSnapshotContent, VolumeSnapshotContent
from moorage.kube.secrets import SecretKeys

C = TypeVar("C", bound=VolumeSnapshotContent | VolumeGroupSnapshotContent)


@dataclass(frozen=True, slots=True)
class ContentFlavour(Generic[C]):
    """How one flavour calls things, and where its contents keep what the steps read."""

    noun: str  # in messages
    queue: str  # the name of its work queue, in metrics
    word: str  # in event reasons
    stem: str  # in parameters, and in the tokens of secret templates
    being_created: str  # an annotation: the outcome of CreateSnapshot is open
    being_deleted: str  # an annotation: the content's snapshot is being deleted
    finalizer: str
    secret_annotations: tuple[str, str]  # name and namespace, for making and deleting
    secret_for_asking: SecretKeys
    reference_of: Callable[[C], ObjectReference]
    class_of: Callable[[C], str]
    is_existing: Callable[[C], bool]  # whether the content is of a snapshot that the driver had before
    is_to_be_taken: Callable[[C], bool]  # whether the snapshot is taken for this content

    @property
    def creation_failed(self) -> str:
        return f"{self.word}CreationFailed"

    @property
    def check_failed(self) -> str:
        return f"{self.word}ContentCheckandUpdateFailed"

    @property
    def deletion_failed(self) -> str:
        return f"{self.word}DeleteError"


def is_group_member(content: VolumeSnapshotContent) -> bool:
    """Whether the snapshot is one of a group. It is taken and deleted with the group, never alone."""
    by_status = content.status is not None and bool(content.status.volume_group_snapshot_handle)
    return by_status or names.GROUP_HANDLE in content.annotations


SINGLE: ContentFlavour[VolumeSnapshotContent] = ContentFlavour(
    noun="snapshot",
    queue="csi-snapshotter-content",
    word="Snapshot",
    stem="volumesnapshot",
    being_created=names.SNAPSHOT_BEING_CREATED,
    being_deleted=names.SNAPSHOT_BEING_DELETED,
    finalizer=names.SNAPSHOT_CONTENT_BOUND,
    secret_annotations=(names.SNAPSHOT_SECRET_NAME, names.SNAPSHOT_SECRET_NAMESPACE),
    secret_for_asking=secrets.SNAPSHOT_LIST,
    reference_of=lambda c: c.spec.volume_snapshot_ref,
    class_of=lambda c: c.spec.volume_snapshot_class_name or "",
    is_existing=lambda c: bool(c.spec.source.snapshot_handle),
    is_to_be_taken=lambda c: bool(c.spec.source.volume_handle) and not is_group_member(c),
)

GROUP: ContentFlavour[VolumeGroupSnapshotContent] = ContentFlavour(
    noun="group snapshot",
    queue="csi-snapshotter-groupsnapshotcontent",
    word="GroupSnapshot",
    stem="volumegroupsnapshot",
    being_created=names.GROUP_BEING_CREATED,
    being_deleted=names.GROUP_BEING_DELETED,
    finalizer=names.GROUP_CONTENT_BOUND,
    secret_annotations=(names.GROUP_SECRET_NAME, names.GROUP_SECRET_NAMESPACE),
    secret_for_asking=secrets.GROUP_SNAPSHOT_GET,
    reference_of=lambda c: c.spec.volume_group_snapshot_ref,
    class_of=lambda c: c.spec.volume_group_snapshot_class_name or "",
    is_existing=lambda c: c.spec.source.group_snapshot_handles is not None,
    is_to_be_taken=lambda c: bool(c.spec.source.volume_handles),
)
