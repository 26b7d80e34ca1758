"""Quotas for claims: how many a namespace may have and how much they may request, in all and of each class.

Owns: what a claim counts as, the check before a claim is written, and `status.used` of ResourceQuotas.
Start reading at: `charge`, `recount`.

A write charges its claim to every quota of the namespace in the same transaction, so that claims written together
cannot pass a quota that each of them alone would keep. Deletions are counted afterwards by `recount`.
"""

from collections.abc import Iterable, Iterator

import msgspec

from moorage.apiserver.errors import forbidden
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.store.store import Transaction, decode
from moorage.kube.objects.volumes import PersistentVolumeClaim
from moorage.kube.quantity import Quantity
from moorage.kube.volumes import claim_class, requested_bytes, storage_bytes

CLAIMS, QUOTAS = "persistentvolumeclaims", "resourcequotas"
_COUNTS = (CLAIMS, f"count/{CLAIMS}")
_STORAGE = "requests.storage"
_OF_CLASS = ".storageclass.storage.k8s.io/"

Usage = dict[str, int]


_decoder = msgspec.json.Decoder(PersistentVolumeClaim)


def _usage_of(claim: PersistentVolumeClaim) -> Usage:
    """Count a claim. A request that was lowered after a failed expansion counts as large as what was allocated."""
    size = max(requested_bytes(claim), storage_bytes(claim.status.allocated_resources))
    found = {_STORAGE: size, **dict.fromkeys(_COUNTS, 1)}
    name = claim_class(claim)
    if name:
        found |= {f"{name}{_OF_CLASS}{_STORAGE}": size, f"{name}{_OF_CLASS}{CLAIMS}": 1}
    return found


def _typed(claim: Object) -> PersistentVolumeClaim:
    return msgspec.convert(claim, PersistentVolumeClaim)


def _is_counted(key: str) -> bool:
    return key in (*_COUNTS, _STORAGE) or key.endswith((f"{_OF_CLASS}{_STORAGE}", f"{_OF_CLASS}{CLAIMS}"))


def charge(txn: Transaction, kind: Kind, claim: Object, old: Object | None, is_dry_run: bool) -> None:
    """Count a new claim, or the change from `old`, in every quota of its namespace. Other kinds are not counted.

    Raises Forbidden, and counts nothing, if any quota would be exceeded.
    """
    if kind.stored_as != CLAIMS:
        return
    namespace, name = claim["metadata"].get("namespace", ""), claim["metadata"].get("name", "")
    more = _difference(claim, old)
    changed = []
    for quota in list(_quotas(txn, namespace)):
        hard = _limits(quota)
        due = {key: more[key] for key in hard if more.get(key, 0)}
        if not due:
            continue
        used = _known_usage(txn, namespace, quota, hard)
        over = [key for key in sorted(due) if due[key] > 0 and used[key] + due[key] > hard[key].value]
        if over:
            raise forbidden(CLAIMS, "", name, _complaint(quota["metadata"]["name"], over, due, used, hard))
        _set_status(quota, hard, {key: used[key] + due.get(key, 0) for key in hard})
        changed.append(quota)
    for quota in () if is_dry_run else changed:
        txn.put(QUOTAS, namespace, quota["metadata"]["name"], quota)


def recount(txn: Transaction, namespace: str) -> None:
    """Count the claims of a namespace and write the result into its quotas, where it differs."""
    for quota in list(_quotas(txn, namespace)):
        hard = _limits(quota)
        before = msgspec.json.encode(quota.get("status"))
        _set_status(quota, hard, _count(txn, namespace, hard))
        if msgspec.json.encode(quota.get("status")) != before:
            txn.put(QUOTAS, namespace, quota["metadata"]["name"], quota)


def _difference(claim: Object, old: Object | None) -> Usage:
    new_usage = _usage_of(_typed(claim))
    if old is None:
        return new_usage
    old_usage = _usage_of(_typed(old))
    return {key: value - old_usage.get(key, 0) for key, value in new_usage.items()}


def _quotas(txn: Transaction, namespace: str) -> Iterator[Object]:
    return (decode(record.body) for record in txn.records(QUOTAS, namespace))


def _limits(quota: Object) -> dict[str, Quantity]:
    """Return the limits that concern claims. A quota with scopes is about pods."""
    spec = quota.get("spec") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return {}
    return {key: Quantity.parse(value) for key, value in (spec.get("hard") or {}).items() if _is_counted(key)}


def _known_usage(txn: Transaction, namespace: str, quota: Object, keys: Iterable[str]) -> Usage:
    """Return what `status.used` says, or count if it does not cover every key yet."""
    said = (quota.get("status") or {}).get("used") or {}
    if all(key in said for key in keys):
        return {key: Quantity.parse(said[key]).value for key in keys}
    return _count(txn, namespace, keys)


def _count(txn: Transaction, namespace: str, keys: Iterable[str]) -> Usage:
    total = dict.fromkeys(keys, 0)
    for record in txn.records(CLAIMS, namespace):
        for key, value in _usage_of(_decoder.decode(record.body)).items():
            if key in total:
                total[key] += value
    return total


def _set_status(quota: Object, hard: dict[str, Quantity], used: Usage) -> None:
    status = quota.setdefault("status", {})
    given = (quota.get("spec") or {}).get("hard") or {}
    kept = {key: value for key, value in (status.get("used") or {}).items() if key in given and key not in hard}
    status["hard"] = dict(given)
    status["used"] = kept | {key: _text(key, value) for key, value in used.items()}


def _text(key: str, value: int) -> str:
    return Quantity(value, "BinarySI" if key.endswith(_STORAGE) else "DecimalSI").canonical()


def _complaint(name: str, over: list[str], due: Usage, used: Usage, hard: dict[str, Quantity]) -> str:
    def listed(values: dict[str, str]) -> str:
        return ",".join(f"{key}={values[key]}" for key in over)

    requested = listed({key: _text(key, due[key]) for key in over})
    present = listed({key: _text(key, used[key]) for key in over})
    limited = listed({key: str(hard[key]) for key in over})
    return f"exceeded quota: {name}, requested: {requested}, used: {present}, limited: {limited}"
