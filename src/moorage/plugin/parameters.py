"""Parameters of classes: what each key means, and which values it takes.

Owns: the keys of storage classes, snapshot classes and inline volumes. Keys that can be changed
later (`mutable.KEYS` of storage) are accepted at creation too.
May not touch: generated messages, pools.
Start reading at: `ClassParameters.parse`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moorage.csi.sizes import size_from
from moorage.errors import InvalidRequest
from moorage.plugin.access import FILESYSTEMS
from moorage.storage import InUse, VolumeKind
from moorage.storage import tunables as mutable_parameters
from moorage.suggest import did_you_mean

CLASS_KEYS = ("pool", "kind", "fsType", "provisioning", "snapshotInUse")
INLINE_KEYS = frozenset({"size", *CLASS_KEYS, *mutable_parameters.KEYS})

_KUBERNETES = "csi.storage.k8s.io/"
_FS_TYPE = "csi.storage.k8s.io/fstype"  # callers without a provisioner in front pass it on
_CLAIM = ("csi.storage.k8s.io/pvc/namespace", "csi.storage.k8s.io/pvc/name")  # with --extra-create-metadata
_IDENTITY = "storage.kubernetes.io/csiProvisionerIdentity"
_INLINE_BYTES = 1 << 30
_SHOWN = 64  # of what a tenant wrote, in messages


@dataclass(frozen=True, slots=True)
class ClassParameters:
    """A storage class's parameters, decoded. `rest` is what makes two classes different volumes."""

    pool: str = ""
    kind: VolumeKind = VolumeKind.IMAGE
    thick: bool = False
    in_use: InUse = InUse.REFUSE
    fs_type: str = ""
    mutable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, parameters: Mapping[str, str], mutable: Mapping[str, str]) -> "ClassParameters":
        """InvalidRequest names the key that is unknown or wrong. Mutable parameters win over the others."""
        own = {key: value for key, value in parameters.items() if not key.startswith(_KUBERNETES)}
        changeable = {key: value for key, value in own.items() if key in mutable_parameters.KEYS} | dict(mutable)
        fixed = {key: value for key, value in own.items() if key not in mutable_parameters.KEYS}
        unknown = sorted(set(fixed) - set(CLASS_KEYS))
        if unknown:
            meant = did_you_mean(unknown[0][:_SHOWN], (*CLASS_KEYS, *mutable_parameters.KEYS))
            raise InvalidRequest(
                f"parameters: {unknown[0][:_SHOWN]!r} is not known{meant or '; see docs/reference/class-parameters.md'}"
            )
        return cls(
            pool=fixed.get("pool", ""),
            kind=VolumeKind(_one_of("kind", fixed.get("kind", "image"), ("image", "directory"))),
            thick=_one_of("provisioning", fixed.get("provisioning", "thin"), ("thin", "thick")) == "thick",
            in_use=_in_use(fixed.get("snapshotInUse", "refuse")),
            fs_type=_filesystem("fsType", fs_type_from(parameters)),
            mutable=changeable,
        )


@dataclass(frozen=True, slots=True)
class SnapshotParameters:
    """A snapshot class's parameters."""

    in_use: InUse | None = None

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> "SnapshotParameters":
        own = {key: value for key, value in parameters.items() if not key.startswith(_KUBERNETES)}
        unknown = sorted(set(own) - {"snapshotInUse"})
        if unknown:
            raise InvalidRequest(f"parameters: {unknown[0][:_SHOWN]!r} is not known; snapshots take only snapshotInUse")
        return cls(_in_use(own["snapshotInUse"]) if "snapshotInUse" in own else None)


@dataclass(frozen=True, slots=True)
class InlineParameters:
    """The attributes of a volume that is written into a pod and lives with it."""

    size_bytes: int
    of_class: ClassParameters

    @classmethod
    def parse(cls, context: Mapping[str, str], allowed: Collection[str], max_bytes: int) -> "InlineParameters":
        """InvalidRequest names the attribute that is unknown or not allowed: the pod's author wrote these."""
        own = {key: value for key, value in context.items() if not key.startswith(_KUBERNETES) and key != _IDENTITY}
        for key in sorted(INLINE_KEYS.intersection(own).difference(allowed)):
            why = f"the operator allows {', '.join(sorted(allowed)) or 'none'}"
            raise InvalidRequest(f"volumeAttributes: {key} is not for inline volumes here; {why}")
        if not max_bytes:
            raise InvalidRequest("inline volumes are not made here; use a claim")
        size = size_from("size", own.pop("size", "")) if "size" in own else min(_INLINE_BYTES, max_bytes)
        if size > max_bytes:
            raise InvalidRequest(f"size: {size} bytes are more than the operator allows inline volumes: {max_bytes}")
        return cls(size, ClassParameters.parse(own, {}))


def pool_from(parameters: Mapping[str, str]) -> str:
    """The pool that a class names. For capacity, where all other keys are of no concern."""
    return parameters.get("pool", "")


def claim_from(parameters: Mapping[str, str]) -> str:
    """Return the namespace and name of the claim, as `default/data`; empty if the caller does not tell them."""
    return "/".join(parameters[key][:253] for key in _CLAIM) if all(parameters.get(key) for key in _CLAIM) else ""


def fs_type_from(parameters: Mapping[str, str]) -> str:
    """The filesystem that a class names, in either of its two keys."""
    return parameters.get("fsType", "") or parameters.get(_FS_TYPE, "")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidRequest(f"parameters: {key} is {value[:_SHOWN]!r}; it must be {' or '.join(allowed)}")
    return value


def _filesystem(key: str, value: str) -> str:
    return _one_of(key, value, FILESYSTEMS) if value else ""


def _in_use(value: str) -> InUse:
    return InUse(_one_of("snapshotInUse", value, tuple(InUse)))
