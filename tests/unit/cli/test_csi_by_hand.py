"""A CSI call written by a person becomes exactly the request that it describes."""

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi import text
from moorage.errors import UsageError


def test_words_with_dots_reach_nested_fields_lists_and_maps():
    request = text.request_from(
        "CreateVolume",
        [
            "name=v1",
            "capacity_range.required_bytes=64Mi",
            "capacity_range.limit_bytes=0",
            "volume_capabilities.0.mount.fs_type=ext4",
            "volume_capabilities.0.mount.mount_flags=noatime",
            "volume_capabilities.0.access_mode.mode=SINGLE_NODE_WRITER",
            "parameters.example.org/kind=fast",
        ],
    )
    capability = pb.VolumeCapability(
        mount=pb.VolumeCapability.MountVolume(fs_type="ext4", mount_flags=["noatime"]),
        access_mode=pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER),
    )
    assert request == pb.CreateVolumeRequest(
        name="v1",
        capacity_range=pb.CapacityRange(required_bytes=67108864),
        volume_capabilities=[capability],
        parameters={"example.org/kind": "fast"},
    )


def test_words_lie_on_top_of_a_document_and_json_values_are_taken_whole():
    request = text.request_from(
        "CreateVolume", ["name=other", 'volume_capabilities:=[{"block": {}}]'], {"name": "v1", "parameters": {"a": "b"}}
    )
    assert request.name == "other"
    assert dict(request.parameters) == {"a": "b"}
    assert request.volume_capabilities[0].WhichOneof("access_type") == "block"


def test_truth_values_and_empty_messages_are_understood():
    request = text.request_from("ControllerPublishVolume", ["readonly=true", "volume_capability.block="])
    assert request.readonly
    assert request.volume_capability.HasField("block")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense"], "field=value"),
        (["=1"], "field=value"),
        (["volume=1"], "has no field 'volume'"),
        (["name.first=1"], "has no fields of its own"),
        (["capacity_range=1"], "give its fields"),
        (["volume_capabilities.3.block="], "volume_capabilities.0"),
        (["parameters:={"], "not JSON"),
        (["capacity_range.required_bytes=many"], "CreateVolume"),
        (["capacity_range.required_bytes=64Mo"], "is not a size such as 500Mi"),
        (["capacityrange.required_bytes=1"], "did you mean .capacity_range"),
    ],
)
def test_a_word_that_is_wrong_is_named(words, says):
    with pytest.raises(UsageError, match=says):
        text.request_from("CreateVolume", words)


def test_every_method_of_the_five_services_is_listed_once():
    names = text.methods()
    assert len(names) == len(set(names))
    assert {name.split(".")[0] for name in names} == {
        "Identity",
        "Controller",
        "GroupController",
        "SnapshotMetadata",
        "Node",
    }
    assert ("capacity_range.required_bytes", "int64") in text.fields_of("CreateVolume")
    assert text.is_streaming("GetMetadataDelta")
    assert not text.is_streaming("Probe")
