"""The root of every error that Moorage raises on purpose.

Owns: the base class. Each part defines its own errors beside the code that raises them.
May not touch: gRPC and HTTP; a code is a name, and the edges translate it.
"""

from typing import ClassVar


class MoorageError(Exception):
    """What went wrong, for which object, and whether trying again can help.

    `code` is the name of a gRPC status code (`grpc.StatusCode[code]`); the API server and the
    command line map the same name to an HTTP status or an exit code.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = True


class InvalidRequest(MoorageError):
    """The caller sent something that no retry will make right; the message names the field."""

    code = "INVALID_ARGUMENT"
    retryable = False


class UsageError(MoorageError):
    """A person typed something that cannot work; the command line exits with 2."""

    code = "INVALID_ARGUMENT"
    retryable = False
