"""What is to be done about a content or group content. Pure.

Owns: when a snapshot may be deleted, created or checked; names; parameters; which updates are worth a look.
Start reading at: `next_step`.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.errors import MoorageError
from moorage.kube import names
from moorage.kube.objects import ObjectReference, SecretReference
from moorage.kube.objects.meta import KubeObject
from moorage.kube.secrets import GROUP_SNAPSHOT, GROUP_SNAPSHOT_GET, SNAPSHOT, SNAPSHOT_LIST
from moorage.sidecars.errors import BadParameters
from moorage.sidecars.snapshotter.flavour import C, ContentFlavour

_KNOWN = {
    key for pair in (SNAPSHOT, SNAPSHOT_LIST, GROUP_SNAPSHOT, GROUP_SNAPSHOT_GET) for key in (pair.name, pair.namespace)
}


class ContentStep(Enum):
    """The next thing to do about a content."""

    NOTHING = "nothing"
    DELETE = "delete"
    CREATE = "create"
    CHECK = "check"
    TIDY = "tidy"  # ready, but still marked as being created


def next_step(content: C, flavour: ContentFlavour[C]) -> ContentStep:
    """Return what the content's state calls for."""
    is_marked = flavour.being_created in content.annotations
    if content.is_deleting:
        is_unbound = flavour.is_existing(content) and not flavour.reference_of(content).uid
        if is_unbound or (not is_marked and flavour.being_deleted in content.annotations):
            return ContentStep.DELETE
        if not is_marked:
            return ContentStep.NOTHING
    if content.status is not None and content.status.ready_to_use:
        return ContentStep.TIDY if is_marked else ContentStep.NOTHING
    return ContentStep.CREATE if flavour.is_to_be_taken(content) else ContentStep.CHECK


def is_relevant_change(old: KubeObject | None, new: KubeObject, being_created: str) -> bool:
    """Whether something changed that we do not write ourselves. Our own writes must not reset the back-off."""
    if old is None or old.metadata.resource_version == new.metadata.resource_version:
        return True
    if not _is_ready(old) and _is_ready(new):
        return True
    return _without_ours(old, being_created) != _without_ours(new, being_created)


def is_over(error: MoorageError, was_open: bool) -> bool:
    """Whether nothing can be left of a failed creation, so that the content may be deleted.

    With an earlier call still open, UNKNOWN and INTERNAL say that this call failed, not that the other made nothing.
    """
    if not isinstance(error, CsiError):
        return not was_open
    return error.is_final and not (was_open and error.code in ("UNKNOWN", "INTERNAL"))


def snapshot_name(prefix: str, uuid_length: int, uid: str) -> str:
    return f"{prefix}-{uid}" if uuid_length < 0 else f"{prefix}-{uid.replace('-', '')[:uuid_length]}"


def driver_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """The class's parameters without ours; an unknown one under our prefix is an error."""
    unknown = sorted(k for k in parameters if k.startswith(names.RESERVED_PREFIX) and k not in _KNOWN)
    if unknown:
        raise BadParameters(
            f"the class has unknown parameters {', '.join(unknown)}; {names.RESERVED_PREFIX} is reserved"
        )
    return {key: value for key, value in parameters.items() if key not in _KNOWN}


def metadata_parameters(kind: str, reference: ObjectReference, content: str) -> dict[str, str]:
    """For --extra-create-metadata: the names of the snapshot and its content."""
    prefix = names.RESERVED_PREFIX
    return {
        f"{prefix}{kind}/name": reference.name,
        f"{prefix}{kind}/namespace": reference.namespace,
        f"{prefix}{kind}content/name": content,
    }


def annotated_secret(content: KubeObject, name_key: str, namespace_key: str) -> SecretReference | None:
    """The secret that the snapshot controller wrote down; both keys empty is an error, both absent is none."""
    annotations = content.annotations
    if name_key not in annotations and namespace_key not in annotations:
        return None
    name, namespace = annotations.get(name_key, ""), annotations.get(namespace_key, "")
    if not name or not namespace:
        raise BadParameters(f"{content.name}: annotations {name_key} and {namespace_key} must both have a value")
    return SecretReference(name=name, namespace=namespace)


def nanoseconds(stamp: pb.Snapshot | pb.VolumeGroupSnapshot) -> int:
    return int(stamp.creation_time.seconds * 1_000_000_000 + stamp.creation_time.nanos)


def _is_ready(obj: KubeObject) -> bool:
    return bool(getattr(getattr(obj, "status", None), "ready_to_use", False))


def _without_ours(obj: KubeObject, being_created: str) -> KubeObject:
    annotations = {key: value for key, value in obj.annotations.items() if key != being_created}
    metadata = msgspec.structs.replace(
        obj.metadata, resource_version="", finalizers=[], annotations=annotations, generation=0
    )
    return msgspec.structs.replace(obj, metadata=metadata, status=None)
