"""Sets of fields: which fields an object has, in the notation of managedFields.

Owns: paths, the FieldsV1 form, merging and removing by path.
May not touch: managers and conflicts; that is `apply`.
Start reading at: `leaves`.

A path is a tuple of steps: `f:name` for a field, `k:{"name":"a"}` for an item of a keyed list, `v:"x"` for a member
of a set. A path that ends in a keyed item stands for the item itself.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

import msgspec

from moorage.apiserver.kinds.schema import ANY, Type

Path = tuple[str, ...]
_encode = msgspec.json.Encoder(order="deterministic").encode


class _Item:
    """The value of an item that is there, whatever is in it."""

    def __repr__(self) -> str:
        return "<item>"


ITEM = _Item()
INSIDE = _Item()  # the value of a struct, map or keyed list: what it is, is below it


def leaves(value: Any, node: Type) -> dict[Path, Any]:
    """Every field that a configuration says something about, with its value."""
    found: dict[Path, Any] = {}
    _collect(value, node, (), found, False)
    return found


def nodes(value: Any, node: Type) -> dict[Path, Any]:
    """Return the same with everything that holds fields: the writer of the first label also owns `labels` itself."""
    found: dict[Path, Any] = {}
    _collect(value, node, (), found, True)
    return found


def _collect(value: Any, node: Type, path: Path, found: dict[Path, Any], inner: bool) -> None:
    if isinstance(value, dict) and not node.is_atomic and node.shape in ("struct", "map", "any"):
        if node.shape == "any" and not node.keeps_unknown:
            found[path] = value
            return
        if path and (inner or not value):
            found[path] = INSIDE if inner else value
        for name, item in value.items():
            _collect(item, node.child(name) or ANY, (*path, f"f:{name}"), found, inner)
        return
    if isinstance(value, list) and node.shape == "list" and node.list_kind in ("map", "set"):
        if inner:
            found[path] = INSIDE
        for item in value:
            step = step_of(item, node)
            if step is None:
                continue
            found[(*path, step)] = ITEM
            if node.list_kind == "map":
                _collect_item(item, node.item or ANY, (*path, step), found, inner)
        return
    found[path] = value


def _collect_item(item: Any, node: Type, path: Path, found: dict[Path, Any], inner: bool) -> None:
    """What is in an item of a keyed list; an atomic item is one value."""
    if node.is_atomic:
        found[path] = item
        return
    for name, value in item.items():
        _collect(value, node.child(name) or ANY, (*path, f"f:{name}"), found, inner)


def step_of(item: Any, node: Type) -> str | None:
    """How an item of an associative list is named; None when it lacks its keys."""
    if node.list_kind == "set":
        return "v:" + _encode(item).decode()
    if not isinstance(item, dict):
        return None
    keys: dict[str, Any] = {}
    for key in node.map_keys:
        known = (node.item or ANY).fields.get(key)
        value = item.get(key, known.default if known else None)
        if value is not None:
            keys[key] = value
    return "k:" + _encode(keys).decode() if keys else None


def fields_v1(paths: AbstractSet[Path]) -> dict[str, Any]:
    """The nested form that managedFields has. It is kept and shared, for most objects of a kind have the same fields:
    a caller that puts it into an object may not change it there."""
    return _nested(frozenset(paths))


@lru_cache(maxsize=2048)
def _nested(paths: frozenset[Path]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path in sorted(paths):
        node = root
        for step in path:
            node = node.setdefault(step, {})
        node["."] = {}
    return _without_dots(root)


def _without_dots(node: dict[str, Any]) -> dict[str, Any]:
    """A leaf is written as `{}`; a dot only stays beside other children."""
    if set(node) == {"."}:
        return {}
    return {step: _without_dots(child) if step != "." else {} for step, child in node.items()}


def paths_from(document: Any) -> set[Path]:
    """The paths of the nested form; anything malformed is skipped."""
    return set(_paths_in(msgspec.json.encode(document)))


@lru_cache(maxsize=2048)
def _paths_in(document: bytes) -> frozenset[Path]:
    return frozenset(_paths(msgspec.json.decode(document), ()))


def _paths(document: Any, prefix: Path) -> Iterator[Path]:
    for step, child in document.items() if isinstance(document, dict) else ():
        if step == ".":
            yield prefix
        elif not child:
            yield (*prefix, step)
        else:
            yield from _paths(child, (*prefix, step))


def merged(live: Any, applied: Any, node: Type) -> Any:
    """What the object becomes when a configuration is applied: its fields win, others stay."""
    if isinstance(live, dict) and isinstance(applied, dict) and not node.is_atomic and node.shape != "any":
        out = dict(live)
        for name, value in applied.items():
            out[name] = merged(live[name], value, node.child(name) or ANY) if name in live else value
        return out
    if isinstance(live, dict) and isinstance(applied, dict) and node.shape == "any" and node.keeps_unknown:
        return {**live, **{k: merged(live[k], v, ANY) if k in live else v for k, v in applied.items()}}
    if isinstance(live, list) and isinstance(applied, list) and node.list_kind in ("map", "set"):
        return _merged_list(live, applied, node)
    return applied


def _merged_list(live: list[Any], applied: list[Any], node: Type) -> list[Any]:
    wanted = {step_of(item, node): item for item in applied}
    out = []
    for item in live:
        step = step_of(item, node)
        if step in wanted:
            new = wanted.pop(step)
            out.append(merged(item, new, node.item or ANY) if node.list_kind == "map" else item)
        else:
            out.append(item)
    return out + [item for step, item in wanted.items()]


def remove(value: Any, node: Type, paths: Iterable[Path]) -> None:
    """Take the fields at some paths out, in place; a path that is not there is no error."""
    tree: _Tree = {}
    for path in sorted(paths, key=len):  # an item goes whole, whatever else is said about what it holds
        below = tree
        for step in path[:-1]:
            found = below.setdefault(step, {})
            if found is None:
                break
            below = found
        else:
            below[path[-1]] = None
    _remove(value, node, tree)


_Tree = dict[str, "_Tree | None"]  # None: all of it


def _remove(value: Any, node: Type, tree: _Tree) -> None:
    if isinstance(value, dict):
        for step, below in tree.items():
            name = step[2:]
            if not step.startswith("f:") or name not in value:
                continue
            if below is not None:
                _remove(value[name], node.child(name) or ANY, below)
            if below is None or value[name] in ({}, []):
                del value[name]
    elif isinstance(value, list):
        kept = []
        for item in value:
            step = step_of(item, node) or ""
            below = tree.get(step, {})
            if below:  # an item that stays keeps what it is known by
                _remove(item, node.item or ANY, {s: b for s, b in below.items() if s[2:] not in node.map_keys})
            if below is not None:
                kept.append(item)
        value[:] = kept


def shown(path: Path) -> str:
    """A path as conflicts name it: `.spec.containers[name="a"].image`."""
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += f".{step[2:]}"
        elif step.startswith("k:"):
            keys = msgspec.json.decode(step[2:])
            text += "[" + ",".join(f"{key}={_encode(value).decode()}" for key, value in keys.items()) + "]"
        else:
            text += f"[={step[2:]}]"
    return text
