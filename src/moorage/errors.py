"""The root of every error that Moorage raises on purpose.

Owns: the base class. Each part defines its own errors beside the code that raises them. A code is only a name here;
the gRPC services, the API server and the command line translate it.
"""

from typing import ClassVar


class MoorageError(Exception):
    """An expected failure: its message names the object and the reason.

    `code` is the name of a gRPC status code (`grpc.StatusCode[code]`); the API server and the
    command line map the same name to an HTTP status or an exit code.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = True


class InvalidRequest(MoorageError):
    """The request is invalid, and a retry cannot succeed. The message names the field."""

    code = "INVALID_ARGUMENT"
    retryable = False


class UsageError(MoorageError):
    """The command line is wrong. The command exits with 2."""

    code = "INVALID_ARGUMENT"
    retryable = False
