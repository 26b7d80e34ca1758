"""Errors of the contract layer, and what a caller may conclude from a status code.

Owns: `CsiError` (what a driver answered), endpoint errors, `OperationPending`.
May not touch: grpc; a code is a name.
Start reading at: `CsiError`.
"""

from moorage.errors import InvalidRequest, MoorageError

MAY_STILL_RUN = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED"})
"""After these codes the operation may still be running at the driver."""

_EXHAUSTION_IS_FINAL = frozenset({"CreateVolume"})


class CsiError(MoorageError):
    """What a driver answered to one call: `code` is the gRPC code's name, `message` its words."""

    def __init__(self, method: str, code: str, message: str) -> None:
        super().__init__(f"{method}: {code}: {message}" if message else f"{method}: {code}")
        self.__dict__["code"] = code  # the base class keeps one code per class; here it is per answer
        self.method = method
        self.message = message

    @property
    def is_final(self) -> bool:
        """Whether the operation is over. If not, it may still be running and must be asked again.

        RESOURCE_EXHAUSTED ends a CreateVolume (the claim may be placed elsewhere), but for
        attaching, growing, modifying and snapshots it only says "not now".
        """
        if self.code == "RESOURCE_EXHAUSTED":
            return self.method in _EXHAUSTION_IS_FINAL
        return self.code not in MAY_STILL_RUN

    @property
    def is_infeasible(self) -> bool:
        """Whether asking again for the same thing is pointless until the request changes."""
        return self.code in {"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND"}

    @property
    def is_unreachable(self) -> bool:
        return self.code == "UNAVAILABLE"

    @property
    def is_unimplemented(self) -> bool:
        return self.code == "UNIMPLEMENTED"


class InvalidEndpoint(InvalidRequest):
    """An address that no CSI socket can have."""


class InvalidAccessModes(InvalidRequest):
    """A set of Kubernetes access modes that has no CSI access mode."""


class EndpointInUse(MoorageError):
    """Another process answers on the socket that was to be served."""

    code = "FAILED_PRECONDITION"

    def __init__(self, path: str) -> None:
        super().__init__(f"another process is listening on {path}; stop it first, or give this one another --endpoint")


class OperationPending(MoorageError):
    """Another call on the same object is running; the caller tries again after a while."""

    code = "ABORTED"

    def __init__(self, key: str, holder: str) -> None:
        super().__init__(f"{holder} is still running for {key}; try again when it is done")


class NotServed(MoorageError):
    """A method that this process, in this mode, does not offer."""

    code = "UNIMPLEMENTED"
    retryable = False
