"""What fields an object may have: the types behind decoding, patching, applying and the published schemas.

Owns: the type nodes, reading `data/schema.txt`, and bringing an object into the form that Kubernetes would
store: unknown fields dropped and named, nulls and empty optional values left out, wrong types refused.
May not touch: rules about values; those are in `validation`.
Start reading at: `Type`, `Normaliser`.
"""

import re
import threading
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from moorage.errors import InvalidRequest
from moorage.kube.quantity import BadQuantity, canonical_text

SCALARS = ("string", "duration", "bool", "int32", "int64", "number", "byte", "bytes", "time", "microtime", "quantity")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


class WrongType(InvalidRequest):
    """A value whose JSON type is not the field's; answered with 400."""


@dataclass(slots=True)
class Field:
    """A property of a struct and what Go's encoder does with its empty value."""

    name: str
    type: "Type"
    is_pointer: bool = False
    is_always_written: bool = False
    is_required: bool = False
    default: Any = None
    number: int = 0  # of the field in protobuf


@dataclass(slots=True)
class Type:
    """One node: a struct, a map, a list or a scalar.

    `merge_key` and `patch` drive strategic merge patches; `list_kind` and `map_keys` server-side apply.
    """

    shape: str
    name: str = ""
    fields: dict[str, Field] = field(default_factory=dict)
    inlined: "dict[int, Type]" = field(default_factory=dict)  # in protobuf, structs that JSON has no name for
    item: "Type | None" = None
    patch: str = ""
    merge_key: str = ""
    list_kind: str = "atomic"
    map_keys: tuple[str, ...] = ()
    is_atomic: bool = False
    keeps_unknown: bool = False
    is_embedded: bool = False
    spec: dict[str, Any] | None = None
    written: "tuple[tuple[str, Type], ...] | None" = None

    def child(self, name: str) -> "Type | None":
        """The type of a property of this struct or map; None when it is not known."""
        if self.shape == "map":
            return self.item
        found = self.fields.get(name)
        return found.type if found else None


ANY = Type("any", keeps_unknown=True)


@lru_cache(maxsize=1)
def _paragraphs() -> dict[str, list[str]]:
    text = resources.files("moorage.apiserver").joinpath("data/schema.txt").read_text()
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        if line[0] != " ":
            current = found.setdefault(line.split()[0], [line])
        else:
            current.append(line[1:])
    return found


def known_types() -> list[str]:
    """The names of every struct in the table."""
    return list(_paragraphs())


@cache
def struct(name: str) -> Type:
    """The struct of that name, such as `core.v1.PodSpec`; types may refer to themselves."""
    with _MAKING:
        return _UNDER_WAY.get(name) or _struct(name)


def _struct(name: str) -> Type:
    lines = _paragraphs()[name]
    node = Type("struct", name=name, is_atomic=lines[0].endswith(" atomic"))
    _UNDER_WAY[name] = node
    for line in lines[1:]:
        found = _field_from(line)
        if found.name == "~":
            node.fields |= found.type.fields
            node.inlined[found.number] = found.type
        else:
            node.fields[found.name] = found
    del _UNDER_WAY[name]
    return node


_UNDER_WAY: dict[str, Type] = {}
_MAKING = threading.RLock()  # requests are decoded in several threads


def _field_from(line: str) -> Field:
    label, text, *flags = line.split()
    name, _, number = label.partition(":")
    node = _type_from(text)
    made = Field(name, node, number=int(number or 0))
    for flag in flags:
        key, _, value = flag.partition("=")
        match key:
            case "ptr":
                made.is_pointer = True
            case "always":
                made.is_always_written = True
            case "required":
                made.is_required = True
            case "patch":
                node.patch = value
            case "key":
                node.merge_key = value
            case "list":
                node.list_kind = value
            case "mapkeys":
                node.map_keys = tuple(value.split(","))
            case "atomic":
                if node.shape == "struct":  # a struct node is shared, so its atomic use gets a copy
                    made.type = node = Type("struct", node.name, node.fields, node.inlined, is_atomic=True)
                else:
                    node.is_atomic = True
            case "granular":  # here the fields of a struct that is atomic elsewhere have owners of their own
                made.type = node = Type("struct", node.name, node.fields, node.inlined)
            case "default":
                made.default = value.strip('"')
    return made


def _type_from(text: str) -> Type:
    if text.startswith("[]"):
        return Type("list", item=_type_from(text[2:]))
    if text.startswith("{}"):
        return Type("map", item=_type_from(text[2:]))
    if text in SCALARS or text == "intorstring":
        return Type(text)
    if text in ("any", "raw"):
        return Type("any", keeps_unknown=True)
    return _UNDER_WAY.get(text) or struct(text)


class Normaliser:
    """One pass over one object: what is unknown is dropped and remembered, what is empty is left out."""

    __slots__ = ("kind", "unknown")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.unknown: list[str] = []

    def struct(self, value: Any, node: Type, path: str, stored: dict[str, Any] | None = None) -> dict[str, Any]:
        """The struct in its stored form. What is the very object that `stored` has was in that form already."""
        if not isinstance(value, dict):
            raise self._wrong(value, path, node.name.rpartition(".")[2] or "object")
        out: dict[str, Any] = {}
        fields = node.fields
        for name, item in value.items():
            known = fields.get(name)
            if known is None:
                if node.keeps_unknown:
                    out[name] = item
                else:
                    self.unknown.append(f"{path}.{name}" if path else name)
                continue
            if item is None:
                continue
            if stored is not None and stored.get(name) is item:
                out[name] = item
                continue
            if stored is not None and name == "metadata":
                out[name] = self.struct(item, known.type, name, stored.get(name))
                continue
            kept = self.any(item, known.type, f"{path}.{name}" if path else name)
            if (kept or known.is_pointer or known.is_always_written or known.type.shape == "struct") or (
                known.type.shape in ("any", "intorstring")
            ):
                out[name] = kept
        for name, kind in _always(node):
            if name not in out:
                out[name] = zero_of(kind)
        return out

    def any(self, value: Any, node: Type, path: str) -> Any:
        shape = node.shape
        if shape == "string":
            if type(value) is not str:
                raise self._wrong(value, path, "string")
            return value
        if shape == "struct":
            return self.struct(value, node, path)
        if shape == "any":
            return value
        if shape == "list":
            if not isinstance(value, list):
                raise self._wrong(value, path, "list")
            item = node.item or ANY
            if item.shape == "any":
                return value
            return [
                zero_of(item) if entry is None else self.any(entry, item, f"{path}[{at}]")
                for at, entry in enumerate(value)
            ]
        if shape == "map":
            if not isinstance(value, dict):
                raise self._wrong(value, path, f"map[string]{(node.item or ANY).shape}")
            item = node.item or ANY
            if item.shape == "quantity":
                return {key: _quantity(entry, is_amount=True) for key, entry in value.items()}
            empty = "" if item.shape == "bytes" else zero_of(item)
            return {key: empty if entry is None else self.any(entry, item, path) for key, entry in value.items()}
        return self._scalar(value, shape, path)

    def _scalar(self, value: Any, shape: str, path: str) -> Any:
        match shape:
            case "bool":
                fits = isinstance(value, bool)
            case "int32" | "int64" | "byte":
                fits = isinstance(value, int) and not isinstance(value, bool)
                limit = 2**31 if shape == "int32" else 2**63
                fits = fits and -limit <= value < limit
            case "number":
                fits = isinstance(value, int | float) and not isinstance(value, bool)
            case "intorstring":
                fits = isinstance(value, int | str) and not isinstance(value, bool)
            case "quantity":
                return _quantity(value)
            case "time" | "microtime":
                fits = isinstance(value, str) and _TIME.fullmatch(value) is not None
                if isinstance(value, str) and not fits:
                    raise WrongType(f'{self.kind}: {path}: parsing time "{value[:80]}" as RFC 3339: cannot parse')
            case _:
                fits = isinstance(value, str)
        if not fits:
            raise self._wrong(value, path, shape)
        return value

    def _wrong(self, value: Any, path: str, wanted: str) -> WrongType:
        names = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}
        have = names.get(type(value), "null")
        return WrongType(f"json: cannot unmarshal {have} into Go struct field {self.kind}.{path} of type {wanted}")


_LIKE_A_QUANTITY = re.compile(r"[+-]?[0-9]*(\.[0-9]*)?[eEinumkKMGTP]*[-+]?[0-9]*")


def _quantity(value: Any, is_amount: bool = False) -> str:
    """A quantity in the one spelling that is stored; `1024Mi` and `1Gi` are the same bytes afterwards."""
    if value is None:
        return "0"
    text = value if isinstance(value, str) else str(value) if type(value) in (int, float) else ""
    try:
        return canonical_text(text, is_amount)
    except BadQuantity as error:
        if text and _LIKE_A_QUANTITY.fullmatch(text.strip()):
            raise WrongType("unable to parse quantity's suffix") from error
        raise WrongType(
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        ) from error


_ZEROS: dict[str, Any] = {
    "string": "", "bool": False, "int32": 0, "int64": 0, "byte": 0, "number": 0, "quantity": "0", "intorstring": 0,
    "duration": "0s",
}  # fmt: skip


def zero_of(node: Type, with_nulls: bool = False) -> Any:
    """What Go writes for a value that was never set; fields that would be null are left out unless asked for."""
    if node.shape != "struct":
        return _ZEROS.get(node.shape)
    if with_nulls:
        written = [field for field in node.fields.values() if field.is_always_written and field.name != "metadata"]
        return {field.name: zero_of(field.type, True) for field in written}
    return {name: zero_of(kind) for name, kind in _always(node)}


def _always(node: Type) -> "tuple[tuple[str, Type], ...]":
    """The fields that are written even when they are empty, except for those that would be null."""
    if node.written is None:
        node.written = tuple(
            (f.name, f.type)
            for f in node.fields.values()
            if f.is_always_written and (f.type.shape == "struct" or f.type.shape in _ZEROS) and f.name != "metadata"
        )
    return node.written
