"""What pods, nodes and attachments mean to the controller: objects in, the world, requests and words out."""

import hashlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec
import pytest

from moorage.controllers.attachdetach.execute import AttachExecutor
from moorage.controllers.attachdetach.plan import AttachLimits, plan
from moorage.controllers.attachdetach.populate import Populator
from moorage.controllers.attachdetach.state import AttachPhase, AttachState, attachment_of
from moorage.kube.errors import AlreadyExists, NotFound
from moorage.kube.names import MANAGED_ATTACH, OUT_OF_SERVICE
from moorage.kube.objects.core import Node
from moorage.kube.objects.meta import ObjectReference
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import NodeName, csi_volume_name

DRIVER, RWO = "csi.example.com", "ReadWriteOnce"
VOLUME = csi_volume_name(DRIVER, "handle")
A, B = NodeName("a"), NodeName("b")
GONE = "2026-01-01T00:00:00Z"


class Cluster:
    """Caches, API and recorder in one: requests take effect at once, and the caches have the result."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.claims: dict[str, PersistentVolumeClaim] = {}
        self.volumes: dict[str, PersistentVolume] = {}
        self.drivers: dict[str, CSIDriver] = {}
        self.attachments: dict[str, VolumeAttachment] = {}
        self.all_pods: dict[str, Pod] = {}
        self.requests: list[str] = []
        self.events: list[tuple[str, str, str, str]] = []
        self.now = 1000.0
        self.world = AttachState()
        self.limits = AttachLimits()
        caches: Any = self
        self.populator = Populator(self.world, caches, lambda: self.now, 60.0)
        self.executor = AttachExecutor(self.world, caches, caches, caches, lambda: self.now, self.limits)

    # Caches

    @property
    def pods(self) -> Iterable[Pod]:
        return self.all_pods.values()

    def pods_using(self, key: str) -> Iterable[Pod]:
        return self.all_pods.values()

    def pods_on(self, name: str) -> Iterable[Pod]:
        return [pod for pod in self.all_pods.values() if pod.spec.node_name == name]

    # Requests

    async def create_attachment(self, name: str, driver: str, node: str, pv_name: str) -> None:
        self.requests.append(f"create {driver} {pv_name} {node}")
        if name in self.attachments:
            raise AlreadyExists(409, "AlreadyExists", name)
        self.set_attachment(NodeName(node))

    async def delete_attachment(self, name: str) -> None:
        self.requests.append("delete attachment")
        found = self.attachments.get(name)
        if found is None:
            raise NotFound(404, "NotFound", name)
        if not found.finalizers:
            del self.attachments[name]

    async def refresh_attachment(self, name: str) -> None:
        """Nothing to do: the caches are the cluster itself."""

    async def live_node(self, name: str) -> Node | None:
        self.requests.append("get node")
        return self.nodes.get(name)

    async def list_attached(self, node: NodeName, entries: Sequence[tuple[str, str]]) -> None:
        self.requests.append(f"list {len(entries)} on {node}")
        old = self.nodes[node]
        status = msgspec.to_builtins(old.status)
        status["volumesAttached"] = [{"name": name, "devicePath": path} for name, path in entries]
        self.nodes[node] = msgspec.structs.replace(old, status=msgspec.convert(status, type(old.status)))
        self.populator.node_changed(old, self.nodes[node])

    # Events

    def normal(self, about: ObjectReference, reason: str, message: str) -> None:
        self.events.append((about.name, "Normal", reason, message))

    def warning(self, about: ObjectReference, reason: str, message: str) -> None:
        self.events.append((about.name, "Warning", reason, message))

    # Setting the scene

    def add_node(self, name: str, *, ready: str = "True", in_use: Sequence[str] = (), **more: Any) -> Node:
        listed = [{"name": one, "devicePath": ""} for one in more.pop("listed", ())]
        notes = more.pop("notes", {MANAGED_ATTACH: "true"})
        conditions = [{"type": "Ready", "status": ready}] if ready else []
        status = {"conditions": conditions, "volumesInUse": list(in_use), "volumesAttached": listed}
        document = {"metadata": {"name": name, "annotations": notes}, "spec": more, "status": status}
        old, self.nodes[name] = self.nodes.get(name), msgspec.convert(document, Node)
        self.populator.node_changed(old, self.nodes[name])
        return self.nodes[name]

    def remove_node(self, name: str) -> None:
        self.populator.node_changed(self.nodes.pop(name), None)

    def add_volume(self, modes: Sequence[str] = (RWO,), **change: Any) -> None:
        claim = {"phase": "Bound", "volume": "pv", "uid": "c", "owners": []} | change
        csi = {"driver": DRIVER, "volumeHandle": "handle"}
        self.claims["default/claim"] = msgspec.convert(
            {
                "metadata": {
                    "name": "claim",
                    "namespace": "default",
                    "uid": claim["uid"],
                    "ownerReferences": claim["owners"],
                },
                "spec": {"volumeName": claim["volume"]},
                "status": {"phase": claim["phase"]},
            },
            PersistentVolumeClaim,
        )
        reference = {"namespace": "default", "name": "claim", "uid": "c"}
        spec = {"accessModes": list(modes), "claimRef": reference, **change.get("source", {"csi": csi})}
        self.volumes["pv"] = msgspec.convert({"metadata": {"name": "pv"}, "spec": spec}, PersistentVolume)

    def add_pod(self, name: str, node: str = "a", **more: Any) -> Pod:
        meta = {"name": name, "namespace": more.get("namespace", "default"), "uid": f"uid-{name}"} | more.get(
            "meta", {}
        )
        source = more.get("source", {"persistentVolumeClaim": {"claimName": "claim"}})
        volumes = [{"name": "data", **source}]
        document = {
            "metadata": meta,
            "spec": {"nodeName": node, "volumes": volumes},
            "status": more.get("status", {}),
        }
        old, new = self.all_pods.get(name), msgspec.convert(document, Pod)
        self.all_pods[name] = new
        self.populator.pod_changed(old, new)
        return new

    def set_attachment(self, node: NodeName, *, finalizers: Sequence[str] = (), **status: Any) -> None:
        name = attachment_of(VOLUME, node)
        meta: dict[str, Any] = {"name": name, "finalizers": list(finalizers)}
        if status.pop("deleting", False):
            meta["deletionTimestamp"] = GONE
        spec = {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": "pv"}}
        document = {"metadata": meta, "spec": spec, "status": {"attached": False, **status}}
        self.attachments[name] = msgspec.convert(document, VolumeAttachment)
        self.executor.judge(VOLUME, node)

    def step(self) -> None:
        """One pass, with all requests answered."""

        def spawn(work: Coroutine[Any, Any, None], _: str) -> None:
            with pytest.raises(StopIteration):
                work.send(None)

        self.world.ring(self.now)
        dirty, self.world.dirty = self.world.dirty, set()
        self.executor.begin(plan(self.world, dirty, self.limits, self.now), spawn)

    def attach(self, node: str = "a", modes: Sequence[str] = (RWO,)) -> None:
        """The usual start: a pod on a node, and its volume attached and listed there."""
        self.add_node(node)
        self.add_volume(modes)
        self.add_pod("pod", node)
        self.step()
        self.set_attachment(NodeName(node), attached=True)
        self.step()
        self.requests.clear()
        self.events.clear()

    def state(self, node: NodeName = A) -> AttachPhase | None:
        found = self.world.attachment(VOLUME, node)
        return found.state if found is not None else None

    @property
    def wanted(self) -> set[str]:
        volume = self.world.volumes.get(VOLUME)
        return set(volume.wanted) if volume is not None else set()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


# Which volumes a pod wants


@pytest.mark.parametrize(
    ("notes", "is_managed"), [({MANAGED_ATTACH: "true"}, True), ({MANAGED_ATTACH: "false"}, True), ({}, False)]
)
def test_the_annotation_of_any_value_makes_a_node_ours(cluster, notes, is_managed):
    cluster.add_node("a", notes=notes)
    cluster.add_volume()
    cluster.add_pod("pod")
    assert bool(cluster.wanted) is is_managed


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "Pending"},
        {"phase": "Lost"},
        {"volume": ""},
        {"volume": "other"},
        {"uid": "another"},
        {"source": {"nfs": {"server": "s", "path": "/"}}},
    ],
    ids=lambda change: str(change),
)
def test_a_claim_that_is_not_wholly_bound_to_a_csi_volume_attaches_nothing(cluster, change):
    cluster.add_node("a")
    cluster.add_volume(**change)
    cluster.add_pod("pod")
    assert not cluster.wanted


def test_a_claim_that_becomes_bound_is_noticed(cluster):
    cluster.add_node("a")
    cluster.add_volume(phase="Pending")
    cluster.add_pod("pod")
    cluster.add_volume()
    cluster.populator.claim_changed(None, cluster.claims["default/claim"])
    assert cluster.wanted == {"a"}


@pytest.mark.parametrize(("spec", "is_wanted"), [(None, True), ({}, True), ({"attachRequired": False}, False)])
def test_attaching_is_needed_unless_the_driver_says_no(cluster, spec, is_wanted):
    if spec is not None:
        cluster.drivers[DRIVER] = msgspec.convert({"metadata": {"name": DRIVER}, "spec": spec}, CSIDriver)
    cluster.add_node("a")
    cluster.add_volume()
    cluster.add_pod("pod")
    assert bool(cluster.wanted) is is_wanted


@pytest.mark.parametrize("owner", ["uid-pod", "uid-of-an-older-pod"])
def test_the_claim_of_an_ephemeral_volume_counts_only_for_its_own_pod(cluster, owner):
    cluster.add_node("a")
    cluster.add_volume(owners=[{"kind": "Pod", "name": "pod", "uid": owner, "controller": True}])
    cluster.claims["default/pod-data"] = cluster.claims["default/claim"]
    cluster.add_pod("pod", source={"ephemeral": {}})
    assert bool(cluster.wanted) is (owner == "uid-pod")


RUNNING: dict[str, Any] = {"running": {}}
WAITING: dict[str, Any] = {"waiting": {}}
ENDED: dict[str, Any] = {"terminated": {"exitCode": 0}}


@pytest.mark.parametrize(
    ("meta", "status", "is_wanted"),
    [
        ({}, {"phase": "Succeeded"}, False),
        ({}, {"phase": "Failed"}, False),
        ({}, {"phase": "Unknown"}, True),
        ({"deletionTimestamp": GONE}, {}, False),
        ({"deletionTimestamp": GONE}, {"containerStatuses": [{"state": RUNNING}]}, True),
        ({"deletionTimestamp": GONE}, {"containerStatuses": [{"state": ENDED}, {"state": WAITING}]}, False),
        ({"deletionTimestamp": GONE}, {"initContainerStatuses": [{"state": RUNNING}]}, True),
        ({"deletionTimestamp": GONE}, {"ephemeralContainerStatuses": [{"state": RUNNING}]}, True),
        ({"deletionTimestamp": GONE}, {"containerStatuses": [{"state": {}}]}, True),
    ],
)
def test_a_pod_wants_its_volumes_until_it_has_ended(cluster, meta, status, is_wanted):
    cluster.add_node("a")
    cluster.add_volume()
    cluster.add_pod("pod")
    cluster.add_pod("pod", meta=meta, status=status)
    assert bool(cluster.wanted) is is_wanted


def test_a_pod_of_the_same_name_is_another_pod(cluster):
    cluster.add_node("a")
    cluster.add_node("b")
    cluster.add_volume()
    cluster.add_pod("pod", "a")
    cluster.add_pod("pod", "b", meta={"uid": "newer"})
    assert cluster.wanted == {"b"}


@pytest.mark.parametrize(
    ("modes", "is_shared"),
    [
        (["ReadWriteOnce"], False),
        (["ReadWriteOncePod"], False),
        (["ReadWriteOnce", "ReadOnlyMany"], True),
        (["ReadWriteMany"], True),
        ([], True),
    ],
)
def test_who_may_share(cluster, modes, is_shared):
    for node in "ab":
        cluster.add_node(node)
    cluster.add_volume(modes)
    cluster.add_pod("one", "a")
    cluster.add_pod("two", "b")
    cluster.step()
    assert cluster.requests.count(f"create {DRIVER} pv b") == is_shared


# Nodes


@pytest.mark.parametrize("ready", ["False", "Unknown", ""])
@pytest.mark.parametrize("passed", [360.0, 360.5])
def test_a_node_that_is_not_ready_is_waited_for_six_minutes(cluster, ready, passed):
    cluster.attach()
    cluster.add_node("a", ready=ready, in_use=[VOLUME], listed=[VOLUME])
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    cluster.now += passed
    cluster.world.dirty.add(VOLUME)
    cluster.step()
    cluster.step()
    assert ("delete attachment" in cluster.requests) is (passed > 360)
    assert "get node" not in cluster.requests  # what it would say is known, and no longer heeded


@pytest.mark.parametrize("effect", ["NoExecute", "NoSchedule", "PreferNoSchedule"])
def test_an_out_of_service_node_is_not_waited_for_whatever_the_effect(cluster, effect):
    cluster.attach()
    taint = {"key": OUT_OF_SERVICE, "effect": effect}
    cluster.add_node("a", in_use=[VOLUME], listed=[VOLUME], taints=[taint])
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    cluster.step()
    assert cluster.requests == ["list 0 on a", "delete attachment"]


def test_a_deleted_node_that_did_not_use_the_volume_is_not_waited_for(cluster):
    """A fresh attachment counts as mounted until the node says something; that it was deleted says it too."""
    cluster.add_node("a")
    cluster.add_volume()
    cluster.add_pod("pod")
    cluster.step()
    cluster.set_attachment(A, attached=True)
    cluster.remove_node("a")
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    assert cluster.state() is None
    assert not cluster.attachments
    assert not cluster.world.nodes


def test_a_deleted_node_that_used_the_volume_is_waited_for_six_minutes(cluster):
    cluster.attach()
    cluster.add_node("a", in_use=[VOLUME], listed=[VOLUME])
    cluster.remove_node("a")
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    assert cluster.state() is AttachPhase.ATTACHED
    cluster.now += 361
    cluster.step()
    assert cluster.state() is None


def test_a_deleted_node_stays_known_while_a_pod_is_there(cluster):
    cluster.attach()
    cluster.remove_node("a")
    cluster.step()
    assert cluster.wanted == {"a"}
    assert cluster.state() is AttachPhase.ATTACHED


def test_a_node_that_comes_back_empty_is_told_what_is_attached_to_it_at_once(cluster):
    cluster.attach()
    cluster.remove_node("a")
    cluster.step()
    cluster.add_node("a")
    cluster.step()
    assert cluster.requests == ["list 1 on a"]


# The order and the contents of what is written


def test_an_attachment_is_made_as_kubernetes_makes_it(cluster):
    cluster.add_node("a")
    cluster.add_volume()
    cluster.add_pod("pod")
    cluster.step()
    assert cluster.requests == [f"create {DRIVER} pv a"]
    assert list(cluster.attachments) == ["csi-" + hashlib.sha256(f"handle{DRIVER}a".encode()).hexdigest()]
    cluster.set_attachment(A, attached=True)
    said = ("pod", "Normal", "SuccessfulAttachVolume", 'AttachVolume.Attach succeeded for volume "pv" ')
    assert cluster.events == [said]
    cluster.step()
    assert cluster.requests[1:] == ["list 1 on a"]


def test_a_detach_withdraws_then_asks_then_deletes(cluster):
    cluster.attach()
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    cluster.step()
    assert cluster.requests == ["list 0 on a", "get node", "delete attachment"]
    assert cluster.state() is None


def test_a_node_that_began_to_use_the_volume_unheard_keeps_it(cluster):
    cluster.attach()
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    status = msgspec.to_builtins(cluster.nodes["a"].status) | {"volumesInUse": [VOLUME]}
    cluster.nodes["a"] = msgspec.structs.replace(
        cluster.nodes["a"], status=msgspec.convert(status, type(cluster.nodes["a"].status))
    )
    cluster.step()
    assert cluster.requests == ["list 0 on a", "get node"]
    assert cluster.state() is AttachPhase.UNCERTAIN
    assert cluster.world.listing(A) == []  # not reported as attached until an attach succeeds


def test_a_node_that_is_gone_is_no_reason_to_wait_for_its_answer(cluster):
    cluster.attach()
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    del cluster.nodes["a"]
    cluster.step()
    assert cluster.requests == ["list 0 on a", "get node", "delete attachment"]


# What an attachment says


def test_attached_wins_over_an_old_error(cluster):
    cluster.add_node("a")
    cluster.add_volume()
    cluster.add_pod("pod")
    cluster.step()
    cluster.set_attachment(A, attached=True, attachError={"message": "old"})
    assert cluster.state() is AttachPhase.ATTACHED


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"attachError": {"message": "no such disk"}}, "no such disk"),
        ({"deleting": True, "finalizers": ["x"], "attached": True}, "volume attachment is being deleted"),
    ],
)
def test_an_error_that_is_there_already_fails_the_attach_at_once(cluster, status, reason):
    cluster.add_node("a")
    cluster.add_volume()
    cluster.set_attachment(A, **status)
    cluster.add_pod("pod")
    cluster.step()
    assert cluster.state() is AttachPhase.UNCERTAIN
    said = ("pod", "Warning", "FailedAttachVolume", f'AttachVolume.Attach failed for volume "pv" : {reason}')
    assert cluster.events == [said]


def test_an_attach_without_an_answer_is_given_up_after_two_minutes_in_the_words_of_kubernetes(cluster):
    cluster.add_node("a")
    cluster.add_volume()
    cluster.add_pod("pod")
    cluster.step()
    cluster.now += 120
    cluster.step()
    assert cluster.state() is AttachPhase.UNCERTAIN
    words = f"timed out waiting for external-attacher of {DRIVER} CSI driver to attach volume handle"
    assert [message.partition(" : ")[2] for *_, message in cluster.events] == [words]


def test_a_detach_that_fails_leaves_the_attachment_uncertain_and_is_tried_again(cluster):
    cluster.attach()
    cluster.set_attachment(A, attached=True, finalizers=["x"])
    cluster.populator.pod_changed(cluster.all_pods.pop("pod"), None)
    cluster.step()
    cluster.step()
    assert cluster.state() is AttachPhase.DETACHING
    cluster.set_attachment(A, attached=True, finalizers=["x"], detachError={"message": "busy"})
    assert cluster.state() is AttachPhase.UNCERTAIN
    cluster.set_attachment(A, attached=True)
    cluster.requests.clear()
    cluster.step()
    assert cluster.requests == []  # half a second has not passed
    cluster.now += 0.5
    cluster.step()
    assert cluster.requests == ["get node", "delete attachment"]
    assert cluster.state() is None


# Two nodes


NEAR = ObjectReference(namespace="default", name="near")
FAR = ObjectReference(namespace="team-b", name="far")


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        (
            [],
            "Volume is already exclusively attached to one node, "
            "waiting on detach before it can be attached to another node",
        ),
        ([NEAR], "Volume is already used by pod(s) near"),
        ([NEAR, FAR], "Volume is already used by pod(s) near and 1 pod(s) in different namespaces"),
        ([FAR, FAR], "Volume is already used by 2 pod(s) in different namespaces"),
    ],
    ids=["nobody", "near", "both", "far"],
)
def test_who_waits_is_told_by_whom_it_is_held_and_no_names_of_other_namespaces(cluster, holders, words):
    cluster.attach()
    wish = cluster.world.volumes[VOLUME].wanted.pop(A)
    if holders:
        wish.pods = {str(number): holder for number, holder in enumerate(holders)}
        cluster.world.volumes[VOLUME].wanted[A] = wish
    cluster.world.volumes[VOLUME].attachments[A].assumed_in_use = True
    cluster.add_node("b")
    cluster.add_pod("waiting", "b")
    cluster.step()
    assert cluster.events == [
        ("waiting", "Warning", "FailedAttachVolume", f'Waiting for detach for volume "pv" {words}')
    ]
    cluster.world.dirty.add(VOLUME)
    cluster.step()
    assert len(cluster.events) == 1


# A start


def test_a_start_takes_listed_volumes_for_attached_and_other_attachments_for_uncertain(cluster):
    cluster.add_volume()
    listing = cluster.add_node("a", listed=[VOLUME, "other/plugin/x"])
    silent = cluster.add_node("b")
    cluster.set_attachment(A)
    cluster.set_attachment(B)
    cluster.populator.rebuild([listing, silent], cluster.attachments.values())
    assert (cluster.state(A), cluster.state(B)) == (AttachPhase.ATTACHED, AttachPhase.UNCERTAIN)
    attachments = cluster.world.volumes[VOLUME].attachments
    assert (attachments[A].assumed_in_use, attachments[B].assumed_in_use) == (False, True)
    assert cluster.world.nodes[A].foreign == (("other/plugin/x", ""),)


def test_a_start_passes_over_attachments_of_inline_and_of_unknown_volumes(cluster):
    cluster.add_volume()
    sources: list[dict[str, Any]] = [{"inlineVolumeSpec": {"csi": {}}}, {"persistentVolumeName": "unknown"}, {}]
    for source in sources:
        spec = {"attacher": DRIVER, "nodeName": "a", "source": source}
        odd = msgspec.convert({"metadata": {"name": "odd"}, "spec": spec}, VolumeAttachment)
        cluster.populator.rebuild([], [odd])
    assert not cluster.world.volumes


def test_what_a_start_found_is_detached_though_no_pod_has_named_its_volume(cluster):
    node = cluster.add_node("a", listed=[VOLUME])
    cluster.set_attachment(A, attached=True)
    cluster.populator.rebuild([node], [])
    cluster.step()
    cluster.step()
    assert cluster.requests == ["list 0 on a", "get node", "delete attachment"]
    assert not cluster.world.volumes
