"""What a delete does: grace, finalizers, propagation, and when an object is gone.

Owns: preconditions, deletionTimestamp, the finalizers that propagation policies add, grace of pods.
May not touch: HTTP.
Start reading at: `delete`, `is_over`.
"""

from datetime import UTC, datetime, timedelta

from moorage.apiserver.errors import conflict
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.request.options import DeleteOptions
from moorage.apiserver.store.change_log import ObjectVersion
from moorage.apiserver.store.store import Store, Transaction, encode


def check(kind: Kind, meta: Object, options: DeleteOptions) -> None:
    """Preconditions that do not hold are conflicts."""
    for what, wanted, have in (
        ("UID", options.uid, meta.get("uid")),
        ("ResourceVersion", options.version, meta.get("resourceVersion")),
    ):
        if wanted and wanted != have:
            why = f"Precondition failed: {what} in precondition: {wanted}, {what} in object meta: {have}"
            raise conflict(kind.plural, kind.group, meta["name"], why)


def delete(
    store: Store, txn: Transaction, kind: Kind, obj: Object, record: ObjectVersion, options: DeleteOptions
) -> tuple[ObjectVersion, bool]:
    """Stage the deletion; the record to answer with, and whether the object is gone."""
    meta = obj["metadata"]
    grace = _grace(kind, obj, options)
    finalizers = _finalizers(meta.get("finalizers") or [], options, store, meta.get("uid", ""))
    pending = _namespace_finalizers(kind, obj)
    if not finalizers and not pending and grace == 0:
        if options.is_dry_run:
            return record, True
        if meta.get("deletionTimestamp"):
            _stamp(obj, 0, [])  # the last event of a pod says that no grace was left
        return txn.delete(kind.stored_as, meta.get("namespace", ""), meta["name"], obj), True
    if not _stamp(obj, grace, finalizers):
        return record, False
    if kind.name == "Namespace":
        obj["status"] = {**(obj.get("status") or {}), "phase": "Terminating"}
    if options.is_dry_run:
        return ObjectVersion(record.revision, encode(obj)), False
    return txn.put(kind.stored_as, meta.get("namespace", ""), meta["name"], obj), False


def _stamp(obj: Object, grace: int, finalizers: list[str]) -> bool:
    """Mark the object as going; False when it already was and nothing is new."""
    meta = obj["metadata"]
    before = dict(meta)
    if finalizers:
        meta["finalizers"] = finalizers
    already = meta.get("deletionTimestamp")
    shorter = already and grace < int(meta.get("deletionGracePeriodSeconds") or 0)
    if not already or shorter:
        base = datetime.now(UTC)
        if shorter:
            base = _parsed(already) - timedelta(seconds=int(meta.get("deletionGracePeriodSeconds") or 0))
            base = max(base, datetime.now(UTC) - timedelta(seconds=grace))
        meta["deletionTimestamp"] = (base + timedelta(seconds=grace)).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta["deletionGracePeriodSeconds"] = grace
        if not already and int(meta.get("generation", 0)) > 0:
            meta["generation"] = int(meta["generation"]) + 1
    return bool(meta != before)


def _parsed(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _grace(kind: Kind, obj: Object, options: DeleteOptions) -> int:
    if kind.name != "Pod" or kind.group:
        return 0
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return 0
    asked = options.grace_s if options.grace_s is not None else spec.get("terminationGracePeriodSeconds", 30)
    asked = 1 if asked < 0 else int(asked)
    already = obj["metadata"].get("deletionGracePeriodSeconds")
    if obj["metadata"].get("deletionTimestamp") and already is not None:
        return min(asked, int(already))
    return asked


def _finalizers(current: list[str], options: DeleteOptions, store: Store, uid: str) -> list[str]:
    """The finalizers after a propagation policy has added or removed its own."""
    if not options.propagation:
        return current
    kept = [f for f in current if f not in ("orphan", "foregroundDeletion")]
    if options.propagation == "Orphan":
        return [*kept, "orphan"] if store.owners.get(uid) else kept
    if options.propagation == "Foreground":
        return [*kept, "foregroundDeletion"] if store.owners.get(uid) else kept
    return kept


def _namespace_finalizers(kind: Kind, obj: Object) -> list[str]:
    if kind.name != "Namespace" or kind.group:
        return []
    found: list[str] = (obj.get("spec") or {}).get("finalizers") or []
    return found


def is_over(new: Object, old: Object) -> bool:
    """Whether this update took the last finalizer of an object that waits for just that."""
    meta = new["metadata"]
    if not old["metadata"].get("deletionTimestamp") or meta.get("finalizers"):
        return False
    if new["kind"] == "Namespace" and (new.get("spec") or {}).get("finalizers"):
        return False
    return not meta.get("deletionGracePeriodSeconds")
