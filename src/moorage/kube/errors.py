"""Errors of the Kubernetes API, as Moorage sees them.

Owns: one class per answer that callers treat differently, and the mapping from a Status object to it.
May not touch: HTTP; `client.py` hands over the code and the body.
"""

from typing import Any, ClassVar

from moorage.errors import MoorageError


class ApiError(MoorageError):
    """The API server refused a request: its HTTP status, reason and message."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, status: int, reason: str, message: str, body: dict[str, Any] | None = None) -> None:
        super().__init__(message or reason or f"HTTP {status}")
        self.status = status
        self.reason = reason
        self.message = message
        self.body = body or {}

    @property
    def causes(self) -> list[dict[str, Any]]:
        details = self.body.get("details") or {}
        return list(details.get("causes") or [])


class BadRequest(ApiError):
    code = "INVALID_ARGUMENT"
    retryable = False


class Unauthorized(ApiError):
    code = "UNAUTHENTICATED"


class Forbidden(ApiError):
    code = "PERMISSION_DENIED"


class NotFound(ApiError):
    code = "NOT_FOUND"


class Conflict(ApiError):
    """The object has changed since it was read. Read it again and decide again."""

    code = "ABORTED"


class AlreadyExists(ApiError):
    code = "ALREADY_EXISTS"


class Gone(ApiError):
    """The revision asked for is no longer kept; list again."""

    code = "OUT_OF_RANGE"


class Invalid(ApiError):
    code = "INVALID_ARGUMENT"
    retryable = False


class TooManyRequests(ApiError):
    code = "RESOURCE_EXHAUSTED"


class Unavailable(ApiError):
    """The server could not be reached, or answered 5xx; the write may or may not have happened."""

    code = "UNAVAILABLE"


_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: BadRequest,
    415: BadRequest,
    422: Invalid,
    429: TooManyRequests,
}


def error_from(status: int, body: dict[str, Any]) -> ApiError:
    """The error for an HTTP status and a Status object (or what stood in its place)."""
    reason = str(body.get("reason") or "")
    message = str(body.get("message") or "")
    kind = _BY_STATUS.get(status, Unavailable if status >= 500 else ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, reason, message, body)
