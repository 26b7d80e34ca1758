"""The validation rules of one schema: compiled once, evaluated for each write.

Owns: finding the rules in a schema, which old value belongs to which new one, and the field errors of broken rules.
Start reading at: `compile_schema`, `Evaluation`.

This runs in the process of `rule_worker`, and stops when its time is used up.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from moorage.apiserver.crd.cel import ABSENT, BadRule, Rule, RuleFailed, Schema, cel_value
from moorage.apiserver.crd.patterns import BadPattern, compile_pattern
from moorage.apiserver.errors import (
    FieldError,
    as_text,
    duplicate,
    forbidden_field,
    invalid_value,
    not_supported,
    required,
)

REASONS = ("FieldValueRequired", "FieldValueInvalid", "FieldValueForbidden", "FieldValueDuplicate")
LIMIT_MESSAGE = 2048
_JUNCTORS = ("allOf", "anyOf", "oneOf", "not")


@dataclass(slots=True)
class RuleNode:
    """The rules of one place in a schema, and those below it."""

    schema: Schema
    rules: list[tuple[Schema, Rule]] = field(default_factory=list)
    properties: dict[str, "RuleNode"] = field(default_factory=dict)
    items: "RuleNode | None" = None
    values: "RuleNode | None" = None  # of a map

    def is_empty(self) -> bool:
        return not (self.rules or self.properties or self.items or self.values)


def compile_schema(schema: Schema, where: str, errors: list[FieldError], has_old: bool = True) -> RuleNode:
    """Compile every rule of a schema; `errors` gets what is wrong with them.

    `has_old` is False below a list whose items have no identity: no old value belongs to a new one there.
    """
    node = RuleNode(schema)
    _check_pattern(schema, where, errors)
    for at, rule in enumerate(schema.get("x-kubernetes-validations") or []):
        compiled = _compile_rule(rule, schema, f"{where}.x-kubernetes-validations[{at}]", errors, has_old)
        if compiled is not None:
            node.rules.append((rule, compiled))
    for word in _JUNCTORS:
        _check_junctor(schema.get(word), f"{where}.{word}", errors)
    for name, sub in (schema.get("properties") or {}).items():
        below = compile_schema(sub, f"{where}.properties[{name}]", errors, has_old)
        if not below.is_empty():
            node.properties[name] = below
    if isinstance(schema.get("items"), dict):
        keeps = has_old and schema.get("x-kubernetes-list-type") == "map"
        below = compile_schema(schema["items"], f"{where}.items", errors, keeps)
        node.items = None if below.is_empty() else below
    if isinstance(schema.get("additionalProperties"), dict):
        below = compile_schema(schema["additionalProperties"], f"{where}.additionalProperties", errors, has_old)
        node.values = None if below.is_empty() else below
    return node


def _check_pattern(schema: Schema, where: str, errors: list[FieldError]) -> None:
    if schema.get("pattern"):
        try:
            compile_pattern(str(schema["pattern"]))
        except BadPattern as error:
            errors.append(invalid_value(f"{where}.pattern", schema["pattern"], f"must be a valid pattern: {error}"))


def _check_junctor(schema: Any, where: str, errors: list[FieldError]) -> None:
    """Below a logical junctor, patterns are checked too, and rules are refused."""
    if isinstance(schema, list):
        for at, sub in enumerate(schema):
            _check_junctor(sub, f"{where}[{at}]", errors)
    elif isinstance(schema, dict):
        if schema.get("x-kubernetes-validations"):
            why = "rules cannot be part of a logical junctor"
            errors.append(forbidden_field(f"{where}.x-kubernetes-validations", why))
        _check_pattern(schema, where, errors)
        for word in (*_JUNCTORS, "items", "additionalProperties"):
            _check_junctor(schema.get(word), f"{where}.{word}", errors)
        for name, sub in (schema.get("properties") or {}).items():
            _check_junctor(sub, f"{where}.properties[{name}]", errors)


def _compile_rule(rule: Any, schema: Schema, where: str, errors: list[FieldError], has_old: bool) -> Rule | None:
    if not isinstance(rule, dict):
        errors.append(invalid_value(where, "", "must be an object"))
        return None
    text, message = str(rule.get("rule") or ""), str(rule.get("message") or "")
    before = len(errors)
    if not text.strip():
        errors.append(required(f"{where}.rule", "rule is not specified"))
    if "\n" in message or len(message) > LIMIT_MESSAGE:
        errors.append(
            invalid_value(f"{where}.message", message, f"must be one line of at most {LIMIT_MESSAGE} characters")
        )
    if rule.get("reason") and rule["reason"] not in REASONS:
        errors.append(not_supported(f"{where}.reason", rule["reason"], REASONS))
    if rule.get("fieldPath") and not _leads_to_field(str(rule["fieldPath"]), schema):
        errors.append(invalid_value(f"{where}.fieldPath", rule["fieldPath"], "does not refer to a field of the schema"))
    if len(errors) > before:
        return None
    try:
        compiled = Rule.compile(rule, schema)
    except BadRule as error:
        errors.append(invalid_value(f"{where}.rule", text, str(error)))
        return None
    if compiled.is_transition and not has_old:
        errors.append(
            invalid_value(f"{where}.rule", text, "oldSelf cannot be used below a list whose items have no identity")
        )
        return None
    return compiled


def path_steps(path: str) -> list[str] | None:
    """The names in `.spec.a['b.c']`; None if the text is no such path."""
    steps: list[str] = []
    at = 0
    while at < len(path):
        if path.startswith("['", at):
            end = path.find("']", at)
            if end < 0:
                return None
            steps.append(path[at + 2 : end])
            at = end + 2
        elif path[at] == ".":
            end = at + 1
            while end < len(path) and path[end] not in ".[":
                end += 1
            if end == at + 1:
                return None
            steps.append(path[at + 1 : end])
            at = end
        else:
            return None
    return steps


def _leads_to_field(path: str, schema: Schema) -> bool:
    steps = path_steps(path)
    node: Any = schema
    for step in steps or ():
        below = (node.get("properties") or {}).get(step) or node.get("additionalProperties")
        if not isinstance(below, dict):
            return False
        node = below
    return bool(steps)


class OutOfTime(Exception):
    """The time for the rules of one object is used up."""


class Evaluation:
    """One object checked against the rules of its schema; errors gather in `errors`."""

    def __init__(self, deadline: float) -> None:
        self.errors: list[FieldError] = []
        self._deadline = deadline

    def check(self, node: RuleNode, value: Any, old: Any, path: str = "") -> None:
        """Evaluate the rules of a node and of everything below it. Raises OutOfTime after the deadline."""
        if value is None:
            return
        if node.rules:
            self._check_rules(node, value, old, path)
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            properties = node.schema.get("properties") or {}
            for name, item in value.items():
                below = node.properties.get(name) if name in properties else node.values
                if below is not None:
                    self.check(below, item, before.get(name, ABSENT), f"{path}.{name}" if path else name)
        elif isinstance(value, list) and node.items is not None:
            keys = node.schema.get("x-kubernetes-list-map-keys") or []
            known = {_identity(item, keys): item for item in old} if keys and isinstance(old, list) else {}
            for at, item in enumerate(value):
                self.check(node.items, item, known.get(_identity(item, keys), ABSENT), f"{path}[{at}]")

    def _check_rules(self, node: RuleNode, value: Any, old: Any, path: str) -> None:
        try:
            new_value = cel_value(value, node.schema)
            old_value = ABSENT if old is ABSENT or old is None else cel_value(old, node.schema)
        except RuleFailed as error:
            self.errors.append(invalid_value(path or "<nil>", _shown(value), str(error)))
            return
        for rule, compiled in node.rules:
            if time.process_time() > self._deadline:
                raise OutOfTime
            if not compiled.is_transition and old is not ABSENT and value == old:
                continue  # what an older definition admitted stays, as long as it does not change
            try:
                if compiled.holds(new_value, old_value):
                    continue
                why = compiled.message(new_value, old_value) or _message(rule)
            except RuleFailed as error:
                why = f"{error}, evaluating the rule: {_message(rule)}"
            self.errors.append(_field_error(rule, value, path, why))


def _identity(item: Any, keys: list[str]) -> str:
    return as_text([item.get(key) for key in keys]) if isinstance(item, dict) else ""


def _message(rule: Schema) -> str:
    return str(rule.get("message") or "").strip() or f"failed rule: {str(rule['rule']).strip()}"


def _shown(value: Any) -> Any:
    return {} if isinstance(value, dict) else value


def _field_error(rule: Schema, value: Any, path: str, why: str) -> FieldError:
    for step in path_steps(str(rule.get("fieldPath") or "")) or ():
        path = f"{path}[{step}]" if "." in step else f"{path}.{step}" if path else step
        value = value.get(step) if isinstance(value, dict) else None
    path = path or "<nil>"
    match rule.get("reason"):
        case "FieldValueRequired":
            return required(path, why)
        case "FieldValueForbidden":
            return forbidden_field(path, why)
        case "FieldValueDuplicate":
            return duplicate(path, _shown(value))
    return invalid_value(path, _shown(value), why)
