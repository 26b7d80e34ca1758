"""Access modes as CSI has them."""

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.access_modes import capabilities_per_mode, capability_of, mode_of
from moorage.csi.errors import InvalidAccessModes

RWO, RWX, ROX, RWOP = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"
NAME = pb.VolumeCapability.AccessMode.Mode.Name


@pytest.mark.parametrize(
    ("modes", "plain", "fine"),
    [
        ([RWO], "SINGLE_NODE_WRITER", "SINGLE_NODE_MULTI_WRITER"),
        ([RWOP], "SINGLE_NODE_WRITER", "SINGLE_NODE_SINGLE_WRITER"),
        ([RWX], "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"),
        ([ROX], "MULTI_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY"),
        ([RWO, RWX], "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"),
        ([ROX, RWX, RWO], "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"),
    ],
)
def test_a_set_of_modes_has_one_csi_mode(modes, plain, fine):
    assert NAME(mode_of(modes, False)) == plain
    assert NAME(mode_of(modes, True)) == fine


@pytest.mark.parametrize("modes", [[ROX, RWO], [RWOP, RWO], [], ["Sometimes"]])
def test_sets_without_a_csi_mode_are_refused(modes):
    with pytest.raises(InvalidAccessModes):
        mode_of(modes, False)


def test_a_claim_gets_one_capability_per_mode_and_a_volume_one_for_all():
    found = capabilities_per_mode([ROX, RWO], False, "xfs", ["ro"], False)
    assert [NAME(c.access_mode.mode) for c in found] == ["MULTI_NODE_READER_ONLY", "SINGLE_NODE_WRITER"]
    assert found[0].mount.fs_type == "xfs"
    with pytest.raises(InvalidAccessModes):
        capabilities_per_mode([RWOP, RWO], False, "", [], False)
    assert capability_of([RWO], True, "ext4", [], False).HasField("block")
