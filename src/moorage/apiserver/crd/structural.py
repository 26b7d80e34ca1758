"""Structural schemas: what a CustomResourceDefinition says about its objects.

Owns: turning an OpenAPI v3 schema into types, pruning, defaulting, and validation with field paths.
May not touch: storage.
Start reading at: `type_from`, `Checker`.
"""

import copy
from collections.abc import Callable
from typing import Any

import msgspec

from moorage.apiserver.errors import FieldError, as_text, invalid_value, not_supported, required
from moorage.apiserver.kinds.schema import ANY, Field, Type, struct

Schema = dict[str, Any]


def type_from(schema: Schema, is_root: bool = False) -> Type:
    """The type tree of a schema, for pruning and for server-side apply."""
    if schema.get("x-kubernetes-int-or-string"):
        return Type("intorstring", spec=schema)
    kind = schema.get("type")
    if kind == "object" or "properties" in schema or is_root:
        return _object_type(schema, is_root)
    if kind == "array":
        item = type_from(schema.get("items") or {})
        return Type(
            "list",
            item=item,
            list_kind=str(schema.get("x-kubernetes-list-type", "atomic")),
            map_keys=tuple(schema.get("x-kubernetes-list-map-keys") or ()),
            spec=schema,
        )
    if kind in ("string", "boolean", "integer", "number"):
        return Type({"string": "string", "boolean": "bool", "integer": "int64", "number": "number"}[kind], spec=schema)
    return Type("any", keeps_unknown=True, spec=schema)


def _object_type(schema: Schema, is_root: bool) -> Type:
    extra = schema.get("additionalProperties")
    is_atomic = schema.get("x-kubernetes-map-type") == "atomic"
    properties = schema.get("properties") or {}
    if extra is not None and extra is not False and not properties:
        item = type_from(extra) if isinstance(extra, dict) else ANY
        return Type("map", item=item, is_atomic=is_atomic, spec=schema)
    node = Type("struct", is_atomic=is_atomic, spec=schema)
    node.keeps_unknown = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    node.is_embedded = bool(schema.get("x-kubernetes-embedded-resource"))
    needed = schema.get("required") or []
    for name, sub in properties.items():
        made = type_from(sub) if isinstance(sub, dict) else ANY
        node.fields[name] = Field(name, made, is_pointer=True, is_required=name in needed)
    if is_root or node.is_embedded:
        node.fields["apiVersion"] = Field("apiVersion", Type("string"), is_pointer=True)
        node.fields["kind"] = Field("kind", Type("string"), is_pointer=True)
        node.fields["metadata"] = Field("metadata", struct("meta.v1.ObjectMeta"), is_pointer=True)
    return node


def prune(value: Any, node: Type, path: str, unknown: list[str]) -> Any:
    """The value without fields that its schema does not know; what is dropped is named."""
    if node.shape == "struct" and isinstance(value, dict):
        out = {}
        for name, item in value.items():
            known = node.fields.get(name)
            if known is not None:
                where = f"{path}.{name}" if path else name
                out[name] = item if name == "metadata" and not path else prune(item, known.type, where, unknown)
            elif node.keeps_unknown:
                out[name] = item
            else:
                unknown.append(f"{path}.{name}" if path else name)
        return out
    if node.shape == "map" and isinstance(value, dict):
        return {name: prune(item, node.item or ANY, f"{path}.{name}", unknown) for name, item in value.items()}
    if node.shape == "list" and isinstance(value, list):
        return [prune(item, node.item or ANY, f"{path}[{at}]", unknown) for at, item in enumerate(value)]
    return value


def default(value: Any, schema: Schema) -> None:
    """Fill in defaults below a value, in place; a null where null is not allowed counts as absent."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        for name, sub in properties.items():
            if not isinstance(sub, dict):
                continue
            if "default" in sub and (name not in value or (value[name] is None and not sub.get("nullable"))):
                value[name] = copy.deepcopy(sub["default"])
            elif name in value and value[name] is None and not sub.get("nullable"):
                del value[name]
            if name in value:
                default(value[name], sub)
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            for name, item in value.items():
                if name not in properties:
                    default(item, extra)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for item in value:
            default(item, schema["items"])


class Checker:
    """One validation of one object; errors gather in `errors`.

    `matches` says whether a pattern occurs in a text. A schema without patterns needs none.
    """

    def __init__(self, matches: Callable[[str, str], bool] | None = None) -> None:
        self.errors: list[FieldError] = []
        self._matches = matches

    def check_object(self, obj: dict[str, Any], schema: Schema) -> None:
        """Check a whole object; its metadata is checked elsewhere."""
        needed = [name for name in schema.get("required") or [] if name != "metadata"]
        self.check({k: v for k, v in obj.items() if k != "metadata"}, {**schema, "required": needed}, "")

    def check(self, value: Any, schema: Schema, path: str) -> None:
        if value is None and schema.get("nullable"):
            return
        if not self._check_type(value, schema, path):
            return
        if "enum" in schema and value not in schema["enum"]:
            self.errors.append(not_supported(path, value, [str(item) for item in schema["enum"]]))
        if isinstance(value, str):
            self._check_text(value, schema, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._check_number(value, schema, path)
        elif isinstance(value, dict):
            self._check_object(value, schema, path)
        elif isinstance(value, list):
            self._check_list(value, schema, path)
        self._check_logic(value, schema, path)

    def _check_type(self, value: Any, schema: Schema, path: str) -> bool:
        if schema.get("x-kubernetes-int-or-string"):
            fits = isinstance(value, int | str) and not isinstance(value, bool)
            wanted = "integer,string"
        else:
            wanted = str(schema.get("type", ""))
            match wanted:
                case "object":
                    fits = isinstance(value, dict)
                case "array":
                    fits = isinstance(value, list)
                case "string":
                    fits = isinstance(value, str)
                case "boolean":
                    fits = isinstance(value, bool)
                case "integer":
                    fits = (isinstance(value, int) and not isinstance(value, bool)) or (
                        isinstance(value, float) and value.is_integer()
                    )
                case "number":
                    fits = isinstance(value, int | float) and not isinstance(value, bool)
                case _:
                    fits = True
        if not fits:
            have = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
            got = have.get(type(value), "null")
            message = f"Invalid value: {as_text(got)}: {path} in body must be of type {wanted}: {as_text(got)}"
            self.errors.append(FieldError("FieldValueTypeInvalid", path, message))
        return fits

    def _check_text(self, value: str, schema: Schema, path: str) -> None:
        if "maxLength" in schema and len(value) > schema["maxLength"]:
            why = f"may not be more than {schema['maxLength']} bytes"
            self.errors.append(FieldError("FieldValueTooLong", path, f"Too long: {why}"))
        if "minLength" in schema and len(value) < schema["minLength"]:
            why = f"{path} in body should be at least {schema['minLength']} chars long"
            self.errors.append(invalid_value(path, value, why))
        pattern = schema.get("pattern")
        if pattern and self._matches is not None and not self._matches(str(pattern), value):
            self.errors.append(invalid_value(path, value, f"{path} in body should match '{pattern}'"))

    def _check_number(self, value: float, schema: Schema, path: str) -> None:
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None and (value < low or (schema.get("exclusiveMinimum") and value == low)):
            self.errors.append(invalid_value(path, value, f"{path} in body should be greater than or equal to {low}"))
        if high is not None and (value > high or (schema.get("exclusiveMaximum") and value == high)):
            self.errors.append(invalid_value(path, value, f"{path} in body should be less than or equal to {high}"))
        step = schema.get("multipleOf")
        if step and value % step:
            self.errors.append(invalid_value(path, value, f"{path} in body should be a multiple of {step}"))

    def _check_object(self, value: dict[str, Any], schema: Schema, path: str) -> None:
        for name in schema.get("required") or []:
            if name not in value:
                self.errors.append(required(f"{path}.{name}" if path else name))
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        for name, item in value.items():
            sub = properties.get(name, extra)
            if isinstance(sub, dict):
                self.check(item, sub, f"{path}.{name}" if path else name)
        for word, fits in (("minProperties", len(value) >= schema.get("minProperties", 0)),
                           ("maxProperties", len(value) <= schema.get("maxProperties", len(value)))):  # fmt: skip
            if not fits:
                self.errors.append(invalid_value(path, len(value), f"{path} in body should have {word} {schema[word]}"))

    def _check_list(self, value: list[Any], schema: Schema, path: str) -> None:
        if len(value) > schema.get("maxItems", len(value)):
            message = f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
            self.errors.append(FieldError("FieldValueTooMany", path, message))
        if len(value) < schema.get("minItems", 0):
            why = f"{path} in body should have at least {schema['minItems']} items"
            self.errors.append(invalid_value(path, len(value), why))
        keys = schema.get("x-kubernetes-list-map-keys") or []
        kind = schema.get("x-kubernetes-list-type")
        if kind in ("map", "set") or schema.get("uniqueItems"):
            seen: set[str] = set()
            for at, item in enumerate(value):
                identity = [item.get(k) for k in keys] if kind == "map" and isinstance(item, dict) else item
                known_by = json_text(identity)
                if known_by in seen:
                    message = f"Duplicate value: {as_text(identity)}"
                    self.errors.append(FieldError("FieldValueDuplicate", f"{path}[{at}]", message))
                seen.add(known_by)
        if isinstance(schema.get("items"), dict):
            for at, item in enumerate(value):
                self.check(item, schema["items"], f"{path}[{at}]")

    def _check_logic(self, value: Any, schema: Schema, path: str) -> None:
        for sub in schema.get("allOf") or []:
            self.check(value, sub, path)
        if schema.get("anyOf") and not any(self._fits(value, sub) for sub in schema["anyOf"]):
            self.errors.append(invalid_value(path, "", f"{path} in body must validate at least one schema (anyOf)"))
        if schema.get("oneOf") and sum(self._fits(value, sub) for sub in schema["oneOf"]) != 1:
            self.errors.append(invalid_value(path, "", f"{path} in body must validate one and only one schema (oneOf)"))
        if schema.get("not") and self._fits(value, schema["not"]):
            self.errors.append(invalid_value(path, "", f"{path} in body must not validate the schema (not)"))

    def _fits(self, value: Any, schema: Schema) -> bool:
        checker = Checker(self._matches)
        checker.check(value, schema, "")
        return not checker.errors


def json_text(value: Any) -> str:
    """One text for values that are the same as JSON: members in any order, 1 and 1.0."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_encoded(key)}:{json_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(json_text, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _encoded(value)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
