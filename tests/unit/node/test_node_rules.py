"""Small decisions: versions, access modes, fsGroup, errors, expansion, names."""

import hashlib

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.kube.objects.meta import Meta
from moorage.kube.objects.storage import CsiDriverSpec
from moorage.kube.objects.volumes import ClaimSpec, ClaimStatus, PersistentVolumeClaim
from moorage.kube.volumes import attachment_name, csi_volume_name, ephemeral_handle
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.plugins.versions import highest_usable
from moorage.node.volumes import rules, wire
from moorage.node.volumes.expand import Choice, decide
from moorage.node.volumes.state import CsiSource, PodRef, StepFailure, VolumeUse

MODE = pb.VolumeCapability.AccessMode
GI = 1 << 30


def use_of(source, **fields):
    name = csi_volume_name(source.driver, source.handle)
    return VolumeUse(name, PodRef(PodUid("u"), "ns", "pod", "sa"), source, ("v",), **fields)


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (["1.0.0"], (1, 0, 0)),
        (["0.3.0", "v1.12"], (1, 12, 0)),
        (["1.2.0", "2.0.0"], (1, 2, 0)),
        (["0.3.0"], None),
        (["2.0.0"], None),
        (["banana"], None),
        (["1"], None),  # nor does a kubelet take these two
        (["01.2"], None),
        (["banana", "v1.3.0-rc1+meta"], (1, 3, 0)),
        (["1.2", "1.10", "1.9.9.9"], (1, 10, 0)),
        ([], None),
    ],
)
def test_a_plugin_needs_a_version_of_major_one(offered, expected):
    assert highest_usable(offered) == expected


@pytest.mark.parametrize(
    ("modes", "plain", "fine"),
    [
        (("ReadWriteOnce", "ReadOnlyMany"), MODE.SINGLE_NODE_WRITER, MODE.SINGLE_NODE_MULTI_WRITER),
        (("ReadOnlyMany",), MODE.MULTI_NODE_READER_ONLY, MODE.MULTI_NODE_READER_ONLY),
        (("ReadWriteMany",), MODE.MULTI_NODE_MULTI_WRITER, MODE.MULTI_NODE_MULTI_WRITER),
        (("ReadWriteOncePod",), MODE.SINGLE_NODE_WRITER, MODE.SINGLE_NODE_SINGLE_WRITER),
        ((), MODE.SINGLE_NODE_WRITER, MODE.SINGLE_NODE_MULTI_WRITER),
    ],
)
def test_only_the_first_access_mode_counts(modes, plain, fine):
    assert rules.access_mode(modes, ()) == plain
    assert rules.access_mode(modes, {rules.MULTI_WRITER}) == fine


@pytest.mark.parametrize(
    ("policy", "fs_type", "modes", "capabilities", "read_only", "applies"),
    [
        (None, "ext4", ("ReadWriteOnce",), (), False, True),
        (None, "", ("ReadWriteOnce",), (), False, False),
        (None, "ext4", ("ReadWriteMany",), (), False, False),
        (None, "ext4", ("ReadWriteOncePod",), (), False, True),
        ("File", "", ("ReadWriteMany",), (), False, True),
        ("None", "ext4", ("ReadWriteOnce",), (), False, False),
        ("File", "ext4", ("ReadWriteOnce",), (rules.MOUNT_GROUP,), False, False),
        ("File", "ext4", ("ReadWriteOnce",), (), True, False),
        ("ReadWriteOnceWithFSType", "ext4", ("ReadWriteOnce",), (), False, True),
        ("ReadWriteOnceWithFSType", "", ("ReadWriteOnce",), (), False, False),
        ("ReadWriteOnceWithFSType", "ext4", ("ReadOnlyMany", "ReadWriteOnce"), (), False, True),
        ("ReadWriteOnceWithFSType", "ext4", ("ReadOnlyMany",), (), False, False),
        ("ReadWriteOnceWithFSType", "ext4", ("ReadWriteOnce",), (rules.MOUNT_GROUP,), False, False),
        ("", "ext4", ("ReadWriteOnce",), (), False, True),
        ("", "", ("ReadWriteOnce",), (), False, False),
    ],
)
def test_who_gives_files_to_the_group(policy, fs_type, modes, capabilities, read_only, applies):
    source = CsiSource("d", "h", "pv", access_modes=modes, fs_type=fs_type)
    driver = CsiDriverSpec(fs_group_policy=policy or None) if policy is not None else None  # "": an object without it
    found = rules.agent_applies_fs_group(use_of(source, fs_group=7, read_only=read_only), driver, capabilities)
    assert found is applies


@pytest.mark.parametrize(
    ("policy", "fs_type", "applies"),
    [(None, "ext4", True), (None, "", False), ("File", "", True), ("None", "ext4", False)],
)
def test_an_inline_volume_has_no_access_modes_but_its_filesystem_counts(policy, fs_type, applies):
    source = CsiSource("d", "h", "v", is_ephemeral=True, fs_type=fs_type)
    found = rules.agent_applies_fs_group(use_of(source, fs_group=7), CsiDriverSpec(fs_group_policy=policy), ())
    assert found is applies


def test_no_group_no_change():
    source = CsiSource("d", "h", "pv", access_modes=("ReadWriteOnce",), fs_type="ext4")
    assert not rules.agent_applies_fs_group(use_of(source), CsiDriverSpec(fs_group_policy="File"), ())


@pytest.mark.parametrize("code", ["CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED"])
def test_these_codes_say_nothing_about_what_happened(code):
    assert rules.failure_from(CsiError("NodeStageVolume", code, "x")) is StepFailure.UNCERTAIN


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "NOT_FOUND", "UNKNOWN", "FAILED_PRECONDITION"])
def test_all_others_are_final(code):
    assert rules.failure_from(CsiError("NodeStageVolume", code, "x")) is StepFailure.FINAL


def test_an_inline_volume_needs_a_driver_that_says_so():
    inline, claimed = CsiSource("d", "h", "v", is_ephemeral=True), CsiSource("d", "h", "v")
    assert "no CSIDriver" in rules.lifecycle_obstacle(inline, None)
    assert "Ephemeral" in rules.lifecycle_obstacle(inline, CsiDriverSpec())
    assert rules.lifecycle_obstacle(inline, CsiDriverSpec(volume_lifecycle_modes=["Ephemeral"])) == ""
    assert rules.lifecycle_obstacle(claimed, None) == ""
    assert "Persistent" in rules.lifecycle_obstacle(claimed, CsiDriverSpec(volume_lifecycle_modes=["Ephemeral"]))


def test_the_group_goes_to_a_driver_that_asks_for_it_and_labels_to_the_flags():
    source = CsiSource("d", "h", "v", mount_options=("noatime",), fs_type="xfs")
    made = wire.capability(use_of(source, fs_group=99), source, {rules.MOUNT_GROUP}, "a:b:c:d")
    assert made.mount.volume_mount_group == "99"
    assert list(made.mount.mount_flags) == ["noatime", 'context="a:b:c:d"']
    assert made.mount.fs_type == "xfs"
    block = wire.capability(use_of(source), CsiSource("d", "h", "v", is_block=True), ())
    assert block.HasField("block")
    assert not block.HasField("mount")


def test_pod_info_has_the_five_keys():
    info = wire.pod_info(use_of(CsiSource("d", "h", "v", is_ephemeral=True)))
    assert info == {
        "csi.storage.k8s.io/pod.name": "pod",
        "csi.storage.k8s.io/pod.namespace": "ns",
        "csi.storage.k8s.io/pod.uid": "u",
        "csi.storage.k8s.io/serviceAccount.name": "sa",
        "csi.storage.k8s.io/ephemeral": "true",
    }


def test_names_are_those_that_kubernetes_makes(tmp_path):
    assert attachment_name("d", "h", "n") == "csi-" + hashlib.sha256(b"hdn").hexdigest()
    assert len(ephemeral_handle("u", "v")) == len("csi-") + 64
    layout = NodeLayout(tmp_path)
    assert layout.publish_target("u", "pv") == tmp_path / "pods/u/volumes/kubernetes.io~csi/pv/mount"
    staged = layout.staging_target("drv", "h").relative_to(tmp_path).parts
    assert staged[:4] == ("plugins", "kubernetes.io", "csi", "drv")
    assert staged[-1] == "globalmount"
    assert layout.block_map("pv", "u") == tmp_path / "plugins/kubernetes.io/csi/volumeDevices/pv/dev/u"


def claim(state="", allocated="", usable="1Gi", modes=("ReadWriteOnce",), annotations=None):
    return PersistentVolumeClaim(
        metadata=Meta(name="c", namespace="ns", annotations=annotations or {}),
        spec=ClaimSpec(access_modes=list(modes)),
        status=ClaimStatus(
            capacity={"storage": usable},
            allocated_resources={"storage": allocated} if allocated else {},
            allocated_resource_statuses={"storage": state} if state else {},
        ),
    )


@pytest.mark.parametrize(
    ("found", "choice", "target"),
    [
        (claim("NodeResizePending", "2Gi"), Choice.GROW, 2 * GI),
        (claim("NodeResizeInProgress", "2Gi"), Choice.GROW, 2 * GI),
        (claim("ControllerResizeInProgress", "2Gi"), Choice.NOTHING, 0),
        (claim("NodeResizeInfeasible", "2Gi"), Choice.NOTHING, 0),
        (claim(), Choice.GROW_UNTRACKED, 3 * GI),
        (claim("NodeResizeInProgress"), Choice.GROW, 3 * GI),
        (claim("", "", "3Gi"), Choice.RECORD, 3 * GI),
        (claim("", "2Gi", "2Gi"), Choice.RECORD, 2 * GI),
        (claim("", "2Gi", "2Gi", ("ReadWriteMany",)), Choice.GROW_SILENTLY, 2 * GI),
        (
            claim("", "2Gi", "2Gi", ("ReadWriteMany",), {"volume.kubernetes.io/node-expansion-not-required": "yes"}),
            Choice.RECORD,
            2 * GI,
        ),
    ],
)
def test_the_claims_status_decides_whether_to_grow_here(found, choice, target):
    decision = decide(found, 3 * GI)
    assert (decision.choice, decision.target_bytes) == (choice, target)
