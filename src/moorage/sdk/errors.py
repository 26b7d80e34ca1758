"""What a driver raises. Each error is one gRPC status; any other exception becomes INTERNAL without its text."""

from moorage.errors import InvalidRequest, MoorageError

DriverError = MoorageError
InvalidArgument = InvalidRequest


class NotFound(DriverError):
    """The volume, snapshot or node does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(DriverError):
    """The name is taken by an object that differs from the request."""

    code = "ALREADY_EXISTS"
    retryable = False


class OutOfRange(DriverError):
    """The size, or another number, cannot be provided."""

    code = "OUT_OF_RANGE"
    retryable = False


class ResourceExhausted(DriverError):
    """There is no room here now."""

    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(DriverError):
    """The object is in a state in which the call cannot be carried out; the message says what has to change."""

    code = "FAILED_PRECONDITION"


class Aborted(DriverError):
    """Another operation is running, or a token has expired. The caller tries again."""

    code = "ABORTED"


class Unavailable(DriverError):
    """The storage cannot be reached now. The caller tries again."""

    code = "UNAVAILABLE"
