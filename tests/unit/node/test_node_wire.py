"""Which field of a CSI request is filled with what."""

from dataclasses import replace
from pathlib import Path

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.volumes import csi_volume_name
from moorage.node.layout import PodUid
from moorage.node.volumes import rules, wire
from moorage.node.volumes.state import CsiSource, PodRef, VolumeUse

MODE = pb.VolumeCapability.AccessMode
PLACE, TARGET = Path("/r/globalmount"), Path("/r/mount")
CLAIMED = CsiSource(
    "d",
    "handle",
    "pv",
    access_modes=("ReadWriteOncePod", "ReadOnlyMany"),
    fs_type="ext4",
    mount_options=("noatime", "discard"),
    attributes={"pool": "fast"},
)
INLINE = replace(CLAIMED, is_ephemeral=True, access_modes=(), spec_name="v")
BLOCK = replace(CLAIMED, is_block=True)
EXTRAS = wire.Extras(
    publish_context={"device": "sdx"},
    secrets={"password": "x"},
    context={"csi.storage.k8s.io/pod.name": "p"},
    se_linux_context="u:r:t:s0",
)
LABEL = 'context="u:r:t:s0"'


def use(source, **fields):
    return VolumeUse(csi_volume_name("d", "handle"), PodRef(PodUid("u"), "ns", "p"), source, ("v",), **fields)


def test_staging_carries_what_the_volume_is_and_nothing_of_the_pod():
    made = wire.stage_request(use(CLAIMED), CLAIMED, PLACE, EXTRAS, {rules.MULTI_WRITER})
    assert (made.volume_id, made.staging_target_path) == ("handle", str(PLACE))
    assert dict(made.publish_context) == {"device": "sdx"}
    assert dict(made.secrets) == {"password": "x"}
    assert dict(made.volume_context) == {"pool": "fast"}
    assert made.volume_capability.access_mode.mode == MODE.SINGLE_NODE_SINGLE_WRITER
    assert made.volume_capability.mount.fs_type == "ext4"
    assert list(made.volume_capability.mount.mount_flags) == ["noatime", "discard", LABEL]


@pytest.mark.parametrize("read_only", [False, True])
def test_publishing_carries_the_pod_as_well(read_only):
    made = wire.publish_request(use(CLAIMED, read_only=read_only), CLAIMED, PLACE, TARGET, EXTRAS, ())
    assert (made.volume_id, made.target_path, made.readonly) == ("handle", str(TARGET), read_only)
    assert made.staging_target_path == str(PLACE)
    assert dict(made.publish_context) == {"device": "sdx"}
    assert dict(made.secrets) == {"password": "x"}
    assert dict(made.volume_context) == {"pool": "fast", "csi.storage.k8s.io/pod.name": "p"}
    assert made.volume_capability.access_mode.mode == MODE.SINGLE_NODE_WRITER
    assert list(made.volume_capability.mount.mount_flags) == ["noatime", "discard", LABEL]


def test_without_staging_there_is_no_staging_path():
    assert wire.publish_request(use(CLAIMED), CLAIMED, None, TARGET, EXTRAS, ()).staging_target_path == ""


def test_an_inline_volume_has_no_mount_options_but_the_label_and_one_writer():
    made = wire.publish_request(use(INLINE), INLINE, None, TARGET, EXTRAS, ())
    assert list(made.volume_capability.mount.mount_flags) == [LABEL]
    assert made.volume_capability.mount.fs_type == "ext4"
    assert made.volume_capability.access_mode.mode == MODE.SINGLE_NODE_WRITER


def test_a_block_volume_has_neither_flags_nor_group():
    for made in (
        wire.stage_request(use(BLOCK, fs_group=7), BLOCK, PLACE, EXTRAS, {rules.MOUNT_GROUP}),
        wire.publish_request(use(BLOCK, fs_group=7), BLOCK, PLACE, TARGET, EXTRAS, {rules.MOUNT_GROUP}),
    ):
        assert made.volume_capability.HasField("block")
        assert not made.volume_capability.HasField("mount")
        assert made.staging_target_path == str(PLACE)


@pytest.mark.parametrize(
    ("capabilities", "fs_group", "sent"),
    [({rules.MOUNT_GROUP}, 7, "7"), ({rules.MOUNT_GROUP}, 0, "0"), ({rules.MOUNT_GROUP}, None, ""), (set(), 7, "")],
)
def test_the_group_goes_only_to_a_driver_that_applies_it(capabilities, fs_group, sent):
    one = use(CLAIMED, fs_group=fs_group)
    staged = wire.stage_request(one, CLAIMED, PLACE, EXTRAS, capabilities)
    published = wire.publish_request(one, CLAIMED, PLACE, TARGET, EXTRAS, capabilities)
    assert [made.volume_capability.mount.volume_mount_group for made in (staged, published)] == [sent, sent]


@pytest.mark.parametrize(("source", "is_ephemeral"), [(CLAIMED, "false"), (INLINE, "true")])
def test_pod_info_says_whether_the_volume_lives_with_the_pod(source, is_ephemeral):
    assert wire.pod_info(use(source))["csi.storage.k8s.io/ephemeral"] == is_ephemeral
