"""The words of the snapshot API: finalizers, annotations, labels, and the names of what the controller makes.

Owns: constants, deterministic names, and the secret that a class's parameters name. Pure.
Start reading at: `content_name`, `secret_annotations`.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from moorage.errors import MoorageError

AS_SOURCE: Final = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection"
BOUND: Final = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"
IN_GROUP: Final = "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection"
CONTENT_BOUND: Final = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"
CLAIM_AS_SOURCE: Final = "snapshot.storage.kubernetes.io/pvc-as-source-protection"
GROUP_BOUND: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-bound-protection"
GROUP_CONTENT_BOUND: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshotcontent-bound-protection"

BEING_DELETED: Final = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"
GROUP_BEING_DELETED: Final = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted"
DELETION_SECRET: Final = "snapshot.storage.kubernetes.io/deletion-secret-"
GROUP_DELETION_SECRET: Final = "groupsnapshot.storage.kubernetes.io/deletion-secret-"
GROUP_HANDLE: Final = "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle"
MANAGED_BY: Final = "snapshot.storage.kubernetes.io/managed-by"
IS_DEFAULT: Final = "snapshot.storage.kubernetes.io/is-default-class"
GROUP_IS_DEFAULT: Final = "groupsnapshot.storage.kubernetes.io/is-default-class"

SNAPSHOT_API: Final = "snapshot.storage.k8s.io/v1"
SNAPSHOT_GROUP: Final = "snapshot.storage.k8s.io"


class BadSecretTemplate(MoorageError):
    """The class names a secret only half, or with a word that means nothing."""

    code = "INVALID_ARGUMENT"


def content_name(snapshot_uid: str) -> str:
    """The content that is made for a snapshot."""
    return f"snapcontent-{snapshot_uid}"


def group_content_name(group_uid: str) -> str:
    return f"groupsnapcontent-{group_uid}"


def member_suffix(group_uid: str, volume_handle: str) -> str:
    """What the names of a group's member snapshot and its content end in."""
    return hashlib.sha256(f"{group_uid}{volume_handle}".encode()).hexdigest()


def secret_annotations(
    parameters: Mapping[str, str], parameter: str, annotation: str, words: Mapping[str, str]
) -> dict[str, str]:
    """The annotations that name the secret for deletion; none when the class names no secret.

    `parameter` is the common start of the two class parameters, `annotation` that of the two annotations, and `words`
    what `${…}` may stand for; in a namespace, a word for the snapshot's own name is not allowed.
    """
    name, namespace = parameters.get(f"{parameter}name"), parameters.get(f"{parameter}namespace")
    if name is None and namespace is None:
        return {}
    if not name or not namespace:
        raise BadSecretTemplate(f"class parameters {parameter}name and {parameter}namespace must both be given")
    for_namespace = {word: text for word, text in words.items() if not word.endswith("snapshot.name")}
    return {f"{annotation}name": _filled(name, words), f"{annotation}namespace": _filled(namespace, for_namespace)}


def _filled(template: str, words: Mapping[str, str]) -> str:
    text = template
    for word, value in words.items():
        text = text.replace("${" + word + "}", value)
    if "${" in text:
        raise BadSecretTemplate(f"class parameter {template!r} holds a word that is not known here")
    return text
