"""Whatever crashes, lags or interferes: no volume is given twice or taken from a living claim, and all comes to rest.

The real binder works on copies of the cluster that lag behind, is killed at random writes and starts again, while users
create and delete. The API is a small class that keeps versions and refuses what Kubernetes refuses.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.unit.controllers.binder.binder_objects import claim as new_claim
from tests.unit.controllers.binder.binder_objects import merged
from tests.unit.controllers.binder.binder_objects import volume as new_volume

from moorage.controllers.binder.execute import BinderExecutor
from moorage.controllers.binder.matching import is_free
from moorage.controllers.binder.run import Binder
from moorage.controllers.binder.state import BinderState
from moorage.kube.control.writer import Writer
from moorage.kube.errors import Conflict, NotFound
from moorage.kube.names import BIND_COMPLETED, PROVISIONED_BY
from moorage.kube.objects import KubeObject, PersistentVolume, PersistentVolumeClaim
from moorage.kube.objects.meta import as_document
from moorage.kube.volumes import capacity_bytes, reference_key, requested_bytes


class Killed(BaseException):
    """The process of the binder is gone."""


class Copy:
    """What an informer is to the binder: a copy that moves only when it is told to, and never back."""

    def __init__(self, objects: Iterable[KubeObject] = ()) -> None:
        self._objects = {obj.key: obj for obj in objects}
        self._indexes: dict[str, Callable[[Any], Iterable[str]]] = {}
        self._handlers: list[Callable[[Any, Any], None]] = []

    def get(self, key: str) -> Any:
        return self._objects.get(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._objects.values()))

    def index(self, name: str, keys: Callable[[Any], Iterable[str]]) -> None:
        self._indexes[name] = keys

    def at(self, name: str, value: str) -> list[Any]:
        return [obj for obj in self if value in self._indexes[name](obj)]

    def by(self, keys: Callable[[Any], Iterable[str]], value: str) -> list[Any]:
        return [obj for obj in self if value in keys(obj)]

    def subscribe(self, handler: Callable[[Any, Any], None]) -> None:
        self._handlers.append(handler)
        for obj in self:
            handler(None, obj)

    def remember(self, obj: KubeObject) -> None:
        old = self._objects.get(obj.key)
        if old is None or old.version < obj.version:
            self._objects[obj.key] = obj
            self._tell(old if old is not None and old.uid == obj.uid else None, obj)

    def forget(self, obj: KubeObject) -> None:
        old = self._objects.get(obj.key)
        if old is not None and old.version <= obj.version:
            del self._objects[obj.key]
            self._tell(old, None)

    def _tell(self, old: Any, new: Any) -> None:
        for handler in self._handlers:
            handler(old, new)


class Api:
    """The objects themselves, their history since the binder last listened, and the promises that must hold."""

    def __init__(self) -> None:
        self.revision = 0
        self.objects: dict[type[Any], dict[str, Any]] = {PersistentVolume: {}, PersistentVolumeClaim: {}}
        self.history: dict[type[Any], list[tuple[str, Any]]] = {PersistentVolume: [], PersistentVolumeClaim: []}
        self.kill_at = 0  # which of the next writes kills the binder; 0 for none
        self.is_sent = False
        self.writes = 0

    def put(self, obj: Any) -> Any:
        self.revision += 1
        document = msgspec.to_builtins(obj)
        document["metadata"]["resourceVersion"] = str(self.revision)
        document["metadata"].setdefault("uid", f"uid-{self.revision}")
        stored = msgspec.convert(document, type(obj))
        self.objects[type(obj)][stored.key] = stored
        self.history[type(obj)].append(("MODIFIED", stored))
        return stored

    def delete(self, kind: type[Any], key: str) -> None:
        obj = self.objects[kind].pop(key, None)
        if obj is not None:
            self.revision += 1
            meta = msgspec.structs.replace(obj.metadata, resource_version=str(self.revision))
            self.history[kind].append(("DELETED", msgspec.structs.replace(obj, metadata=meta)))

    async def find(self, kind: type[Any], name: str, namespace: str = "") -> Any:
        return self.objects[kind].get(f"{namespace}/{name}" if namespace else name)

    async def patch(self, kind: type[Any], name: str, patch: Any, namespace: str = "", **options: Any) -> Any:
        self.writes += 1
        if self.kill_at:
            self.kill_at -= 1
            if self.kill_at == 0:
                if self.is_sent:
                    self._patch(kind, name, patch, namespace, options["version"])
                raise Killed
        return self._patch(kind, name, patch, namespace, options["version"])

    def _patch(self, kind: type[Any], name: str, patch: Any, namespace: str, version: str) -> Any:
        key = f"{namespace}/{name}" if namespace else name
        old = self.objects[kind].get(key)
        if old is None:
            raise NotFound(404, "NotFound", key)
        if old.metadata.resource_version != version:
            raise Conflict(409, "Conflict", key)
        new = msgspec.convert(merged(as_document(old), patch), kind)
        self._check(old, new)
        return self.put(new)

    def _check(self, old: Any, new: Any) -> None:
        """The promises about single writes."""
        claims = self.objects[PersistentVolumeClaim].values()
        if isinstance(new, PersistentVolumeClaim):
            assert old.spec.volume_name in ("", new.spec.volume_name), "a claim changed its volume"
            assert BIND_COMPLETED not in new.annotations or new.spec.volume_name, "complete without a volume"
            return
        before, after = old.spec.claim_ref, new.spec.claim_ref
        holder = next((c for c in claims if before is not None and before.uid and c.uid == before.uid), None)
        has_it = holder is not None and holder.spec.volume_name in ("", new.name)
        if new.status.phase in ("Released", "Failed"):
            assert not has_it, "a volume was taken from a living claim"
        if before is not None and before.uid and after is not None and after.uid:
            assert after.uid == before.uid, "what belonged to one claim, gone or not, was handed to another"
        if holder is not None and holder.spec.volume_name == new.name:
            assert after is not None, "a volume forgot the claim that has it"
            assert after.uid == holder.uid, "a volume was given twice"


class Nothing:
    """A recorder without readers, and a controller whose queue has no workers."""

    def __init__(self, *_: object) -> None:
        self.queue = self

    def event(self, *_: object) -> None: ...

    def add(self, key: str) -> None: ...


class Process:
    """One life of the binder: copies of what was there when it started, and its own memory."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.claims = Copy(api.objects[PersistentVolumeClaim].values())
        self.volumes = Copy(api.objects[PersistentVolume].values())
        for history in api.history.values():
            history.clear()
        copies: Any = (self.claims, self.volumes, Copy(), Copy())
        self.world = BinderState(*copies)
        any_api: Any = api
        writer = Writer(any_api, self)  # type: ignore[arg-type]
        executor = BinderExecutor(any_api, writer, Nothing())  # type: ignore[arg-type]
        self.binder = Binder(any_api, self.world, executor, Nothing)  # type: ignore[arg-type]
        self.volumes.subscribe(self.world.free.see)

    def remember(self, obj: Any) -> None:
        (self.volumes if isinstance(obj, PersistentVolume) else self.claims).remember(obj)

    def hear(self, kind: type[Any], count: int) -> None:
        """Take in the next events of a kind; the order within a kind is kept, that between kinds is not."""
        copy = self.volumes if kind is PersistentVolume else self.claims
        history = self.api.history[kind]
        for event, obj in history[:count]:
            copy.forget(obj) if event == "DELETED" else copy.remember(obj)
        del history[:count]


def _renamed(obj: Any, name: str) -> Any:
    return msgspec.structs.replace(
        obj, metadata=msgspec.structs.replace(obj.metadata, name=name, uid="", resource_version="")
    )


class Story:
    """Users, time and death, as chosen by hypothesis."""

    def __init__(self) -> None:
        self.api = Api()
        self.process = Process(self.api)
        self.made = 0

    async def step(self, what: str, number: int, detail: int) -> None:
        volumes, claims = self.api.objects[PersistentVolume], self.api.objects[PersistentVolumeClaim]
        chosen = sorted(volumes)[detail % len(volumes)] if volumes else ""
        match what:
            case "volume" | "reserved volume" | "provisioned volume":
                self._make_volume(what, number, detail)
            case "claim" | "claim by name":
                self._make_claim(what, number, detail)
            case "delete claim":
                self.api.delete(PersistentVolumeClaim, f"default/c{number}")
            case "delete volume":
                self.api.delete(PersistentVolume, chosen)
            case "clear" if chosen:
                self._clear(volumes[chosen], {claim.uid for claim in claims.values()})
            case "hear volumes":
                self.process.hear(PersistentVolume, detail + 1)
            case "hear claims":
                self.process.hear(PersistentVolumeClaim, detail + 1)
            case "sync claim":
                await self._sync(self.process.binder.sync_claim, f"default/c{number}", 0)
            case "sync volumes":
                for name in sorted(volumes):
                    await self._sync(self.process.binder.sync_volume, name, 0)
            case "die in claim":
                await self._sync(self.process.binder.sync_claim, f"default/c{number}", detail + 2)
            case "die in volume":
                await self._sync(self.process.binder.sync_volume, chosen, detail + 2)

    def _make_volume(self, what: str, number: int, detail: int) -> None:
        self.made += 1  # a name is never used again
        options: dict[str, Any] = {"phase": "Pending"}
        owner = self.api.objects[PersistentVolumeClaim].get(f"default/c{number}")
        if what != "volume":
            options["claim"] = f"c{number}"
        if what == "provisioned volume" and owner is not None:
            options |= {"claim_uid": owner.uid, "notes": {PROVISIONED_BY: "csi.example.com"}}
            options["csi"] = {"driver": "csi.example.com", "volumeHandle": "h"}
            options["persistentVolumeReclaimPolicy"] = "Delete" if detail & 1 else "Retain"
        self.api.put(_renamed(new_volume(size=f"{1 + detail % 2}Gi", **options), f"v{self.made}"))

    def _make_claim(self, what: str, number: int, detail: int) -> None:
        if f"default/c{number}" not in self.api.objects[PersistentVolumeClaim]:
            named = {"volumeName": f"v{1 + detail % max(1, self.made)}"} if what == "claim by name" else {}
            self.api.put(_renamed(new_claim(size=f"{1 + detail % 2}Gi", **named), f"c{number}"))

    def _clear(self, volume: PersistentVolume, alive: set[str]) -> None:
        """An administrator recovers a volume whose claim is gone."""
        reference = volume.spec.claim_ref
        if reference is not None and reference.uid and reference.uid not in alive:
            self.api.put(msgspec.structs.replace(volume, spec=msgspec.structs.replace(volume.spec, claim_ref=None)))

    async def _sync(self, sync: Callable[[str], Any], key: str, detail: int) -> None:
        self.api.kill_at, self.api.is_sent = detail // 2, bool(detail & 1)
        try:
            await sync(key)
        except Killed:
            self.process = Process(self.api)
        except Conflict:
            pass  # the queue would bring it back
        finally:
            self.api.kill_at = 0

    async def rest(self) -> None:
        """Let everything be heard and looked at until nothing changes."""
        for _ in range(40):
            before = self.api.revision
            for kind in (PersistentVolume, PersistentVolumeClaim):
                self.process.hear(kind, 10_000)
            for name in list(self.api.objects[PersistentVolume]):
                await self._sync(self.process.binder.sync_volume, name, 0)
            for key in list(self.api.objects[PersistentVolumeClaim]):
                await self._sync(self.process.binder.sync_claim, key, 0)
            if self.api.revision == before:
                return
        raise AssertionError("the binder never comes to rest")


def test_a_claim_that_only_the_copy_misses_keeps_its_volume() -> None:
    """As after a restore from a backup: the copy has heard, long ago and rightly, that the claim was deleted."""

    async def live() -> Story:
        story = Story()
        await story.step("claim", 0, 0)
        await story.step("volume", 0, 0)
        await story.rest()
        held = story.api.objects[PersistentVolumeClaim]["default/c0"]
        meta = msgspec.structs.replace(held.metadata, resource_version="1000")
        story.process.claims.forget(msgspec.structs.replace(held, metadata=meta))
        await story.process.binder.sync_volume("v1")
        return story

    story = asyncio.run(live())
    assert story.api.objects[PersistentVolume]["v1"].status.phase == "Bound"
    assert story.process.claims.get("default/c0") is None  # it was the question that saved the volume


HAPPENS = (
    *("volume", "reserved volume", "provisioned volume", "claim", "claim", "claim by name"),
    *("delete claim", "delete volume", "clear", "hear volumes", "hear volumes", "hear claims"),
    *("sync claim", "sync claim", "sync volumes", "sync volumes", "die in claim", "die in volume"),
)
STEPS = st.tuples(st.sampled_from(HAPPENS), st.integers(0, 1), st.integers(0, 7))


@settings(max_examples=examples(2000), deadline=None)
@given(st.lists(STEPS, min_size=10, max_size=50))
def test_nothing_is_given_twice_or_taken_away_and_all_comes_to_rest(steps: list[tuple[str, int, int]]) -> None:
    async def live() -> Story:
        story = Story()
        for step in steps:
            await story.step(*step)
        await story.rest()
        return story

    objects = asyncio.run(live()).api.objects
    volumes, claims = objects[PersistentVolume], objects[PersistentVolumeClaim]
    for claim in claims.values():
        volume = volumes.get(claim.spec.volume_name)
        if claim.status.phase == "Bound":
            assert volume is not None
            assert volume.spec.claim_ref.uid == claim.uid
            assert volume.status.phase == "Bound"
    bound = [claim.spec.volume_name for claim in claims.values() if claim.status.phase == "Bound"]
    assert len(bound) == len(set(bound))
    free = [volume for volume in volumes.values() if is_free(volume)]
    for claim in claims.values():
        if claim.status.phase == "Pending" and not claim.spec.volume_name:
            assert not any(_fits(volume, claim) for volume in free), "a claim waits beside a volume that it could have"
    for volume in volumes.values():
        if volume.status.phase == "Bound":
            assert claims[reference_key(volume.spec.claim_ref)].spec.volume_name == volume.name


def _fits(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    return capacity_bytes(volume) >= requested_bytes(claim)
