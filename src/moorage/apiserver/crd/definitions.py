"""CustomResourceDefinitions: kinds that users add.

Owns: what a definition must be like, the kinds it makes, and following definitions as they come and go.
May not touch: HTTP.
Start reading at: `Definitions`, `Custom`.
"""

from functools import cache
from typing import Any

from moorage.apiserver.crd.rule_process import (
    alternatives,
    compile_question,
    evaluate_question,
    has_programs,
    is_installed,
    without_programs,
)
from moorage.apiserver.crd.structural import Checker, default, prune, type_from
from moorage.apiserver.errors import FieldError, bad_request, invalid_value, required
from moorage.apiserver.kinds.metadata import is_label, is_subdomain, now_text
from moorage.apiserver.kinds.registry import Kind, KindRegistry, Object
from moorage.apiserver.kinds.rules import register
from moorage.apiserver.kinds.rules.base import Rules, one_of, unchanged
from moorage.apiserver.kinds.schema import Normaliser, Type, WrongType, struct
from moorage.apiserver.kinds.snapshot_crds import snapshot_definitions
from moorage.apiserver.store.change_log import ObjectVersion
from moorage.apiserver.store.store import PendingChange, Store, Transaction, decode, encode

_LIMIT_WEIGHT = 40_000  # bytes of an object times what a schema compares them with: some 50 ms
_ORPHANS_AT_A_TIME = 200
STORED_AS = "customresourcedefinitions.apiextensions.k8s.io"


class Custom:
    """What one version of a definition says about its objects."""

    def __init__(self, kind_name: str, version: Object) -> None:
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {"type": "object"}
        if not is_installed() and _is_shipped(schema):
            # The snapshot kinds work without the libraries, but nothing enforces their rules and patterns.
            schema = without_programs(schema)
        self.schema: Object = schema
        self.type: Type = type_from(schema, is_root=True)
        self.columns: list[Object] = version.get("additionalPrinterColumns") or []
        subresources = version.get("subresources") or {}
        self.has_status = "status" in subresources
        self.scale: Object = subresources.get("scale") or {}
        self._kind = kind_name
        self._schema_bytes = encode(schema)
        self._has_programs = has_programs(schema)
        self._weight = alternatives(schema)

    def intake(self, obj: Object) -> tuple[Object, list[str]]:
        """The object pruned, and the fields that were dropped."""
        unknown: list[str] = []
        kept: Object = prune(obj, self.type, "", unknown)
        normaliser = Normaliser(self._kind)
        try:
            kept["metadata"] = normaliser.struct(kept.get("metadata") or {}, struct("meta.v1.ObjectMeta"), "metadata")
        except WrongType as error:
            raise bad_request(str(error)) from error
        return kept, unknown + normaliser.unknown

    def default(self, obj: Object) -> None:
        meta = obj["metadata"]
        default(obj, self.schema)
        obj["metadata"] = meta

    def check(self, new: Object) -> list[FieldError]:
        """What is wrong with an object; where that is expensive to tell it is left to `question`."""
        if self._is_expensive(new):
            return []
        checker = Checker()
        checker.check_object(new, self.schema)
        return checker.errors

    def question(self, new: Object, old: Object | None) -> bytes | None:
        """What to ask about an object that `check` does not decide about; None if it does."""
        if not self._is_expensive(new):
            return None
        return evaluate_question(self._schema_bytes, _seen_by_rules(new), None if old is None else _seen_by_rules(old))

    def _is_expensive(self, new: Object) -> bool:
        return self._has_programs or (is_installed() and self._weight * len(encode(new)) > _LIMIT_WEIGHT)


def _seen_by_rules(obj: Object) -> Object:
    """Rules see of an object's metadata only its name."""
    meta = obj["metadata"]
    return {**obj, "metadata": {name: meta[name] for name in ("name", "generateName") if name in meta}}


def question_about(kind: Kind, new: Object, old: Object | None, subresource: str) -> bytes | None:
    """The question about validation rules that a write depends on, if there is one."""
    if kind.custom is not None:
        found: bytes | None = kind.custom.question(new, old)
        return found
    if kind.stored_as != STORED_AS or subresource:
        return None
    before = [] if old is None else [version.get("schema") for version in old["spec"]["versions"]]
    schemas = [
        (f"spec.versions[{at}].schema.openAPIV3Schema", version["schema"]["openAPIV3Schema"])
        for at, version in enumerate(new["spec"]["versions"])
        if version["schema"] not in before
    ]
    asked = [(where, schema) for where, schema in schemas if has_programs(schema) and not _is_shipped(schema)]
    return compile_question(asked) if asked else None


@cache
def _shipped() -> list[Object]:
    versions = [version for definition in snapshot_definitions() for version in definition["spec"]["versions"]]
    return [version["schema"]["openAPIV3Schema"] for version in versions]


def _is_shipped(schema: Object) -> bool:
    return schema in _shipped()


def kinds_of(definition: Object) -> list[Kind]:
    """A kind for each served version."""
    spec = definition["spec"]
    names = spec["names"]
    storage = next((v["name"] for v in spec["versions"] if v.get("storage")), spec["versions"][0]["name"])
    served = [version for version in spec["versions"] if version.get("served")]
    stored = (definition.get("status") or {}).get("storedVersions") or [storage]
    converts = len(served) > 1 or stored != [storage]
    found = []
    for version in served:
        custom = Custom(names["kind"], version)
        kind = Kind(
            group=spec["group"],
            version=version["name"],
            name=names["kind"],
            plural=names["plural"],
            type=custom.type,
            is_namespaced=spec.get("scope") == "Namespaced",
            short_names=tuple(names.get("shortNames") or ()),
            singular=names.get("singular") or names["kind"].lower(),
            list_name=names.get("listKind") or f"{names['kind']}List",
            categories=tuple(names.get("categories") or ()),
            has_status=custom.has_status,
            has_scale=bool(custom.scale),
            tracks_generation=True,
            answers_deleted=False,
            needs_version=True,
            is_custom=True,
            custom=custom,
            selectable=tuple(f["jsonPath"].lstrip(".") for f in version.get("selectableFields") or ()),
        )
        if converts:
            kind.decode_from = _in_version(f"{spec['group']}/{storage}")
            kind.encode_to = _in_version(kind.api_version)
        found.append(kind)
    return found


def _in_version(api_version: str) -> Any:
    return lambda obj: {**obj, "apiVersion": api_version}


class Definitions:
    """Keeps the registry in step with the stored definitions."""

    def __init__(self, store: Store, registry: KindRegistry) -> None:
        self._store = store
        self._registry = registry
        self.orphans: list[str] = []  # resources whose definition is gone, for the housekeeper to empty
        self._made: dict[ObjectVersion, tuple[Object, list[Kind]]] = {}  # from a definition that is being committed
        for definition in store.objects(STORED_AS):
            self._serve(definition, kinds_of(definition))
        store.before_commit.append(self._prepare)
        store.on_commit.append(self._notice)

    def _prepare(self, staged: list[PendingChange]) -> None:
        """Make the kinds of new definitions. Runs in the thread of the database: a large schema takes long."""
        self._made.clear()
        for change in staged:
            if change.resource == STORED_AS:
                definition = decode(change.record.body)
                self._made[change.record] = definition, [] if change.kind == "DELETED" else kinds_of(definition)

    def _notice(self, staged: list[PendingChange]) -> None:
        for change in staged:
            if change.resource != STORED_AS:
                continue
            definition, kinds = self._made.pop(change.record)
            if change.kind == "DELETED":
                spec = definition["spec"]
                self._registry.remove(spec["group"], spec["names"]["plural"])
                self.orphans.append(change.key[1])
            else:
                self._serve(definition, kinds)

    def _serve(self, definition: Object, kinds: list[Kind]) -> None:
        spec = definition["spec"]
        self._registry.remove(spec["group"], spec["names"]["plural"])
        for kind in kinds:
            self._registry.add(kind)

    async def empty_orphans(self) -> None:
        """Delete the objects of definitions that are gone."""
        while self.orphans:
            resource = self.orphans[-1]
            if not self._store.table(resource).order:
                self.orphans.pop()
                continue

            def work(txn: Transaction, resource: str = resource) -> None:
                for namespace, name in self._store.table(resource).order[:_ORPHANS_AT_A_TIME]:
                    record = txn.get(resource, namespace, name)
                    if record is not None:
                        txn.delete(resource, namespace, name, decode(record.body))

            await self._store.write(work)


def _default_definition(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    names = spec.get("names") or {}
    if names.get("kind"):
        names.setdefault("singular", names["kind"].lower())
        names.setdefault("listKind", f"{names['kind']}List")
    spec.setdefault("conversion", {"strategy": "None"})
    _accept(obj)


def _accept(obj: Object) -> None:
    """Names are accepted and the kind is established at once; there is no controller to wait for."""
    status = obj.setdefault("status", {})
    names = (obj.get("spec") or {}).get("names") or {}
    status["acceptedNames"] = names
    known = {c.get("type"): c for c in status.get("conditions") or []}
    reasons = {"NamesAccepted": ("NoConflicts", "no conflicts found"),
               "Established": ("InitialNamesAccepted", "the initial names have been accepted")}  # fmt: skip
    for name, (reason, message) in reasons.items():
        known.setdefault(name, {"type": name, "status": "True", "lastTransitionTime": now_text(), "reason": reason,
                                "message": message})  # fmt: skip
    status["conditions"] = list(known.values())
    stored = status.setdefault("storedVersions", [])
    for version in (obj.get("spec") or {}).get("versions") or []:
        if isinstance(version, dict) and version.get("storage") and version.get("name") not in stored:
            stored.append(version.get("name"))


def _check_definition(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    names = spec.get("names") or {}
    group, plural = spec.get("group", ""), names.get("plural", "")
    errors: list[FieldError] = []
    if not group or not is_subdomain(group) or "." not in group:
        errors.append(invalid_value("spec.group", group, "should be a domain with at least one dot"))
    if obj["metadata"].get("name") != f"{plural}.{group}":
        errors.append(
            invalid_value("metadata.name", obj["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
        )
    errors += one_of("spec.scope", spec.get("scope"), ("Cluster", "Namespaced"))
    if not plural or not is_label(plural):
        errors.append(required("spec.names.plural"))
    if not names.get("kind") or not is_label(names["kind"].lower()):
        errors.append(required("spec.names.kind"))
    versions = spec.get("versions") or []
    if not versions:
        errors.append(required("spec.versions", "must have at least one version"))
    if versions and sum(bool(v.get("storage")) for v in versions) != 1:
        errors.append(
            invalid_value(
                "spec.versions",
                [v.get("name") for v in versions],
                "must have exactly one version marked as storage version",
            )
        )
    if len({v.get("name") for v in versions}) != len(versions):
        errors.append(
            invalid_value("spec.versions", [v.get("name") for v in versions], "must contain unique version names")
        )
    for at, version in enumerate(versions):
        errors += _check_version(f"spec.versions[{at}]", version)
    return errors


def _check_version(where: str, version: Object) -> list[FieldError]:
    if not is_label(version.get("name", "")):
        return [invalid_value(f"{where}.name", version.get("name"), "must be a DNS label")]
    schema = (version.get("schema") or {}).get("openAPIV3Schema")
    if not isinstance(schema, dict):
        return [required(f"{where}.schema.openAPIV3Schema", "schemas are required")]
    if schema.get("type") != "object":
        return [invalid_value(f"{where}.schema.openAPIV3Schema.type", schema.get("type"), "must be object at the root")]
    return _check_schema(f"{where}.schema.openAPIV3Schema", schema, 0)


_LISTS = ("required", "enum", "allOf", "anyOf", "oneOf", "x-kubernetes-validations", "x-kubernetes-list-map-keys")
_NUMBERS: tuple[str, ...] = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "multipleOf")
_NUMBERS += ("minProperties", "maxProperties")


def _check_schema(where: str, schema: Object, depth: int) -> list[FieldError]:
    """The shape of a schema: objects in the places of objects, and a type everywhere it is needed."""
    errors: list[FieldError] = []
    if depth > 60:
        return [invalid_value(where, depth, "the schema is nested too deeply")]
    if not isinstance(schema.get("properties") or {}, dict):
        return [invalid_value(f"{where}.properties", "", "must be an object")]
    for words, kind in ((_LISTS, list), (_NUMBERS, int | float), (("pattern",), str)):
        wrong = [word for word in words if schema.get(word) is not None and not isinstance(schema[word], kind)]
        errors += [invalid_value(f"{where}.{word}", "", "is of the wrong type") for word in wrong]
    for name, sub in (schema.get("properties") or {}).items():
        errors += _check_sub(f"{where}.properties[{name}]", sub, depth)
    for word in ("items", "additionalProperties", "not"):
        if schema.get(word) not in (None, True, False):
            errors += _check_sub(f"{where}.{word}", schema[word], depth)
    for word in ("allOf", "anyOf", "oneOf"):
        for at, sub in enumerate(schema[word] if isinstance(schema.get(word), list) else ()):
            errors += _check_sub(f"{where}.{word}[{at}]", sub, depth, needs_type=False)
    return errors


def _check_sub(where: str, sub: Any, depth: int, needs_type: bool = True) -> list[FieldError]:
    if not isinstance(sub, dict):
        return [invalid_value(where, "", "must be a schema")]
    free = sub.get("x-kubernetes-int-or-string") or sub.get("x-kubernetes-preserve-unknown-fields")
    if needs_type and not sub.get("type") and not free and "not" not in where.rpartition(".")[2]:
        return [required(f"{where}.type", "must not be empty for specified object fields")]
    return _check_schema(where, sub, depth + 1)


def _update_definition(new: Object, old: Object) -> list[FieldError]:
    errors: list[FieldError] = []
    spec, before = new.get("spec") or {}, old.get("spec") or {}
    for path in ("group", "scope"):
        errors += unchanged(f"spec.{path}", spec.get(path), before.get(path))
    names, names_before = spec.get("names") or {}, before.get("names") or {}
    for path in ("kind", "plural"):
        errors += unchanged(f"spec.names.{path}", names.get(path), names_before.get(path))
    return errors


register(STORED_AS, Rules(default=_default_definition, check=_check_definition, check_update=_update_definition))
