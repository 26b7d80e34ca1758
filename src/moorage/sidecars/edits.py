"""Changes for `Writer.update`: the official provisioner may update claims and snapshots, but not patch them.

Owns: putting a finalizer on a document, and taking finalizers and annotations off.
"""

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], bool]


def add_finalizer(finalizer: str) -> Change:
    def change(document: dict[str, Any]) -> bool:
        finalizers = document["metadata"].setdefault("finalizers", [])
        if finalizer in finalizers:
            return False
        finalizers.append(finalizer)
        return True

    return change


def remove_finalizer(finalizer: str) -> Change:
    def change(document: dict[str, Any]) -> bool:
        finalizers = document["metadata"].get("finalizers") or []
        if finalizer not in finalizers:
            return False
        document["metadata"]["finalizers"] = [each for each in finalizers if each != finalizer]
        return True

    return change


def remove_annotation(*keys: str) -> Change:
    def change(document: dict[str, Any]) -> bool:
        annotations = document["metadata"].get("annotations") or {}
        found = [key for key in keys if key in annotations]
        for key in found:
            del annotations[key]
        return bool(found)

    return change
