"""The two flavours of snapshots: of one volume, and of a group of volumes.

Owns: what differs between them in words: kinds, fields, finalizers, annotations, event reasons. The steps are shared.
Start reading at: `Flavour`, `SINGLE`, `GROUP`.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from moorage.kube import names, secrets
from moorage.kube.objects.meta import KubeObject, ObjectReference
from moorage.kube.objects.snapshots import (
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.kube.secrets import SecretKeys

S = TypeVar("S", bound=VolumeSnapshot | VolumeGroupSnapshot)
C = TypeVar("C", bound=VolumeSnapshotContent | VolumeGroupSnapshotContent)
SnapshotClass = VolumeSnapshotClass | VolumeGroupSnapshotClass


@dataclass(frozen=True, slots=True)
class Flavour(Generic[S, C]):
    """How one flavour calls things, and where its objects keep what the steps read."""

    noun: str  # in messages
    word: str  # in event reasons
    stem: str  # in JSON fields, and in lower case in the tokens of secret templates
    kind: type[S]
    content_kind: type[C]
    content_prefix: str
    is_default_class: str  # an annotation
    bound: str  # the finalizer of a snapshot that has a content
    content_bound: str  # the finalizer of that content
    being_deleted: str  # an annotation of the content: its snapshot is being deleted
    secret: SecretKeys
    secret_annotations: tuple[str, str]  # name and namespace, for deleting
    creation_failed: str  # an event reason
    content_of: Callable[[S], str]  # the content that a snapshot is bound to, or ""
    source_of: Callable[[S], str]  # the content that a user named as the source, or ""
    class_of: Callable[[S], str]
    snapshot_of: Callable[[C], ObjectReference]
    is_existing: Callable[[C], bool]  # whether the content is of a snapshot that the driver has already
    is_to_be_taken: Callable[[C], bool]
    content_sources: str  # of which a content needs exactly one

    def content_name(self, uid: str) -> str:
        """Return the name of the content that is created for a snapshot."""
        return f"{self.content_prefix}-{uid}"

    def expected_content(self, snapshot: S) -> str:
        """Return the name of a snapshot's content: bound, named by the user, or to be created."""
        return self.content_of(snapshot) or self.source_of(snapshot) or self.content_name(snapshot.uid)

    def points_at(self, content: C, snapshot: S, *, exactly: bool = True) -> bool:
        """Whether a content names the snapshot. Unless `exactly`, a content without a uid does too."""
        ref = self.snapshot_of(content)
        if (ref.namespace, ref.name) != (snapshot.namespace, snapshot.name):
            return False
        return ref.uid == snapshot.uid or (not exactly and not ref.uid)

    def secrets_for(self, parameters: Mapping[str, str], snapshot: KubeObject, content: str) -> dict[str, str]:
        """Return the annotations that name the secret of a class, none if it names none. Raises BadSecret."""
        stem = self.stem.lower()
        in_namespace = {f"{stem}content.name": content, f"{stem}.namespace": snapshot.namespace}
        in_name = in_namespace | {f"{stem}.name": snapshot.name}
        found = secrets.reference_from(parameters, self.secret, in_name, in_namespace)
        if found is None:
            return {}
        name, namespace = self.secret_annotations
        return {name: found.name, namespace: found.namespace}


SINGLE: Flavour[VolumeSnapshot, VolumeSnapshotContent] = Flavour(
    noun="snapshot",
    word="Snapshot",
    stem="volumeSnapshot",
    kind=VolumeSnapshot,
    content_kind=VolumeSnapshotContent,
    content_prefix="snapcontent",
    is_default_class=names.DEFAULT_SNAPSHOT_CLASS,
    bound=names.SNAPSHOT_BOUND,
    content_bound=names.SNAPSHOT_CONTENT_BOUND,
    being_deleted=names.SNAPSHOT_BEING_DELETED,
    secret=secrets.SNAPSHOT,
    secret_annotations=(names.SNAPSHOT_SECRET_NAME, names.SNAPSHOT_SECRET_NAMESPACE),
    creation_failed="SnapshotContentCreationFailed",
    content_of=lambda s: (s.status.bound_volume_snapshot_content_name if s.status else None) or "",
    source_of=lambda s: s.spec.source.volume_snapshot_content_name or "",
    class_of=lambda s: s.spec.volume_snapshot_class_name or "",
    snapshot_of=lambda c: c.spec.volume_snapshot_ref,
    is_existing=lambda c: bool(c.spec.source.snapshot_handle),
    is_to_be_taken=lambda c: bool(c.spec.source.volume_handle),
    content_sources="volumeHandle and snapshotHandle",
)

GROUP: Flavour[VolumeGroupSnapshot, VolumeGroupSnapshotContent] = Flavour(
    noun="group snapshot",
    word="GroupSnapshot",
    stem="volumeGroupSnapshot",
    kind=VolumeGroupSnapshot,
    content_kind=VolumeGroupSnapshotContent,
    content_prefix="groupsnapcontent",
    is_default_class=names.DEFAULT_GROUP_SNAPSHOT_CLASS,
    bound=names.GROUP_BOUND,
    content_bound=names.GROUP_CONTENT_BOUND,
    being_deleted=names.GROUP_BEING_DELETED,
    secret=secrets.GROUP_SNAPSHOT,
    secret_annotations=(names.GROUP_SECRET_NAME, names.GROUP_SECRET_NAMESPACE),
    creation_failed="CreateGroupSnapshotContentFailed",
    content_of=lambda s: (s.status.bound_volume_group_snapshot_content_name if s.status else None) or "",
    source_of=lambda s: s.spec.source.volume_group_snapshot_content_name or "",
    class_of=lambda s: s.spec.volume_group_snapshot_class_name or "",
    snapshot_of=lambda c: c.spec.volume_group_snapshot_ref,
    is_existing=lambda c: c.spec.source.group_snapshot_handles is not None,
    is_to_be_taken=lambda c: bool(c.spec.source.volume_handles),
    content_sources="volumeHandles and groupSnapshotHandles",
)


def member_suffix(group_uid: str, volume_handle: str) -> str:
    """Return the end of the names of a group's member snapshot and of its content."""
    return hashlib.sha256(f"{group_uid}{volume_handle}".encode()).hexdigest()
