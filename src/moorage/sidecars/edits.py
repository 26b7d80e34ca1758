"""Changes to objects in the way that the official sidecars make them, so that their RBAC rules suffice.

Owns: the full update (read raw, change, write with the version read) and the finalizer patches.
Start reading at: `update_whole`, `finalizer_patch`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from moorage.kube.api.client import Client
from moorage.kube.objects import KubeObject

T = TypeVar("T", bound=KubeObject)


async def update_whole(
    client: Client, kind: type[T], name: str, namespace: str, change: Callable[[dict[str, Any]], bool]
) -> T | None:
    """Read the whole object, let `change` edit it, and write it back; None when `change` had nothing to do.

    Conflict when somebody wrote in between: the caller's key comes back and decides anew.
    """
    raw = await client.request("GET", kind.resource.path(namespace, name))
    document: dict[str, Any] = msgspec.json.decode(raw)
    if not change(document):
        return None
    return await client.update(kind, name, document, namespace)


def add_finalizer(finalizer: str) -> Callable[[dict[str, Any]], bool]:
    """A change for `update_whole` that puts a finalizer on."""

    def change(document: dict[str, Any]) -> bool:
        finalizers = document["metadata"].setdefault("finalizers", [])
        if finalizer in finalizers:
            return False
        finalizers.append(finalizer)
        return True

    return change


def remove_finalizer(finalizer: str) -> Callable[[dict[str, Any]], bool]:
    """A change for `update_whole` that takes a finalizer off."""

    def change(document: dict[str, Any]) -> bool:
        finalizers = document["metadata"].get("finalizers") or []
        if finalizer not in finalizers:
            return False
        document["metadata"]["finalizers"] = [each for each in finalizers if each != finalizer]
        return True

    return change


def remove_annotation(*keys: str) -> Callable[[dict[str, Any]], bool]:
    """A change for `update_whole` that takes annotations off."""

    def change(document: dict[str, Any]) -> bool:
        annotations = document["metadata"].get("annotations") or {}
        found = [key for key in keys if key in annotations]
        for key in found:
            del annotations[key]
        return bool(found)

    return change


def finalizer_patch(finalizer: str, wanted: bool) -> dict[str, Any]:
    """A strategic merge patch: finalizers are merged as a set, so nobody else's are touched."""
    if wanted:
        return {"metadata": {"finalizers": [finalizer]}}
    return {"metadata": {"$deleteFromPrimitiveList/finalizers": [finalizer]}}


def json_add_finalizer(finalizers: list[str], finalizer: str) -> list[dict[str, Any]]:
    """A JSON patch that adds a finalizer and fails when the list is not the one that was seen empty."""
    if finalizers:
        return [{"op": "add", "path": "/metadata/finalizers/-", "value": finalizer}]
    return [
        {"op": "test", "path": "/metadata/finalizers", "value": None},
        {"op": "add", "path": "/metadata/finalizers", "value": [finalizer]},
    ]


def json_remove_finalizer(finalizers: list[str], finalizer: str) -> list[dict[str, Any]]:
    """A JSON patch that removes a finalizer, and fails when it is no longer where it was seen."""
    at = f"/metadata/finalizers/{finalizers.index(finalizer)}"
    return [{"op": "test", "path": at, "value": finalizer}, {"op": "remove", "path": at}]
