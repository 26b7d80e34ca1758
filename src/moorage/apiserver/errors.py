"""Answers that are not success: the Status object, its HTTP code and its reason, as Kubernetes gives them.

Owns: `StatusError` and one function per kind of refusal; field errors and their wording.
May not touch: HTTP and storage; the edge turns a StatusError into a response.
Start reading at: `StatusError`, `invalid`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from moorage.errors import MoorageError


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing that is wrong with one field; `reason` is a cause type such as FieldValueInvalid."""

    reason: str
    field: str
    message: str


class StatusError(MoorageError):
    """A request refused with a Kubernetes Status."""

    code: ClassVar[str] = "FAILED_PRECONDITION"
    retryable: ClassVar[bool] = False

    def __init__(self, http: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.http = http
        self.reason = reason
        self.details = details or {}
        self.metadata: dict[str, str] = {}

    def status(self) -> dict[str, Any]:
        """The Status object that goes to the client."""
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata,
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
        }
        if self.details:
            status["details"] = self.details
        status["code"] = self.http
        return status


def _details(name: str = "", group: str = "", resource: str = "", **more: Any) -> dict[str, Any]:
    found = {"name": name, "group": group, "kind": resource, **more}
    return {key: value for key, value in found.items() if value not in ("", None)}


def qualified(resource: str, group: str) -> str:
    return f"{resource}.{group}" if group else resource


def bad_request(message: str) -> StatusError:
    return StatusError(400, "BadRequest", message)


def unauthorized() -> StatusError:
    return StatusError(401, "Unauthorized", "Unauthorized")


def forbidden(resource: str, group: str, name: str, why: str, causes: Sequence[dict[str, str]] = ()) -> StatusError:
    what = f'{qualified(resource, group)} "{name}" is forbidden: {why}'
    return StatusError(403, "Forbidden", what, _details(name, group, resource, causes=list(causes) or None))


def not_found(resource: str, group: str, name: str) -> StatusError:
    message = f'{qualified(resource, group)} "{name}" not found'
    return StatusError(404, "NotFound", message, _details(name, group, resource))


def no_such_path() -> StatusError:
    return StatusError(404, "NotFound", "the server could not find the requested resource")


def method_not_allowed() -> StatusError:
    return StatusError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def not_acceptable(served: str) -> StatusError:
    return StatusError(406, "NotAcceptable", f"only the following media types are accepted: {served}")


def already_exists(resource: str, group: str, name: str, deleting: bool = False) -> StatusError:
    prefix = "object is being deleted: " if deleting else ""
    message = f'{prefix}{qualified(resource, group)} "{name}" already exists'
    return StatusError(409, "AlreadyExists", message, _details(name, group, resource))


def conflict(resource: str, group: str, name: str, why: str) -> StatusError:
    message = f'Operation cannot be fulfilled on {qualified(resource, group)} "{name}": {why}'
    return StatusError(409, "Conflict", message, _details(name, group, resource))


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def expired(message: str, token: str = "") -> StatusError:
    error = StatusError(410, "Expired", message)
    if token:
        error.metadata = {"continue": token}
    return error


def too_large_body(limit: int) -> StatusError:
    message = f"Request entity too large: limit is {limit}"
    return StatusError(413, "RequestEntityTooLarge", message)


def too_large_object(size: int, limit: int) -> StatusError:
    message = f"Request entity too large: the object would have {size} bytes; the limit is {limit}"
    return StatusError(413, "RequestEntityTooLarge", message)


def too_many_values(message: str) -> StatusError:
    return StatusError(413, "RequestEntityTooLarge", f"Request entity too large: {message}")


def unsupported_media(message: str) -> StatusError:
    return StatusError(415, "UnsupportedMediaType", message)


def invalid(kind: str, group: str, name: str, errors: Sequence[FieldError]) -> StatusError:
    """422 with every field error as a cause; no more than the first hundred."""
    errors = errors[:100]
    texts = [f"{error.field}: {error.message}" for error in errors]
    joined = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    causes = [{"reason": e.reason, "message": e.message, "field": e.field} for e in errors]
    label = f"{kind}.{group}" if group else kind
    return StatusError(
        422, "Invalid", f'{label} "{name}" is invalid: {joined}', _details(name, group, kind, causes=causes)
    )


def too_many(message: str, retry_after_s: int) -> StatusError:
    details: dict[str, Any] = {"retryAfterSeconds": retry_after_s}
    return StatusError(429, "TooManyRequests", message, details)


def internal(message: str) -> StatusError:
    return StatusError(500, "InternalError", f"Internal error occurred: {message}")


def unavailable(message: str) -> StatusError:
    return StatusError(503, "ServiceUnavailable", message)


def too_large_version(asked: int, current: int) -> StatusError:
    """504 when a client knows a revision that this store has not reached."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    details = {"causes": causes, "retryAfterSeconds": 1}
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    return StatusError(504, "Timeout", message, details)


def as_text(value: Any) -> str:
    """A value as it appears inside a field error: strings quoted, the rest as JSON."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 400 else text[:400] + "..."


def required(field: str, why: str = "") -> FieldError:
    return FieldError("FieldValueRequired", field, "Required value" + (f": {why}" if why else ""))


def invalid_value(field: str, value: Any, why: str) -> FieldError:
    return FieldError("FieldValueInvalid", field, f"Invalid value: {as_text(value)}: {why}")


def not_supported(field: str, value: Any, allowed: Sequence[str]) -> FieldError:
    listed = ", ".join(f'"{item}"' for item in sorted(allowed))
    return FieldError(
        "FieldValueNotSupported", field, f"Unsupported value: {as_text(value)}: supported values: {listed}"
    )


def forbidden_field(field: str, why: str) -> FieldError:
    return FieldError("FieldValueForbidden", field, f"Forbidden: {why}")


def duplicate(field: str, value: Any) -> FieldError:
    return FieldError("FieldValueDuplicate", field, f"Duplicate value: {as_text(value)}")


def too_long(field: str, limit: int) -> FieldError:
    return FieldError("FieldValueTooLong", field, f"Too long: may not be more than {limit} bytes")


def too_many_items(field: str, count: int, limit: int) -> FieldError:
    return FieldError("FieldValueTooMany", field, f"Too many: {count}: must have at most {limit} items")


def immutable(field: str, value: Any) -> FieldError:
    return invalid_value(field, value, "field is immutable")
