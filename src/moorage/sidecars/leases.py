"""The name of each role's lease: the official ones, so that an official and a Moorage instance never both lead."""

from moorage.kube.names import sanitised
from moorage.sidecars.roles import Role


def lease_name(role: Role, driver: str) -> str:
    """The Lease that a leader of `role` for `driver` holds. Drivers `a.b` and `a-b` share it, as they always have."""
    match role:
        case Role.PROVISIONER:
            return sanitised(driver.replace("/", "-"))
        case Role.ATTACHER:
            return sanitised(f"external-attacher-leader-{driver}")
        case Role.RESIZER:
            return sanitised(f"external-resizer-{sanitised(driver)}")
        case Role.SNAPSHOTTER:
            return sanitised(f"external-snapshotter-leader-{driver}")
        case Role.HEALTH:
            return sanitised(f"external-health-monitor-leader-{driver}")
        case Role.CAPACITY:  # officially a part of the provisioner; its own lease only when it runs apart from it
            return sanitised(f"external-capacity-{driver}")
        case Role.REGISTRAR | Role.LIVENESS:
            return ""
