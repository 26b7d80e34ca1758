"""Validation rules of CustomResourceDefinitions, evaluated by Google's CEL (`cel-expr-python`).

Owns: the variables and functions that a rule has, compiling rules, objects as CEL values, and how fields are named.
Start reading at: `Rule`.

Only the process of `rule_worker` imports this module: the library holds the interpreter lock while it evaluates, and a
rule can ask for any amount of memory. Fields of objects have no static type, so a rule that names a field that does
not exist compiles, and fails when it is evaluated. An unknown function or variable does not compile.
"""

import base64
import binascii
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_bindings, ext_encoders, ext_math, ext_optional, ext_strings
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from moorage.apiserver.crd.cel_functions import kubernetes_functions

Schema = dict[str, Any]
ABSENT = object()
LIMIT_TEXT = 16 << 10
_DURATION = re.compile(r"(-?)((?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+)")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_RESERVED = frozenset(
    ("true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if", "import",
     "let", "loop", "package", "namespace", "return")
)  # fmt: skip
_NAME = re.compile(r"[a-zA-Z_.\-/][a-zA-Z0-9_.\-/]*")
_SPECIAL = re.compile(r"__|[.\-/]")
_ESCAPES = {"__": "__underscores__", ".": "__dot__", "-": "__dash__", "/": "__slash__"}
# With optionalOldSelf, oldSelf is an optional value. The library cannot be given one, but an expression can make it.
_OPTIONAL = "cel.bind(oldSelf, hasOldSelf ? optional.of(givenOldSelf) : optional.none(), {})"


class BadRule(Exception):
    """The text does not compile; the message says why."""


class RuleFailed(Exception):
    """The rule could not be evaluated for this value."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A compiled rule. A transition rule is evaluated only where there is an old value."""

    text: str
    is_transition: bool
    is_optional: bool
    verdict: Any
    explanation: Any

    @classmethod
    def compile(cls, rule: Schema, schema: Schema) -> "Rule":
        """Raises BadRule if the rule or its messageExpression does not compile or has the wrong type."""
        text = str(rule.get("rule") or "")
        is_optional = rule.get("optionalOldSelf") is True
        kind = _static_type(schema)
        verdict, is_transition = _compiled(text, kind, "BOOL", is_optional)
        explanation = None
        if rule.get("messageExpression"):
            explanation, uses_old = _compiled(str(rule["messageExpression"]), kind, "STRING", is_optional)
            if uses_old and not is_transition:
                raise BadRule("messageExpression uses oldSelf, but the rule does not")
        if is_optional and not is_transition:
            raise BadRule("optionalOldSelf is set, but the rule does not use oldSelf")
        return cls(text, is_transition, is_optional, verdict, explanation)

    def holds(self, value: Any, old: Any = ABSENT) -> bool:
        """Whether CEL values keep the rule. Raises RuleFailed if the rule has no verdict on them."""
        if self.is_transition and not self.is_optional and old is ABSENT:
            return True
        found = _evaluated(self.verdict, value, old)
        if not isinstance(found, bool):
            raise RuleFailed("the rule did not evaluate to a bool")
        return found

    def message(self, value: Any, old: Any = ABSENT) -> str:
        """What messageExpression makes of the values; "" if there is none, or if it makes no useful text."""
        if self.explanation is None:
            return ""
        try:
            found = _evaluated(self.explanation, value, old)
        except RuleFailed:
            return ""
        text = found.strip() if isinstance(found, str) else ""
        return "" if "\n" in text or len(text) > 5120 else text


def _static_type(schema: Schema) -> str:
    """The type of self as far as it helps: numbers stay dynamic, because Kubernetes compares them across types."""
    if schema.get("nullable") or schema.get("x-kubernetes-int-or-string"):
        return "dyn"
    match schema.get("type"):
        case "string":
            return "dyn" if schema.get("format") in ("byte", "date", "date-time", "duration") else "string"
        case "boolean":
            return "bool"
        case "array":
            items = schema.get("items")
            return f"list({_static_type(items) if isinstance(items, dict) else 'dyn'})"
        case "object":
            return "map"
    return "dyn"


def _type(name: str) -> Any:
    if name.startswith("list("):
        return cel.Type.List(_type(name[5:-1]))
    if name == "map":
        return cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return {"string": cel.Type.STRING, "bool": cel.Type.BOOL}.get(name, cel.Type.DYN)


@cache
def _extensions() -> list[Any]:
    return [
        ext_strings.ExtStrings(),
        ext_math.ExtMath(),
        ext_optional.ExtOptional(),
        ext_encoders.ExtEncoders(),
        kubernetes_functions(),
    ]


@cache
def _environment(kind: str, old: str) -> Any:
    variables = {"self": _type(kind)}
    if old == "plain":
        variables["oldSelf"] = _type(kind)
    elif old == "dynamic":
        variables["oldSelf"] = cel.Type.DYN
    elif old == "optional":
        variables |= {"givenOldSelf": cel.Type.DYN, "hasOldSelf": cel.Type.BOOL}
    extensions = [*_extensions(), ext_bindings.ExtBindings()] if old == "optional" else _extensions()
    return cel.NewEnv(variables=variables, extensions=extensions)


def _compiled(text: str, kind: str, result: str, is_optional: bool) -> tuple[Any, bool]:
    """The expression, and whether it uses oldSelf: it does if it compiles only with that variable."""
    if not text.strip():
        raise BadRule("the expression is empty")
    if len(text) > LIMIT_TEXT:
        raise BadRule(f"the expression is longer than {LIMIT_TEXT} characters")
    try:
        return _checked(_environment(kind, "none").compile(text), result), False
    except RuntimeError:
        pass  # the next attempt has the message to report
    try:
        if not is_optional:
            return _checked(_environment(kind, "plain").compile(text), result), True
        _environment(kind, "dynamic").compile(text)  # so that the text is one whole expression before it is wrapped
        return _checked(_environment(kind, "optional").compile(_OPTIONAL.format(text)), result), True
    except RuntimeError as error:
        raise BadRule(f"compilation failed: {str(error)[:1000]}") from error


def _checked(expression: Any, result: str) -> Any:
    name = expression.return_type().name()
    if name not in (result, "DYN"):
        raise BadRule(f"the expression must evaluate to a {result.lower()}, not to {name.lower()}")
    return expression


def _evaluated(expression: Any, value: Any, old: Any) -> Any:
    has_old = old is not ABSENT
    given = old if has_old else None
    data = {"self": value, "oldSelf": given, "givenOldSelf": given, "hasOldSelf": has_old}
    try:
        found = expression.eval(data=data)
        if found.type().name() == "ERROR":
            raise RuleFailed(str(found.value())[:500])
        return found.value()
    except (RuntimeError, TypeError) as error:
        raise RuleFailed(str(error)[:500]) from error


def cel_value(value: Any, schema: Schema) -> Any:
    """A JSON value as CEL sees it. Raises RuleFailed if CEL has no such value."""
    match value:
        case dict():
            return _object_value(value, schema)
        case list():
            items = schema.get("items")
            below = items if isinstance(items, dict) else {}
            return [cel_value(item, below) for item in value]
        case str():
            return _text_value(value, str(schema.get("format", "")))
        case bool():
            return value
        case int() if schema.get("type") == "number":
            return float(value)
        case float() if schema.get("type") == "integer":
            return int(value)
    return value


def _object_value(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    below = extra if isinstance(extra, dict) else {}
    made: dict[str, Any] = {}
    for name, item in value.items():
        if "\0" in name:
            raise RuleFailed("a name with a null character cannot be evaluated")
        key = escaped(name) if properties else name
        sub = properties.get(name, below)
        if key is not None and not (item is None and name in properties and not sub.get("nullable")):
            made[key] = cel_value(item, sub)
    return made


def _text_value(value: str, how: str) -> Any:
    try:
        if how == "byte":
            return base64.b64decode(value, validate=True)
        if how in ("date", "date-time"):
            moment = Timestamp()
            moment.FromJsonString(value if how == "date-time" else f"{value}T00:00:00Z")
            return moment
        if how == "duration":
            length = Duration()
            length.FromNanoseconds(_nanoseconds(value))
            return length
    except (ValueError, binascii.Error) as error:
        raise RuleFailed(f"{value[:64]!r} is not in the format {how}: {error}") from error
    if "\0" in value:  # the library would take only what comes before it
        raise RuleFailed("a text with a null character cannot be evaluated")
    return value


def _nanoseconds(text: str) -> int:
    match = _DURATION.fullmatch(text[:64])
    if match is None:
        raise ValueError("not a duration")
    total = sum(int(float(number) * _UNITS[unit]) for number, unit in _DURATION_PART.findall(match[2]))
    return -total if match[1] else total


def escaped(name: str) -> str | None:
    """The field's name in an expression; None if expressions cannot name the field."""
    if name in _RESERVED:
        return f"__{name}__"
    if not _NAME.fullmatch(name):
        return None
    return _SPECIAL.sub(lambda match: _ESCAPES[match[0]], name)
