"""Strategic merge patches: merge patches that know which lists are keyed.

Owns: the algorithm and its directives ($patch, $retainKeys, $deleteFromPrimitiveList, $setElementOrder).
May not touch: anything but the object, the patch and the kind's type.
Start reading at: `strategic_patch`.
"""

import copy
from typing import Any

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
        merged = {key: value for key, value in merged.items() if key in retained}
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
    merged = (
        _merge_keyed(current, patch, node) if node.merge_key else [*current, *(i for i in patch if i not in current)]
    )
    return _in_order(merged, patch if order is None else order, node, current)


def _merge_keyed(current: list[Any], patch: list[Any], node: Type) -> list[Any]:
    key = node.merge_key
    merged = list(current)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise bad_request(f"map: {str(item)[:120]} does not contain declared merge key: {key}")
        at = [i for i, have in enumerate(merged) if isinstance(have, dict) and have.get(key) == item[key]]
        if item.get("$patch") == "delete":
            merged = [have for i, have in enumerate(merged) if i not in at]
        elif at:
            merged[at[0]] = _merge_map(merged[at[0]], item, node.item or ANY)
        else:
            merged.append(_merge_map({}, item, node.item or ANY))
    return merged


def _in_order(items: list[Any], order: Any, node: Type, before: list[Any]) -> list[Any]:
    """The items that are listed, in that order, and the others: each ahead of the first listed one that it preceded
    `before`, and after all of them if there is none. An item that is new and listed goes ahead."""
    if not isinstance(order, list):
        raise bad_request("$setElementOrder must be a list")
    key = node.merge_key

    def identity(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    wanted, places = [identity(item) for item in order], [identity(item) for item in before]
    listed = sorted((i for i in items if identity(i) in wanted), key=lambda i: wanted.index(identity(i)))
    result: list[Any] = []
    for item in items:
        if identity(item) in wanted:
            continue
        behind = places[places.index(identity(item)) :] if identity(item) in places else []
        while listed and identity(listed[0]) not in behind:
            result.append(listed.pop(0))
        result.append(item)
    return result + listed


def _delete_primitives(merged: dict[str, Any], field: str, values: Any) -> None:
    if not isinstance(values, list):
        raise bad_request(f"{_DELETE}{field[:80]} must be a list")
    current = merged.get(field)
    if isinstance(current, list):
        merged[field] = [item for item in current if item not in values]


def _without_directives(item: Any) -> Any:
    if isinstance(item, dict):
        return {k: _without_directives(v) for k, v in item.items() if not k.startswith("$") and v is not None}
    return item
