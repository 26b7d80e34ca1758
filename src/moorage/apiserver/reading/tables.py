"""Tables, as kubectl prints them.

Owns: the Table document, PartialObjectMetadata, and the columns of custom kinds.
May not touch: storage.
Start reading at: `table_of`.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.reading.columns import AGE, NAME, Column, columns_for
from moorage.apiserver.reading.durations import age_of
from moorage.apiserver.store.store import encode


def table_of(
    kind: Kind, objects: list[Object], meta: dict[str, Any], version: str, include: str = "", default_class: str = ""
) -> bytes:
    """The objects as a Table of their kind's columns; `include` says what of each object goes along."""
    columns = _custom_columns(kind) if kind.custom is not None else columns_for(kind.stored_as)
    rows = []
    for obj in objects:
        row: Object = {"cells": [column.cell(obj) for column in columns]}
        if include == "Object":
            row["object"] = obj
        elif include != "None":
            row["object"] = partial(obj, version)
        else:
            row["object"] = None
        if default_class and kind.name == "StorageClass" and obj["metadata"]["name"] == default_class:
            row["cells"][0] += " (default)"
        rows.append(row)
    return encode(
        {
            "kind": "Table",
            "apiVersion": f"meta.k8s.io/{version}",
            "metadata": meta,
            "columnDefinitions": [column.definition() for column in columns],
            "rows": rows,
        }
    )


def partial(obj: Object, version: str = "v1") -> Object:
    """Only the metadata of an object."""
    return {"kind": "PartialObjectMetadata", "apiVersion": f"meta.k8s.io/{version}", "metadata": obj["metadata"]}


def _custom_columns(kind: Kind) -> list[Column]:
    """Name, then what the definition lists; age when it lists nothing."""
    listed = kind.custom.columns
    if not listed:
        return [NAME, AGE]
    return [NAME, *(_custom_column(column) for column in listed)]


def _custom_column(column: Object) -> Column:
    find, kind = json_path(str(column.get("jsonPath", ""))), str(column.get("type", "string"))

    def cell(obj: Object) -> Any:
        found = find(obj)
        value = found[0] if found else None
        if kind == "date":
            return age_of(value) if value is not None else None
        if value is None:
            return None
        if kind == "string":
            return value if isinstance(value, str) else encode(value).decode()
        return value

    return Column(
        str(column.get("name", "")), cell, kind, int(column.get("priority") or 0), str(column.get("format") or "")
    )


_STEP = re.compile(
    r"\.?([A-Za-z0-9_$-]+|\*)|\['([^']*)'\]|\[\"([^\"]*)\"\]|\[(-?\d+|\*)\]|\[\?\(@\.([^=!]+)==\s*[\"']([^\"']*)[\"']\s*\)\]"
)


@lru_cache(maxsize=512)
def json_path(text: str) -> Callable[[Any], list[Any]]:
    """The simple JSON paths that printer columns are made of: names, indexes, * and equality filters."""
    text = text.strip().removeprefix("{").removesuffix("}").replace("\\.", "\0")
    steps = [match.groups() for match in _STEP.finditer(text)]

    def find(obj: Any) -> list[Any]:
        found = [obj]
        for name, quoted, double, index, field, value in steps:
            found = [item for one in found for item in _step(one, name or quoted or double, index, field, value)]
        return found

    return find


def _step(value: Any, name: str | None, index: str | None, field: str | None, wanted: str | None) -> list[Any]:
    if field is not None:
        items = value if isinstance(value, list) else []
        return [item for item in items if isinstance(item, dict) and str(item.get(field.strip())) == wanted]
    if index == "*" or name == "*":
        return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    if index is not None:
        at = int(index)
        return [value[at]] if isinstance(value, list) and -len(value) <= at < len(value) else []
    key = (name or "").replace("\0", ".")
    return [value[key]] if isinstance(value, dict) and key in value else []
