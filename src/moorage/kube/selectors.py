"""Label selectors, field selectors and node-affinity terms: parsed once, matched often.

Owns: the text syntax (`a=b,c!=d,e in (f,g),!h`), the object form (matchLabels, matchExpressions), and node terms.
May not touch: clients and stores; these are pure values and functions.
Start reading at: `LabelMatch.parse`, `node_matches`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.errors import InvalidRequest
from moorage.kube.objects.meta import LabelSelector, NodeSelector, NodeSelectorTerm, Requirement

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")  # int() alone would take `1_000` and foreign digits
_FIELD_PIECE = re.compile(r"(?:[^,\\]|\\.)+")
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")


class BadSelector(InvalidRequest):
    """The text or object is no selector."""


@dataclass(frozen=True, slots=True)
class LabelMatch:
    """A conjunction of requirements on labels; with none, everything matches."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "LabelMatch":
        """The selector written as kubectl's `-l` takes it."""
        return cls(tuple(_requirement_from(part) for part in _split(text)))

    @classmethod
    def of(cls, selector: LabelSelector | None) -> "LabelMatch":
        """The selector of an object; an absent one matches nothing in Kubernetes, so ask before you call."""
        if selector is None:
            return cls()
        pairs = [Requirement(key=k, operator="In", values=[v]) for k, v in sorted(selector.match_labels.items())]
        return cls(tuple(pairs + list(selector.match_expressions)))

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement_holds(requirement, labels) for requirement in self.requirements)

    def text(self) -> str:
        """The selector as a query parameter."""
        return ",".join(_text_of(requirement) for requirement in self.requirements)


@dataclass(frozen=True, slots=True)
class FieldMatch:
    """A conjunction of `path=value` and `path!=value`."""

    terms: tuple[tuple[str, str, bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "FieldMatch":
        """The selector as `--field-selector` takes it; a backslash keeps `,`, `=` and itself from being special."""
        terms = []
        for part in filter(None, (piece.strip() for piece in _FIELD_PIECE.findall(text))):
            match = re.fullmatch(r"([A-Za-z0-9_.()\[\]/'-]+)\s*(==|=|!=)\s*((?:[^\\=]|\\[\\,=])*)", part)
            if match is None:
                raise BadSelector(f"field selector {part!r}: want path=value or path!=value")
            terms.append((match[1], re.sub(r"\\(.)", r"\1", match[3]), match[2] != "!="))
        return cls(tuple(terms))

    def matches(self, value_at: Callable[[str], str]) -> bool:
        return all((value_at(path) == value) is wanted for path, value, wanted in self.terms)


def requirement_holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Whether labels meet one requirement; NotIn and DoesNotExist hold for an absent key."""
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value is not None and value in requirement.values
        case "NotIn":
            return value is None or value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(requirement, value)
    raise BadSelector(f"unknown operator {requirement.operator!r} for key {requirement.key!r}")


def term_matches(term: NodeSelectorTerm, labels: Mapping[str, str], name: str) -> bool:
    """One node-affinity term; a term without requirements matches no node."""
    if not term.match_expressions and not term.match_fields:
        return False
    fields = {"metadata.name": name}
    return all(requirement_holds(r, labels) for r in term.match_expressions) and all(
        requirement_holds(r, fields) for r in term.match_fields
    )


def node_matches(selector: NodeSelector | None, labels: Mapping[str, str], name: str) -> bool:
    """Whether a node satisfies a required node selector: any of its terms; an absent selector fits all."""
    if selector is None:
        return True
    return any(term_matches(term, labels, name) for term in selector.node_selector_terms)


def value_at(document: Mapping[str, Any], path: str) -> str:
    """The text of a field in a raw object, for field selectors; an absent field is the empty string."""
    found: Any = document
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    if found is None:
        return ""
    return str(found).lower() if isinstance(found, bool) else str(found)


def _compares(requirement: Requirement, value: str | None) -> bool:
    texts = (value or "", requirement.values[0] if len(requirement.values) == 1 else "")
    if not all(_INTEGER.fullmatch(text) for text in texts):
        return False
    have, want = map(int, texts)
    return have > want if requirement.operator == "Gt" else have < want


def _split(text: str) -> Sequence[str]:
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    if depth != 0:
        raise BadSelector(f"label selector {text!r}: parentheses do not match")
    if not text.strip():
        return []
    if not all(part.strip() for part in parts):
        raise BadSelector(f"label selector {text!r}: empty requirement")
    return [part.strip() for part in parts]


def _requirement_from(part: str) -> Requirement:
    if match := _SET.fullmatch(part):
        values = sorted({value.strip() for value in match[3].split(",")})
        return _checked(match[1], "In" if match[2] == "in" else "NotIn", values)
    for symbol, operator in (("!=", "NotIn"), ("==", "In"), ("=", "In"), (">", "Gt"), ("<", "Lt")):
        if symbol in part and not part.startswith("!"):
            key, value = part.split(symbol, 1)
            return _checked(key.strip(), operator, [value.strip()])
    if part.startswith("!"):
        return _checked(part[1:].strip(), "DoesNotExist", [])
    return _checked(part, "Exists", [])


def _checked(key: str, operator: str, values: list[str]) -> Requirement:
    prefix, slash, name = key.rpartition("/")
    bad_prefix = bool(slash) and (len(prefix) > 253 or not _PREFIX.fullmatch(prefix))
    if bad_prefix or len(name) > 63 or not _NAME.fullmatch(name):
        raise BadSelector(f"label selector: {key!r} is not a label key")
    for value in values:
        if operator in ("Gt", "Lt"):
            if not _INTEGER.fullmatch(value):
                raise BadSelector(f"label selector: {value!r} is not an integer, as {operator} needs")
        elif value and (len(value) > 63 or not _NAME.fullmatch(value)):
            raise BadSelector(f"label selector: {value!r} is not a label value")
    return Requirement(key=key, operator=operator, values=values)


def _text_of(requirement: Requirement) -> str:
    key, values = requirement.key, requirement.values
    match requirement.operator:
        case "In":
            return f"{key}={values[0]}" if len(values) == 1 else f"{key} in ({','.join(values)})"
        case "NotIn":
            return f"{key} notin ({','.join(values)})"
        case "Exists":
            return key
        case "DoesNotExist":
            return f"!{key}"
        case _:
            return f"{key}{'>' if requirement.operator == 'Gt' else '<'}{values[0]}"
