"""One attempt to make a volume: everything that is needed to repeat the call and to save what it made.

Owns: the record and its text for the journal. An attempt is kept, unchanged, until the driver's answer is final, so
that every repetition asks for exactly the same; and it needs neither the claim nor the class any more.
Start reading at: `ProvisionAttempt`.
"""

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.csi import csi_pb2 as pb
from moorage.kube.objects import ObjectReference, SecretReference
from moorage.sidecars.provisioner.sources import DataSource


@dataclass(frozen=True, slots=True)
class ProvisionAttempt:
    """What was decided before CreateVolume was called."""

    claim: ObjectReference
    class_name: str
    class_uid: str
    request: pb.CreateVolumeRequest  # without secrets
    skeleton: dict[str, Any]
    secret: SecretReference | None
    has_selected_node: bool
    source: DataSource | None
    source_is_required: bool

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def requested_bytes(self) -> int:
        return self.request.capacity_range.required_bytes

    @property
    def source_kind(self) -> str:
        return self.source.kind if self.source is not None else ""


# What most attempts say: with it, one is packed into half the room. It is a part of the format and must not change.
_USUAL = (
    b'","resourceVersion":"","class_name":"","class_uid":"-","request":"CihwdmMt","skeleton":{"metadata":{"name":"pvc-",'
    b'"annotations":{"pv.kubernetes.io/provisioned-by":"volume.kubernetes.io/provisioner-deletion-secret-name":"",'
    b'"volume.kubernetes.io/provisioner-deletion-secret-namespace":""},"finalizers":'
    b'["external-provisioner.volume.kubernetes.io/finalizer"]},"spec":{"accessModes":["ReadWriteOnce"],"claimRef":'
    b'{"apiVersion":"v1","kind":"PersistentVolumeClaim","namespace":"default","name":"","uid":"","resourceVersion":"'
    b'"},"persistentVolumeReclaimPolicy":"Delete","storageClassName":"","volumeMode":"Filesystem","csi":{"driver":"'
    b'","volumeHandle":"","fsType":"ext4"}}},"secret":null,"has_selected_node":false,"source":null,'
    b'"source_is_required":false}{"claim":{"apiVersion":"v1","kind":"PersistentVolumeClaim","namespace":"'
)


_LARGEST_BYTES = 4 << 20  # of an attempt; the note of another instance may hold anything


class _Written(msgspec.Struct):
    claim: ObjectReference
    class_name: str
    class_uid: str
    request: bytes
    skeleton: dict[str, Any]
    secret: SecretReference | None
    has_selected_node: bool
    source: tuple[str, str, str, str, bool] | None
    source_is_required: bool


def to_text(attempt: ProvisionAttempt) -> str:
    """The attempt for the journal; secrets are named, never held."""
    source = attempt.source
    written = _Written(
        claim=attempt.claim,
        class_name=attempt.class_name,
        class_uid=attempt.class_uid,
        request=attempt.request.SerializeToString(deterministic=True),
        skeleton=attempt.skeleton,
        secret=attempt.secret,
        has_selected_node=attempt.has_selected_node,
        source=(source.group, source.kind, source.namespace, source.name, source.crosses) if source else None,
        source_is_required=attempt.source_is_required,
    )
    packer = zlib.compressobj(level=1, zdict=_USUAL)
    return base64.b64encode(packer.compress(msgspec.json.encode(written)) + packer.flush()).decode()


def from_text(text: str) -> ProvisionAttempt:
    """The attempt that `to_text` wrote; ValueError when the text is not one."""
    try:
        unpacker = zlib.decompressobj(zdict=_USUAL)
        packed = unpacker.decompress(base64.b64decode(text), _LARGEST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"it has more than {_LARGEST_BYTES} bytes")
        written = msgspec.json.decode(packed, type=_Written)
        request = pb.CreateVolumeRequest.FromString(written.request)
    except (zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"not an attempt: {error}") from error
    return ProvisionAttempt(
        claim=written.claim,
        class_name=written.class_name,
        class_uid=written.class_uid,
        request=request,
        skeleton=written.skeleton,
        secret=written.secret,
        has_selected_node=written.has_selected_node,
        source=DataSource(*written.source) if written.source else None,
        source_is_required=written.source_is_required,
    )
