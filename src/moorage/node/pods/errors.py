"""Errors of pods that a later attempt, or a change of the pod, can repair."""

from moorage.errors import MoorageError


class BadContainer(MoorageError):
    """A container that cannot be made from what the pod says; `reason` is shown in its status."""

    code = "INVALID_ARGUMENT"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
