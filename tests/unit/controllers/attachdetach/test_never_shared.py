"""A volume that one node must have to itself is never attached to two, whatever crashes, fails, or comes late.

A whole small cluster is played here, one step at a time and in any order that hypothesis thinks of: the API server, the
watches (each kind as late as it likes), the attacher (which fails, and sometimes attaches what it says it did not), the
kubelets, and the controller itself, whose every request can be lost before or after it took effect, and which can be
killed at any request and started again.

    HYPOTHESIS_PROFILE=thorough pytest …/test_never_shared.py     runs 2,000 examples
"""

from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.examples import examples

from moorage.controllers.attachdetach.execute import AttachExecutor
from moorage.controllers.attachdetach.plan import AttachLimits
from moorage.controllers.attachdetach.populate import Populator
from moorage.controllers.attachdetach.run import AttachDetachController
from moorage.controllers.attachdetach.state import AttachState
from moorage.kube.api.client import WatchEvent
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informer import Informer
from moorage.kube.control.controller import subscribed
from moorage.kube.errors import AlreadyExists, NotFound, Unavailable
from moorage.kube.names import MANAGED_ATTACH, OUT_OF_SERVICE
from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import csi_volume_name

EXAMPLES = examples(60)
DRIVER = "csi.example.com"
NODES = ("a", "b", "c")
VOLUMES = {"own": ["ReadWriteOnce"], "pod-own": ["ReadWriteOncePod"], "shared": ["ReadWriteMany"]}
KINDS = (Node, PersistentVolume, PersistentVolumeClaim, CSIDriver, VolumeAttachment, Pod)


class Server:
    """Objects with revisions, and a log of changes for each kind."""

    def __init__(self) -> None:
        self.revision = 0
        self.objects: dict[type, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self.log: dict[type, list[WatchEvent[Any]]] = {kind: [] for kind in KINDS}

    def put(self, kind: type, document: dict[str, Any]) -> Any:
        self.revision += 1
        meta = document["metadata"]
        is_new = meta["name"] not in self.objects[kind]
        meta["resourceVersion"] = str(self.revision)
        meta.setdefault("uid", f"uid-{self.revision}")
        if kind in (Pod, PersistentVolumeClaim):
            meta["namespace"] = "default"
        self.objects[kind][meta["name"]] = document
        obj = self.read(kind, document)
        self.log[kind].append(WatchEvent("ADDED" if is_new else "MODIFIED", obj))
        return obj

    def remove(self, kind: type, name: str) -> None:
        document = self.objects[kind].pop(name)
        self.revision += 1
        document["metadata"]["resourceVersion"] = str(self.revision)
        self.log[kind].append(WatchEvent("DELETED", self.read(kind, document)))

    def read(self, kind: type, document: dict[str, Any]) -> Any:
        return msgspec.convert(msgspec.json.decode(msgspec.json.encode(document)), kind)


@dataclass
class Request:
    """One request of the controller on its way: it takes effect when the play says so."""

    effect: Any
    has_landed: bool = False
    result: Any = None

    def __await__(self) -> Generator["Request", str, Any]:
        outcome = yield self
        if outcome == "lost":
            raise Unavailable(503, "Unreachable", "lost")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def land(self) -> None:
        if not self.has_landed:
            self.has_landed = True
            try:
                self.result = self.effect()
            except (AlreadyExists, NotFound) as error:
                self.result = error


class PlayedApi:
    """The controller's requests, each a step of the play."""

    def __init__(self, server: Server, caches: Caches, on_delete: Any) -> None:
        self._server, self._caches, self._on_delete = server, caches, on_delete

    async def create_attachment(self, name: str, driver: str, node: str, pv_name: str) -> None:
        spec = {"attacher": driver, "nodeName": node, "source": {"persistentVolumeName": pv_name}}

        def effect() -> Any:
            if name in self._server.objects[VolumeAttachment]:
                raise AlreadyExists(409, "AlreadyExists", name)
            return self._server.put(VolumeAttachment, {"metadata": {"name": name}, "spec": spec, "status": {}})

        self._caches.attachments.remember(await Request(effect))

    async def delete_attachment(self, name: str) -> None:
        def effect() -> None:
            found = self._server.objects[VolumeAttachment].get(name)
            if found is None:
                raise NotFound(404, "NotFound", name)
            self._on_delete(found)
            if found["metadata"].get("finalizers"):
                if "deletionTimestamp" not in found["metadata"]:
                    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                    self._server.put(VolumeAttachment, found)
            else:
                self._server.remove(VolumeAttachment, name)

        await Request(effect)

    async def refresh_attachment(self, name: str) -> None:
        found = await Request(lambda: self._live(VolumeAttachment, name))
        if found is not None:
            self._caches.attachments.remember(found)

    async def live_node(self, name: str) -> Node | None:
        found = await Request(lambda: self._live(Node, name))
        if found is not None:
            self._caches.nodes.remember(found)
        return found

    async def list_attached(self, node: str, entries: Sequence[tuple[str, str]]) -> None:
        def effect() -> Any:
            found = self._server.objects[Node].get(node)
            if found is None:  # a node that is gone needs no list
                return None
            found["status"]["volumesAttached"] = [{"name": name, "devicePath": path} for name, path in entries]
            return self._server.put(Node, found)

        written = await Request(effect)
        if written is not None:
            self._caches.nodes.remember(written)

    def _live(self, kind: type, name: str) -> Any:
        found = self._server.objects[kind].get(name)
        return self._server.read(kind, found) if found is not None else None


@dataclass
class Running:
    """One life of the controller: its informers, how far each watch has come, and its unfinished requests."""

    controller: AttachDetachController
    informers: dict[type, Informer[Any]]
    seen: dict[type, int]
    following: Any  # its subscriptions, which end when nothing holds them
    tasks: list[tuple[Coroutine[Any, Any, None], Request]] = field(default_factory=list)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.resume(work, None)

    def resume(self, work: Coroutine[Any, Any, None], outcome: str | None) -> None:
        try:
            self.tasks.append((work, work.send(outcome)))
        except StopIteration:
            return


class Play(RuleBasedStateMachine):
    """The cluster. `truth` is where the driver really attached a volume; `mounted` what kubelets really mounted."""

    def __init__(self) -> None:
        super().__init__()
        self.server, self.now, self.serial = Server(), 1000.0, 0
        self.truth: dict[str, set[str]] = {volume: set() for volume in VOLUMES}
        self.mounted: dict[str, set[str]] = {node: set() for node in NODES}
        self.down: set[str] = set()
        self.overruled: set[str] = set()
        for node in NODES:
            self.add_node(node)
        for volume, modes in VOLUMES.items():
            claim = self.server.put(
                PersistentVolumeClaim,
                {"metadata": {"name": volume}, "spec": {"volumeName": volume}, "status": {"phase": "Bound"}},
            )
            csi = {"driver": DRIVER, "volumeHandle": volume}
            ref = {"namespace": "default", "name": volume, "uid": claim.uid}
            spec = {"csi": csi, "accessModes": modes, "claimRef": ref}
            self.server.put(PersistentVolume, {"metadata": {"name": volume}, "spec": spec})
        self.start()

    def add_node(self, node: str) -> None:
        ready = {"conditions": [{"type": "Ready", "status": "True"}], "volumesInUse": [], "volumesAttached": []}
        meta = {"name": node, "annotations": {MANAGED_ATTACH: "true"}}
        self.server.put(Node, {"metadata": meta, "spec": {}, "status": ready})

    # The controller

    def start(self) -> None:
        informers: dict[type, Informer[Any]] = {}
        for kind in KINDS:
            informer = informers[kind] = Informer(None, kind)  # type: ignore[arg-type,type-var]
            found = [self.server.read(kind, document) for document in self.server.objects[kind].values()]
            informer._replace({obj.key: obj for obj in found}, self.server.revision)
        caches = Caches(SimpleNamespace(of=informers.__getitem__))  # type: ignore[arg-type]
        world, limits, clock = AttachState(), AttachLimits(), lambda: self.now
        events = SimpleNamespace(normal=lambda *_: None, warning=lambda *_: None)
        api = PlayedApi(self.server, caches, self.check_deletion)
        executor = AttachExecutor(world, caches, api, events, clock, limits)  # type: ignore[arg-type]
        populator = Populator(world, caches, clock, 60.0)
        controller = AttachDetachController(world, caches, populator, executor, limits, clock)
        controller.rebuild()
        following = subscribed(controller.watches())
        following.__enter__()
        self.life = Running(controller, informers, {kind: len(self.server.log[kind]) for kind in KINDS}, following)

    def check_deletion(self, attachment: dict[str, Any]) -> None:
        """A detach on a healthy node never pulls a mounted volume."""
        node, volume = attachment["spec"]["nodeName"], attachment["spec"]["source"]["persistentVolumeName"]
        assert volume not in self.mounted[node] or node in self.overruled

    @rule()
    def controller_steps(self) -> None:
        self.life.controller.step(self.life.spawn)

    @precondition(lambda self: self.life.tasks)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "lands", "lost", "lost later"]))
    def a_request_goes_on(self, data: Any, outcome: str) -> None:
        at = data.draw(st.integers(0, len(self.life.tasks) - 1))
        work, request = self.life.tasks[at]
        if outcome in ("ok", "lands", "lost later"):
            request.land()
        if outcome != "lands":
            del self.life.tasks[at]
            self.life.resume(work, "ok" if outcome == "ok" else "lost")

    @rule(kind=st.sampled_from([Node, VolumeAttachment, Pod]), count=st.integers(1, 5))
    def a_watch_delivers(self, kind: type, count: int) -> None:
        at = self.life.seen[kind]
        for event in self.server.log[kind][at : at + count]:
            self.life.informers[kind]._take(event)
            self.life.seen[kind] += 1

    @rule(landing=st.booleans())
    def the_controller_crashes(self, landing: bool) -> None:
        for work, request in self.life.tasks:
            if landing:
                request.land()
            work.close()
        self.start()

    @rule(seconds=st.sampled_from([0.6, 3.0, 130.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if seconds > 360:
            self.overruled |= self.down

    @rule(rounds=st.integers(2, 6))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        """Deep states are rarely reached by single steps."""
        for _ in range(rounds):
            self.calm_round(1.0)

    @rule(rounds=st.integers(1, 4))
    def only_the_controller_works_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self.controller_works()

    # Users

    @rule(volume=st.sampled_from(sorted(VOLUMES)), node=st.sampled_from(NODES))
    def a_pod_arrives(self, volume: str, node: str) -> None:
        self.serial += 1
        claim = {"name": "v", "persistentVolumeClaim": {"claimName": volume}}
        spec = {"nodeName": node, "volumes": [claim]}
        self.server.put(Pod, {"metadata": {"name": f"pod-{self.serial}"}, "spec": spec, "status": {}})

    @precondition(lambda self: self.server.objects[Pod])
    @rule(data=st.data(), finishes=st.booleans())
    def a_pod_goes(self, data: Any, finishes: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.server.objects[Pod])))
        if finishes:
            pod = self.server.objects[Pod][name]
            pod["status"] = {"phase": "Succeeded"}
            self.server.put(Pod, pod)
        else:
            self.server.remove(Pod, name)

    # The attacher

    @precondition(lambda self: self.server.objects[VolumeAttachment])
    @rule(data=st.data(), way=st.sampled_from(["well", "well", "fails", "lies"]))
    def the_attacher_acts(self, data: Any, way: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.server.objects[VolumeAttachment])))
        self.attacher_handles(name, way)

    def attacher_handles(self, name: str, way: str) -> None:
        found = self.server.objects[VolumeAttachment][name]
        node, volume = found["spec"]["nodeName"], found["spec"]["source"]["persistentVolumeName"]
        if "deletionTimestamp" not in found["metadata"]:
            if found["status"].get("attached"):
                return
            found["metadata"]["finalizers"] = ["external-attacher/csi-example-com"]
            if way in ("well", "lies"):
                self.truth[volume].add(node)
            error = {"attachError": {"message": "no"}}
            found["status"] = {"attached": True} if way == "well" else {"attached": False, **error}
            self.server.put(VolumeAttachment, found)
        elif way == "well":
            self.truth[volume].discard(node)
            self.server.remove(VolumeAttachment, name)
        else:
            found["status"]["detachError"] = {"message": "busy"}
            self.server.put(VolumeAttachment, found)

    # The kubelets

    @rule(node=st.sampled_from(NODES))
    def a_kubelet_acts(self, node: str) -> None:
        if node not in self.down:
            self.kubelet_works(node)

    def kubelet_works(self, node: str) -> None:
        """Unmount what no pod needs; say what is in use; mount what was said before and is listed as attached."""
        status = self.server.objects[Node][node]["status"]
        needed = self.needed(node)
        self.mounted[node] &= needed
        listed = {entry["name"] for entry in status["volumesAttached"]}
        for volume in needed:
            name = csi_volume_name(DRIVER, volume)
            if name in status["volumesInUse"] and name in listed and node in self.truth[volume]:
                self.mounted[node].add(volume)
        in_use = {csi_volume_name(DRIVER, volume) for volume in self.mounted[node]}
        in_use |= {csi_volume_name(DRIVER, volume) for volume in needed} & listed
        if sorted(in_use) != status["volumesInUse"]:
            status["volumesInUse"] = sorted(in_use)
            self.server.put(Node, self.server.objects[Node][node])

    def needed(self, node: str) -> set[str]:
        pods = [pod for pod in self.server.objects[Pod].values() if pod["status"].get("phase") != "Succeeded"]
        claims = [
            pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
            for pod in pods
            if pod["spec"]["nodeName"] == node
        ]
        return set(claims)

    @precondition(lambda self: not self.down and self.serial > 3)
    @rule(node=st.sampled_from(NODES), marked=st.booleans())
    def a_node_goes_down(self, node: str, marked: bool) -> None:
        found = self.server.objects[Node][node]
        self.down.add(node)
        found["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
        if marked:
            found["spec"]["taints"] = [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]
            self.overruled.add(node)
        self.server.put(Node, found)

    @precondition(lambda self: any(node in self.server.objects[Node] for node in self.down))
    @rule()
    def a_dead_node_is_deleted(self) -> None:
        """An administrator takes it out of the cluster; its pods may stay for a while."""
        for node in self.down & set(self.server.objects[Node]):
            self.server.remove(Node, node)
            self.overruled.add(node)

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def a_node_comes_back(self, data: Any) -> None:
        self.node_returns(data.draw(st.sampled_from(sorted(self.down))))

    def node_returns(self, node: str) -> None:
        """It was rebooted: nothing is mounted. The mark is taken off before its kubelet starts."""
        self.down.discard(node)
        self.mounted[node] = set()
        found = self.server.objects[Node].get(node)
        if found is None:
            self.add_node(node)
        else:
            found["spec"] = {}
            found["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
            self.server.put(Node, found)
        while self.life.seen[Node] < len(self.server.log[Node]):
            self.a_watch_delivers(Node, 1000)
        self.overruled.discard(node)

    @invariant()
    def one_node_has_what_must_not_be_shared(self) -> None:
        for volume in ("own", "pod-own"):
            assert len(self.truth[volume]) <= 1, f"{volume} is attached to {sorted(self.truth[volume])}"
        held = [
            (found["spec"]["source"]["persistentVolumeName"])
            for found in self.server.objects[VolumeAttachment].values()
            if found["spec"]["source"]["persistentVolumeName"] != "shared"
        ]
        assert len(held) == len(set(held)), "two attachments of a volume that one node must have to itself"

    def teardown(self) -> None:
        """Left in peace, the cluster arrives where it should be."""
        for node in sorted(self.down):
            self.node_returns(node)
        for _ in range(60):
            for node in NODES:  # a kubelet reports every few minutes, whether or not something changed
                self.server.put(Node, self.server.objects[Node][node])
            self.calm_round(123.0)
        for volume, modes in VOLUMES.items():
            wanted = {node for node in NODES if volume in self.needed(node)}
            attached = self.truth[volume]
            assert attached <= wanted, f"{volume} is left on {attached - wanted}"
            if "ReadWriteMany" in modes:
                assert attached == wanted
            else:
                assert len(attached) == min(1, len(wanted))
        for node in NODES:
            listed = {entry["name"] for entry in self.server.objects[Node][node]["status"]["volumesAttached"]}
            assert listed == {csi_volume_name(DRIVER, v) for v in VOLUMES if node in self.truth[v]}
        self.one_node_has_what_must_not_be_shared()

    def calm_round(self, seconds: float) -> None:
        self.now += seconds
        for name in sorted(self.server.objects[VolumeAttachment]):
            self.attacher_handles(name, "well")
        for node in NODES:
            self.a_kubelet_acts(node)
        self.controller_works()

    def controller_works(self) -> None:
        for kind in KINDS:
            self.a_watch_delivers(kind, 1000)
        self.controller_steps()
        while self.life.tasks:
            work, request = self.life.tasks.pop()
            request.land()
            self.life.resume(work, "ok")


Play.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestNeverShared = Play.TestCase
