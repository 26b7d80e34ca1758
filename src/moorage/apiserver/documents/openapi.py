"""Schemas for clients: what `kubectl explain` shows and `kubectl apply` checks against.

Owns: the OpenAPI v2 and v3 documents, made from the type table and from the schemas of custom kinds.
May not touch: storage.
Start reading at: `OpenApi.v3`, `OpenApi.v2`.
"""

from importlib import resources
from typing import Any

from moorage.apiserver.kinds.registry import Kind, KindRegistry, package_of
from moorage.apiserver.kinds.schema import Field, Type, struct

Document = dict[str, Any]

_META = "io.k8s.apimachinery.pkg.apis.meta.v1"
_PLAIN: dict[str, Document] = {
    "string": {"type": "string"},
    "duration": {"type": "string"},
    "bool": {"type": "boolean"},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "byte": {"type": "integer", "format": "byte"},
    "number": {"type": "number", "format": "double"},
    "bytes": {"type": "string", "format": "byte"},
}
_NAMED: dict[str, tuple[str, Document]] = {
    "time": (f"{_META}.Time", {"type": "string", "format": "date-time"}),
    "microtime": (f"{_META}.MicroTime", {"type": "string", "format": "date-time"}),
    "quantity": ("io.k8s.apimachinery.pkg.api.resource.Quantity", {"type": "string"}),
    "intorstring": (
        "io.k8s.apimachinery.pkg.util.intstr.IntOrString",
        {"type": "string", "format": "int-or-string"},
    ),
}
_QUERY = ("dryRun", "fieldManager", "fieldValidation", "force", "pretty")


def definition_name(name: str) -> str:
    """`core.v1.Pod` as OpenAPI names it."""
    package, version, kind = name.split(".")
    if package == "meta":
        return f"{_META}.{kind}"
    if package == "apiextensions":
        return f"io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.{version}.{kind}"
    return f"io.k8s.api.{package}.{version}.{kind}"


def _words() -> dict[str, str]:
    text = resources.files("moorage.apiserver").joinpath("data/words.txt").read_text()
    pairs = [line.split(": ", 1) for line in text.splitlines() if ": " in line and not line.startswith("#")]
    return {pair[0]: pair[1] for pair in pairs}


class OpenApi:
    """Documents of one registry; kept until the registry changes."""

    def __init__(self, registry: KindRegistry) -> None:
        self._registry = registry
        self._made: dict[tuple[str, int], Document] = {}
        self._words: dict[str, str] | None = None

    def index(self) -> Document:
        """Which group-versions have a v3 document."""
        paths = {}
        for group, versions in self._registry.groups().items():
            for version in versions:
                where = f"apis/{group}/{version}" if group else f"api/{version}"
                paths[where] = {"serverRelativeURL": f"/openapi/v3/{where}?hash={self._registry.revision:X}"}
        return {"paths": paths}

    def v3(self, where: str) -> Document | None:
        """The document of one group-version, given as `apis/GROUP/VERSION` or `api/v1`."""
        parts = where.split("/")
        group, version = ("", parts[1]) if parts[0] == "api" and len(parts) == 2 else ("", "")
        if parts[0] == "apis" and len(parts) == 3:
            group, version = parts[1], parts[2]
        kinds = self._registry.of(group, version) if version else []
        if not kinds:
            return None
        return self._kept(where, lambda: self._document_v3(kinds))

    def v2(self) -> Document:
        return self._kept("v2", self._document_v2)

    def _kept(self, name: str, make: Any) -> Document:
        key = (name, self._registry.revision)
        if key not in self._made:
            self._made = {k: v for k, v in self._made.items() if k[1] == self._registry.revision}
            self._made[key] = make()
        return self._made[key]

    def _document_v3(self, kinds: list[Kind]) -> Document:
        schemas = self._definitions(kinds, "#/components/schemas/", is_v3=True)
        paths: Document = {}
        for kind in kinds:
            paths |= _paths(kind, "#/components/schemas/", is_v3=True)
        return {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": "v1.37.0"},
            "paths": paths,
            "components": {"schemas": schemas},
        }

    def _document_v2(self) -> Document:
        kinds = self._registry.all()
        paths: Document = {}
        for kind in kinds:
            paths |= _paths(kind, "#/definitions/", is_v3=False)
        return {
            "swagger": "2.0",
            "info": {"title": "Kubernetes", "version": "v1.37.0"},
            "paths": paths,
            "definitions": self._definitions(kinds, "#/definitions/", is_v3=False),
        }

    def _definitions(self, kinds: list[Kind], prefix: str, is_v3: bool) -> Document:
        if self._words is None:
            self._words = _words()
        builder = _Builder(prefix, is_v3, self._words)
        for kind in kinds:
            builder.add_kind(kind)
        for name in ("meta.v1.DeleteOptions", "meta.v1.Status"):
            builder.ref(name)
        return dict(sorted(builder.made.items()))


class _Builder:
    """Collects definitions, following references."""

    def __init__(self, prefix: str, is_v3: bool, words: dict[str, str]) -> None:
        self.made: Document = {}
        self._prefix = prefix
        self._is_v3 = is_v3
        self._words = words

    def add_kind(self, kind: Kind) -> None:
        name = schema_name(kind)
        if kind.custom is not None:
            self.made[name] = self._custom(kind)
        else:
            self.ref(kind.type.name)
        found = self.made[name]
        found["x-kubernetes-group-version-kind"] = [_gvk(kind)]
        items = {"type": "array", "items": self._pointer(name)}
        self.made[f"{name}List"] = {
            "type": "object",
            "description": f"A list of {kind.name} objects.",
            "required": ["items"],
            "properties": {"apiVersion": {"type": "string"}, "items": items, "kind": {"type": "string"},
                           "metadata": self.ref("meta.v1.ListMeta")},
            "x-kubernetes-group-version-kind": [{**_gvk(kind), "kind": kind.list_name}],
        }  # fmt: skip

    def _custom(self, kind: Kind) -> Document:
        schema = {key: value for key, value in kind.custom.schema.items() if self._is_v3 or key not in _V3_ONLY}
        schema = schema if self._is_v3 else _for_v2(schema)
        properties = dict(schema.get("properties") or {})
        properties["apiVersion"] = {"type": "string", **_text(self._words, "apiVersion")}
        properties["kind"] = {"type": "string", **_text(self._words, "kind")}
        properties["metadata"] = self.ref("meta.v1.ObjectMeta")
        return {**schema, "type": "object", "properties": properties}

    def ref(self, name: str) -> Document:
        """A reference to a struct of the table, which is defined when it is first met."""
        full = definition_name(name)
        if full not in self.made:
            self.made[full] = {}
            self.made[full] = self._struct(struct(name))
        return self._pointer(full)

    def _pointer(self, full: str) -> Document:
        target = {"$ref": self._prefix + full}
        return {"allOf": [target], "default": {}} if self._is_v3 else target

    def _struct(self, node: Type) -> Document:
        short = node.name.rpartition(".")[2]
        made: Document = {"type": "object", **_text(self._words, short)}
        needed = [f.name for f in node.fields.values() if f.is_required]
        if needed:
            made["required"] = sorted(needed)
        made["properties"] = {f.name: self._field(f, short) for f in node.fields.values()}
        if node.is_atomic:
            made["x-kubernetes-map-type"] = "atomic"
        return made

    def _field(self, known: Field, owner: str) -> Document:
        made = self._type(known.type)
        words = _text(self._words, f"{owner}.{known.name}") or _text(self._words, known.name)
        if words and "$ref" not in made:
            made = {**made, **words}
        node = known.type
        if node.shape == "list":
            made |= {"x-kubernetes-list-type": node.list_kind}
            if node.map_keys:
                made["x-kubernetes-list-map-keys"] = list(node.map_keys)
            if node.patch:
                made["x-kubernetes-patch-strategy"] = node.patch
            if node.merge_key:
                made["x-kubernetes-patch-merge-key"] = node.merge_key
        elif node.patch and "$ref" not in made:
            made["x-kubernetes-patch-strategy"] = node.patch
        return made

    def _type(self, node: Type) -> Document:
        if node.shape in _PLAIN:
            return dict(_PLAIN[node.shape])
        if node.shape in _NAMED:
            name, schema = _NAMED[node.shape]
            self.made.setdefault(name, _v3_scalar(node.shape) if self._is_v3 else schema)
            return self._pointer(name)
        if node.shape == "struct":
            return self.ref(node.name)
        if node.shape == "list":
            return {"type": "array", "items": self._type(node.item or Type("any"))}
        if node.shape == "map":
            return {"type": "object", "additionalProperties": self._type(node.item or Type("any"))}
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _v3_scalar(shape: str) -> Document:
    if shape in ("quantity", "intorstring"):
        kinds = [{"type": "string"}, {"type": "number" if shape == "quantity" else "integer"}]
        return {"oneOf": kinds, **({"format": "int-or-string"} if shape == "intorstring" else {})}
    return dict(_NAMED[shape][1])


def _text(words: dict[str, str], name: str) -> Document:
    return {"description": words[name]} if name in words else {}


_V3_ONLY = ("oneOf", "anyOf", "not", "nullable", "x-kubernetes-validations")


def _for_v2(schema: Any) -> Any:
    """A custom kind's schema without the words that OpenAPI v2 does not have."""
    if not isinstance(schema, dict):
        return {}
    made = {key: value for key, value in schema.items() if key not in _V3_ONLY}
    if made.pop("x-kubernetes-int-or-string", None):
        return {"x-kubernetes-int-or-string": True}
    if schema.get("nullable"):
        made.pop("type", None)
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: _for_v2(sub) for name, sub in made["properties"].items()}
    for word in ("items", "additionalProperties"):
        if isinstance(made.get(word), dict):
            made[word] = _for_v2(made[word])
    if made.get("x-kubernetes-preserve-unknown-fields"):
        return {key: made[key] for key in ("description", "x-kubernetes-preserve-unknown-fields") if key in made}
    return made


def schema_name(kind: Kind) -> str:
    """The name of a kind's definition."""
    if kind.custom is None:
        return definition_name(kind.type.name)
    return ".".join([*reversed(kind.group.split(".")), kind.version, kind.name])


def _gvk(kind: Kind) -> Document:
    return {"group": kind.group, "version": kind.version, "kind": kind.name}


def _paths(kind: Kind, prefix: str, is_v3: bool) -> Document:
    """The paths of a kind, with as much of their operations as clients look at."""
    scope = "namespaces/{namespace}/" if kind.is_namespaced else ""
    base = f"{kind.root}/{scope}{kind.plural}"
    collection = {verb: _operation(kind, word, prefix, is_v3) for verb, word in
                  (("get", "list"), ("post", "create"), ("delete", "deletecollection"))}  # fmt: skip
    one = {verb: _operation(kind, word, prefix, is_v3) for verb, word in
           (("get", "get"), ("put", "update"), ("patch", "patch"), ("delete", "delete"))}  # fmt: skip
    found = {base: collection, f"{base}/{{name}}": one}
    if kind.has_status:
        found[f"{base}/{{name}}/status"] = {verb: one[verb] for verb in ("get", "put", "patch")}
    if kind.is_namespaced:
        found[f"{kind.root}/{kind.plural}"] = {"get": collection["get"]}
    return found


def _operation(kind: Kind, action: str, prefix: str, is_v3: bool) -> Document:
    names = _QUERY if action in ("create", "update", "patch", "delete") else ("limit", "continue", "labelSelector")
    parameters = [
        {"name": name, "in": "query", **({"schema": {"type": "string"}} if is_v3 else {"type": "string"})}
        for name in names
    ]
    target = schema_name(kind) + ("List" if action == "list" else "")
    schema = {"$ref": prefix + target}
    answer = {
        "description": "OK",
        **({"content": {"application/json": {"schema": schema}}} if is_v3 else {"schema": schema}),
    }
    made: Document = {
        "operationId": f"{action}{package_of(kind.group).title().replace('.', '')}{kind.version.title()}{kind.name}",
        "parameters": parameters,
        "responses": {"200": answer},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _gvk(kind),
    }
    if action in ("create", "update") and is_v3:
        made["requestBody"] = {"content": {"*/*": {"schema": schema}}}
    return made
