"""Which volumes a pod needs, and why some cannot be used."""

import msgspec
import pytest
from msgspec.structs import replace

from moorage.kube.objects.core import Node
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CsiDriverSpec
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.node.volumes.plan import wants_growth
from moorage.node.volumes.populate import refuse_replacements, same_for_uses, uses_of
from moorage.node.volumes.state import ActualVolume, CsiSource, PlainSource


def made(kind, document):
    return msgspec.convert(document, kind)


def pod(*volumes, mounts=None, devices=(), **spec):
    names = [volume["name"] for volume in volumes] if mounts is None else mounts
    container = {
        "name": "c",
        "image": "host",
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in names],
        "volumeDevices": [{"name": name, "devicePath": f"/dev/{name}"} for name in devices],
    }
    meta = {"name": "p", "namespace": "ns", "uid": "uid-p"}
    return made(Pod, {"metadata": meta, "spec": {"volumes": list(volumes), "containers": [container], **spec}})


def claim(phase="Bound", volume="pv", uid="uid-c", **meta):
    return made(
        PersistentVolumeClaim,
        {
            "metadata": {"name": "c", "namespace": "ns", "uid": uid, **meta},
            "spec": {"volumeName": volume},
            "status": {"phase": phase, "capacity": {"storage": "1Gi"}},
        },
    )


def volume(uid="uid-c", **spec):
    base = {
        "capacity": {"storage": "2Gi"},
        "accessModes": ["ReadWriteOnce"],
        "claimRef": {"namespace": "ns", "name": "c", "uid": uid},
        "csi": {"driver": "d", "volumeHandle": "h", "fsType": "ext4", "volumeAttributes": {"a": "b"}},
        "mountOptions": ["noatime"],
    }
    return made(PersistentVolume, {"metadata": {"name": "pv"}, "spec": {**base, **spec}})


class Cluster:
    def __init__(self, claim=None, volume=None, driver=None, labels=None, se_linux=False):
        self._claim, self._volume, self._driver, self._labels = claim, volume, driver, labels or {}
        self._se_linux = se_linux

    def claim(self, key):
        return self._claim if key == "ns/c" else None

    def volume(self, name):
        return self._volume if name == "pv" else None

    def driver(self, name):
        return self._driver

    def node(self):
        return made(Node, {"metadata": {"name": "n", "labels": self._labels}})

    def has_se_linux(self):
        return self._se_linux


CLAIMED = {"name": "v", "persistentVolumeClaim": {"claimName": "c"}}


def test_a_bound_claim_becomes_a_use_of_its_volume():
    needs = uses_of(pod(CLAIMED, securityContext={"fsGroup": 5}), Cluster(claim(), volume()), 60.0)
    (use,) = needs.uses
    assert needs.errors == {}
    assert use.volume == "kubernetes.io/csi/d^h"
    assert use.is_attachable  # there is no CSIDriver object
    assert (use.fs_group, use.size_bytes, use.claim_size_bytes) == (5, 2 << 30, 1 << 30)
    assert isinstance(use.source, CsiSource)
    assert (use.source.spec_name, use.source.mount_options, use.source.claim) == ("pv", ("noatime",), "ns/c")


def affinity(**expression):
    return {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster(), "not found"),
        (Cluster(claim("Pending")), "not bound"),
        (Cluster(claim(volume="")), "not bound"),
        (Cluster(claim()), "persistentvolume 'pv' not found"),
        (Cluster(claim(), volume(uid="other")), "is not bound to PVC"),
        (Cluster(claim(deletionTimestamp="2026-01-01T00:00:00Z"), volume()), "being deleted"),
        (Cluster(claim(), volume(csi=None)), "not a CSI volume"),
        (Cluster(claim(), volume(volumeMode="Block")), "volumeMode Block"),
        (
            Cluster(
                claim(),
                volume(nodeAffinity=affinity(key="zone", operator="In", values=["a"])),
                labels={"zone": "b"},
            ),
            "node affinity",
        ),
        (Cluster(claim(), volume(nodeAffinity=affinity(key="zone", operator="Like")), labels={}), "Like"),
        (Cluster(claim(), volume(capacity={"storage": "plenty"})), "plenty"),
    ],
)
def test_an_unusable_claim_is_an_error_in_words(cluster, words):
    needs = uses_of(pod(CLAIMED), cluster, 60.0)
    assert needs.uses == []
    assert words in needs.errors["v"]


def test_a_claim_that_is_protected_may_still_be_used_while_it_is_deleted():
    held = claim(deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["kubernetes.io/pvc-protection"])
    assert uses_of(pod(CLAIMED), Cluster(held, volume()), 60.0).errors == {}


def test_a_volume_that_no_container_refers_to_is_not_mounted():
    assert uses_of(pod(CLAIMED, mounts=[]), Cluster(claim(), volume()), 60.0).uses == []


def test_one_claim_under_two_names_is_mounted_once_and_written_if_either_writes():
    second = {"name": "w", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}}
    (use,) = uses_of(pod(CLAIMED, second), Cluster(claim(), volume()), 60.0).uses
    assert use.outer_names == ("v", "w")
    assert not use.read_only


def test_a_filesystem_volume_is_no_device():
    needs = uses_of(pod(CLAIMED, mounts=[], devices=["v"]), Cluster(claim(), volume()), 60.0)
    assert "volumeMode Filesystem" in needs.errors["v"]


def test_a_reader_never_makes_the_volume_grow():
    reader = {"name": "v", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}}
    (use,) = uses_of(pod(reader), Cluster(claim(), volume()), 60.0).uses
    assert use.read_only
    assert use.claim_size_bytes < use.size_bytes
    assert not wants_growth(ActualVolume(use.volume, use.source), use)
    (writer,) = uses_of(pod(CLAIMED), Cluster(claim(), volume()), 60.0).uses
    assert wants_growth(ActualVolume(use.volume, use.source), writer)


def test_what_the_driver_says_about_itself_counts():
    spec = CsiDriverSpec(attach_required=False, requires_republish=True)
    (use,) = uses_of(pod(CLAIMED), Cluster(claim(), volume(), spec), 60.0).uses
    assert not use.is_attachable
    assert use.republish_s == 60.0


@pytest.mark.parametrize(
    ("driver", "is_attachable"),
    [(None, True), (CsiDriverSpec(), True), (CsiDriverSpec(attach_required=True), True)]
    + [(CsiDriverSpec(attach_required=False), False)],
)
def test_a_volume_is_attached_unless_its_driver_says_that_it_is_not(driver, is_attachable):
    (use,) = uses_of(pod(CLAIMED), Cluster(claim(), volume(), driver), 60.0).uses
    assert use.is_attachable is is_attachable


@pytest.mark.parametrize(("policy", "found"), [(None, False), ("Always", False), ("OnRootMismatch", True)])
def test_the_pod_says_when_files_are_looked_at(policy, found):
    security = {"fsGroup": 5, "fsGroupChangePolicy": policy}
    inline = {"name": "i", "csi": {"driver": "d", "fsType": "xfs"}}
    uses = uses_of(pod(CLAIMED, inline, securityContext=security), Cluster(claim(), volume()), 60.0).uses
    assert [use.fs_group_on_root_mismatch for use in uses] == [found, found]
    assert [use.source.fs_type for use in uses] == ["ext4", "xfs"]


@pytest.mark.parametrize(
    ("state", "expands"),
    [("", True), ("NodeResizePending", True), ("NodeResizeInProgress", True), ("ControllerResizeInProgress", False)]
    + [("ControllerResizeInfeasible", False), ("NodeResizeInfeasible", False)],
)
def test_a_node_waits_for_the_controllers_part_of_an_expansion(state, expands):
    held = claim()
    status = replace(held.status, allocated_resource_statuses={"storage": state} if state else {})
    (use,) = uses_of(pod(CLAIMED), Cluster(replace(held, status=status), volume()), 60.0).uses
    assert use.claim_expands is expands


def test_init_containers_have_volumes_too_and_a_claim_reference_may_be_missing():
    init = {"name": "i", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    needs = uses_of(pod(CLAIMED, mounts=[], initContainers=[init]), Cluster(claim(), volume()), 60.0)
    assert [use.outer_names for use in needs.uses] == [("v",)]
    unbound = uses_of(pod(CLAIMED), Cluster(claim(), volume(claimRef=None)), 60.0)
    assert "is not bound to PVC" in unbound.errors["v"]


def test_a_generic_ephemeral_claim_must_belong_to_the_pod():
    generic = {"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}

    class Named(Cluster):
        def claim(self, key):
            return self._claim if key == "ns/p-v" else None

    stranger = uses_of(pod(generic), Named(claim(), volume()), 60.0)
    assert "pod is not owner" in stranger.errors["v"]
    for owner in ({"uid": "uid-p"}, {"uid": "another", "controller": True}):  # not its controller; not this pod's
        almost = claim(ownerReferences=[{"kind": "Pod", "name": "p", "apiVersion": "v1", **owner}])
        assert "pod is not owner" in uses_of(pod(generic), Named(almost, volume()), 60.0).errors["v"]
    owned = claim(
        ownerReferences=[{"uid": "uid-p", "kind": "Pod", "name": "p", "apiVersion": "v1", "controller": True}]
    )
    assert uses_of(pod(generic), Named(owned, volume()), 60.0).errors == {}


def test_inline_and_plain_volumes_belong_to_one_pod():
    inline = {"name": "i", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}, "readOnly": True}}
    needs = uses_of(
        pod(
            inline,
            {"name": "e", "emptyDir": {}},
            {"name": "s", "secret": {"secretName": "x"}},
            {"name": "d", "downwardAPI": {"items": []}},
        ),
        Cluster(),
        9.0,
    )
    by_name = {use.outer_names[0]: use for use in needs.uses}
    assert by_name["i"].volume == "kubernetes.io/csi/uid-p-i"
    assert by_name["i"].source.publish_secret.namespace == "ns"
    assert by_name["i"].read_only
    assert isinstance(by_name["e"].source, PlainSource)
    assert (by_name["e"].republish_s, by_name["s"].republish_s, by_name["d"].republish_s) == (0.0, 9.0, 9.0)


def test_two_volumes_never_share_a_directory():
    inline = {"name": "pv", "csi": {"driver": "d"}}
    needs = uses_of(pod(CLAIMED, inline), Cluster(claim(), volume()), 60.0)
    assert [use.outer_names for use in needs.uses] == [("v",)]
    assert "has the name of PersistentVolume pv" in needs.errors["pv"]


def test_a_medium_that_nobody_makes_is_said_to_be_unknown():
    needs = uses_of(pod({"name": "x", "emptyDir": {"medium": "HugePages"}}), Cluster(), 60.0)
    assert "no emptyDir of medium HugePages" in needs.errors["x"]


def test_an_unknown_kind_of_volume_is_said_to_be_unknown():
    assert "not made by this node agent" in uses_of(pod({"name": "x"}), Cluster(), 60.0).errors["x"]


LEVEL = {"level": "s0:c1,c2"}
LABEL = "system_u:object_r:container_file_t:s0:c1,c2"
PROCESS = {"role": "system_r", "type": "container_t"}
LABELLED = CsiDriverSpec(se_linux_mount=True)


@pytest.mark.parametrize(
    ("driver", "se_linux", "security", "label"),
    [
        (LABELLED, True, {"seLinuxOptions": LEVEL}, LABEL),
        (LABELLED, False, {"seLinuxOptions": LEVEL}, ""),
        (CsiDriverSpec(), True, {"seLinuxOptions": LEVEL}, ""),
        (CsiDriverSpec(se_linux_mount=False), True, {"seLinuxOptions": LEVEL}, ""),
        (None, True, {"seLinuxOptions": LEVEL}, ""),
        (LABELLED, True, {}, ""),
        (LABELLED, True, {"seLinuxOptions": LEVEL, "seLinuxChangePolicy": "Recursive"}, ""),
        (LABELLED, True, {"seLinuxOptions": LEVEL, "seLinuxChangePolicy": "MountOption"}, LABEL),
        (LABELLED, True, {"seLinuxOptions": {"user": "u", **PROCESS, **LEVEL}}, LABEL.replace("system_u", "u")),
        (LABELLED, True, {"seLinuxOptions": PROCESS}, ""),
    ],
)
def test_a_volume_is_mounted_with_a_label_if_host_driver_and_pod_want_it(driver, se_linux, security, label):
    cluster = Cluster(claim(), volume(), driver, se_linux=se_linux)
    (use,) = uses_of(pod(CLAIMED, securityContext=security), cluster, 60.0).uses
    assert use.se_linux_label == label


@pytest.mark.parametrize("modes", [["ReadWriteOnce"], ["ReadWriteMany"], ["ReadWriteOncePod"]])
def test_every_access_mode_may_have_a_label(modes):
    cluster = Cluster(claim(), volume(accessModes=modes), LABELLED, se_linux=True)
    (use,) = uses_of(pod(CLAIMED, securityContext={"seLinuxOptions": LEVEL}), cluster, 60.0).uses
    assert use.se_linux_label == LABEL


@pytest.mark.parametrize(
    ("first", "second", "label"),
    [
        (None, None, LABEL),
        (LEVEL, None, LABEL),
        ({"level": "s0:c9"}, None, ""),
        ({"level": "s0:c9"}, {"level": "s0:c9"}, LABEL.replace("s0:c1,c2", "s0:c9")),
    ],
    ids=["the pod's", "both the same", "they differ", "the containers' own counts before the pod's"],
)
def test_containers_that_share_a_volume_must_agree_on_its_label(first, second, label):
    def container(name, options, mounts):
        return {
            "name": name,
            "volumeMounts": [{"name": one, "mountPath": f"/{one}"} for one in mounts],
            "securityContext": {"seLinuxOptions": options} if options else {},
        }

    aside = container("aside", {"level": "s0:c77"}, [])  # does not have the volume
    spec = {
        "securityContext": {"seLinuxOptions": LEVEL},
        "initContainers": [container("one", first, ["v"])],
        "containers": [container("two", second, ["w"]), aside],
    }
    again = {"name": "w", "persistentVolumeClaim": {"claimName": "c"}}  # the same claim under another name
    made_pod = made(
        Pod, {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {**spec, "volumes": [CLAIMED, again]}}
    )
    (use,) = uses_of(made_pod, Cluster(claim(), volume(), LABELLED, se_linux=True), 60.0).uses
    assert use.se_linux_label == label


OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": True}


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        pytest.param(claim(), claim(labels={"a": "b"}, resourceVersion="7"), True, id="labels"),
        pytest.param(claim(), claim(annotations={"a": "b"}), True, id="annotations"),
        pytest.param(claim(), claim(uid="uid-d"), False, id="made anew"),
        pytest.param(claim(), claim(volume="pv-2"), False, id="another volume"),
        pytest.param(claim(), claim(phase="Lost"), False, id="lost"),
        pytest.param(claim(), claim(deletionTimestamp="2026-01-01T00:00:00Z"), False, id="deleted"),
        pytest.param(claim(finalizers=["kubernetes.io/pvc-protection"]), claim(), False, id="no longer protected"),
        pytest.param(claim(), claim(ownerReferences=[OWNER]), False, id="owned"),
    ],
)
def test_a_change_that_does_not_bear_on_uses_is_known(old, new, is_same):
    assert same_for_uses(old, new) is is_same
    if is_same:
        wanted = pod({"name": "data", "persistentVolumeClaim": {"claimName": "c"}})
        assert uses_of(wanted, Cluster(old, volume()), 60) == uses_of(wanted, Cluster(new, volume()), 60)


@pytest.mark.parametrize("status", [{"capacity": {"storage": "2Gi"}}, {"allocatedResourceStatuses": {"storage": "x"}}])
def test_growth_of_a_claim_bears_on_uses(status):
    document = {"metadata": {"name": "c"}, "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}}
    grown = {**document, "status": {**document["status"], **status}}
    assert not same_for_uses(made(PersistentVolumeClaim, document), made(PersistentVolumeClaim, grown))


def found(*names, handle="h"):
    """What an earlier agent has left, by the names of PersistentVolumes."""
    return {f"kubernetes.io/csi/d^{handle}": CsiSource("d", handle, name) for name in names}


@pytest.mark.parametrize(
    ("left", "given", "is_refused"),
    [
        pytest.param({}, (), False, id="a pod that had nothing"),
        pytest.param(found("pv"), (), False, id="the volume that it had"),
        pytest.param(found("old", handle="other"), (), True, id="another volume"),
        pytest.param(found("old"), (), True, id="the same by another name, which is another directory"),
        pytest.param(found("old", handle="x"), ("kubernetes.io/csi/d^h",), False, id="what this agent has given it"),
    ],
)
def test_a_pod_that_began_with_one_volume_gets_no_other_in_its_place(left, given, is_refused):
    empty = {"name": "e", "emptyDir": {}}
    needs = uses_of(pod(CLAIMED, empty), Cluster(claim(), volume()), 60.0)
    refuse_replacements(needs, left, given)
    assert [use.outer_names for use in needs.uses] == [("e",)] if is_refused else [("v",), ("e",)]
    assert list(needs.errors) == (["v"] if is_refused else [])
    assert all("began with volume old" in reason for reason in needs.errors.values())
