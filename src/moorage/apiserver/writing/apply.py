"""Server-side apply, and who owns which field.

Owns: field managers: conflicts, taking ownership by force, giving fields up, and following other writes.
May not touch: HTTP.
Start reading at: `apply_patch`, `track_update`.

Every write is followed, under the name that it gives itself or the start of its user agent. An object whose
managers were taken away is followed again from its next apply on; what it held until then belongs to
`before-first-apply`, as in Kubernetes.
"""

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moorage.apiserver.errors import StatusError, bad_request, invalid, required
from moorage.apiserver.kinds.metadata import now_text
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.kinds.schema import Type, zero_of
from moorage.apiserver.request.apart import apart
from moorage.apiserver.request.options import Call
from moorage.apiserver.writing.decoding import check_identity, intake
from moorage.apiserver.writing.managed_fields import (
    INSIDE,
    ITEM,
    Path,
    fields_v1,
    leaves,
    merged,
    nodes,
    paths_from,
    remove,
    shown,
)

if TYPE_CHECKING:
    from moorage.apiserver.writing.operations import Operations

LIMIT_UPDATERS = 10
_SYSTEM = (
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink",
    "deletionTimestamp", "deletionGracePeriodSeconds",
)  # fmt: skip
_UNTRACKED = ("binding", "eviction", "finalize")  # subresources whose writes have no manager


@dataclass(slots=True)
class Manager:
    """One entry of managedFields."""

    name: str
    operation: str
    api_version: str
    subresource: str
    paths: set[Path]
    time: str

    def entry(self) -> Object:
        made: Object = {
            "manager": self.name, "operation": self.operation, "apiVersion": self.api_version, "time": self.time,
            "fieldsType": "FieldsV1", "fieldsV1": fields_v1(self.paths),
        }  # fmt: skip
        if self.subresource:
            made["subresource"] = self.subresource
        return made

    def is_same(self, name: str, operation: str, subresource: str) -> bool:
        return (self.name, self.operation, self.subresource) == (name, operation, subresource)


def managers_in(meta: Object) -> list[Manager]:
    entries = [e for e in meta.get("managedFields") or [] if isinstance(e, dict) and e.get("manager") is not None]
    return [
        Manager(
            str(entry["manager"]),
            str(entry.get("operation", "Update")),
            str(entry.get("apiVersion", "")),
            str(entry.get("subresource", "")),
            paths_from(entry.get("fieldsV1")),
            str(entry.get("time") or now_text()),
        )
        for entry in entries
    ]


def owned(obj: Object, node: Type) -> dict[Path, Any]:
    """The fields of an object that can be owned, with their values."""
    kept = _ownable(obj)
    return leaves(kept if kept["metadata"] else {k: v for k, v in kept.items() if k != "metadata"}, node)


def _ownable(obj: Object) -> Object:
    kept = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind", "metadata")}
    meta = {key: value for key, value in (obj.get("metadata") or {}).items() if key not in _SYSTEM}
    kept["metadata"] = meta
    return kept


def entries_of(managers: list[Manager]) -> list[Object]:
    """managedFields: appliers, then updaters, each by time; too many updaters become one."""
    appliers, updaters = [
        sorted(
            (m for m in managers if (m.operation == "Apply") is applies and m.paths),
            key=lambda m: (m.time, m.name, m.subresource),
        )
        for applies in (True, False)
    ]
    while len(updaters) > LIMIT_UPDATERS:
        first, second, *rest = updaters
        joined = Manager("ancient-changes", "Update", second.api_version, "", first.paths | second.paths, second.time)
        updaters = [joined, *rest]
    return [manager.entry() for manager in [*appliers, *updaters]]


async def apply_patch(resources: "Operations", call: Call, body: Any) -> tuple[bytes, bool]:
    """Apply a configuration; the second value says that the object was created."""
    kind = call.kind
    if not call.options.field_manager:
        error = required("fieldManager", "is required for apply patch")
        raise invalid("PatchOptions", "meta.k8s.io", "", [error])
    if not isinstance(body, dict) or not body.get("apiVersion") or not body.get("kind"):
        raise bad_request("error decoding YAML: the configuration needs apiVersion and kind")
    check_identity(kind, body)
    meta = body.get("metadata")
    if isinstance(meta, dict) and meta.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    config = await apart(call.size_bytes, _configuration, call, body)
    if not call.subresource and resources.store.get(kind.stored_as, call.namespace, call.name) is None:
        call.guard.check_create()
        try:
            managed = await apart(call.size_bytes, _first_entries, call, config)
            return await resources.create(call, config, managed), True
        except StatusError as error:
            if error.reason != "AlreadyExists":
                raise

    def changed(old: Object, _txn: Any) -> Object:
        return _applied(call, old, config)

    return await resources.change(call, changed, is_apply=True), False


def _configuration(call: Call, body: Object) -> Object:
    """What is applied: without what the server owns, and without the other half of a kind with a status."""
    config = intake(call, body)
    sent = body.get("metadata") or {}
    config["metadata"] = {key: value for key, value in config["metadata"].items() if key in sent or key == "name"}
    if config["metadata"].get("name") not in (None, call.name):
        raise bad_request(
            f"the name of the object ({config['metadata']['name']}) does not match the name on the URL ({call.name})"
        )
    config["metadata"]["name"] = call.name
    _strip_always(config, body)
    if call.subresource == "status":
        return {k: v for k, v in config.items() if k in ("apiVersion", "kind", "metadata", "status")}
    if call.kind.has_status:
        config.pop("status", None)
    return config


def _strip_always(config: Any, body: Any) -> None:
    """Take out the empty values that decoding added: a configuration owns only what it says."""
    if isinstance(config, dict) and isinstance(body, dict):
        for key in [key for key, value in config.items() if key not in body and _is_zero(value)]:
            if key != "metadata":
                del config[key]
        for key, value in config.items():
            _strip_always(value, body.get(key))
    elif isinstance(config, list) and isinstance(body, list):
        for one, other in zip(config, body, strict=False):
            _strip_always(one, other)


def _is_zero(value: Any) -> bool:
    return all(_is_zero(item) for item in value.values()) if isinstance(value, dict) else value in ("", 0, "0", "0s")


def _first_entries(call: Call, config: Object) -> list[Object]:
    paths = set(owned(config, call.kind.type))
    return entries_of([Manager(call.manager, "Apply", call.kind.api_version, "", paths, now_text())])


def _applied(call: Call, old: Object, config: Object) -> Object:
    """The object after an apply, with its managers; a conflict is raised unless it is forced."""
    kind, name = call.kind, call.manager
    managers = managers_in(old["metadata"])
    live = owned(old, kind.type)
    if not managers and live:
        managers.append(Manager("before-first-apply", "Update", kind.api_version, "", set(live), now_text()))
    wanted = owned(config, kind.type)
    mine = next((m for m in managers if m.is_same(name, "Apply", call.subresource)), None)
    others = [m for m in managers if m is not mine]
    _settle_conflicts(call, wanted, live, others)
    new: Object = merged(copy.deepcopy(old), _body(config), kind.type)
    new["metadata"] = merged(new["metadata"], config["metadata"], kind.type.fields["metadata"].type)
    if mine is not None:
        held = _with_parents([*(m.paths for m in others), wanted])
        remove(new, kind.type, [path for path in mine.paths if path not in held])
    entry = mine or Manager(name, "Apply", kind.api_version, call.subresource, set(), now_text())
    if entry.paths != set(wanted):
        entry.paths, entry.time = set(wanted), now_text()
    there = nodes(_ownable(new), kind.type).keys()
    for manager in others:
        manager.paths &= there
    new["metadata"]["managedFields"] = entries_of([entry, *others])
    return new


def _body(config: Object) -> Object:
    return {key: value for key, value in config.items() if key not in ("apiVersion", "kind", "metadata")}


def _with_parents(held: Iterable[Iterable[Path]]) -> set[Path]:
    """The fields that are held, and everything that they are in."""
    found: set[Path] = set()
    for path in itertools.chain.from_iterable(held):
        while path and path not in found:
            found.add(path)
            path = path[:-1]
    return found


def _settle_conflicts(call: Call, wanted: dict[Path, Any], live: dict[Path, Any], others: list[Manager]) -> None:
    clashes: list[tuple[Manager, Path]] = []
    for manager in others:
        shared = sorted(manager.paths & wanted.keys() & live.keys())
        clashes += [(manager, p) for p in shared if wanted[p] is not ITEM and live[p] != wanted[p]]
    if not clashes:
        return
    if call.options.force:
        for manager, path in clashes:
            manager.paths.discard(path)
        return
    by_manager: dict[str, list[str]] = {}
    causes = []
    for manager, path in clashes:
        who = f'conflict with "{manager.name}"'
        if manager.subresource:
            who += f' with subresource "{manager.subresource}"'
        if manager.operation == "Update":
            who += f" using {manager.api_version}"
        by_manager.setdefault(who, []).append(shown(path))
        causes.append({"reason": "FieldManagerConflict", "message": who, "field": shown(path)})
    count = len(clashes)
    text = "\n".join(f"{who}:\n" + "\n".join(f"- {p}" for p in paths) for who, paths in by_manager.items())
    if count == 1:
        text = f"{causes[0]['message']}: {causes[0]['field']}"
    message = f"Apply failed with {count} conflict{'s' if count > 1 else ''}: {text}"
    raise StatusError(409, "Conflict", message, {"causes": causes})


def track_create(kind: Kind, call: Call, obj: Object) -> None:
    """Record who made an object. Fields that an empty object of the kind has too get no owner."""
    made = {key: value for key, value in obj.items() if key != "status" or not kind.has_status}
    paths = _set_by(nodes(_ownable(made), kind.type), _empty(kind))
    if paths:
        manager = Manager(call.manager, "Update", kind.api_version, "", paths, now_text())
        obj["metadata"]["managedFields"] = [manager.entry()]


def _empty(kind: Kind) -> dict[Path, Any]:
    """The fields that an object of a kind has before anything is written into it."""
    if kind.custom is not None:
        return {("f:metadata",): INSIDE}
    found = _EMPTY.get(kind.type.name)
    if found is None:
        found = _EMPTY[kind.type.name] = nodes(zero_of(kind.type, with_nulls=True), kind.type)
        found["f:metadata",] = INSIDE
    return found


_EMPTY: dict[str, dict[Path, Any]] = {}


def _set_by(have: dict[Path, Any], had: dict[Path, Any]) -> set[Path]:
    """The fields that a write has set: those that were not there, and those that were otherwise."""
    return {
        path
        for path, value in have.items()
        if path not in had or (value is not INSIDE and value is not ITEM and had[path] != value)
    }


def track_update(kind: Kind, call: Call, new: Object, old: Object, is_apply: bool) -> None:
    """Record a write in managedFields: its manager owns what it set; what it removed loses its owner."""
    meta, before = new["metadata"], old["metadata"].get("managedFields")
    if is_apply:
        return
    reset = meta.get("managedFields")
    if isinstance(reset, list) and len(reset) == 1 and not reset[0]:
        meta.pop("managedFields")
        return
    meta.pop("managedFields", None)
    if not before:
        return
    meta["managedFields"] = before
    if call.subresource in _UNTRACKED:
        return
    have, had = nodes(_ownable(_differing(new, old)), kind.type), nodes(_ownable(_differing(old, new)), kind.type)
    set_now, gone = _set_by(have, had), had.keys() - have.keys()
    if not set_now and not gone:
        return
    managers = managers_in(old["metadata"])
    mine = next((m for m in managers if m.is_same(call.manager, "Update", call.subresource)), None)
    for manager in managers:
        manager.paths -= gone if manager is mine else gone | set_now
    if mine is None and set_now:
        mine = Manager(call.manager, "Update", kind.api_version, call.subresource, set(), now_text())
        managers.append(mine)
    if mine is not None:
        mine.paths |= set_now
        mine.time = now_text()
    meta["managedFields"] = entries_of(managers)


def _differing(one: Object, other: Object) -> Object:
    """The parts of an object that another one has not, or has otherwise; most writes touch only one or two."""
    theirs = other.get("metadata") or {}
    kept = {key: value for key, value in one.items() if key != "metadata" and other.get(key) != value}
    kept["metadata"] = {k: v for k, v in (one.get("metadata") or {}).items() if theirs.get(k) != v}
    return kept
