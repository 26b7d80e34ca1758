"""Writes that apply only to the version that was read; responses go into the caches at once.

Owns: guarded patches, full updates, finalizers, and passing each response to the informers of its kind.
Start reading at: `Writer.patch`, `Writer.add_finalizers`.

The informers are asked only for caches that exist: a write never starts a watch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from moorage.kube.api.client import Client, PatchType
from moorage.kube.cache.informers import Informers
from moorage.kube.errors import Conflict, NotFound
from moorage.kube.objects.meta import KubeObject

T = TypeVar("T", bound=KubeObject)
Patch = Mapping[str, Any] | Sequence[Any]


class Writer:
    """Writes objects and caches the responses, so that the next decision sees them.

    With `refreshes` a Conflict is raised only after the object has been read again into its cache.
    """

    def __init__(self, client: Client, informers: Informers, *, refreshes: bool = False) -> None:
        self._client = client
        self._informers = informers
        self._refreshes = refreshes

    async def patch(
        self,
        obj: T,
        patch: Patch | None,
        *,
        subresource: str = "",
        how: PatchType = PatchType.MERGE,
        guarded: bool = True,
    ) -> T:
        """Patch an object and return the result; without a patch, return the object itself.

        Raises Conflict if the object has changed since it was read, unless `guarded` is False. Raises NotFound if it
        is gone.
        """
        if not patch:
            return obj
        version = obj.metadata.resource_version if guarded else ""
        try:
            written = await self._client.patch(
                type(obj), obj.name, patch, obj.namespace, how=how, subresource=subresource, version=version
            )
        except Conflict:
            if self._refreshes:
                await self.fresh(type(obj), obj.name, obj.namespace)
            raise
        if not is_removed(obj, written):
            self._informers.remember(written)
        return written

    async def patch_status(self, obj: T, fields: Mapping[str, Any], *, guarded: bool = True) -> T:
        """Merge fields into the status; without any, return the object itself."""
        return await self.patch(obj, {"status": fields} if fields else None, subresource="status", guarded=guarded)

    async def update(
        self, kind: type[T], name: str, namespace: str, change: Callable[[dict[str, Any]], bool]
    ) -> T | None:
        """Read the whole object, let `change` edit it, and write it back. Returns None if `change` returned False.

        For roles that may update a kind but not patch it. Raises Conflict if the object changed in between, NotFound
        if it is gone.
        """
        raw = await self._client.request("GET", kind.resource.path(namespace, name))
        document: dict[str, Any] = msgspec.json.decode(raw)
        if not change(document):
            return None
        written = await self._client.update(kind, name, document, namespace)
        self._informers.remember(written)
        return written

    async def create(self, kind: type[T], body: KubeObject | Mapping[str, Any], namespace: str = "") -> T:
        """Create an object. Raises AlreadyExists if its name is taken."""
        made = await self._client.create(kind, body, namespace)
        self._informers.remember(made)
        return made

    async def delete(self, obj: KubeObject) -> None:
        """Ask for the deletion of exactly this object. One that is gone already, or on its way, is success."""
        if obj.is_deleting:
            return
        try:
            await self._client.delete(type(obj), obj.name, obj.namespace, uid=obj.uid)
        except NotFound:
            return

    async def annotate(self, obj: T, annotations: Mapping[str, str]) -> T:
        """Set annotations; write nothing if the object has them already."""
        if all(obj.annotations.get(key) == value for key, value in annotations.items()):
            return obj
        return await self.patch(obj, {"metadata": {"annotations": dict(annotations)}})

    async def add_finalizers(self, obj: T, *names: str, how: PatchType = PatchType.MERGE) -> T:
        """Add the finalizers that are missing.

        MERGE writes the whole list, guarded by the version. STRATEGIC and JSON leave other finalizers alone and need
        no guard.
        """
        missing = [name for name in names if name not in obj.finalizers]
        if not missing:
            return obj
        match how:
            case PatchType.STRATEGIC:
                return await self.patch(obj, _metadata(obj, {"finalizers": missing}), how=how, guarded=False)
            case PatchType.JSON:
                return await self.patch(obj, _json_add(obj.finalizers, missing), how=how, guarded=False)
            case _:
                return await self.patch(obj, {"metadata": {"finalizers": [*obj.finalizers, *missing]}}, how=how)

    async def remove_finalizers(self, obj: T, *names: str, how: PatchType = PatchType.MERGE) -> T | None:
        """Remove finalizers. Returns None if the object is gone, also if it went with its last finalizer."""
        present = [name for name in names if name in obj.finalizers]
        if not present:
            return obj
        try:
            match how:
                case PatchType.STRATEGIC:
                    change = {"$deleteFromPrimitiveList/finalizers": present}
                    written = await self.patch(obj, _metadata(obj, change), how=how, guarded=False)
                case PatchType.JSON:
                    written = await self.patch(obj, _json_remove(obj.finalizers, present), how=how, guarded=False)
                case _:
                    left = [name for name in obj.finalizers if name not in present]
                    written = await self.patch(obj, {"metadata": {"finalizers": left}}, how=how)
        except NotFound:
            return None
        return None if is_removed(obj, written) else written

    async def fresh(self, kind: type[T], name: str, namespace: str = "") -> T | None:
        """Read an object from the API server into its cache. Returns None if it does not exist."""
        found = await self._client.find(kind, name, namespace)
        if found is not None:
            self._informers.remember(found)
        return found


def is_removed(before: KubeObject, written: KubeObject) -> bool:
    """Whether a write took the last finalizer off a deleted object, which removes it: its DELETED event follows."""
    return written.is_deleting and bool(before.finalizers) and not written.finalizers


def _metadata(obj: KubeObject, change: Mapping[str, Any]) -> dict[str, Any]:
    """A change of the metadata that fails on another object of the same name."""
    return {"metadata": {**change, **({"uid": obj.uid} if obj.uid else {})}}


def _json_add(present: Sequence[str], missing: Sequence[str]) -> list[dict[str, Any]]:
    """Append finalizers. Fails if the list was empty when it was read and exists now."""
    if present:
        return [{"op": "add", "path": "/metadata/finalizers/-", "value": name} for name in missing]
    return [
        {"op": "test", "path": "/metadata/finalizers", "value": None},
        {"op": "add", "path": "/metadata/finalizers", "value": list(missing)},
    ]


def _json_remove(present: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Remove finalizers, the last in the list first. Fails if one is no longer where it was read."""
    steps: list[dict[str, Any]] = []
    for place in sorted((present.index(name) for name in names), reverse=True):
        path = f"/metadata/finalizers/{place}"
        steps += [{"op": "test", "path": path, "value": present[place]}, {"op": "remove", "path": path}]
    return steps
