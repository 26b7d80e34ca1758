"""The volume manager with an executor that only notes what it was asked: claims that change under running pods."""

import asyncio
import contextlib
import errno
from types import SimpleNamespace

import msgspec
import pytest

from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, CsiDriverSpec
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.run import _first_wishes
from moorage.node.volumes import manager as run
from moorage.node.volumes import restart
from moorage.node.volumes.expand import NOT_YET
from moorage.node.volumes.manager import VolumeManager
from moorage.node.volumes.populate import Needs, uses_of
from moorage.node.volumes.state import (
    ActualPod,
    ActualVolume,
    CsiSource,
    MountState,
    MountVolume,
    StepFailure,
    StepOutcome,
    UnmountVolume,
)
from moorage.testing import until

ONE, TWO = PodUid("uid-1"), PodUid("uid-2")


def made(kind, document):
    return msgspec.convert(document, kind)


def pod(uid=ONE):
    container = {"name": "c", "image": "host", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]
    meta = {"name": f"p-{uid}", "namespace": "ns", "uid": uid}
    return made(Pod, {"metadata": meta, "spec": {"volumes": volumes, "containers": [container]}})


class Cluster:
    """One claim and the volume it is bound to; both can be replaced."""

    def __init__(self):
        self.attach_required, self.modes, self.capacity = False, ["ReadWriteOnce"], "1Gi"
        self.labels, self.affinity = {}, None
        self.resize_state = ""
        self.bind("pv-1")

    def bind(self, volume, uid="uid-c", phase="Bound"):
        meta = {"name": "c", "namespace": "ns", "uid": uid}
        status = {"phase": phase, "capacity": {"storage": "1Gi"}}
        if self.resize_state:
            status["allocatedResourceStatuses"] = {"storage": self.resize_state}
        document = {"metadata": meta, "spec": {"volumeName": volume}, "status": status}
        self.claim_object = made(PersistentVolumeClaim, document)

    def claim(self, key):
        return self.claim_object

    def volume(self, name):
        spec = {
            "accessModes": self.modes,
            "capacity": {"storage": self.capacity},
            "nodeAffinity": self.affinity,
            "claimRef": {"namespace": "ns", "name": "c", "uid": self.claim_object.uid},
            "csi": {"driver": "d", "volumeHandle": f"handle-of-{name}"},
        }
        return made(PersistentVolume, {"metadata": {"name": name}, "spec": spec})

    def driver(self, name):
        return CsiDriverSpec(attach_required=self.attach_required)

    def node(self):
        return made(Node, {"metadata": {"name": "n", "labels": self.labels}})

    def has_se_linux(self):
        return False


class Noting:
    """Does nothing, well or badly, and notes what it was asked."""

    def __init__(self):
        self.done = []
        self.refusing, self.refusal = set(), StepFailure.UNCERTAIN
        self.missing, self.message = False, "no driver"
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def execute(self, action, volume):
        await asyncio.sleep(0)
        self.done.append(action)
        await self.may_go_on.wait()
        if self.missing:
            return StepOutcome(StepFailure.TRANSIENT, "device", self.message)
        if isinstance(action, MountVolume):
            if action.use.source.spec_name in self.refusing:
                return StepOutcome(self.refusal, "pod", "no", staged=True)
            return StepOutcome(staged=True, published=True)
        return StepOutcome()

    def mounted(self):
        return [(one.use.source.spec_name, one.use.pod.uid) for one in self.done if isinstance(one, MountVolume)]

    def unmounted(self):
        return [one.uid for one in self.done if isinstance(one, UnmountVolume)]


class Node1:
    def __init__(self, root):
        self.cluster, self.executor = Cluster(), Noting()
        self.manager = VolumeManager(
            NodeLayout(root), self.cluster, self.executor, clock=lambda: 1.0
        )  # it stands still
        self.manager.world.is_ready = True
        self.moved = []
        self.manager.on_moved = self.moved.append

    async def rest(self):
        """Until the manager has nothing left to do now."""
        for _ in range(20):
            await asyncio.sleep(0)

    def bind(self, *args, **more):
        self.cluster.bind(*args, **more)
        self.manager.claim_changed(None, self.cluster.claim_object)


@pytest.fixture
async def node(tmp_path):
    one = Node1(tmp_path)
    task = asyncio.create_task(one.manager.run())
    yield one
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_running_pod_keeps_its_volume_when_its_claim_becomes_another_one(node):
    node.manager.want(pod())
    await node.rest()
    assert node.manager.is_mounted(pod())
    node.bind("pv-2", uid="uid-new")  # the claim was deleted by force and made anew
    await node.rest()
    assert node.executor.mounted() == [("pv-1", ONE)]
    assert node.executor.unmounted() == []
    assert node.manager.use_named(ONE, "data").source.spec_name == "pv-1"
    node.manager.release(ONE)
    await node.rest()
    assert node.executor.unmounted() == [ONE]
    assert node.manager.is_unmounted(ONE)


@pytest.fixture
async def uncertain(node):
    """A pod is to have pv-1, and whether that is mounted is not known."""
    node.executor.refusing = {"pv-1"}
    node.manager.want(pod())
    await node.rest()
    return node


async def test_a_pod_that_never_started_follows_its_claim(uncertain):
    node = uncertain
    node.bind("pv-2", uid="uid-new")
    await node.rest()
    assert node.executor.mounted() == [("pv-1", ONE), ("pv-2", ONE)]
    assert node.executor.unmounted() == [ONE]  # of the first, which may have been mounted
    assert node.manager.is_mounted(pod())


async def test_a_claim_that_becomes_unusable_lets_go_of_a_volume_that_never_was_there_for_certain(uncertain):
    node = uncertain
    node.bind("pv-1", phase="Lost")
    await node.rest()
    assert node.executor.unmounted() == [ONE]
    assert node.manager.refusals(ONE) == {"PVC ns/c is not bound"}
    node.executor.refusing = set()
    node.bind("pv-1")
    await node.rest()
    assert node.manager.is_mounted(pod())


async def test_a_claim_that_becomes_unusable_is_told_and_takes_nothing_away(node):
    node.manager.want(pod())
    await node.rest()
    node.bind("pv-1", phase="Lost")
    await node.rest()
    assert node.manager.refusals(ONE) == {"PVC ns/c is not bound"}
    assert not node.manager.is_mounted(pod())
    assert node.executor.unmounted() == []
    node.bind("pv-1")
    assert node.manager.refusals(ONE) == frozenset()
    assert node.manager.is_mounted(pod())


async def test_a_pod_that_waits_for_a_read_write_once_pod_volume_is_told_so_at_once(node):
    node.cluster.modes = ["ReadWriteOncePod"]
    node.manager.want(pod(ONE))
    await node.rest()
    node.manager.want(pod(TWO))
    node.moved.clear()
    await node.rest()
    assert node.moved == [TWO]
    assert [reason for reason in node.manager.refusals(TWO) if "ReadWriteOncePod" in reason]
    node.manager.release(ONE)
    await node.rest()
    assert node.manager.refusals(TWO) == frozenset()
    assert node.manager.is_mounted(pod(TWO))


async def test_a_pod_keeps_its_read_write_once_pod_volume_when_publishing_it_again_is_refused(node):
    async def is_lost(_use):
        return True

    node.cluster.modes = ["ReadWriteOncePod"]
    node.manager.want(pod(ONE))
    await node.rest()
    node.executor.refusing, node.executor.refusal = {"pv-1"}, StepFailure.FINAL
    await node.manager.publish_again(ONE, is_lost)
    await node.rest()
    node.executor.refusing = set()
    node.manager.want(pod(TWO))  # while other containers of the first run on
    await node.rest()
    assert not node.manager.is_mounted(pod(TWO))
    node.manager.release(ONE)
    await node.rest()
    assert node.executor.unmounted() == [ONE]
    assert node.manager.is_mounted(pod(TWO))


async def test_a_successor_gets_the_volume_when_the_processes_of_a_pod_that_is_no_more_have_ended(node):
    node.manager.want(pod(ONE))
    await node.rest()
    node.manager.hold(ONE)
    node.manager.leave(ONE)
    node.manager.want(pod(TWO))
    await node.rest()
    assert not node.manager.is_mounted(pod(TWO))
    assert node.manager.refusals(TWO) == frozenset()  # nothing that a person would have to do
    assert "deleted pod" in node.manager.unmounted(pod(TWO))[0]
    node.manager.release(ONE)
    await node.rest()
    assert node.manager.is_mounted(pod(TWO))
    assert node.manager.world.leaving == {}


async def test_waiting_for_the_attachment_is_no_refusal(node):
    node.cluster.attach_required = True
    node.manager.want(pod())
    await node.rest()
    assert node.executor.done == []
    assert node.manager.refusals(ONE) == frozenset()
    assert "in use" in node.manager.unmounted(pod())[0]


@pytest.mark.parametrize("attach_required", [True, False])
async def test_only_what_is_attached_is_in_use_and_until_its_device_is_gone(node, attach_required):
    node.cluster.attach_required = attach_required
    world = node.manager.world
    name = "kubernetes.io/csi/d^handle-of-pv-1"
    if attach_required:
        world.in_use_reported = world.attached = frozenset({name})
    node.manager.want(pod())
    listed = {name} if attach_required else set()
    assert world.in_use() == listed  # before anything is mounted
    await node.rest()
    assert node.manager.is_mounted(pod())
    seen = []
    execute = node.executor.execute

    async def looking(action, volume):
        seen.append((action.kind, world.in_use()))
        return await execute(action, volume)

    node.executor.execute = looking
    node.manager.release(ONE)
    await node.rest()
    assert seen == [("unmount", listed), ("unmount device", listed)]
    assert world.in_use() == frozenset()


NAME = "kubernetes.io/csi/d^handle-of-pv-1"


def left_by_an_earlier_run(node):
    """ONE has its volume; nobody has said yet whether it still wants it."""
    source = CsiSource("d", "handle-of-pv-1", "pv-1")
    volume = ActualVolume(NAME, source, device=MountState.UNCERTAIN, device_is_reconstructed=True)
    volume.pods[ONE] = ActualPod(MountState.UNCERTAIN, is_reconstructed=True, source=source)
    node.manager.world.actual[NAME] = volume
    node.manager.world.is_ready = False
    node.manager._touched[ONE] = {NAME}


async def test_what_nobody_wants_goes_once_all_is_known_and_not_before(node):
    left_by_an_earlier_run(node)
    node.manager.look_at(NAME)
    await node.rest()
    assert node.executor.done == []
    node.manager.begin()
    await node.rest()
    assert [action.kind for action in node.executor.done] == ["unmount", "unmount device"]
    assert node.manager.world.actual == {}


async def test_what_running_processes_have_stays_until_they_are_released(node):
    left_by_an_earlier_run(node)
    node.manager.hold(ONE)
    node.manager.begin()
    await node.rest()
    assert node.executor.done == []
    assert not node.manager.is_unmounted(ONE)
    node.manager.release(ONE)
    await node.rest()
    assert node.executor.unmounted() == [ONE]
    assert node.manager.is_unmounted(ONE)


async def test_a_pod_whose_claim_cannot_be_read_after_a_restart_keeps_what_it_has(node):
    left_by_an_earlier_run(node)
    node.cluster.bind("pv-1", phase="Lost")
    node.manager.want(pod())
    node.manager.begin()
    await node.rest()
    assert node.executor.done == []


async def test_a_pod_from_before_a_restart_gets_no_other_volume_in_place_of_its_own(node, tmp_path):
    left_by_an_earlier_run(node)
    (NodeLayout(tmp_path).containers_of(ONE) / "c" / "0").mkdir(parents=True)
    node.cluster.bind("pv-2", uid="uid-new")  # the claim was made anew while no agent was there
    node.manager.want(pod())
    node.manager.begin()
    await node.rest()
    assert node.executor.done == []
    assert not node.manager.is_mounted(pod())
    assert "began with volume pv-1" in node.manager.unmounted(pod())[0]
    assert node.manager.refusals(ONE)
    node.manager.want(pod(TWO))  # which began with nothing
    await node.rest()
    assert node.executor.mounted() == [("pv-2", TWO)]
    node.manager.release(ONE)
    await node.rest()
    assert node.executor.unmounted() == [ONE]
    assert node.manager.is_unmounted(ONE)


@pytest.fixture
def no_descriptors(monkeypatch):
    """Whoever looks for what pods need finds no descriptor left, until told otherwise."""

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(run, "uses_of", fail)
        yield patch


async def test_a_pod_whose_volumes_could_not_be_made_out_is_no_pod_without_volumes(node, no_descriptors):
    left_by_an_earlier_run(node)
    one = pod()
    for _ in range(2):
        with pytest.raises(OSError, match="Too many"):
            node.manager.want(one)
    node.manager.begin()
    await node.rest()
    assert node.executor.done == []  # above all, nothing is unmounted
    assert not node.manager.is_mounted(one)
    no_descriptors.undo()
    node.manager.want(one)
    await node.rest()
    assert node.executor.mounted() == [("pv-1", ONE)]
    assert node.manager.is_mounted(one)
    node.manager.release(ONE)
    await node.rest()
    assert node.manager.is_unmounted(ONE)


async def test_the_first_wishes_of_a_pod_that_cannot_be_made_out_do_not_end_the_agent(node, no_descriptors):
    left_by_an_earlier_run(node)
    worker = SimpleNamespace(pod=pod(), is_gone=False, containers={}, may_run=lambda _pod: True)
    await _first_wishes(SimpleNamespace(volumes=node.manager, pods=SimpleNamespace(workers={ONE: worker})))
    node.manager.begin()
    await node.rest()
    assert node.executor.done == []


async def test_a_change_that_cannot_be_made_out_for_one_pod_is_heard_of_for_the_others(node, monkeypatch):
    pods = {uid: pod(uid) for uid in (ONE, TWO)}
    node.cluster.bind("pv-1", phase="Pending")
    for one in pods.values():
        node.manager.want(one)
    await node.rest()
    node.moved.clear()
    failing = [True]

    def once(wanted, *more):
        if failing and failing.pop():
            raise OSError(errno.EMFILE, "Too many open files")
        return uses_of(wanted, *more)

    monkeypatch.setattr(run, "uses_of", once)
    node.bind("pv-1")
    await node.rest()
    assert [node.manager.is_mounted(one) for one in pods.values()].count(True) == 1
    for uid in set(node.moved):
        node.manager.want(pods[uid])  # as the worker of a pod does that is told to look
    await node.rest()
    assert all(node.manager.is_mounted(one) for one in pods.values())


async def test_a_pod_from_before_a_restart_that_has_not_begun_follows_its_claim(node):
    left_by_an_earlier_run(node)
    node.cluster.bind("pv-2", uid="uid-new")
    node.manager.want(pod())
    node.manager.begin()
    await node.rest()
    assert node.executor.mounted() == [("pv-2", ONE)]
    assert node.executor.unmounted() == [ONE]  # of the first, which no process has seen
    assert node.manager.is_mounted(pod())


async def test_a_pod_from_before_a_restart_has_its_own_volume_confirmed_once_its_claim_is_known(node):
    left_by_an_earlier_run(node)
    node.cluster.bind("pv-1", phase="Pending")
    node.manager.want(pod())
    node.manager.begin()
    node.bind("pv-1")
    await node.rest()
    assert node.executor.mounted() == [("pv-1", ONE)]
    assert node.manager.is_mounted(pod())


async def test_a_running_pod_keeps_its_volume_when_its_claim_names_the_same_one_by_another_name(node):
    node.manager.want(pod())
    await node.rest()
    one = node.cluster.volume("pv-1")
    node.cluster.volume = lambda name: msgspec.structs.replace(
        one,
        metadata=msgspec.structs.replace(one.metadata, name=name),
        spec=msgspec.structs.replace(
            one.spec, claim_ref=msgspec.structs.replace(one.spec.claim_ref, uid=node.cluster.claim_object.uid)
        ),
    )
    node.bind("pv-2", uid="uid-new")
    await node.rest()
    assert node.manager.use_named(ONE, "data").source.spec_name == "pv-1"  # the name of its directory
    assert node.manager.is_mounted(pod())


async def test_a_pod_that_is_no_more_is_not_remembered_when_that_is_told_after_its_end(node):
    node.manager.want(pod())
    await node.rest()
    node.manager.release(ONE)
    await node.rest()
    assert node.manager.is_unmounted(ONE)
    node.manager.leave(ONE)  # the watch tells of our own delete
    assert node.manager.world.leaving == {}


async def test_a_pod_that_goes_takes_its_back_off_with_it(node):
    node.manager.want(pod(TWO))
    await node.rest()
    node.executor.refusing = {"pv-1"}
    node.executor.may_go_on.clear()
    node.manager.want(pod(ONE))
    await node.rest()
    node.executor.may_go_on.set()
    await node.rest()
    volume = node.manager.world.actual[NAME]
    assert list(volume.backoffs) == [("mount", ONE)]
    node.manager.release(ONE)
    await node.rest()
    assert volume.backoffs == {}


class Left:
    """A staged volume of which nothing is known, on disk before the manager starts."""

    def __init__(self, node, root):
        self.place = NodeLayout(root).staging("d", "h") / "globalmount"
        self.place.mkdir(parents=True)
        node.manager.reconstruct()

    async def looked_at(self, node):
        async with asyncio.timeout(10):
            await node.manager._sweeping


async def test_the_sweep_at_the_start_is_no_volume_that_is_worked_on(node, tmp_path):
    left = Left(node, tmp_path)
    node.manager.begin()
    assert node.manager.under_way == 0
    await left.looked_at(node)
    assert node.manager.under_way == 0
    assert not left.place.exists()


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError("nobody expected this")])
async def test_a_sweep_that_fails_is_told_of_and_ends_nothing(node, tmp_path, monkeypatch, error):
    told = []
    log = SimpleNamespace(
        info=lambda text, **_: None,
        warning=lambda text, **_: told.append("in one line"),
        exception=lambda text, **_: told.append("with its traceback"),
    )
    monkeypatch.setattr(restart, "log", log)

    def fail(*_):
        raise error

    left = Left(node, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(restart.leftovers, "release_staged", fail)
        node.manager.begin()
        await left.looked_at(node)
        await node.manager.sweep()
    assert told == ["in one line" if isinstance(error, OSError) else "with its traceback"] * 2
    assert left.place.exists()
    await node.manager.sweep()
    assert not left.place.exists()


async def test_a_pod_is_not_unmounted_while_a_mount_for_it_is_under_way(node):
    node.executor.may_go_on.clear()
    node.manager.want(pod())
    await node.rest()
    node.manager.release(ONE)
    assert not node.manager.is_unmounted(ONE)
    node.executor.may_go_on.set()
    await node.rest()
    assert node.executor.unmounted() == [ONE]  # whatever the mount has done is undone
    assert node.manager.is_unmounted(ONE)


async def test_a_driver_that_comes_is_asked_at_once(node):
    node.executor.missing = True
    node.manager.want(pod())
    await node.rest()
    assert len(node.executor.done) == 1
    node.manager.look_at(NAME)
    await node.rest()
    assert len(node.executor.done) == 1  # it waits for its time
    node.executor.missing = False
    node.manager.plugin_changed("other")
    await node.rest()
    assert len(node.executor.done) == 1
    node.manager.plugin_changed("d")
    await node.rest()
    assert node.manager.is_mounted(pod())


async def test_an_expansion_is_tried_at_once_when_its_claim_says_something_new(node):
    node.manager.want(pod())
    await node.rest()
    node.executor.missing, node.cluster.capacity = True, "2Gi"
    node.bind("pv-1")
    await node.rest()
    assert [action.kind for action in node.executor.done] == ["mount", "expand"]
    node.bind("pv-1")  # nothing new
    await node.rest()
    assert len(node.executor.done) == 2
    node.cluster.capacity = "3Gi"
    node.bind("pv-1")
    await node.rest()
    assert [action.kind for action in node.executor.done] == ["mount", "expand", "expand"]


async def test_a_refused_expansion_waits_for_its_time_whatever_the_claim_is_made_to_say_of_it(node):
    """The refusal itself is written into the claim, and a resizer sets the claim to pending again."""
    node.manager.want(pod())
    await node.rest()
    node.executor.missing, node.cluster.capacity = True, "2Gi"
    for _ in range(3):
        for node.cluster.resize_state in ("NodeResizePending", "NodeResizeInProgress", "NodeResizeInfeasible"):
            node.bind("pv-1")
            await node.rest()
    assert [action.kind for action in node.executor.done] == ["mount", "expand"]


async def test_an_expansion_that_waited_for_the_resizer_is_tried_at_once(node):
    node.manager.want(pod())
    await node.rest()
    node.executor.missing, node.executor.message, node.cluster.capacity = True, NOT_YET, "2Gi"
    node.bind("pv-1")
    await node.rest()
    node.cluster.resize_state = "ControllerResizeInProgress"
    node.bind("pv-1")
    await node.rest()
    assert len(node.executor.done) == 2
    node.cluster.resize_state = "NodeResizePending"
    node.bind("pv-1")
    await node.rest()
    assert [action.kind for action in node.executor.done] == ["mount", "expand", "expand"]


async def test_a_pod_that_is_the_same_as_before_makes_no_work(node, monkeypatch):
    looked = []
    monkeypatch.setattr(run, "uses_of", lambda pod, *_: looked.append(pod.uid) or Needs())
    same = pod()
    node.manager.want(same)
    node.manager.want(same)
    assert looked == [ONE]
    node.manager.want(pod())  # changed, for all that is known
    node.manager.release(ONE)
    node.manager.want(same)
    assert looked == [ONE, ONE, ONE]


async def test_what_others_write_to_a_claim_makes_no_work(node, monkeypatch):
    node.manager.want(pod())
    await node.rest()
    looked = []
    monkeypatch.setattr(run, "uses_of", lambda pod, *_: looked.append(pod.uid) or Needs())
    before = node.cluster.claim_object
    after = msgspec.structs.replace(before, metadata=msgspec.structs.replace(before.metadata, labels={"a": "b"}))
    node.manager.claim_changed(before, after)
    assert looked == []
    node.cluster.bind("pv-2")
    node.manager.claim_changed(after, node.cluster.claim_object)
    assert looked == [ONE]


async def test_the_node_is_told_whenever_volumes_in_use_may_have_changed(node):
    changed = node.manager.in_use_changed
    node.cluster.attach_required = True
    node.manager.want(pod())
    assert changed.is_set()
    await node.rest()
    changed.clear()
    node.manager.want(pod())
    assert not changed.is_set()
    node.cluster.attach_required = False
    node.manager.driver_changed(None, made(CSIDriver, {"metadata": {"name": "d"}}))
    assert changed.is_set()
    await node.rest()
    changed.clear()
    node.manager.want(pod(TWO))
    assert not changed.is_set()  # nobody attaches it
    node.cluster.attach_required = True
    node.manager.driver_changed(None, made(CSIDriver, {"metadata": {"name": "d"}}))
    assert changed.is_set()
    node.manager.release(TWO)
    node.manager.release(ONE)
    changed.clear()
    await node.rest()
    assert changed.is_set()  # it has left both states
    assert node.manager.world.actual == {}


async def test_a_list_of_volumes_in_use_that_is_not_ours_is_written_again(node):
    def listing(*names):
        return made(Node, {"metadata": {"name": "n"}, "status": {"volumesInUse": list(names)}})

    node.cluster.attach_required = True
    node.manager.want(pod())
    changed = node.manager.in_use_changed
    changed.clear()
    node.manager.node_changed(None, listing(NAME))
    assert not changed.is_set()
    node.manager.node_changed(listing(NAME), listing())  # a write whose answer was lost, or somebody's hand
    assert changed.is_set()
    await node.rest()
    assert node.executor.done == []


async def test_a_volume_of_another_zone_is_mounted_once_the_node_says_that_it_is_there(node):
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    node.cluster.affinity = {"required": {"nodeSelectorTerms": terms}}
    node.manager.want(pod())
    await node.rest()
    assert "node affinity" in node.manager.unmounted(pod())[0]
    before = node.cluster.node()
    node.cluster.labels = {"zone": "a"}
    node.manager.node_changed(before, node.cluster.node())
    await node.rest()
    assert node.manager.is_mounted(pod())


async def test_what_a_driver_says_of_itself_later_counts(node):
    node.cluster.attach_required = True
    node.manager.want(pod())
    await node.rest()
    assert node.executor.done == []
    node.cluster.attach_required = False
    spec = {"metadata": {"name": "d"}, "spec": {"attachRequired": False}}
    node.manager.driver_changed(None, made(CSIDriver, spec))
    await node.rest()
    assert node.manager.is_mounted(pod())


def pod_of_many(count, uid=ONE, **source):
    names = [f"v{number}" for number in range(count)]
    container = {"name": "c", "image": "host", "volumeMounts": [{"name": one, "mountPath": f"/{one}"} for one in names]}
    meta = {"name": f"p-{uid}", "namespace": "ns", "uid": uid}
    volumes = [{"name": one, **(source or {"emptyDir": {}})} for one in names]
    return made(Pod, {"metadata": meta, "spec": {"volumes": volumes, "containers": [container]}})


async def test_of_a_pods_own_volumes_a_few_are_made_at_a_time_and_no_other_pod_waits_for_them(node):
    node.executor.may_go_on.clear()
    many, few = pod_of_many(200), pod_of_many(3, TWO)
    node.manager.want(many)
    node.manager.want(few)
    await node.rest()
    uids = [uid for _, uid in node.executor.mounted()]
    assert (uids.count(ONE), uids.count(TWO)) == (32, 3)
    node.executor.may_go_on.set()
    await until(lambda: node.manager.is_mounted(many) and node.manager.is_mounted(few), what="all there")
    assert sorted(node.executor.mounted()) == sorted(
        [(f"v{number}", ONE) for number in range(200)] + [(f"v{number}", TWO) for number in range(3)]
    )

    node.executor.may_go_on.clear()
    node.manager.release(ONE)
    await node.rest()
    assert len(node.executor.unmounted()) == 32
    node.executor.may_go_on.set()
    await until(lambda: node.manager.is_unmounted(ONE), what="all gone")
    assert len(node.executor.unmounted()) == 200


async def test_volumes_that_waited_for_their_turn_are_not_made_for_a_pod_that_has_gone(node):
    node.executor.may_go_on.clear()
    node.manager.want(pod_of_many(200))
    await node.rest()
    node.manager.release(ONE)
    node.executor.may_go_on.set()
    await until(lambda: node.manager.is_unmounted(ONE), what="all gone")
    assert len(node.executor.mounted()) == len(node.executor.unmounted()) == 32
    node.manager.want(pod_of_many(200))  # and it is back
    await until(lambda: node.manager.is_mounted(pod_of_many(200)), what="all there")


async def test_a_turn_that_nobody_needs_any_more_goes_to_the_next(node):
    """Those that wait are looked at in their order; the first of them may have been made or given up meanwhile."""
    node.executor.may_go_on.clear()
    node.manager.want(pod_of_many(200))
    await node.rest()
    node.manager.want(with_last(pod_of_many(200), 50))  # the others are wanted no longer
    node.executor.may_go_on.set()
    await until(lambda: node.manager.is_mounted(with_last(pod_of_many(200), 50)), what="all there")
    assert {f"v{number}" for number in range(150, 200)} <= {name for name, _ in node.executor.mounted()}


def with_last(pod, count):
    spec = msgspec.structs.replace(pod.spec, volumes=pod.spec.volumes[-count:])
    return msgspec.structs.replace(pod, spec=spec)


async def test_a_driver_is_asked_for_all_volumes_at_once(node):
    node.executor.may_go_on.clear()
    node.manager.want(pod_of_many(100, csi={"driver": "d"}))
    await node.rest()
    assert len(node.executor.mounted()) == 100


async def test_a_volume_is_found_by_each_of_its_names_for_as_long_as_it_is_wanted(node):
    found = pod_of_many(2, persistentVolumeClaim={"claimName": "c"})
    node.manager.want(found)
    await node.rest()
    assert node.manager.use_named(ONE, "v0") == node.manager.use_named(ONE, "v1")
    assert node.manager.use_named(ONE, "v0").outer_names == ("v0", "v1")
    assert node.manager.use_named(ONE, "v2") is None
    assert node.manager.use_named(TWO, "v0") is None
    node.manager.release(ONE)
    assert node.manager.use_named(ONE, "v0") is None
