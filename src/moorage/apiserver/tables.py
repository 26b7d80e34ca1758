"""Tables, as kubectl prints them.

Owns: the Table document and PartialObjectMetadata.
May not touch: storage.
Start reading at: `table_of`.
"""

from typing import Any

from moorage.apiserver.kinds import Kind, Object
from moorage.apiserver.store import encode


def table_of(kind: Kind, objects: list[Object], meta: dict[str, Any], version: str) -> bytes:
    """The objects as a Table of their kind's columns."""
    columns = [{"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}]
    rows = [{"cells": [obj["metadata"]["name"]], "object": partial(obj, version)} for obj in objects]
    return encode({
        "kind": "Table", "apiVersion": f"meta.k8s.io/{version}", "metadata": meta,
        "columnDefinitions": columns, "rows": rows,
    })  # fmt: skip


def partial(obj: Object, version: str = "v1") -> Object:
    """Only the metadata of an object."""
    return {"kind": "PartialObjectMetadata", "apiVersion": f"meta.k8s.io/{version}", "metadata": obj["metadata"]}
