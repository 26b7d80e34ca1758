"""Strategic merge patches: merge patches that know which lists are keyed.

Owns: the algorithm and its directives ($patch, $retainKeys, $deleteFromPrimitiveList, $setElementOrder).
May not touch: anything but the object, the patch and the kind's type.
Start reading at: `strategic_patch`.
"""

import copy
from collections import deque
from typing import Any

import msgspec

from moorage.apiserver.errors import bad_request
from moorage.apiserver.kinds.schema import ANY, Type

_DELETE = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def strategic_patch(target: dict[str, Any], patch: Any, node: Type) -> dict[str, Any]:
    """The target with the patch merged in, list items matched by their merge keys."""
    if not isinstance(patch, dict):
        raise bad_request("error decoding patch: a strategic merge patch is an object")
    return _merge_map(target, copy.deepcopy(patch), node)


def _merge_map(target: dict[str, Any], patch: dict[str, Any], node: Type) -> dict[str, Any]:
    directive = patch.pop("$patch", None)
    if directive == "replace":
        return patch
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise bad_request(f"Unknown patch type: {str(directive)[:40]}")
    merged = dict(target)
    retained = patch.pop("$retainKeys", None)
    if retained is not None:
        if not isinstance(retained, list):
            raise bad_request("$retainKeys must be a list")
        names = {name for name in retained if isinstance(name, str)}
        merged = {key: value for key, value in merged.items() if key in names}
    orders = {key[len(_ORDER) :]: patch.pop(key) for key in list(patch) if key.startswith(_ORDER)}
    for key in [key for key in patch if key.startswith(_DELETE)]:
        _delete_primitives(merged, key[len(_DELETE) :], patch.pop(key))
    for key, value in patch.items():
        kept = _merge_value(merged.get(key), value, node.child(key) or ANY, orders.get(key))
        if value is None or kept is _GONE:
            merged.pop(key, None)
        else:
            merged[key] = kept
    for key, order in orders.items():
        if key not in patch and isinstance(merged.get(key), list):
            merged[key] = _in_order(merged[key], order, node.child(key) or ANY, merged[key])
    return merged


_GONE = object()


def _merge_value(current: Any, value: Any, node: Type, order: Any) -> Any:
    if isinstance(value, dict):
        if value.get("$patch") == "delete":
            return _GONE
        if "replace" in node.patch.split(","):
            value.pop("$patch", None)
            return value
        return _merge_map(current if isinstance(current, dict) else {}, value, node)
    if isinstance(value, list):
        return _merge_list(current if isinstance(current, list) else [], value, node, order)
    return value


def _merge_list(current: list[Any], patch: list[Any], node: Type, order: Any) -> list[Any]:
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if not (isinstance(item, dict) and item.get("$patch") == "replace")]
    if "merge" not in node.patch.split(","):
        return [_without_directives(item) for item in patch if item is not None]
    merged = _merge_keyed(current, patch, node) if node.merge_key else _united(current, patch)
    return _in_order(merged, patch if order is None else order, node, current)


def _united(current: list[Any], patch: list[Any]) -> list[Any]:
    known = {_known_by(item, "") for item in current}
    return [*current, *(item for item in patch if _known_by(item, "") not in known)]


def _merge_keyed(current: list[Any], patch: list[Any], node: Type) -> list[Any]:
    key = node.merge_key
    merged: list[Any] = list(current)
    places: dict[Any, list[int]] = {}
    for at, item in enumerate(merged):
        if isinstance(item, dict):
            places.setdefault(_known_by(item, key), []).append(at)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise bad_request(f"map: {str(item)[:120]} does not contain declared merge key: {key}")
        name = _known_by(item, key)
        found = places.get(name, [])
        if item.get("$patch") == "delete":
            for place in places.pop(name, ()):
                merged[place] = _GONE
        elif found:
            merged[found[0]] = _merge_map(merged[found[0]], item, node.item or ANY)
        else:
            places[name] = [len(merged)]
            merged.append(_merge_map({}, item, node.item or ANY))
    return [item for item in merged if item is not _GONE]


def _known_by(item: Any, key: str) -> Any:
    """Return the identity of an item: the value of the merge key, or the item itself."""
    value = item.get(key) if key and isinstance(item, dict) else item
    return value if isinstance(value, str) else msgspec.json.encode(value)


def _in_order(items: list[Any], order: Any, node: Type, before: list[Any]) -> list[Any]:
    """The items that are listed, in that order, and the others: each ahead of the first listed one that it preceded
    `before`, and after all of them if there is none. An item that is new and listed goes ahead."""
    if not isinstance(order, list):
        raise bad_request("$setElementOrder must be a list")
    key = node.merge_key
    wanted: dict[Any, int] = {}
    for at, item in enumerate(order):
        wanted.setdefault(_known_by(item, key), at)
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for at, item in enumerate(before):
        first.setdefault(_known_by(item, key), at)
        last[_known_by(item, key)] = at
    names = [_known_by(item, key) for item in items]
    listed = deque(sorted((n for n, name in enumerate(names) if name in wanted), key=lambda n: wanted[names[n]]))
    result: list[Any] = []
    for item, name in zip(items, names, strict=True):
        if name in wanted:
            continue
        while listed and not (name in first and last.get(names[listed[0]], -1) >= first[name]):
            result.append(items[listed.popleft()])
        result.append(item)
    return result + [items[n] for n in listed]


def _delete_primitives(merged: dict[str, Any], field: str, values: Any) -> None:
    if not isinstance(values, list):
        raise bad_request(f"{_DELETE}{field[:80]} must be a list")
    current = merged.get(field)
    if isinstance(current, list):
        gone = {_known_by(value, "") for value in values}
        merged[field] = [item for item in current if _known_by(item, "") not in gone]


def _without_directives(item: Any) -> Any:
    if isinstance(item, dict):
        return {k: _without_directives(v) for k, v in item.items() if not k.startswith("$") and v is not None}
    return item
