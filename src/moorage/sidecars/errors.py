"""Errors of the sidecars, and what is known about the volume after a failed attempt to provision it.

Owns: the classes that workers tell apart. A `SidecarError` brings its key back after the queue's back-off.
Start reading at: `ProvisioningState`, `ProvisionError`.
"""

from enum import Enum

from moorage.errors import MoorageError


class SidecarError(MoorageError):
    """Something could not be done now. It is tried again after the back-off."""

    code = "FAILED_PRECONDITION"


class BadParameters(SidecarError):
    """A class or a claim asks for something that cannot be carried out."""

    code = "INVALID_ARGUMENT"


class ProvisioningState(Enum):
    """What is known about the volume after a failed attempt."""

    FINISHED = "finished"  # there is no volume and nothing is running
    BACKGROUND = "background"  # a volume may exist or may still appear: ask again until the answer is final
    NO_CHANGE = "no-change"  # the driver was not asked; what was known before still holds
    RESCHEDULE = "reschedule"  # no room where the scheduler wanted it: let it choose again
    INFEASIBLE = "infeasible"  # asking again for the same thing is pointless for a while


class ProvisionError(SidecarError):
    """An attempt to provision a claim failed. `state` is what is known about the volume."""

    def __init__(self, message: str, state: ProvisioningState = ProvisioningState.NO_CHANGE) -> None:
        super().__init__(message)
        self.state = state


class OtherProvisioner(SidecarError):
    """The claim belongs to another provisioner, such as a populator."""
