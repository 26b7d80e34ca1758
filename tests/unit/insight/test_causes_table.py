"""Causes as worlds in and sentences out, in the words of other drivers and kubelets; promises of the whole table."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moorage.insight.causes import REGISTRY
from moorage.insight.causes.model import code_in, driver_words
from moorage.insight.cluster_view import ClusterView
from moorage.insight.explain import ObjectNotFound, first_cause, found, parse, story_of, stuck_stories
from moorage.insight.troubleshooting_page import page
from moorage.kube.objects import CSIDriver, CSINode, Event, Node, PersistentVolume, PersistentVolumeClaim, Pod
from moorage.kube.objects.meta import KubeObject

ROOT = Path(__file__).parents[3]
_STEPS = {"shows", "ends", "leaves", "then", "in_words", "last"}
NODE = {"metadata": {"name": "node-1", "uid": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
CLAIM = {
    "metadata": {"namespace": "default", "name": "data", "uid": "c"},
    "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv-1"},
    "status": {"phase": "Bound"},
}
VOLUME = {
    "metadata": {"name": "pv-1", "uid": "v"},
    "spec": {"accessModes": ["ReadWriteOnce"], "csi": {"driver": "d", "volumeHandle": "h"}},
    "status": {"phase": "Bound"},
}


def make(kind: type[KubeObject], body: dict) -> KubeObject:
    return msgspec.convert(body, kind)


def pod(**more):
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}
    spec = {"nodeName": "node-1", "volumes": [volume], **more.pop("spec", {})}
    body = {
        "metadata": {"namespace": "default", "name": "web", "uid": "p"},
        "spec": spec,
        "status": {"phase": "Pending"},
    }
    return make(Pod, body | more)


def world_of(*pods, events=(), driver=None, volume=None):
    """A bound claim on a ready node that has the driver; events are (reason, message), newest first."""
    made = ClusterView()
    made.nodes["node-1"] = make(Node, NODE)
    made.claims["default/data"] = make(PersistentVolumeClaim, CLAIM)
    made.volumes["pv-1"] = make(PersistentVolume, volume or VOLUME)
    made.drivers["d"] = make(
        CSIDriver, {"metadata": {"name": "d"}, "spec": {"attachRequired": False, **(driver or {})}}
    )
    made.node_drivers["node-1"] = make(CSINode, {"metadata": {"name": "node-1"}, "spec": {"drivers": [{"name": "d"}]}})
    made.pods = {one.key: one for one in pods}
    told = [{"type": "Warning", "reason": reason, "message": message} for reason, message in events]
    made.events["p"] = [make(Event, one) for one in told]
    return made


MOUNT = 'MountVolume.MountDevice failed for volume "pv-1" : '


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (MOUNT + "NodeStageVolume: DEADLINE_EXCEEDED: no answer in 120 s", "pod-driver-silent"),
        (MOUNT + "rpc error: code = Unavailable desc = connection error", "pod-driver-silent"),
        (MOUNT + "NodeStageVolume: FAILED_PRECONDITION: volume x holds xfs and not ext4", "pod-filesystem-differs"),
        (MOUNT + "mount failed: wrong fs type, bad option, bad superblock on /dev/sdb", "pod-filesystem-differs"),
        (MOUNT + "'fsck' found errors on device /dev/sdb but could not correct them", "pod-filesystem-damaged"),
        (MOUNT + "format of disk failed: mkfs.ext4: Device size reported to be zero", "pod-format-failed"),
        (MOUNT + 'fetching NodeStageSecretRef a/b failed: secrets "b" not found', "pod-secret-missing"),
        (MOUNT + 'references non-existent config key: configmap "x" not found', "pod-configmap-missing"),
        (MOUNT + "rpc error: code = Internal desc = no more information", "pod-mount-fails"),
    ],
)
def test_mounting_fails_in_the_words_of_drivers_and_kubelets(message, cause):
    web = pod()
    late = "Unable to attach or mount volumes: unmounted volumes=[v]: timed out waiting for the condition"
    world = world_of(web, events=[("FailedMount", late), ("FailedMount", message)])
    story = story_of(world, web)
    assert story.cause == cause
    assert message in story.sentence
    assert story.evidence[0].startswith("FailedMount (")
    assert story.next_step.startswith("kubectl ")


def test_a_mount_that_only_took_too_long_is_told_as_that():
    late = "Unable to attach or mount volumes: timed out waiting for the condition"
    web = pod()
    assert late in story_of(world_of(web, events=[("FailedMount", late)]), web).sentence


def test_a_quota_refuses_the_claim_of_an_ephemeral_volume():
    web = pod(spec={"nodeName": "", "volumes": [{"name": "tmp", "ephemeral": {"volumeClaimTemplate": {}}}]})
    words = 'ephemeral volume tmp: persistentvolumeclaims "web-tmp" is forbidden: exceeded quota: storage'
    story = story_of(world_of(web, events=[("FailedBinding", words)]), web)
    assert story.cause == "pod-quota"
    assert "claim web-tmp for its ephemeral volume exceeds the quota of namespace default" in story.sentence
    assert story.next_step == "kubectl -n default describe resourcequota"


def failing(**more):
    ended = {
        "name": "main",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1}},
    }
    status = {"phase": "Running", "containerStatuses": [ended]}
    return pod(spec={"securityContext": {"fsGroup": 2000}}, status=status, **more)


def test_an_fs_group_that_is_not_applied_is_told_when_a_container_fails():
    web = failing()
    story = story_of(world_of(web, driver={"fsGroupPolicy": "None"}), web)
    assert story.cause == "pod-fs-group-ignored"
    assert "fsGroup 2000 is not applied to volume pv-1: fsGroupPolicy of d is None" in story.sentence
    assert story_of(world_of(web, driver={"fsGroupPolicy": "File"}), web).cause == "pod-crashing"


def test_an_fs_group_that_is_not_applied_is_a_note_while_all_is_well():
    web = pod(spec={"securityContext": {"fsGroup": 2000}}, status={"phase": "Running"})
    story = story_of(world_of(web, driver={"fsGroupPolicy": "None"}), web)
    assert not story.stuck
    assert story.sentence.endswith(
        "nothing is wrong; fsGroup 2000 is not applied to volume pv-1: fsGroupPolicy of d is None"
    )


def test_what_belongs_to_another_story_is_told_once():
    lost = make(PersistentVolumeClaim, CLAIM | {"status": {"phase": "Lost"}})
    web = pod(spec={"nodeName": ""})
    world = world_of(web)
    world.claims["default/data"] = lost
    assert [story.object for story in stuck_stories(world)] == ["pod/web"]


class Counted(dict):
    """Objects by key that count how often all of them are looked at."""

    looks = 0

    def values(self):
        Counted.looks += 1
        return super().values()


def cluster_of(count):
    """Bound claims with a volume, a pod and a warning each, of which every second pod cannot mount."""
    view = ClusterView(is_complete=True)
    for at in range(count):
        name = f"data-{at}"
        claim = CLAIM | {"metadata": {"namespace": "default", "name": name, "uid": f"c{at}"}}
        claim["spec"] = CLAIM["spec"] | {"volumeName": f"pv-{at}"}
        volume = VOLUME | {"metadata": {"name": f"pv-{at}", "uid": f"v{at}"}}
        reference = {"namespace": "default", "name": name}
        volume["spec"] = VOLUME["spec"] | {"claimRef": reference, "nodeAffinity": on_node(f"node-{at % 5}")}
        web = pod(spec={"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]})
        meta = {"namespace": "default", "name": f"web-{at}", "uid": f"p{at}"}
        web = msgspec.structs.replace(web, metadata=msgspec.convert(meta, type(web.metadata)))
        node = NODE | {"metadata": {"name": f"node-{at}", "uid": f"n{at}"}}
        view.claims[f"default/{name}"] = make(PersistentVolumeClaim, claim)
        view.volumes[f"pv-{at}"] = make(PersistentVolume, volume)
        view.pods[web.key] = web
        view.nodes[f"node-{at}"] = make(Node, node)
        event = {"type": "Warning", "reason": "FailedMount", "message": "no"}
        view.events[f"p{at}"] = [make(Event, event)] if at % 2 else []
    for name in ("claims", "volumes", "pods", "nodes", "events", "attachments", "leases", "node_drivers"):
        setattr(view, name, Counted(getattr(view, name)))
    return view


def on_node(name):
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}
    return {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}


def test_all_stories_together_look_at_all_objects_a_fixed_number_of_times():
    looks = []
    for count in (20, 80):
        view = cluster_of(count)
        Counted.looks = 0
        assert len(stuck_stories(view)) >= count
        looks.append(Counted.looks)
    assert looks[0] == looks[1], looks


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("rpc error: code = ResourceExhausted desc = full", "RESOURCE_EXHAUSTED"),
        ("CreateVolume: OUT_OF_RANGE: too small", "OUT_OF_RANGE"),
        ("nothing of the kind", ""),
    ],
)
def test_codes_are_read_in_both_spellings(words, code):
    assert code_in(words) == code


def test_the_words_of_the_driver_stand_alone():
    message = (
        'failed to provision volume with StorageClass "fast": CreateVolume: INTERNAL: no; retried with growing pauses'
    )
    assert driver_words(message) == "CreateVolume: INTERNAL: no"


@pytest.mark.parametrize(
    ("text", "kind"), [("pvc/a", PersistentVolumeClaim), ("PODS/a", Pod), ("pv/a", PersistentVolume)]
)
def test_references(text, kind):
    assert parse(text) == (kind, "a")


def test_every_cause_is_told_once_in_plain_words():
    ids = [cause.id for cause in REGISTRY]
    assert len(ids) == len(set(ids)) >= 100
    for cause in REGISTRY:
        assert cause.why.endswith("."), cause.id
        assert cause.remedy, cause.id
        assert not cause.title.endswith("."), cause.id


def test_the_steps_of_every_cause_are_taken_in_a_live_cluster():
    """Each cause is made by a test, which takes its steps, or whose chain ends in another cause that has them."""
    taken: set[str] = set()
    for path in ROOT.glob("tests/e2e/insight/test_*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef):
                taken |= _causes_whose_steps_are_taken(function)
    assert [cause.id for cause in REGISTRY if cause.id not in taken] == []


def _causes_whose_steps_are_taken(function: ast.AsyncFunctionDef) -> set[str]:
    found: set[str] = set()
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "check_cause" and _STEPS & {word.arg for word in call.keywords}:
            first = call.args[0]
            cause = first.value.elts[1] if isinstance(first, ast.Starred) else call.args[1]
            # A cause in a variable is one of the function's strings.
            places = [cause] if isinstance(cause, ast.Constant) else [*function.decorator_list, *function.body]
            found |= {one.value for place in places for one in ast.walk(place) if isinstance(one, ast.Constant)}
    return found


_SHOWN = re.compile(r"^\$ ((?:moorage|kubectl) [^#\n]*)|`((?:moorage|kubectl) [^`]*)`", re.MULTILINE)
_PAGES = ("docs/reference/troubleshooting.md", "docs/how-to/explain-a-stuck-volume.md")


def test_the_commands_of_the_pages_and_their_options_exist():
    """`--help` after a command parses its words and options, and does nothing."""
    shown = {one or two for name in _PAGES for one, two in _SHOWN.findall((ROOT / name).read_text())}
    assert len(shown) > 8  # of the two pages
    without_names = {tuple(word for word in shlex.split(each) if "/" not in word) for each in shown}
    for words in sorted(without_names):
        program = [sys.executable, "-m", "moorage.cli.main"] if words[0] == "moorage" else [shutil.which("kubectl")]
        if program[0]:
            done = subprocess.run(
                [*program, *words[1:], "--help"], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, (words, done.stderr)


def test_a_page_names_commands_as_commands():
    """What is not marked as a command is not checked, and a person cannot tell it from prose."""
    for each in REGISTRY:
        prose = re.sub(r"`[^`]*`", "", f"{each.remedy} {each.why}")
        assert not re.search(r"\b(kubectl|moorage) [a-z]+", prose), each.id
        commands = [words for words in re.findall(r"`([^`]*)`", each.remedy) if words.startswith("kubectl ")]
        assert not [words for words in commands if re.search(r"\b[A-Z]{3,}\b", words)], each.id


def test_deleted_data_of_moorage_stays_in_the_trash():
    reference = {"namespace": "default", "name": "data", "uid": "c"}
    spec = {"csi": {"driver": "csi.moorage.dev", "volumeHandle": "h"}, "claimRef": reference}
    policies = {"Delete": True, "Retain": False}
    for policy, is_told in policies.items():
        world = world_of(volume=VOLUME | {"spec": {**spec, "persistentVolumeReclaimPolicy": policy}})
        told = story_of(world, world.volumes["pv-1"]).sentence
        assert ("deleted data stays in the trash of the pool for a day" in told) is is_told
    with pytest.raises(ObjectNotFound, match="`moorage volume undelete default/gone`"):
        found(ClusterView(), PersistentVolumeClaim, "gone", "default")


def test_the_troubleshooting_page_is_made_from_the_table():
    command = "python -m moorage.insight.troubleshooting_page docs/reference/troubleshooting.md"
    assert (ROOT / "docs" / "reference" / "troubleshooting.md").read_text() == page(), f"the page is stale: {command}"


def test_an_object_with_which_nothing_is_wrong():
    world = world_of()
    claim = world.claims["default/data"]
    assert first_cause(world, claim) == (None, None)
    assert story_of(world, claim).sentence == "pvc/data: it is bound to pv-1, used by no pod; nothing is wrong"
