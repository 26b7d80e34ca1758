"""What a set of rules is.

Owns: `Rules`, and small checks that several kinds share.
May not touch: anything outside the object it is given.
Start reading at: `Rules`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage.apiserver.errors import (
    FieldError,
    duplicate,
    forbidden_field,
    immutable,
    invalid_value,
    not_supported,
    required,
)
from moorage.apiserver.kinds.metadata import qualified_problem
from moorage.errors import InvalidRequest
from moorage.kube.quantity import Quantity

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


def quantity_of(field: str, value: Any) -> tuple[Quantity | None, list[FieldError]]:
    """The quantity, or why the text is none."""
    try:
        return Quantity.parse(value), []
    except InvalidRequest:
        why = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        return None, [invalid_value(field, value, why)]


def not_below_zero(field: str, value: Any) -> list[FieldError]:
    """A quantity that may be zero, but no less."""
    amount, errors = quantity_of(field, value)
    if amount is not None and amount < Quantity(0):
        errors.append(invalid_value(field, value, "must be greater than or equal to 0"))
    return errors


_OPERATORS = ("DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn")


def check_node_selector(field: str, selector: Object) -> list[FieldError]:
    """A node selector needs terms, and each requirement a known operator with fitting values."""
    terms = selector.get("nodeSelectorTerms") or []
    if not terms:
        return [required(f"{field}.nodeSelectorTerms", "must have at least one node selector term")]
    errors: list[FieldError] = []
    for at, term in enumerate(terms):
        for part in ("matchExpressions", "matchFields"):
            for n, one in enumerate(term.get(part) or []):
                where = f"{field}.nodeSelectorTerms[{at}].{part}[{n}]"
                errors += _check_requirement(where, one)
    return errors


def _check_requirement(where: str, one: Object) -> list[FieldError]:
    operator, values = one.get("operator", ""), one.get("values") or []
    if operator not in _OPERATORS:
        return [invalid_value(f"{where}.operator", operator, "not a valid selector operator")]
    if operator in ("In", "NotIn") and not values:
        return [required(f"{where}.values", "must be specified when `operator` is 'In' or 'NotIn'")]
    if operator in ("Exists", "DoesNotExist") and values:
        return [
            forbidden_field(f"{where}.values", "may not be specified when `operator` is 'Exists' or 'DoesNotExist'")
        ]
    if operator in ("Gt", "Lt") and len(values) != 1:
        return [required(f"{where}.values", "must be specified single value when `operator` is 'Lt' or 'Gt'")]
    problem = qualified_problem(one.get("key", ""))
    return [invalid_value(f"{where}.key", one.get("key", ""), problem)] if problem else []
