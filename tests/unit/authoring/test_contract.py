"""Which answers of a driver contradict earlier ones, or the kernel."""

import pytest

from moorage.authoring.contract import ContractWatch
from moorage.authoring.proxy import ObservedCall
from moorage.csi import csi_pb2 as pb


def call(method, request, response, code="OK"):
    return ObservedCall(method, request, response, code, "", 0.01)


def created(volume_id="v1", size=100, required=0, limit=0, **context):
    request = pb.CreateVolumeRequest(
        name="v", capacity_range=pb.CapacityRange(required_bytes=required, limit_bytes=limit)
    )
    volume = pb.Volume(volume_id=volume_id, capacity_bytes=size, volume_context=context)
    return call("CreateVolume", request, pb.CreateVolumeResponse(volume=volume))


def deleted(volume_id="v1"):
    return call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume_id), pb.DeleteVolumeResponse())


def listed(volume_id="v1"):
    entry = pb.ListVolumesResponse.Entry(volume=pb.Volume(volume_id=volume_id))
    return call("ListVolumes", pb.ListVolumesRequest(), pb.ListVolumesResponse(entries=[entry]))


def attached(**context):
    request = pb.ControllerPublishVolumeRequest(volume_id="v1", node_id="n1")
    return call("ControllerPublishVolume", request, pb.ControllerPublishVolumeResponse(publish_context=context))


def snapshot(seconds):
    request = pb.CreateSnapshotRequest(name="s", source_volume_id="v1")
    made = pb.Snapshot(snapshot_id="s1", source_volume_id="v1")
    made.creation_time.seconds = seconds
    return call("CreateSnapshot", request, pb.CreateSnapshotResponse(snapshot=made))


def published(path):
    request = pb.NodePublishVolumeRequest(volume_id="v1", target_path=str(path))
    return call("NodePublishVolume", request, pb.NodePublishVolumeResponse())


def unpublished(path):
    request = pb.NodeUnpublishVolumeRequest(volume_id="v1", target_path=str(path))
    return call("NodeUnpublishVolume", request, pb.NodeUnpublishVolumeResponse())


@pytest.mark.parametrize(
    ("calls", "warning"),
    [
        ([created(), created()], ""),
        ([created(), created(volume_id="v2")], "volume_id is v2, and was v1"),
        ([created(kind="a"), created(kind="b")], "volume_context is {'kind': 'b'}"),
        ([created(size=5, required=10)], "10 were required"),
        ([created(size=50, limit=10)], "more than the limit of 10"),
        ([created(), deleted(), created(volume_id="v2")], ""),
        ([created(), deleted(), listed()], "DeleteVolume has answered OK"),
        ([created(), deleted(), created(), listed()], ""),
        ([attached(a="1"), attached(a="2")], "publish_context is {'a': '2'}"),
        ([snapshot(1), snapshot(2)], "creation_time is seconds: 2, and was seconds: 1"),
        ([published("/nowhere/target")], "nothing is mounted at /nowhere/target"),
        ([published("/proc")], ""),
        ([unpublished("/proc")], "a leak: /proc is still mounted"),
        ([unpublished("/etc")], "a leak: /etc is still there"),
        ([published("/proc"), deleted()], "deleted while it is mounted at /proc"),
        ([call("NodePublishVolume", pb.NodePublishVolumeRequest(target_path="/x"), None, code="INTERNAL")], ""),
    ],
)
def test_an_answer_is_compared_with_what_is_known(calls, warning):
    watch = ContractWatch()
    *earlier, last = calls
    for each in earlier:
        assert not watch.warnings_of(each)
    found = watch.warnings_of(last)
    assert (warning in found[0]) if warning else not found, found


def test_a_call_says_who_makes_it_and_about_what():
    assert (created().caller, created().subject) == ("provisioner", "v")
    assert published("/x").caller == "kubelet"
    assert snapshot(1).caller == "snapshotter"
