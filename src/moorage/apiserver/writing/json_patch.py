"""JSON patches (RFC 6902) and JSON merge patches (RFC 7386).

Owns: both algorithms and the errors they are refused with.
May not touch: objects as Kubernetes sees them; these are operations on plain JSON.
Start reading at: `json_patch`, `merge_patch`.
"""

from typing import Any

import msgspec

from moorage.apiserver.errors import StatusError, bad_request, too_many_values

LIMIT_OPERATIONS = 10_000
LIMIT_COST = 8 << 20  # of all copies and comparisons of one patch, in bytes that they read


def merge_patch(target: Any, patch: Any) -> Any:
    """The target with the patch merged in: null deletes, lists are replaced."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def json_patch(target: Any, operations: Any) -> Any:
    """The target after every operation, or the refusal of the first that fails."""
    if not isinstance(operations, list) or not all(isinstance(step, dict) for step in operations):
        raise bad_request("error decoding patch: a JSON patch is a list of operations")
    if len(operations) > LIMIT_OPERATIONS:
        raise StatusError(
            413,
            "RequestEntityTooLarge",
            f"The allowed maximum operations in a JSON patch is {LIMIT_OPERATIONS}, got {len(operations)}",
        )
    document = _copy(target)
    budget = _Budget()
    for step in operations:
        document = _apply(document, step, budget)
    return document


class _Budget:
    """What the copies and comparisons of one patch may still cost: each copy of a copy doubles a document."""

    def __init__(self) -> None:
        self._left = LIMIT_COST

    def charge(self, value: Any) -> None:
        """Count a value that is read whole. Raises 413 if the patch has cost too much."""
        open_values = [value]
        while open_values:
            found = open_values.pop()
            if isinstance(found, dict):
                self._left -= sum(map(len, found))
                open_values.extend(found.values())
            elif isinstance(found, list):
                open_values.extend(found)
            self._left -= 16 + (len(found) if isinstance(found, str) else 0)
            if self._left < 0:
                raise too_many_values("the patch copies or compares too much")


def _copy(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _apply(document: Any, step: dict[str, Any], budget: _Budget) -> Any:
    name, path = step.get("op"), step.get("path")
    if not isinstance(path, str) or name not in ("add", "remove", "replace", "move", "copy", "test"):
        raise _fails(f"unexpected kind or path of operation {str(name)[:40]!r}")
    if name in ("add", "replace", "test") and "value" not in step:
        raise bad_request(f"error decoding patch: operation {name} without a value")
    match name:
        case "add":
            return _add(document, path, _copy(step["value"]))
        case "remove":
            return _remove(document, path)[0]
        case "replace":
            return _replace(document, path, _copy(step["value"]))
        case "test":
            budget.charge(step["value"])
            return _test(document, path, step["value"])
    source = step.get("from")
    if not isinstance(source, str):
        raise bad_request(f"error decoding patch: operation {name} without from")
    if name == "copy":
        copied = _find(document, source)
        budget.charge(copied)
        return _add(document, path, _copy(copied))
    if path.startswith(source + "/"):
        raise _fails(f"move: {source} is a parent of {path}")
    document, value = _remove(document, source)
    return _add(document, path, value)


def _fails(why: str) -> StatusError:
    return StatusError(422, "Invalid", f"the server rejected our request due to an error in our request: {why[:300]}")


def _steps(path: str) -> list[str]:
    if path == "":
        return []
    if not path.startswith("/"):
        raise _fails(f"path {path!r} does not begin with a slash")
    return [part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/")]


def _index(step: str, size: int, path: str) -> int:
    if not step.isascii() or not step.isdigit() or (step != "0" and step.startswith("0")) or int(step[:12]) >= size:
        raise _fails(f"no such index: {path}")
    return int(step)


def _child(node: Any, step: str, path: str) -> Any:
    if isinstance(node, dict):
        if step not in node:
            raise _fails(f"no such path: {path}")
        return node[step]
    if isinstance(node, list):
        return node[_index(step, len(node), path)]
    raise _fails(f"no such path: {path}")


def _find(document: Any, path: str) -> Any:
    node = document
    for step in _steps(path):
        node = _child(node, step, path)
    return node


def _parent(document: Any, path: str) -> tuple[Any, str]:
    *above, last = _steps(path)
    node = document
    for step in above:
        node = _child(node, step, path)
    return node, last


def _add(document: Any, path: str, value: Any) -> Any:
    if path == "":
        return value
    parent, last = _parent(document, path)
    if isinstance(parent, dict):
        parent[last] = value
    elif isinstance(parent, list):
        parent.insert(len(parent) if last == "-" else _index(last, len(parent) + 1, path), value)
    else:
        raise _fails(f"no such path: {path}")
    return document


def _remove(document: Any, path: str) -> tuple[Any, Any]:
    if path == "":
        return None, document
    parent, last = _parent(document, path)
    value = _child(parent, last, path)
    if isinstance(parent, dict):
        del parent[last]
    else:
        del parent[int(last)]
    return document, value


def _replace(document: Any, path: str, value: Any) -> Any:
    if path == "":
        return value
    parent, last = _parent(document, path)
    if not isinstance(parent, dict):
        _find(document, path)
    # A member that is absent is added: Kubernetes does so, and the snapshotter sidecar relies on it.
    parent[last if isinstance(parent, dict) else int(last)] = value
    return document


def _test(document: Any, path: str, value: Any) -> Any:
    try:
        found = _find(document, path)
    except StatusError:
        found = None
    if not same(found, value):
        raise _fails(f"testing path {path} failed")
    return document


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
