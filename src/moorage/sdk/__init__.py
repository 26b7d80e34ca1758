"""Write a CSI driver: define what your storage does, and the library speaks the protocol.

Owns: the public library for driver authors. Everything that is exported here is stable: it changes incompatibly only
with a new major version. Modules and names that are not exported may change at any time.
Start reading at: `Driver`; docs/tutorial/your-own-driver.md builds one step by step.

A driver is a subclass of `Driver`. The methods that it defines are what it offers: capabilities are derived from them.
"""

from moorage.sdk.driver import Driver, Environment
from moorage.sdk.errors import (
    Aborted,
    AlreadyExists,
    DriverError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from moorage.sdk.model import (
    Access,
    AccessMode,
    Attachment,
    Block,
    Capacity,
    CreateGroup,
    CreateSnapshot,
    CreateVolume,
    Expanded,
    Group,
    Health,
    HealthKind,
    NodeVolume,
    Secrets,
    SizeRange,
    Snapshot,
    Source,
    Stats,
    StorageHealth,
    Volume,
)
from moorage.sdk.store import Store
from moorage.sdk.targets import PublishTarget, StagingTarget

__all__ = [
    "Aborted",
    "Access",
    "AccessMode",
    "AlreadyExists",
    "Attachment",
    "Block",
    "Capacity",
    "CreateGroup",
    "CreateSnapshot",
    "CreateVolume",
    "Driver",
    "DriverError",
    "Environment",
    "Expanded",
    "FailedPrecondition",
    "Group",
    "Health",
    "HealthKind",
    "InvalidArgument",
    "NodeVolume",
    "NotFound",
    "OutOfRange",
    "PublishTarget",
    "ResourceExhausted",
    "Secrets",
    "SizeRange",
    "Snapshot",
    "Source",
    "StagingTarget",
    "Stats",
    "StorageHealth",
    "Store",
    "Unavailable",
    "Volume",
]
