"""What a set of rules is.

Owns: `Rules`, and small checks that several kinds share.
May not touch: anything outside the object it is given.
Start reading at: `Rules`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage.apiserver.errors import FieldError, duplicate, immutable, invalid_value, not_supported, required

Object = dict[str, Any]


def _nothing(_obj: Object) -> None:
    return None


def _nothing_on_update(_new: Object, _old: Object) -> None:
    return None


def _fine(_obj: Object) -> list[FieldError]:
    return []


def _fine_on_update(_new: Object, _old: Object) -> list[FieldError]:
    return []


@dataclass(frozen=True, slots=True)
class Rules:
    """What a kind adds to the general behaviour; each part may be left out."""

    name_rule: str = "subdomain"
    default: Callable[[Object], None] = _nothing
    on_create: Callable[[Object], None] = _nothing
    on_update: Callable[[Object, Object], None] = _nothing_on_update
    on_status: Callable[[Object, Object], None] = _nothing_on_update
    check: Callable[[Object], list[FieldError]] = _fine
    check_update: Callable[[Object, Object], list[FieldError]] = _fine_on_update
    check_status: Callable[[Object, Object], list[FieldError]] = _fine_on_update


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> list[FieldError]:
    """A value that must be one of a few words."""
    if value in (None, ""):
        return [required(field)]
    return [] if value in allowed else [not_supported(field, value, list(allowed))]


def unchanged(field: str, new: Any, old: Any) -> list[FieldError]:
    return [] if new == old else [immutable(field, new)]


def unique(field: str, values: list[Any]) -> list[FieldError]:
    errors, seen = [], set()
    for at, value in enumerate(values):
        if value in seen:
            errors.append(duplicate(f"{field}[{at}]", value))
        seen.add(value)
    return errors


def not_negative(field: str, value: Any) -> list[FieldError]:
    if isinstance(value, int) and value < 0:
        return [invalid_value(field, value, "must be greater than or equal to 0")]
    return []
