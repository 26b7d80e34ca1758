"""Reading many objects: selectors, pages and snapshots of the past.

Owns: which records a list holds, continue tokens, and rebuilding an older state from the log.
May not touch: HTTP; it returns records, and `lists` joins their bytes.
Start reading at: `select`.
"""

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from moorage.apiserver.errors import bad_request, expired, too_large_version
from moorage.apiserver.kinds.registry import Kind
from moorage.apiserver.request.options import Call, Options
from moorage.apiserver.store.change_log import ObjectVersion
from moorage.apiserver.store.store import Key, ObjectTable, Store, decode
from moorage.kube.selectors import value_at

Matcher = Callable[[Key, ObjectVersion], bool]
_LAST = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class ListPage:
    """A list's records, the revision it shows, and how to go on."""

    records: list[ObjectVersion]
    revision: int
    token: str = ""
    remaining: int | None = None


class _Token(msgspec.Struct):
    rv: int
    start: list[str]
    v: str = "meta.k8s.io/v1"


def select(store: Store, call: Call) -> ListPage:
    """One page of a list."""
    options, table = call.options, store.table(call.kind.stored_as)
    matches = matcher(call.kind, call.namespace, call.name, options)
    revision, after = store.revision, None
    asked = int(options.version or 0)
    if asked > store.revision:
        raise too_large_version(asked, store.revision)
    if options.token:
        revision, after = _resume(store, table, options.token)
    elif asked and (options.version_match == "Exact" or (options.limit and not options.version_match)):
        revision = asked
    order, records = _snapshot(store, table, revision)
    first, last = _range(order, call.namespace, after)
    chosen: list[ObjectVersion] = []
    for at in range(first, last):
        record = records[order[at]]
        if matches is not None and not matches(order[at], record):
            continue
        if options.limit and len(chosen) == options.limit:
            remaining = None if options.has_selectors else last - at
            return ListPage(chosen, revision, _token(revision, order[at - 1]), remaining)
        chosen.append(record)
    return ListPage(chosen, revision)


def _range(order: list[Key], namespace: str, after: Key | None) -> tuple[int, int]:
    first = bisect_left(order, (namespace, "")) if namespace else 0
    last = bisect_left(order, (namespace, _LAST)) if namespace else len(order)
    if after is not None:
        first = max(first, bisect_right(order, after))
    return first, last


def _snapshot(store: Store, table: ObjectTable, revision: int) -> tuple[list[Key], dict[Key, ObjectVersion]]:
    """The table as it was at a revision."""
    if revision >= store.revision:
        return table.order, table.records
    position = table.log.position_after(revision)
    if position is None:
        raise expired(f"The resourceVersion for the provided list is too old: {revision} ({table.log.floor})")
    changes = table.log.since(position) or []
    if not changes:
        return table.order, table.records
    records = dict(table.records)
    for change in reversed(changes):
        if change.previous is None:
            records.pop(change.key, None)
        else:
            records[change.key] = change.previous
    return sorted(records), records


def _token(revision: int, last: Key) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(_Token(revision, list(last)))).decode().rstrip("=")


def _resume(store: Store, table: ObjectTable, text: str) -> tuple[int, Key]:
    try:
        token = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=_Token)
        namespace, name = token.start
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise bad_request(f"continue key is not valid: {error}") from error
    if token.rv == -1:  # the continuation of a list whose snapshot is lost
        return store.revision, (namespace, name)
    if token.rv < table.log.floor and table.log.position_after(token.rv) is None:
        raise expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new "
            "list without the continue parameter, or use the continue token in this response to retrieve the "
            "remainder of the results.",
            _token(-1, (namespace, name)),
        )
    return token.rv, (namespace, name)


def matcher(kind: Kind, namespace: str, name: str, options: Options) -> Matcher | None:
    """Whether a record belongs to a selection; None when everything does."""
    tests: list[Matcher] = [_field_test(kind, *term) for term in options.fields.terms]  # first: they rule out most
    if namespace:
        tests.append(lambda key, _record: key[0] == namespace)
    if name:
        tests.append(lambda key, _record: key[1] == name)
    if options.labels.requirements:
        labels = options.labels
        tests.append(lambda _key, record: labels.matches(record.labels))
    if not tests:
        return None
    if len(tests) == 1:
        return tests[0]
    return lambda key, record: all(test(key, record) for test in tests)


def selection_of(call: Call) -> tuple[str, ...]:
    """What two calls on one resource have in common if `matcher` makes the same of both."""
    options = call.options
    return (call.kind.api_version, call.namespace, call.name, repr(options.fields.terms), repr(options.labels))


def _field_test(kind: Kind, path: str, value: str, wanted: bool) -> Matcher:
    if path == "metadata.name":
        return lambda key, _record: (key[1] == value) is wanted
    if path == "metadata.namespace" and kind.is_namespaced:
        return lambda key, _record: (key[0] == value) is wanted
    if path not in kind.selectable:
        raise bad_request(f'field label not supported: {path[:120]} for "{kind.api_version}, Kind={kind.name}"')
    if kind.stored_as == "events":
        path = _EVENT_PATHS.get(path, path)
    if path == "name":
        return lambda key, _record: (key[1] == value) is wanted
    if path == "status.podIPs":
        path = "status.podIP"
    empty = "false" if path in ("spec.unschedulable", "spec.hostNetwork") else ""

    # Most records are ruled out by their bytes: what does not hold the value anywhere need not be read.
    needle = value.encode() if wanted and value != empty and value.isascii() and value.isprintable() else b""
    if b'"' in needle or b"\\" in needle:
        needle = b""  # it is spelled otherwise in JSON

    def test(_key: Key, record: ObjectVersion) -> bool:
        if needle and needle not in record.body:
            return False
        return ((value_at(decode(record.body), path) or empty) == value) is wanted

    return test


_EVENT_PATHS = {
    "source": "source.component",
    "regarding.kind": "involvedObject.kind",
    "regarding.name": "involvedObject.name",
    "regarding.namespace": "involvedObject.namespace",
    "regarding.uid": "involvedObject.uid",
}
