"""What a StorageClass's parameters say to us, and what is left for the driver. Pure.

Owns: the reserved keys, the filesystem, the secret references.
Start reading at: `read`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moorage.kube import secrets
from moorage.kube.names import RESERVED_PREFIX
from moorage.kube.objects import PersistentVolumeClaim, SecretReference
from moorage.sidecars.errors import BadParameters

FS_TYPE = f"{RESERVED_PREFIX}fstype"

_PAIRS = {
    "provision": secrets.PROVISION,
    "controller_publish": secrets.CONTROLLER_PUBLISH,
    "node_stage": secrets.NODE_STAGE,
    "node_publish": secrets.NODE_PUBLISH,
    "controller_expand": secrets.CONTROLLER_EXPAND,
    "node_expand": secrets.NODE_EXPAND,
    "controller_modify": secrets.CONTROLLER_MODIFY,
}
_KNOWN = {FS_TYPE, secrets.DEFAULT.name, secrets.DEFAULT.namespace} | {
    key for pair in _PAIRS.values() for key in (pair.name, pair.namespace)
}


@dataclass(frozen=True, slots=True)
class ClaimParameters:
    """A class's parameters, sorted out for one claim."""

    fs_type: str
    for_driver: dict[str, str]
    secrets: dict[str, SecretReference]  # by the keys of _PAIRS; only those that are configured


def read(
    parameters: Mapping[str, str], claim: PersistentVolumeClaim, volume_name: str, default_fs_type: str
) -> ClaimParameters:
    """Return the parameters of the class for this claim. Raises BadParameters or BadSecret."""
    unknown = sorted(key for key in parameters if key.startswith(RESERVED_PREFIX) and key not in _KNOWN)
    if unknown:
        raise BadParameters(f"the class has unknown parameters {', '.join(unknown)}; {RESERVED_PREFIX} is reserved")
    return ClaimParameters(
        fs_type=fs_type_of(parameters) or default_fs_type,
        for_driver={key: value for key, value in parameters.items() if key not in _KNOWN},
        secrets=secret_references(parameters, claim, volume_name),
    )


def fs_type_of(parameters: Mapping[str, str]) -> str:
    """Return the filesystem that a class names, under the reserved key or the legacy one, which the driver sees too."""
    legacy = [value for key, value in parameters.items() if key.lower() == "fstype"]
    if len(legacy) + (FS_TYPE in parameters) > 1:
        raise BadParameters(f"the class names its filesystem twice; keep {FS_TYPE}")
    return parameters.get(FS_TYPE) or (legacy[0] if legacy else "")


def secret_references(
    parameters: Mapping[str, str], claim: PersistentVolumeClaim, volume_name: str
) -> dict[str, SecretReference]:
    """Return every secret that the class names for this claim, by use."""
    namespace_tokens = {"pv.name": volume_name, "pvc.namespace": claim.namespace}
    name_tokens = namespace_tokens | {"pvc.name": claim.name}
    name_tokens |= {f"pvc.annotations['{key}']": value for key, value in claim.annotations.items()}
    found = {}
    for use, keys in _PAIRS.items():
        reference = secrets.reference_from(parameters, keys, name_tokens, namespace_tokens, secrets.DEFAULT)
        if reference is not None:
            found[use] = reference
    return found


def metadata_parameters(claim: PersistentVolumeClaim, volume_name: str) -> dict[str, str]:
    """Return what --extra-create-metadata and --extra-modify-metadata pass to the driver."""
    return {
        f"{RESERVED_PREFIX}pvc/name": claim.name,
        f"{RESERVED_PREFIX}pvc/namespace": claim.namespace,
        f"{RESERVED_PREFIX}pv/name": volume_name,
    }
