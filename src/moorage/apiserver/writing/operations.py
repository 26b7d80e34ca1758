"""The verbs that change objects: create, update, patch, delete; and get.

Owns: the order of steps between a request's body and a staged write, for every kind alike.
May not touch: HTTP, SQL. Kind by kind rules are in `rules`, what needs other objects in `admission`.
Start reading at: `Resources.create`, `Resources.update`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from moorage.apiserver.crd.definitions import question_about
from moorage.apiserver.crd.rule_process import RuleProcess, RulesPending
from moorage.apiserver.errors import (
    MODIFIED,
    FieldError,
    StatusError,
    already_exists,
    bad_request,
    conflict,
    invalid,
    invalid_value,
    not_found,
    too_many,
)
from moorage.apiserver.kinds import metadata as meta
from moorage.apiserver.kinds.registry import Kind, KindRegistry, Object
from moorage.apiserver.kinds.rules import rules_for
from moorage.apiserver.kinds.schema import zero_of
from moorage.apiserver.request.apart import apart
from moorage.apiserver.request.options import Call, DeleteOptions
from moorage.apiserver.store.change_log import ObjectVersion
from moorage.apiserver.store.store import Store, Transaction, decode, encode
from moorage.apiserver.writing import admission, deletion, quota
from moorage.apiserver.writing.apply import track_create, track_update
from moorage.apiserver.writing.decoding import NotOfKind, intake

T = TypeVar("T")
Mutation = Callable[[Object, Transaction], Object]
Verdicts = dict[bytes, list[FieldError]]  # what validation rules say about the objects of one write
ATTEMPTS = 5


class Operations:
    """What requests do to objects, whatever their kind."""

    def __init__(self, store: Store, registry: KindRegistry) -> None:
        self.store = store
        self.registry = registry
        self.rules = RuleProcess()

    async def close(self) -> None:
        await self.rules.close()

    async def _write(self, work: Callable[[Transaction, Verdicts], T]) -> T:
        """Run `work` in a commit. If it needs a verdict of validation rules, get that first, and run it again."""
        verdicts: Verdicts = {}
        for _ in range(ATTEMPTS):
            try:
                return await self.store.write(lambda txn: work(txn, verdicts))
            except RulesPending as pending:
                verdicts[pending.question] = await self.rules.answer(pending.question)
        raise too_many("the object changed while its validation rules were evaluated, please try again", 1)

    def get(self, call: Call) -> bytes:
        """The object's bytes in the version that was asked for."""
        record = self.store.get(call.kind.stored_as, call.namespace, call.name)
        if record is None:
            raise not_found(call.kind.plural, call.kind.group, call.name)
        return served(call.kind, record)

    async def create(self, call: Call, body: Object, managed: list[Object] | None = None) -> bytes:
        """Store a new object; 409 when the name is taken, 8 attempts for a generated one.

        `managed` are the managedFields of an object that is created by applying it.
        """
        obj = await apart(call.size_bytes, intake, call, body)
        obj["metadata"].pop("managedFields", None)
        if managed is not None:
            obj["metadata"]["managedFields"] = managed
        if obj["metadata"].get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        if call.kind.lacks_controller:
            call.warnings.append(
                f"Moorage runs no controller for {call.kind.plural}: this {call.kind.name} makes no pods here, unless "
                "another controller does it. Create the pods themselves"
            )
        generate = obj["metadata"].get("generateName") if not obj["metadata"].get("name") else None
        last: StatusError | None = None
        for _ in range(8 if generate else 1):
            if generate:
                obj["metadata"]["name"] = meta.generated_name(generate)
            try:
                record = await self._write(lambda txn, verdicts: self._create(call, dict(obj), txn, verdicts))
                return served(call.kind, record)
            except StatusError as error:
                if not generate or error.reason != "AlreadyExists":
                    raise
                last = error
        assert last is not None
        raise last

    def _create(self, call: Call, obj: Object, txn: Transaction, verdicts: Verdicts) -> ObjectVersion:
        kind, rules = call.kind, rules_for(call.kind.stored_as)
        admission.check_namespace(txn, kind, call.namespace, obj["metadata"].get("name", ""))
        obj["metadata"] = meta.begin(obj["metadata"], call.namespace, kind.tracks_generation)
        if kind.has_status and kind.stored_as != "nodes":  # a kubelet registers its node with a status
            obj.pop("status", None)
            status = kind.type.fields.get("status") if kind.custom is None else None
            if status is not None and status.is_always_written:
                obj["status"] = zero_of(status.type)
        kind_defaults(kind, obj)
        rules.on_create(obj)
        if "managedFields" not in obj["metadata"]:
            track_create(kind, call, obj)
        admission.on_create(self.store, txn, kind, obj)
        name = obj["metadata"].get("name", "")
        existing = txn.get(kind.stored_as, call.namespace, name) if name else None
        if existing is not None:
            deleting = b'"deletionTimestamp":' in existing.body and bool(
                decode(existing.body)["metadata"].get("deletionTimestamp")
            )
            raise already_exists(kind.plural, kind.group, name, deleting)
        self._check(kind, obj, None, verdicts)
        call.guard.check_write(kind.stored_as, obj, None)
        quota.charge(txn, kind, obj, None, call.options.is_dry_run)
        if call.options.is_dry_run:
            return ObjectVersion(0, encode(obj))
        return txn.put(kind.stored_as, call.namespace, name, obj)

    async def update(self, call: Call, body: Object) -> tuple[bytes, bool]:
        """Replace an object, or its status; the second value says that it was created."""
        obj = await apart(call.size_bytes, intake, call, body)
        if not obj["metadata"].get("name"):
            raise bad_request("name must be provided")
        if obj["metadata"]["name"] != call.name:
            raise bad_request(
                f"the name of the object ({obj['metadata']['name']}) does not match the name on the URL ({call.name})"
            )
        may_create = call.kind.creates_on_update and not call.subresource
        if may_create and self.store.get(call.kind.stored_as, call.namespace, call.name) is None:
            if obj["metadata"].get("uid") or obj["metadata"].get("resourceVersion"):
                raise not_found(call.kind.plural, call.kind.group, call.name)
            call.guard.check_create()
            return await self.create(call, obj), True
        if call.kind.needs_version and not obj["metadata"].get("resourceVersion"):
            error = invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
            raise invalid(call.kind.name, call.kind.group, call.name, [error])
        return await self.change(call, lambda _old, _txn: dict(obj)), False

    async def patch(self, call: Call, change: Callable[[Object], Object]) -> bytes:
        """Change an object with a patch; `change` gets the served form and returns the new one."""

        def patched(old: Object, _txn: Transaction) -> Object:
            served_form = call.kind.encode_to(old) if call.kind.encode_to else old
            return _patched(call, change(served_form), None if call.kind.encode_to else old)

        return await self.change(call, patched)

    async def change(self, call: Call, change: Mutation, is_apply: bool = False) -> bytes:
        """Change an object in its stored form by a function, as apply and some subresources do."""

        def work(txn: Transaction, verdicts: Verdicts) -> ObjectVersion:
            before, new = self._changed(call, txn, change)
            return self._store_change(call, txn, new, before, verdicts, is_apply)

        return served(call.kind, await self._write(work))

    def _changed(self, call: Call, txn: Transaction, change: Mutation) -> tuple[tuple[Object, ObjectVersion], Object]:
        kind = call.kind
        record = txn.get(kind.stored_as, call.namespace, call.name)
        if record is None:
            raise not_found(kind.plural, kind.group, call.name)
        old = decode(record.body)
        new = change(decode(record.body), txn)
        check_preconditions(kind, new["metadata"], old["metadata"])
        return (old, record), new

    def _store_change(
        self,
        call: Call,
        txn: Transaction,
        new: Object,
        before: tuple[Object, ObjectVersion],
        verdicts: Verdicts,
        is_apply: bool,
    ) -> ObjectVersion:
        """Everything between a new version of an object and its place in the transaction."""
        old, record = before
        kind, rules = call.kind, rules_for(call.kind.stored_as)
        new["metadata"] = meta.carry_over(new["metadata"], old["metadata"])
        if call.subresource == "status":
            new = _only_status(kind, new, old)
        elif call.subresource == "" and kind.has_status:
            _keep(new, old, "status")
        kind_defaults(kind, new)
        if call.subresource == "status":
            rules.on_status(new, old)
        else:
            rules.on_update(new, old)
        if kind.tracks_generation and call.subresource != "status" and _spec_changed(new, old):
            new["metadata"]["generation"] = int(old["metadata"].get("generation", 0)) + 1
        track_update(kind, call, new, old, is_apply)
        errors = meta.check_update(new["metadata"], old["metadata"])
        self._check(kind, new, old, verdicts, call.subresource, errors)
        call.guard.check_write(kind.stored_as, new, old)
        if not call.subresource:
            admission.on_update(txn, kind, new, old)
        if call.subresource in ("", "status"):
            quota.charge(txn, kind, new, old, call.options.is_dry_run)
        if new == old:
            return record  # no new version and no event, or controllers would loop
        if deletion.is_over(new, old):
            return record if call.options.is_dry_run else self.finish_delete(txn, kind, new)
        if call.options.is_dry_run:
            return ObjectVersion(record.revision, encode(new))
        return txn.put(kind.stored_as, call.namespace, call.name, new)

    def finish_delete(self, txn: Transaction, kind: Kind, obj: Object) -> ObjectVersion:
        """Remove an object whose last finalizer is gone."""
        namespace = obj["metadata"].get("namespace", "")
        return txn.delete(kind.stored_as, namespace, obj["metadata"]["name"], obj)

    async def delete(self, call: Call, options: DeleteOptions) -> tuple[bytes, bool]:
        """Delete, or begin to; the second value says that the object is gone."""

        def work(txn: Transaction) -> tuple[ObjectVersion, bool]:
            kind = call.kind
            record = txn.get(kind.stored_as, call.namespace, call.name)
            if record is None:
                raise not_found(kind.plural, kind.group, call.name)
            obj = decode(record.body)
            deletion.check(kind, obj["metadata"], options)
            admission.on_delete(kind, obj)
            return deletion.delete(self.store, txn, kind, obj, record, options)

        record, gone = await self.store.write(work)
        return served(call.kind, record), gone

    def _check(
        self,
        kind: Kind,
        new: Object,
        old: Object | None,
        verdicts: Verdicts,
        subresource: str = "",
        errors: list[FieldError] | None = None,
    ) -> None:
        rules = rules_for(kind.stored_as)
        found = list(errors or [])
        if old is None or old["metadata"] != new["metadata"]:
            found += meta.check_metadata(new["metadata"], rules.name_rule)
        if kind.custom is not None:
            found += kind.custom.check(new)
        elif subresource == "status" and old is not None:
            found += rules.check_status(new, old)
        else:
            if old is None or old.get("spec") != new.get("spec") or kind.name not in _SPEC_ONLY:
                found += rules.check(new)
            if old is not None:
                found += rules.check_update(new, old)
        question = None if found else question_about(kind, new, old, subresource)
        if question is not None:
            if question not in verdicts:
                raise RulesPending(question)
            found += verdicts[question]
        if found:
            raise invalid(kind.name, kind.group, new["metadata"].get("name", ""), found)


_SPEC_ONLY = ("Pod", "PersistentVolume", "PersistentVolumeClaim")  # what an old server admitted stays updatable


def served(kind: Kind, record: ObjectVersion) -> bytes:
    """A record's bytes in the form of the version that is asked for."""
    if kind.encode_to is None:
        return record.body
    return encode(kind.encode_to(decode(record.body)))


def _patched(call: Call, body: Object, stored: Object | None) -> Object:
    """What a patch has made of an object; an object of another shape or name is the patch's fault."""
    try:
        obj = intake(call, body, stored)
    except NotOfKind as error:
        text = msgspec.json.encode(body).decode()
        raise invalid("", "", "", [invalid_value("patch", text, str(error))]) from error
    name = obj["metadata"].get("name") or call.name
    if name != call.name:
        raise bad_request(f"the name of the object ({name}) does not match the name on the URL ({call.name})")
    return obj


def kind_defaults(kind: Kind, obj: Object) -> None:
    if kind.custom is not None:
        kind.custom.default(obj)
    else:
        rules_for(kind.stored_as).default(obj)


def check_preconditions(kind: Kind, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """resourceVersion and uid, where they are given, must be those of the stored object."""
    name = str(old.get("name"))
    if new.get("uid") and new["uid"] != old.get("uid"):
        why = f"Precondition failed: UID in precondition: {new['uid']}, UID in object meta: {old.get('uid')}"
        raise conflict(kind.plural, kind.group, name, why)
    version = new.get("resourceVersion")
    if version and version not in ("0", old.get("resourceVersion")):
        raise conflict(kind.plural, kind.group, name, MODIFIED)


def _only_status(kind: Kind, new: Object, old: Object) -> Object:
    kept = dict(old)
    kept.pop("status", None)
    if "status" in new:
        kept["status"] = new["status"]
    if kind.status_writes_metadata:
        kept["metadata"] = {**new["metadata"]}
        if kind.name == "Pod" and "ownerReferences" in old["metadata"]:
            kept["metadata"]["ownerReferences"] = old["metadata"]["ownerReferences"]
    else:
        kept["metadata"] = dict(old["metadata"])
        if "managedFields" in new["metadata"]:
            kept["metadata"]["managedFields"] = new["metadata"]["managedFields"]
    return kept


def _keep(new: Object, old: Object, name: str) -> None:
    new.pop(name, None)
    if name in old:
        new[name] = old[name]


def _spec_changed(new: Object, old: Object) -> bool:
    skipped = ("metadata", "status")
    left = {k: v for k, v in new.items() if k not in skipped}
    return left != {k: v for k, v in old.items() if k not in skipped}
