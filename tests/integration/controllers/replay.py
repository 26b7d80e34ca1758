"""Replays recorded scenarios in this process: actions in, rest awaited, outcome compared with the recording.

Owns: `Stage` (an API server, a client, and controllers that can be stopped and started), `replay`, and how a state is
made comparable. Rest is known, not waited for: see `Stage.settle`.
Start reading at: `replay`.
"""

import asyncio
import difflib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from moorage.controllers.context import Activity, ControllerContext, ControllerOptions, Recorders
from moorage.controllers.run import chosen
from moorage.kube.api.client import Client
from moorage.kube.api.config import ApiConfig
from moorage.kube.cache.informers import Informers
from moorage.kube.errors import ApiError
from moorage.kube.quantity import BadQuantity, bytes_of
from moorage.testing import serve

SCENARIOS = Path(__file__).parents[2] / "data" / "scenarios"

# kind -> (API root, plural, namespaced, short name in uid symbols)
KINDS = {
    "Node": ("/api/v1", "nodes", False, "node"),
    "Pod": ("/api/v1", "pods", True, "pod"),
    "Event": ("/api/v1", "events", True, "event"),
    "PersistentVolume": ("/api/v1", "persistentvolumes", False, "pv"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims", True, "pvc"),
    "StorageClass": ("/apis/storage.k8s.io/v1", "storageclasses", False, "sc"),
    "CSIDriver": ("/apis/storage.k8s.io/v1", "csidrivers", False, "csidriver"),
    "CSINode": ("/apis/storage.k8s.io/v1", "csinodes", False, "csinode"),
    "VolumeAttachment": ("/apis/storage.k8s.io/v1", "volumeattachments", False, "va"),
    "VolumeAttributesClass": ("/apis/storage.k8s.io/v1", "volumeattributesclasses", False, "vac"),
}
OBSERVED = {
    "binder": ("PersistentVolumeClaim", "PersistentVolume", "Pod"),
    "expansion": ("PersistentVolumeClaim", "PersistentVolume", "Pod"),
    "attachdetach": ("VolumeAttachment", "Node", "Pod"),
}
_SOON_S = 0.3  # what is tried again within this time is awaited
MERGE = "application/merge-patch+json"
Scenario = dict[str, Any]
PassTime = Callable[[float], Awaitable[None]]
State = dict[str, Any]


def scenarios(family: str) -> list[Scenario]:
    """All recorded scenarios of a family, by name."""
    return [json.loads(path.read_text()) for path in sorted((SCENARIOS / family).glob("*.json"))]


def path_of(kind: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    root, plural, namespaced, _ = KINDS[kind]
    parts = [root, *(["namespaces", namespace] if namespaced and namespace else []), plural, name, subresource]
    return "/".join(part for part in parts if part)


class Stage:
    """An API server in this process and the controllers under test upon it."""

    def __init__(self, server: Any, client: Client, options: ControllerOptions) -> None:
        self.server = server
        self.client = client
        self.controllers_client = client  # a test may give the controllers one that fails
        self.options = options
        self.informers: Informers | None = None
        self.activity = Activity()
        self.context: ControllerContext | None = None
        self._running: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    async def start(self, names: Sequence[str]) -> None:
        """Start controllers; return when they have taken in what is there."""
        self.activity = Activity()
        self._ready = asyncio.Event()
        self._running = asyncio.create_task(self._run(names), name="controllers")
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({self._running, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        ready.cancel()
        self._raise_failure()

    async def stop(self) -> None:
        """Stop them as a kill does: what is in flight is cut off."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._running = self.informers = self.context = None

    async def settle(self, timeout_s: float = 30.0, *, resync: bool = True) -> None:
        """Return when the controllers have nothing left to do, and would not find anything by looking again.

        Rest is: every informer holds what the server holds, and no queue has a key that is due or soon will be. Both
        must hold in one moment, before and after the controllers were made to do what they do from time to time.
        """
        if self._running is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._rest()
                if resync:
                    self.activity.resync()
                    await self._rest()
        except TimeoutError:
            raise AssertionError(f"no rest within {timeout_s} s: {self._unrest()}") from None

    async def _run(self, names: Sequence[str]) -> None:
        client = self.controllers_client
        async with Recorders(client, self.activity) as recorders, Informers(client) as informers:
            self.informers = informers
            self.context = ControllerContext(client, informers, recorders, self.activity, self.options)
            async with asyncio.TaskGroup() as tasks:
                for name, controller in chosen(names).items():
                    tasks.create_task(_as_coroutine(controller, self.context), name=name)
                for _ in range(5):  # let every controller say which informers it wants
                    await asyncio.sleep(0)
                await informers.wait_synced()
                for _ in range(20):  # and let it subscribe to them
                    await asyncio.sleep(0)
                self._ready.set()

    async def _rest(self) -> None:
        calm = 0
        while calm < 3:  # a look that found nothing to do may still have woken a task: be sure
            self._raise_failure()
            is_calm = self.activity.is_idle_for(_SOON_S) and not self._behind()
            calm = calm + 1 if is_calm else 0
            await asyncio.sleep(0 if is_calm else 0.001)

    def _behind(self) -> list[str]:
        """The kinds of which an informer does not hold exactly what the server holds."""
        behind = []
        for informer in self.informers or ():
            resource = informer.kind.resource
            name = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
            stored = {
                f"{key[0]}/{key[1]}" if key[0] else key[1]: record.revision
                for key, record in self.server.store.table(name).records.items()
            }
            if not informer.is_synced or {obj.key: obj.version for obj in informer} != stored:
                behind.append(name)
        return behind

    def _unrest(self) -> str:
        return f"informers behind: {self._behind()}, queues idle: {self.activity.is_idle}"

    def _raise_failure(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()
            raise AssertionError("the controllers ended by themselves")


async def _as_coroutine(controller: Any, context: ControllerContext) -> None:
    await controller(context)


@asynccontextmanager
async def open_stage(
    data_dir: Path, options: ControllerOptions | None = None, kind: type[Stage] = Stage, **settings: Any
) -> AsyncIterator[Stage]:
    """An API server with the two namespaces that scenarios use, and no controllers yet."""
    settings = {"collects_garbage": False, **settings}
    async with serve(data_dir, **settings) as server, Client(config_of(server)) as client:
        await client.request("POST", "/api/v1/namespaces", {"metadata": {"name": "team-b"}})
        stage = kind(server, client, options or ControllerOptions(binder_resync_s=3600.0))
        try:
            yield stage
        finally:
            await stage.stop()


def config_of(server: Any) -> ApiConfig:
    async def token() -> str:
        return str(server.token)

    return ApiConfig(server.insecure_url, None, token)


class Play:
    """One scenario on one stage: applies actions, and sees the outcome as the recording writes it."""

    def __init__(self, stage: Stage, scenario: Scenario, controllers: Sequence[str]) -> None:
        self.stage = stage
        self.family = scenario["family"]
        self.controllers = controllers
        self.created: set[tuple[str, str | None, str]] = set()
        self.symbols: dict[str, str] = {}  # uid -> symbol
        self.nodes: set[str] = set()

    async def act(self, action: Mapping[str, Any]) -> int:
        """Apply one action; 0 when accepted, else the HTTP status."""
        action = substitute(action, {symbol: uid for uid, symbol in self.symbols.items()})
        try:
            await self._act(action)
        except ApiError as error:
            return error.status
        return 0

    async def _act(self, action: Mapping[str, Any]) -> None:
        request, kind = self.stage.client.request, action.get("kind", "Pod")
        path = path_of(kind, action.get("namespace"), action.get("name"), action.get("subresource"))
        match action["op"]:
            case "stop-controllers":
                await self.stage.stop()
            case "start-controllers":
                await self.stage.start(self.controllers)
            case "create":
                await self._create(action["object"])
            case "patch":
                await request("PATCH", path, action["patch"], content_type=MERGE)
            case "delete":
                options = {"gracePeriodSeconds": action["grace"]} if "grace" in action else {}
                await request("DELETE", path, options)
            case "bind":
                target = {"apiVersion": "v1", "kind": "Node", "name": action["node"]}
                meta = {"name": action["name"], "namespace": action["namespace"]}
                body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
                await request("POST", f"{path}/binding", body)
            case other:
                raise ValueError(other)

    async def _create(self, obj: Mapping[str, Any]) -> None:
        kind, meta = obj["kind"], obj["metadata"]
        if kind == "Node":
            self.nodes.add(meta["name"])
        path = path_of(kind, meta.get("namespace"))
        made = msgspec.json.decode(await self.stage.client.request("POST", path, obj))
        where = (kind, meta.get("namespace"), meta["name"])
        self.created.add(where)
        base = "$uid:" + "/".join(part for part in (KINDS[kind][3], *where[1:]) if part)
        count = sum(symbol.split("#")[0] == base for symbol in self.symbols.values())
        self.symbols[made["metadata"]["uid"]] = f"{base}#{count + 1}" if count else base

    async def observe(self) -> State:
        """The normalised state of the scenario's objects."""
        objects, events = {}, set()
        for kind in OBSERVED[self.family]:
            for obj in await self._items(kind):
                if self._is_ours(kind, obj):
                    meta = obj["metadata"]
                    key = "/".join(part for part in (kind, meta.get("namespace"), meta["name"]) if part)
                    objects[key] = normalised(kind, obj, self.symbols)
        for event in await self._items("Event"):
            about = event.get("involvedObject") or {}
            if about.get("uid") in self.symbols:
                events.add((about.get("kind"), about.get("name"), event.get("type"), event.get("reason")))
        return {"objects": objects, "events": sorted(map(list, events))}

    async def _items(self, kind: str) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(await self.stage.client.request("GET", path_of(kind)))["items"] or [])

    def _is_ours(self, kind: str, obj: Mapping[str, Any]) -> bool:
        meta = obj["metadata"]
        if (kind, meta.get("namespace"), meta["name"]) in self.created:
            return True
        return kind == "VolumeAttachment" and obj["spec"].get("nodeName") in self.nodes


async def replay(
    stage: Stage,
    scenario: Scenario,
    controllers: Sequence[str],
    pass_time: PassTime | None = None,
    *,
    with_events: bool = True,
) -> list[str]:
    """Play a scenario from start to end; the differences from the recording, none if it went the same way.

    `pass_time(seconds)` is called after the actions of a step that the original was given time for: a controller whose
    clock the test holds can be moved on there. Without `with_events` only objects are compared.
    """
    play, tables = Play(stage, scenario, controllers), renamings(scenario.get("interchangeable", []))
    await stage.start(controllers)
    for number, step in enumerate(scenario["steps"], 1):
        where = f"step {number} ({step['title']})"
        for action in step["actions"]:
            status, wanted = await play.act(action), action.get("rejected", 0)
            if bool(status) != bool(wanted):
                return [f"{where}: {action['op']} answered {status or 'ok'}, the recording says {wanted or 'ok'}"]
        await stage.settle()
        if pass_time is not None and step.get("settle"):
            await pass_time(step["settle"])
            await stage.settle()
        if step.get("transient"):
            continue
        state = await play.observe()
        if not with_events:
            state["events"] = step["expect"]["events"]
        wanted_state = comparable(step["expect"])
        matching = [table for table in tables if comparable(renamed(state, table)) == wanted_state]
        if not matching:
            return [f"{where}:", *difference(wanted_state, comparable(state))]
        tables = matching
    return []


def renamings(names: Sequence[str]) -> list[dict[str, str]]:
    """Every way of exchanging interchangeable names, the identity first."""
    return [dict(zip(names, order, strict=True)) for order in itertools.permutations(names)]


def renamed(state: State, table: Mapping[str, str]) -> State:
    objects = {}
    for key, obj in state["objects"].items():
        *head, name = key.split("/")
        objects["/".join([*head, table.get(name, name)])] = substitute(obj, table)
    return {"objects": objects, "events": sorted(substitute(state["events"], table))}


def difference(wanted: State, found: State) -> list[str]:
    recorded, here = (json.dumps(state, indent=1, sort_keys=True).splitlines() for state in (wanted, found))
    return list(difflib.unified_diff(recorded, here, "recorded", "here", lineterm="", n=2))


def substitute(value: Any, table: Mapping[str, str]) -> Any:
    """Replace every string that is a key of `table`, at any depth."""
    if isinstance(value, Mapping):
        return {key: substitute(one, table) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [substitute(one, table) for one in value]
    return table.get(value, value) if isinstance(value, str) else value


def normalised(kind: str, obj: Mapping[str, Any], symbols: Mapping[str, str]) -> dict[str, Any]:
    """An object as the recordings write it: without what differs from run to run."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    out: dict[str, Any] = {
        "annotations": meta.get("annotations"),
        "finalizers": sorted(meta.get("finalizers") or []),
        "deleting": bool(meta.get("deletionTimestamp")) or None,
    }
    if kind == "Pod":
        out |= {"spec": {k: spec[k] for k in ("nodeName",) if spec.get(k)}, "status": {"phase": status.get("phase")}}
    elif kind == "Node":
        attached = sorted(status.get("volumesAttached") or [], key=lambda volume: volume["name"])
        out["status"] = {"volumesInUse": sorted(status.get("volumesInUse") or []), "volumesAttached": attached}
    else:
        out |= {"spec": spec, "status": _normalised_status(kind, status)}
    out = substitute(out, symbols)
    if kind == "PersistentVolume":
        (out["spec"].get("claimRef") or {}).pop("resourceVersion", None)
        if out["spec"].get("storageClassName") == "":  # the same as none, on a volume
            del out["spec"]["storageClassName"]
    return out


def _normalised_status(kind: str, status: Mapping[str, Any]) -> dict[str, Any]:
    dropped = ("conditions", "lastPhaseTransitionTime", "message", "reason")
    kept = {key: value for key, value in status.items() if key not in dropped}
    for error in ("attachError", "detachError"):
        if error in kept:
            kept[error] = {key: value for key, value in kept[error].items() if key != "time"}
    if kind == "VolumeAttachment":
        kept.setdefault("attached", False)
    told = [{k: c[k] for k in ("type", "status", "reason") if c.get(k)} for c in status.get("conditions") or []]
    return kept | {"conditions": sorted(told, key=lambda condition: condition["type"])}


def comparable(value: Any, key: str = "") -> Any:
    """The value without what is empty, and with sizes in bytes, so that 1024Mi equals 1Gi."""
    if isinstance(value, Mapping):
        return {name: comparable(one, name) for name, one in value.items() if one not in (None, {}, [])}
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if key == "storage":
        try:
            return f"{bytes_of(value)} bytes"
        except BadQuantity:
            return value
    return value
