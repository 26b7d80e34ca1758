"""What a cluster does by itself: namespaces get their account and go away whole, dependents follow their owners.

Owns: default ServiceAccounts and the CA's ConfigMap, finishing deleted namespaces, garbage collection, old events.
May not touch: HTTP. On a real cluster these are small controllers; here they belong to the server.
Start reading at: `Housekeeper.run`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from moorage.apiserver.errors import StatusError
from moorage.apiserver.kinds.registry import Kind, KindRegistry, Object
from moorage.apiserver.request.options import Call, DeleteOptions, Options
from moorage.apiserver.store.owner_index import owners_in
from moorage.apiserver.store.store import Key, PendingChange, Store, Transaction, decode
from moorage.apiserver.writing.operations import Operations
from moorage.log import get_logger

log = get_logger(__name__)

AGENT = "moorage-apiserver"  # what the server writes by itself is its own
EVENT_LIFE = timedelta(hours=1)
TRIM_S = 5.0
_EVENTS_AT_A_TIME = 200


class Housekeeper:
    """Works off what committed changes leave to do, one thing after the other."""

    def __init__(self, resources: Operations, registry: KindRegistry, ca: str, collects_garbage: bool) -> None:
        self._resources = resources
        self._store: Store = resources.store
        self._registry = registry
        self._ca = ca
        self._collects = collects_garbage
        self._wake = asyncio.Event()
        self._new_namespaces: deque[str] = deque()
        self._going_namespaces: dict[str, None] = {}
        self._gone: deque[str] = deque()  # uids of owners
        self._waiting: dict[tuple[str, Key], None] = {}  # objects with an orphan or foreground finalizer
        self.chores: list[Callable[[], Awaitable[None]]] = []  # what others want done after changes
        self._store.on_commit.append(self._notice)

    def _notice(self, staged: list[PendingChange]) -> None:
        for change in staged:
            body = change.record.body
            if change.resource == "namespaces" and change.kind != "DELETED":
                if change.kind == "ADDED":
                    self._new_namespaces.append(change.key[1])
                if b'"phase":"Terminating"' in body:
                    self._going_namespaces[change.key[1]] = None
                self._wake.set()
            elif change.kind == "DELETED" and change.key[0] in self._going_namespaces:
                self._wake.set()
            if change.resource.startswith("customresourcedefinitions."):
                self._wake.set()
            if not self._collects:
                continue
            if change.kind == "DELETED":
                uid = decode(body)["metadata"].get("uid", "")
                if self._store.owners.get(uid):
                    self._gone.append(uid)
                    self._wake.set()
                if self._waiting:
                    self._wake.set()
            elif b'"foregroundDeletion"' in body or b'"orphan"' in body:
                self._waiting[change.resource, change.key] = None
                self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        for name in [key[1] for key in self._store.table("namespaces").order]:
            self._new_namespaces.append(name)
            record = self._store.get("namespaces", "", name)
            if record is not None and b'"phase":"Terminating"' in record.body:
                self._going_namespaces[name] = None
        next_sweep = 0.0
        while True:
            await self._round()
            now = time.monotonic()
            self._store.trim(now)
            if now >= next_sweep:
                next_sweep = now + 60
                await self._drop_old_events()
            try:
                async with asyncio.timeout(TRIM_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def _round(self) -> None:
        try:
            for chore in self.chores:
                await chore()
            while self._new_namespaces:
                await self._create_defaults(self._new_namespaces.popleft())
            for name in list(self._going_namespaces):
                await self._finish_namespace(name)
            while self._gone:
                await self._collect(self._gone.popleft())
            for resource, key in list(self._waiting):
                await self._settle_owner(resource, key)
        except StatusError as error:
            log.warning("housekeeping step failed", error=str(error))
        except Exception:  # the other chores and the next round must go on
            log.exception("housekeeping step failed")

    async def _create_defaults(self, namespace: str) -> None:
        """The default account, and the certificate authority for pods to trust."""
        made: list[tuple[str, Object]] = [
            ("serviceaccounts", {"metadata": {"name": "default"}}),
            ("configmaps", {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": self._ca}}),
        ]
        for plural, obj in made:
            kind = self._registry.find("", "v1", plural)
            name = obj["metadata"]["name"]
            if kind is None or self._store.get(kind.stored_as, namespace, name) is not None:
                continue
            try:
                await self._resources.create(Call(kind, namespace, "", "", Options(), user_agent=AGENT), obj)
            except StatusError as error:
                if error.http not in (403, 404, 409):
                    raise

    async def _finish_namespace(self, name: str) -> None:
        record = self._store.get("namespaces", "", name)
        if record is None:
            self._going_namespaces.pop(name, None)
            return
        left = 0
        for resource, table in list(self._store.tables().items()):
            kind = self._registry.by_stored(resource)
            for key in [key for key in table.order if key[0] == name]:
                if kind is None:
                    continue
                left += 1
                await self._delete(kind, key, DeleteOptions(grace_s=None))
                left -= self._store.get(resource, *key) is None
        if left == 0:
            await self._store.write(lambda txn: self._remove_namespace(txn, name))
            self._going_namespaces.pop(name, None)

    def _remove_namespace(self, txn: Transaction, name: str) -> None:
        record = txn.get("namespaces", "", name)
        if record is None:
            return
        obj = decode(record.body)
        obj.get("spec", {}).pop("finalizers", None)
        if obj["metadata"].get("finalizers"):
            txn.put("namespaces", "", name, obj)
        else:
            txn.delete("namespaces", "", name, obj)

    async def _delete(self, kind: Kind, key: Key, options: DeleteOptions) -> None:
        try:
            await self._resources.delete(Call(kind, key[0], key[1], "", Options(), user_agent=AGENT), options)
        except StatusError as error:
            if error.http not in (404, 409):
                raise

    async def _collect(self, uid: str) -> None:
        """Delete what this owner was the last to hold; others only forget it."""
        for resource, key in self._store.owners.get(uid):
            record = self._store.get(resource, *key)
            kind = self._registry.by_stored(resource)
            if record is None or kind is None:
                continue
            others = [other for other in owners_in(record.body) if other != uid and self._lives(record.body, other)]
            if others:
                await self._disown(kind, key, uid)
            else:
                await self._delete(kind, key, DeleteOptions(uid=decode(record.body)["metadata"]["uid"]))

    def _lives(self, body: bytes, uid: str) -> bool:
        """Whether an owner is still there, by its name and uid."""
        meta = decode(body)["metadata"]
        for owner in meta.get("ownerReferences") or []:
            if owner.get("uid") != uid:
                continue
            kind = self._registry.by_name(owner.get("apiVersion", ""), owner.get("kind", ""))
            if kind is None:
                return True
            namespace = meta.get("namespace", "") if kind.is_namespaced else ""
            record = self._store.get(kind.stored_as, namespace, owner.get("name", ""))
            return record is not None and decode(record.body)["metadata"]["uid"] == uid
        return False

    async def _disown(self, kind: Kind, key: Key, uid: str) -> None:
        def without(obj: Object, _txn: Transaction) -> Object:
            meta = obj["metadata"]
            meta["ownerReferences"] = [o for o in meta.get("ownerReferences") or [] if o.get("uid") != uid]
            return obj

        try:
            await self._resources.change(Call(kind, key[0], key[1], "", Options(), user_agent=AGENT), without)
        except StatusError as error:
            if error.http not in (404, 409):
                raise

    async def _settle_owner(self, resource: str, key: Key) -> None:
        """Carry out orphan and foreground deletion, then take the finalizer away."""
        record, kind = self._store.get(resource, *key), self._registry.by_stored(resource)
        meta = decode(record.body)["metadata"] if record else {}
        finalizers = meta.get("finalizers") or []
        mine = [f for f in finalizers if f in ("orphan", "foregroundDeletion")]
        if kind is None or not mine or not meta.get("deletionTimestamp"):
            self._waiting.pop((resource, key), None)
            return
        uid = meta["uid"]
        for dependent, dependent_key in self._store.owners.get(uid):
            other = self._registry.by_stored(dependent)
            if other is None:
                continue
            if "orphan" in mine:
                await self._disown(other, dependent_key, uid)
            else:
                await self._delete(other, dependent_key, DeleteOptions(propagation="Foreground"))
        if not self._store.owners.get(uid):
            self._waiting.pop((resource, key), None)
            await self._drop_finalizers(kind, key, mine)

    async def _drop_finalizers(self, kind: Kind, key: Key, names: list[str]) -> None:
        def without(obj: Object, _txn: Transaction) -> Object:
            obj["metadata"]["finalizers"] = [f for f in obj["metadata"].get("finalizers") or [] if f not in names]
            return obj

        try:
            await self._resources.change(Call(kind, key[0], key[1], "", Options(), user_agent=AGENT), without)
        except StatusError as error:
            if error.http not in (404, 409):
                raise

    async def _drop_old_events(self) -> None:
        kind = self._registry.find("", "v1", "events")
        limit = (datetime.now(UTC) - EVENT_LIFE).strftime("%Y-%m-%dT%H:%M:%SZ")
        table = self._store.table("events")
        for at, key in enumerate(list(table.order)):
            if at % _EVENTS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # there may be very many, and requests must not wait for all of them
            record = table.records.get(key)
            if record is None or kind is None:
                continue
            event = decode(record.body)
            series = event.get("series") or {}
            seen = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
            if max(seen or "", event["metadata"]["creationTimestamp"]) < limit:
                await self._delete(kind, key, DeleteOptions())
