"""Where a claim is, and what its pictures are made of."""

from typing import Any

from msgspec import convert

from moorage.insight.cluster_view import ClusterView
from moorage.insight.trace import Trace, TraceStep
from moorage.kube.objects import (
    CSIDriver,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)
from moorage.ui.pictures import chain_of, family_of, gantt_of
from moorage.ui.stages import ClaimStage, place_of

DRIVER = {"metadata": {"name": "d.example"}, "spec": {"attachRequired": True}}


def claim(name="data", phase="Bound", **spec):
    spec = {"volumeName": f"pv-{name}" if phase == "Bound" else "", **spec}
    return convert(
        {"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": spec, "status": {"phase": phase}},
        PersistentVolumeClaim,
    )


def view_of(*objects):
    view = ClusterView()
    fields: dict[type, Any] = {
        PersistentVolumeClaim: view.claims,
        PersistentVolume: view.volumes,
        Pod: view.pods,
        VolumeAttachment: view.attachments,
        CSIDriver: view.drivers,
        VolumeSnapshot: view.snapshots,
    }
    for each in objects:
        fields[type(each)][each.key] = each
    return view


def volume(name="data"):
    csi = {"driver": "d.example", "volumeHandle": f"h-{name}"}
    return convert({"metadata": {"name": f"pv-{name}"}, "spec": {"csi": csi}}, PersistentVolume)


def pod(phase="Pending", node="n1", name="web"):
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    body = {"metadata": {"name": name, "namespace": "default"}, "spec": {"nodeName": node, "volumes": volumes}}
    return convert({**body, "status": {"phase": phase}}, Pod)


def attachment(attached):
    spec = {"attacher": "d.example", "nodeName": "n1", "source": {"persistentVolumeName": "pv-data"}}
    return convert({"metadata": {"name": "va"}, "spec": spec, "status": {"attached": attached}}, VolumeAttachment)


def stage_of(*objects):
    return place_of(view_of(claim(), volume(), convert(DRIVER, CSIDriver), *objects), claim()).stage


def test_a_claim_goes_through_the_stages():
    assert place_of(view_of(), claim(phase="Pending")).stage is ClaimStage.PROVISION
    assert stage_of() is ClaimStage.IDLE
    assert stage_of(pod()) is ClaimStage.ATTACH
    assert stage_of(pod(), attachment(False)) is ClaimStage.ATTACH
    assert stage_of(pod(), attachment(True)) is ClaimStage.MOUNT
    assert stage_of(pod("Running"), attachment(True)) is ClaimStage.MOUNTED
    assert stage_of(pod("Succeeded"), attachment(True)) is ClaimStage.IDLE
    assert stage_of(pod("Running"), pod(name="second"), attachment(True)) is ClaimStage.MOUNT


def test_a_driver_without_attach_goes_straight_to_mount():
    driver = convert({"metadata": {"name": "d.example"}, "spec": {"attachRequired": False}}, CSIDriver)
    view = view_of(claim(), volume(), driver, pod())
    assert place_of(view, claim()).stage is ClaimStage.MOUNT
    boxes = {box.title: box for box in chain_of(claim(), place_of(view, claim()), {})}
    assert boxes["Attachment"].state == "not needed"


def test_the_chain_marks_what_is_done_what_is_next_and_what_is_wrong():
    view = view_of(claim(), volume(), convert(DRIVER, CSIDriver), pod(), attachment(False))
    boxes = chain_of(claim(), place_of(view, claim()), {"Attachment": "the driver refused"})
    assert [(box.title, box.tone) for box in boxes] == [
        ("Claim", "done"),
        ("Volume", "done"),
        ("Attachment", "wrong"),
        ("Staged", "later"),
        ("Mounted", "later"),
    ]
    assert boxes[2].error == "the driver refused"


def step(at, took=None, who="driver"):
    return TraceStep(at, who, "pvc/data", "did something", "log", took, True)


def test_bars_span_the_whole_width_and_stay_inside_it():
    told = Trace("pvc/data", [], [step(100.0), step(103.0, 2.0), step(104.0, who="binder")], 4.0, True)
    gantt = gantt_of(told, now=500.0)
    assert gantt.seconds == 4.0
    assert gantt.bars[1].left == 25.0
    assert gantt.bars[1].width == 50.0
    assert all(bar.left >= 0 and bar.left + bar.width <= 100.001 for bar in gantt.bars)
    assert gantt.who == ["binder", "driver"]


def test_a_timeline_that_is_not_done_goes_on_until_now():
    assert gantt_of(Trace("pvc/data", [], [step(100.0)], 0.0, False), now=110.0).seconds == 10.0
    assert gantt_of(Trace("pvc/data", [], [], 0.0, False), now=110.0).bars == []


def test_a_family_has_its_oldest_ancestor_at_the_top():
    snapshot = convert(
        {
            "metadata": {"name": "s", "namespace": "default"},
            "spec": {"source": {"persistentVolumeClaimName": "data"}},
        },
        VolumeSnapshot,
    )
    restored = claim("restored", dataSource={"kind": "VolumeSnapshot", "name": "s"})
    view = view_of(claim(), snapshot, restored)
    tree = family_of(view, restored)
    assert tree is not None
    assert (tree.obj.name, tree.children[0].obj.name, tree.children[0].children[0].obj.name) == (
        "data",
        "s",
        "restored",
    )
    assert tree.children[0].children[0].is_asked
    assert family_of(view_of(claim()), claim()) is None


def test_claims_that_name_each_other_as_source_end():
    one, two = (claim(a, dataSource={"kind": "PersistentVolumeClaim", "name": b}) for a, b in (("a", "b"), ("b", "a")))
    tree = family_of(view_of(one, two), one)
    assert tree is not None
