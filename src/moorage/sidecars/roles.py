"""Which sidecars there are, and which of them a driver calls for.

Owns: the names of the roles and the choice by capability. Pure.
Start reading at: `roles_for`.
"""

from enum import StrEnum

from moorage.csi.capabilities import Capabilities
from moorage.errors import UsageError
from moorage.kube.objects import CSIDriver
from moorage.kube.volumes import requires_attach
from moorage.sidecars.settings import SidecarSettings


class Role(StrEnum):
    """A part that stands for one official sidecar (capacity is officially inside the provisioner)."""

    REGISTRAR = "registrar"
    PROVISIONER = "provisioner"
    ATTACHER = "attacher"
    RESIZER = "resizer"
    SNAPSHOTTER = "snapshotter"
    CAPACITY = "capacity"
    HEALTH = "health"
    LIVENESS = "liveness"


_OFFICIAL = {
    "node-driver-registrar": Role.REGISTRAR,
    "csi-node-driver-registrar": Role.REGISTRAR,
    "external-provisioner": Role.PROVISIONER,
    "csi-provisioner": Role.PROVISIONER,
    "external-attacher": Role.ATTACHER,
    "csi-attacher": Role.ATTACHER,
    "external-resizer": Role.RESIZER,
    "csi-resizer": Role.RESIZER,
    "external-snapshotter": Role.SNAPSHOTTER,
    "csi-snapshotter": Role.SNAPSHOTTER,
    "external-health-monitor": Role.HEALTH,
    "csi-external-health-monitor-controller": Role.HEALTH,
    "livenessprobe": Role.LIVENESS,
}


def role_named(text: str) -> Role:
    """The role with this name, or with the name of the official sidecar that it stands for."""
    if text in _OFFICIAL:
        return _OFFICIAL[text]
    try:
        return Role(text)
    except ValueError:
        raise UsageError(f"no role is called {text!r}; the roles are {', '.join(Role)}") from None


def needs_api(roles: frozenset[Role]) -> bool:
    """Whether any of the roles talks to the API server; registrar and liveness do not."""
    return bool(roles - {Role.REGISTRAR, Role.LIVENESS})


def roles_for(capabilities: Capabilities, settings: SidecarSettings, registered: CSIDriver | None) -> frozenset[Role]:
    """Every role that the driver's capabilities (and its CSIDriver object) call for."""
    can = capabilities
    roles = set()
    if settings.kubelet_registration_path:
        roles.add(Role.REGISTRAR)
    if settings.health_port or settings.http_endpoint:
        roles.add(Role.LIVENESS)
    if can.controller("CREATE_DELETE_VOLUME"):
        roles.add(Role.PROVISIONER)
    if requires_attach(registered):
        roles.add(Role.ATTACHER)
    if can.resizes or can.controller("MODIFY_VOLUME"):
        roles.add(Role.RESIZER)
    if can.controller("CREATE_DELETE_SNAPSHOT") or can.groups:
        roles.add(Role.SNAPSHOTTER)
    wants_capacity = registered is None or registered.spec.storage_capacity is True
    if can.controller("GET_CAPACITY") and (wants_capacity or settings.enable_capacity):
        roles.add(Role.CAPACITY)
    if can.reports_health:
        roles.add(Role.HEALTH)
    return frozenset(roles)
