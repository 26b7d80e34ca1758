"""The pure decisions of the sidecars: sizes, steps, names, leases, flags, slow keys, ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.csi import csi_pb2 as pb
from moorage.csi.capabilities import Capabilities
from moorage.csi.errors import CsiError
from moorage.errors import UsageError
from moorage.kube.objects import (
    CSIDriver,
    ObjectReference,
    PersistentVolume,
    PersistentVolumeClaim,
    SecretReference,
    StorageClass,
    VolumeAttachment,
    VolumeSpec,
    VolumeStatus,
)
from moorage.kube.objects.meta import Meta
from moorage.kube.objects.storage import AttachmentSource, AttachmentSpec, AttachmentStatus, CsiDriverSpec, VolumeError
from moorage.kube.objects.volumes import ClaimSpec, CsiVolumeSource
from moorage.sidecars import flags
from moorage.sidecars.attacher.decide import is_relevant_change, releases_volume, source_spec
from moorage.sidecars.capacity.segments import fnv1a_32, items_of, managed_by
from moorage.sidecars.errors import ProvisioningState, SidecarError
from moorage.sidecars.provisioner.attempt import ProvisionAttempt, from_text, to_text
from moorage.sidecars.provisioner.decide import (
    finalizer_wanted,
    is_candidate,
    should_delete,
    state_after,
    volume_name,
    why_not_provision,
)
from moorage.sidecars.provisioner.ownership import rank_of
from moorage.sidecars.provisioner.parameters import fs_type_of
from moorage.sidecars.resizer.sizes import Sizes, target_bytes
from moorage.sidecars.retry_later import RetryLater
from moorage.sidecars.roles import Role, role_named, roles_for
from moorage.sidecars.run import WantedRoles
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings, duration_s

PROVISIONER = "volume.kubernetes.io/storage-provisioner"
FINALIZER = "external-provisioner.volume.kubernetes.io/finalizer"


@pytest.mark.parametrize(
    ("volume", "state", "allocated", "failed", "expected"),
    [
        # P < S (request is 10)
        (5, "", None, False, 10),
        (5, "ControllerResizeInfeasible", 9, False, 10),
        (5, "ControllerResizeInProgress", 8, False, 8),
        (5, "ControllerResizeInProgress", 8, True, 10),
        (5, "NodeResizePending", 8, False, 8),
        (8, "NodeResizePending", 8, False, None),
        (5, "NodeResizeInfeasible", 7, False, 7),
        # P >= S
        (10, "NodeResizePending", 10, False, None),
        (12, "NodeResizeInProgress", 12, False, None),
        (12, "ControllerResizeInProgress", 12, False, 12),
        (12, "ControllerResizeInfeasible", 11, False, 11),
        (12, "NodeResizeInfeasible", 12, False, 12),
        (12, "", 11, False, 11),
        (12, "", None, False, 10),
    ],
)
def test_the_target_size_finishes_what_was_begun(volume, state, allocated, failed, expected):
    sizes = Sizes(requested=10, usable=3, volume=volume, allocated=allocated, state=state)
    assert target_bytes(sizes, had_final_error=failed, expands_on_controller=True) == expected


def test_a_volume_whose_filesystem_must_still_grow_is_left_to_the_node():
    sizes = Sizes(requested=10, usable=3, volume=10, allocated=None, state="", is_fs_pending=True)
    assert target_bytes(sizes, had_final_error=False, expands_on_controller=True) is None


@pytest.mark.parametrize(
    ("code", "topology", "selected", "state"),
    [
        ("RESOURCE_EXHAUSTED", True, True, ProvisioningState.RESCHEDULE),
        ("RESOURCE_EXHAUSTED", True, False, ProvisioningState.FINISHED),
        ("RESOURCE_EXHAUSTED", False, True, ProvisioningState.FINISHED),
        ("DEADLINE_EXCEEDED", True, True, ProvisioningState.BACKGROUND),
        ("CANCELLED", True, True, ProvisioningState.BACKGROUND),
        ("UNAVAILABLE", False, False, ProvisioningState.BACKGROUND),
        ("ABORTED", False, False, ProvisioningState.BACKGROUND),
        ("INVALID_ARGUMENT", False, False, ProvisioningState.INFEASIBLE),
        ("INTERNAL", False, False, ProvisioningState.FINISHED),
    ],
)
def test_what_a_failed_create_says_about_the_volume(code, topology, selected, state):
    assert state_after(CsiError("CreateVolume", code, ""), topology, selected) is state


def volume(policy="Delete", phase="Released", finalizers=(FINALIZER,), deleting=False, by="d"):
    stamp = "2026-01-01T00:00:00Z" if deleting else None
    meta = Meta(
        name="v",
        finalizers=list(finalizers),
        deletion_timestamp=stamp,
        annotations={"pv.kubernetes.io/provisioned-by": by} if by else {},
    )
    spec = VolumeSpec(persistent_volume_reclaim_policy=policy, csi=CsiVolumeSource(driver="d", volume_handle="h"))
    return PersistentVolume(metadata=meta, spec=spec, status=VolumeStatus(phase=phase))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (volume(), True),
        (volume(by=""), True),  # written by hand for our driver
        (volume(by="other"), False),
        (volume(policy="Retain"), False),
        (volume(phase="Bound"), False),
        (volume(deleting=True), True),
        (volume(deleting=True, finalizers=()), False),
    ],
)
def test_a_volume_is_deleted_when_it_is_released_and_ours(found, expected):
    assert should_delete(found, "d") is expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (volume(phase="Bound", finalizers=()), True),
        (volume(phase="Bound"), None),
        (volume(phase="Pending", finalizers=()), None),
        (volume(policy="Retain"), False),
        (volume(policy="Retain", finalizers=()), None),
        (volume(phase="Bound", finalizers=(), deleting=True), None),
    ],
)
def test_the_finalizer_goes_with_the_policy(found, expected):
    assert finalizer_wanted(found, "d") is expected


def test_a_migrated_object_is_ours_when_its_annotation_names_us():
    migrated = {"pv.kubernetes.io/migrated-to": "d"}
    claim = PersistentVolumeClaim(metadata=Meta(annotations=migrated | {PROVISIONER: "kubernetes.io/in-tree"}))
    in_tree = StorageClass(provisioner="kubernetes.io/in-tree")
    assert is_candidate(claim, "d")
    assert why_not_provision(claim, in_tree, "d") == ""
    assert not is_candidate(claim, "other")
    finalizers = ["external-attacher/d"]
    taken = PersistentVolume(metadata=Meta(finalizers=finalizers, annotations=migrated))
    assert not releases_volume(taken, "d")
    assert releases_volume(PersistentVolume(metadata=Meta(finalizers=finalizers)), "d")


def test_an_attachment_names_a_volume_or_holds_its_spec():
    spec = VolumeSpec(csi=CsiVolumeSource(driver="d", volume_handle="h"))
    volume = PersistentVolume(metadata=Meta(name="v"), spec=spec)

    def attachment(**source):
        return VolumeAttachment(spec=AttachmentSpec(source=AttachmentSource(**source)))

    assert source_spec(attachment(inline_volume_spec=spec), None) is spec
    assert source_spec(attachment(persistent_volume_name="v"), volume) is spec
    for wrong, why in (
        (attachment(persistent_volume_name="v", inline_volume_spec=spec), "both"),
        (attachment(), "names no volume"),
        (attachment(persistent_volume_name="gone"), "does not exist"),
        (attachment(inline_volume_spec=VolumeSpec()), "not for a CSI volume"),
    ):
        with pytest.raises(SidecarError, match=why):
            source_spec(wrong, None)


def test_a_claim_is_left_alone_until_it_is_ours_to_provision():
    ours = Meta(annotations={PROVISIONER: "d"})
    late = StorageClass(provisioner="d", volume_binding_mode="WaitForFirstConsumer")
    assert "first consumer" in why_not_provision(PersistentVolumeClaim(metadata=ours), late, "d")
    beta = Meta(annotations={"volume.beta.kubernetes.io/storage-provisioner": "d"})
    assert why_not_provision(PersistentVolumeClaim(metadata=beta), StorageClass(provisioner="d"), "d") == ""
    assert "another provisioner" in why_not_provision(
        PersistentVolumeClaim(metadata=ours), StorageClass(provisioner="e"), "d"
    )
    bound = PersistentVolumeClaim(metadata=ours, spec=ClaimSpec(volume_name="v"))
    assert why_not_provision(bound, StorageClass(provisioner="d"), "d") != ""


def test_names_of_volumes_are_the_official_ones():
    assert volume_name("pvc", -1, "a-b-c") == "pvc-a-b-c"
    assert volume_name("vol", 2, "a-b-c") == "vol-ab"


def test_the_managed_by_label_fits_whatever_the_node_is_called():
    assert managed_by() == "external-provisioner"
    assert managed_by("n1") == "external-provisioner-n1"
    node = "n" * 45
    assert managed_by(node) == f"{'external-provisioner'[:8]}-{fnv1a_32('external-provisioner'):08x}-{node}"
    assert all(len(managed_by("n" * length)) <= 63 for length in range(300))


def test_only_errors_of_our_own_are_no_reason_to_look_again():
    old = VolumeAttachment(metadata=Meta(name="a", resource_version="1"))
    status = AttachmentStatus(attach_error=VolumeError(message="no"))
    new = VolumeAttachment(metadata=Meta(name="a", resource_version="2"), status=status)
    assert not is_relevant_change(old, new)
    assert is_relevant_change(old, old)
    assert is_relevant_change(None, new)
    moved = VolumeAttachment(metadata=Meta(name="a", resource_version="3", deletion_timestamp="x"), status=status)
    assert is_relevant_change(new, moved)


def test_roles_follow_what_the_driver_can_do():
    can = Capabilities(
        plugin=frozenset({"CONTROLLER_SERVICE"}), rpcs=frozenset({"CREATE_DELETE_VOLUME", "GET_CAPACITY"})
    )
    driver = CSIDriver(spec=CsiDriverSpec(attach_required=False, storage_capacity=True))
    assert roles_for(can, SidecarSettings(), driver) == {Role.PROVISIONER, Role.CAPACITY}
    assert Role.ATTACHER in roles_for(can, SidecarSettings(), None)
    assert Role.REGISTRAR in roles_for(can, SidecarSettings(kubelet_registration_path="/x"), driver)
    assert role_named("csi-provisioner") is Role.PROVISIONER
    with pytest.raises(UsageError, match="no role is called"):
        role_named("sidecar")


def test_flags_are_taken_as_go_programs_take_them():
    given_flags = ["provisioner", "--leader-election=true", "-csi-address=/x", "--timeout", "1m30s", "--v=5", "-v", "4"]
    settings, others = flags.parse(given_flags)
    assert others == ["provisioner"]
    assert (settings.leader_election, settings.csi_address, settings.timeout_s) == (True, "/x", 90.0)
    assert flags.parse(["--leader-election", "attacher"])[1] == ["attacher"]
    assert flags.parse(["--immediate-topology=false"])[0].immediate_topology is False
    assert flags.parse(["--workers=3"])[0].workers_for("resizer") == 3
    assert SidecarSettings().workers_for("provisioner") == 100
    assert SidecarSettings(feature_gates="Topology=false,X=true").gate("Topology", True) is False
    for wrong in (["--nope"], ["--timeout=soon"], ["--leader-election=perhaps"], ["--timeout"], ["--max-entries=x"]):
        with pytest.raises(UsageError):
            flags.parse(wrong)
    assert "--kubelet-registration-path" in flags.help_text()


# What the official sidecars take, by their --help and their sources; one with a value is written with it.
_COMMON = """automaxprocs csi-address=/x feature-gates=A=true http-endpoint=:1 kube-api-burst=1 kube-api-qps=1
    kubeconfig=/x
    leader-election leader-election-labels=a:b leader-election-lease-duration=15s leader-election-namespace=n
    leader-election-renew-deadline=10s leader-election-retry-period=5s log-flush-frequency=5s
    log-json-info-buffer-size=0 log-json-split-stream log-text-info-buffer-size=0 log-text-split-stream
    logging-format=text metrics-address=:1 metrics-path=/m retry-interval-max=5m retry-interval-start=1s timeout=10s
    v=5 version vmodule=a=1"""
OFFICIAL_FLAGS = {
    "csi-provisioner": """capacity-for-immediate-binding capacity-ownerref-level=1 capacity-poll-interval=1m
        capacity-threads=1 cloning-protection-threads=1 controller-publish-readonly default-fstype=xfs enable-capacity
        enable-pprof extra-create-metadata immediate-topology kube-api-capacity-burst=1 kube-api-capacity-qps=1
        master=x node-deployment node-deployment-base-delay=20s node-deployment-immediate-binding
        node-deployment-max-delay=60s prevent-volume-mode-conversion snapshot-orphan-sweep-interval=5m strict-topology
        volume-name-prefix=p volume-name-uuid-length=-1 worker-threads=1""",
    "csi-attacher": """default-fstype=xfs max-entries=0 max-grpc-log-length=-1 reconcile-sync=1m resync=10m
        worker-threads=1""",
    "csi-resizer": "extra-modify-metadata handle-volume-inuse-error master=x resync-period=10m workers=1",
    "csi-snapshotter": """extra-create-metadata groupsnapshot-name-prefix=g groupsnapshot-name-uuid-length=-1
        node-deployment resync-period=15m snapshot-name-prefix=s snapshot-name-uuid-length=-1 worker-threads=1""",
    "csi-node-driver-registrar": """connection-timeout=1s enable-pprof health-port=0 kubelet-registration-path=/x mode=
        plugin-registration-path=/x""",
    "livenessprobe": "health-port=9808 probe-timeout=3s",
    "csi-external-health-monitor-controller": """enable-node-watcher list-volumes-interval=5m monitor-interval=1m
        node-list-add-interval=5m resync=10m volume-list-add-interval=5m worker-threads=10""",
}


@pytest.mark.parametrize("official", sorted(OFFICIAL_FLAGS))
def test_every_flag_of_an_official_sidecar_is_taken_in_both_notations(official):
    assert role_named(official) in Role
    for flag in f"{_COMMON} {OFFICIAL_FLAGS[official]}".split():
        name, has_value, value = flag.partition("=")
        assert flags.parse([f"--{flag}", "role"])[1] == ["role"]
        apart = [f"-{name}", value, "role"] if has_value else [f"-{name}", "role"]
        assert flags.parse(apart)[1] == ["role"]


def test_defaults_are_the_official_ones():
    settings = SidecarSettings()
    timeouts = {"provisioner": 10, "attacher": 15, "resizer": 10, "snapshotter": 60, "health": 15, "registrar": 1}
    assert {role: settings.timeout_for(role) for role in timeouts} == timeouts
    workers = {"provisioner": 100, "attacher": 10, "resizer": 10, "snapshotter": 10, "health": 10}
    assert {role: settings.workers_for(role) for role in workers} == workers
    assert (settings.retry_interval_start_s, settings.retry_interval_max_s) == (1, 300)
    assert (settings.monitor_interval_s, settings.list_volumes_interval_s, settings.probe_timeout_s) == (60, 300, 3)
    assert (settings.capacity_poll_interval_s, settings.reconcile_sync_s) == (60, 60)
    leases = (
        settings.leader_election_lease_duration_s,
        settings.leader_election_renew_deadline_s,
        settings.leader_election_retry_period_s,
    )
    assert leases == (15, 10, 5)


def test_liveness_listens_where_livenessprobe_does_unless_told_otherwise():
    def port(*roles, **settings):
        return WantedRoles(SidecarSettings(**settings), SidecarEnvironment(), frozenset(roles)).health_port

    assert port(Role.LIVENESS) == 9808
    assert port(Role.LIVENESS, health_port=9898) == 9898
    assert port(Role.LIVENESS, http_endpoint=":8080") == 0
    assert port(Role.PROVISIONER) == port() == 0


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("1m30s", 90), ("500ms", 0.5), ("1h", 3600), ("0", 0)])
def test_durations_are_gos(text, seconds):
    assert duration_s(text) == seconds


def test_a_slow_key_leaves_by_itself_and_adding_it_again_does_not_keep_it():
    now = [0.0]
    slow: RetryLater[str] = RetryLater(10.0, clock=lambda: now[0])
    assert slow.add("k")
    now[0] = 6.0
    assert not slow.add("k")
    assert slow.left_s("k") == 4.0
    now[0] = 10.0
    assert "k" not in slow
    assert slow.add("k")


def test_the_filesystem_is_named_once():
    assert fs_type_of({"FSType": "xfs"}) == "xfs"
    assert fs_type_of({"csi.storage.k8s.io/fstype": "ext4"}) == "ext4"
    with pytest.raises(Exception, match="twice"):
        fs_type_of({"fstype": "xfs", "csi.storage.k8s.io/fstype": "ext4"})


@given(st.sets(st.text("abcdef", min_size=1), min_size=1), st.text())
def test_every_node_has_its_own_rank_for_a_claim(nodes, uid):
    assert sorted(rank_of(node, nodes, uid) for node in nodes) == list(range(len(nodes)))


def test_an_attempt_survives_the_journal():
    attempt = ProvisionAttempt(
        claim=ObjectReference(kind="PersistentVolumeClaim", name="c", namespace="n", uid="u"),
        class_name="fast",
        class_uid="cu",
        request=pb.CreateVolumeRequest(name="pvc-u", parameters={"a": "b"}),
        skeleton={"metadata": {"name": "pvc-u"}, "spec": {"csi": {"driver": "d"}}},
        secret=SecretReference(name="s", namespace="n"),
        has_selected_node=True,
        source=None,
        source_is_required=False,
    )
    assert from_text(to_text(attempt)) == attempt
    with pytest.raises(ValueError, match="not an attempt"):
        from_text("AAAA")


def test_immediate_classes_need_no_published_capacity():
    classes = [
        StorageClass(metadata=Meta(name="late"), provisioner="d", volume_binding_mode="WaitForFirstConsumer"),
        StorageClass(metadata=Meta(name="now"), provisioner="d", volume_binding_mode="Immediate"),
        StorageClass(metadata=Meta(name="other"), provisioner="e"),
    ]
    assert {item.storage_class for item in items_of([()], classes, "d", False)} == {"late"}
    assert {item.storage_class for item in items_of([()], classes, "d", True)} == {"late", "now"}
