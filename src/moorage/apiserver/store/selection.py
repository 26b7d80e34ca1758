"""Reading many objects: selectors, pages and snapshots of the past.

Owns: which records a list holds, continue tokens, and rebuilding an older state from the log.
May not touch: HTTP; it returns records, and `lists` joins their bytes.
Start reading at: `begin_list`, `page_of`.
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
from moorage.apiserver.store.change_log import Change, ObjectVersion
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


@dataclass(frozen=True, slots=True)
class Reading:
    """What a list looks through: the records of its range as they are now, and what leads back to an older state."""

    call: Call
    revision: int
    after: Key | None
    matches: Matcher | None
    keys: list[Key]
    records: list[ObjectVersion]
    left: int = 0  # records behind the last one, which a page without selectors need not look at
    past: list[Change] | None = None

    @property
    def size_bytes(self) -> int:
        """About how many bytes the list looks through."""
        return len(self.keys) * 100 + sum(len(record.body) for record in self.records[:100])


def begin_list(store: Store, call: Call) -> Reading:
    """Note what a list shows. Belongs to the event loop, and is fast; `page_of` may run in another thread."""
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
    past = _changes_since(store, table, revision)
    if past:
        return Reading(
            call,
            revision,
            after,
            matches,
            table.order.copy(),
            list(map(table.records.__getitem__, table.order)),
            past=past,
        )
    first, last = _range(table.order, call.namespace, after)
    end = min(last, first + options.limit) if options.limit and not options.has_selectors and not call.name else last
    keys = table.order[first:end]
    return Reading(call, revision, after, matches, keys, list(map(table.records.__getitem__, keys)), last - end)


def page_of(reading: Reading) -> ListPage:
    """Return the records that belong to the page."""
    keys, records = (reading.keys, reading.records) if reading.past is None else _rebuilt(reading)
    options, matches, left = reading.call.options, reading.matches, reading.left
    chosen: list[ObjectVersion] = []
    for at, (key, record) in enumerate(zip(keys, records, strict=True)):
        if matches is not None and not matches(key, record):
            continue
        if options.limit and len(chosen) == options.limit:
            remaining = None if options.has_selectors else len(keys) - at + left
            return ListPage(chosen, reading.revision, _token(reading.revision, keys[at - 1]), remaining)
        chosen.append(record)
    if left:
        return ListPage(chosen, reading.revision, _token(reading.revision, keys[-1]), left)
    return ListPage(chosen, reading.revision)


def _range(order: list[Key], namespace: str, after: Key | None) -> tuple[int, int]:
    first = bisect_left(order, (namespace, "")) if namespace else 0
    last = bisect_left(order, (namespace, _LAST)) if namespace else len(order)
    if after is not None:
        first = max(first, bisect_right(order, after))
    return first, last


def _changes_since(store: Store, table: ObjectTable, revision: int) -> list[Change] | None:
    """Return what changed after a revision; None if the table is still as it was then."""
    if revision >= store.revision:
        return None
    position = table.log.position_after(revision)
    if position is None:
        raise expired(f"The resourceVersion for the provided list is too old: {revision} ({table.log.floor})")
    return table.log.since(position) or None


def _rebuilt(reading: Reading) -> tuple[list[Key], list[ObjectVersion]]:
    """Return keys and records as they were before the changes."""
    records = dict(zip(reading.keys, reading.records, strict=True))
    for change in reversed(reading.past or ()):
        if change.previous is None:
            records.pop(change.key, None)
        else:
            records[change.key] = change.previous
    order = sorted(records)
    first, last = _range(order, reading.call.namespace, reading.after)
    return order[first:last], [records[key] for key in order[first:last]]


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
