"""What a pod's volumes have to say about its node: clusters in, placements out."""

import msgspec
import pytest
from tests.unit.controllers.scheduler.scheduler_objects import GI, HOST, Cluster, made, pod

from moorage.controllers.scheduler.plan import Nowhere, Placement
from moorage.kube.names import BIND_COMPLETED, SELECTED_NODE
from moorage.kube.objects.storage import CSIDriver, CSINode, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolumeClaim


def test_a_bound_volume_decides_the_node(cluster):
    cluster.add_bound("data", "b")
    assert cluster.node_for(pod("p", "data")) == "b"
    del cluster.nodes["b"]
    expected = "0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity."
    assert cluster.complaint(pod("p", "data")) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, 'persistentvolumeclaim "data" not found'),
        ({"storage_class": "soon"}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"storage_class": "unknown"}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"volume": "pv-data"}, "pod has unbound immediate PersistentVolumeClaims"),
    ],
)
def test_claims_that_no_node_can_help(cluster, change, said):
    cluster.add_class("soon", waits=False)
    if change:
        cluster.add_claim("data", **change)
    assert cluster.complaint(pod("p", "data")) == f"0/3 nodes are available: {said}."


@pytest.mark.parametrize(
    ("meta", "status", "source", "said"),
    [
        (
            {},
            {"phase": "Lost"},
            {"persistentVolumeClaim": {"claimName": "p-data"}},
            'persistentvolumeclaim "p-data" bound to non-existent persistentvolume "pv-data"',
        ),
        (
            {"deletionTimestamp": "2026-01-01T00:00:00Z"},
            {},
            {"persistentVolumeClaim": {"claimName": "p-data"}},
            'persistentvolumeclaim "p-data" is being deleted',
        ),
        (
            {"name": "another"},
            {},
            {"ephemeral": {}},
            'waiting for ephemeral volume controller to create the persistentvolumeclaim "p-data"',
        ),
        (
            {"ownerReferences": [{"kind": "Pod", "name": "p", "uid": "uid-older", "controller": True}]},
            {},
            {"ephemeral": {}},
            "PVC default/p-data was not created for pod default/p (pod is not owner)",
        ),
    ],
    ids=["lost", "deleting", "not made", "not owned"],
)
def test_claims_that_are_no_good_anywhere(cluster, meta, status, source, said):
    meta = {"name": "p-data", "namespace": "default", "uid": "c", "annotations": {BIND_COMPLETED: "yes"}, **meta}
    claim = made(PersistentVolumeClaim, {"metadata": meta, "spec": {"volumeName": "pv-data"}, "status": status})
    cluster.claims[claim.key] = claim
    cluster.add_volume("pv-data")
    asking = pod("p", volumes=[{"name": "data", **source}])
    assert cluster.complaint(asking) == f"0/3 nodes are available: {said}."


def test_a_volume_that_is_gone_is_said_to_be_gone(cluster):
    cluster.add_bound("data")
    cluster.volumes.clear()
    said = "3 node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
    assert cluster.complaint(pod("p", "data")) == f"0/3 nodes are available: {said}."


def test_a_zone_label_on_a_volume_is_honoured(cluster):
    zone = "topology.kubernetes.io/zone"
    cluster.nodes.clear()
    cluster.add_node("x", labels={zone: "one"})
    cluster.add_node("y", labels={zone: "two"})
    cluster.add_bound("data")
    volume = cluster.volumes["pv-data"]
    labelled = msgspec.structs.replace(volume.metadata, labels={zone: "zero__two"})
    cluster.volumes["pv-data"] = msgspec.structs.replace(volume, metadata=labelled)
    assert cluster.node_for(pod("p", "data")) == "y"


ZONE, OLD_ZONE, REGION = (
    "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/zone",
    "topology.kubernetes.io/region",
)


@pytest.mark.parametrize(
    ("labels", "node_labels", "is_there"),
    [
        ({ZONE: "one"}, {ZONE: "one"}, True),
        ({ZONE: "one"}, {ZONE: "two"}, False),
        ({ZONE: "one"}, {}, True),  # a node that says nothing of zones is in all of them
        ({ZONE: "one"}, {REGION: "r"}, False),
        ({ZONE: "one", REGION: "r"}, {ZONE: "one", REGION: "s"}, False),
        ({OLD_ZONE: "one"}, {ZONE: "one"}, True),
        ({OLD_ZONE: "one"}, {ZONE: "two"}, False),
        ({OLD_ZONE: "one"}, {OLD_ZONE: "one", ZONE: "two"}, True),
        ({ZONE: "one"}, {OLD_ZONE: "one"}, False),
    ],
)
def test_zones_of_a_volume_and_of_a_node(labels, node_labels, is_there):
    cluster = Cluster()
    cluster.add_class()
    cluster.add_node("x", labels=node_labels)
    cluster.add_bound("data")
    volume = cluster.volumes["pv-data"]
    labelled = msgspec.structs.replace(volume.metadata, labels=labels)
    cluster.volumes["pv-data"] = msgspec.structs.replace(volume, metadata=labelled)
    found = cluster.place(pod("p", "data"))
    if is_there:
        assert isinstance(found, Placement)
    else:
        assert found == Nowhere(
            "0/1 nodes are available: 1 node(s) had no available volume zone.",
            "x: node(s) had no available volume zone",
        )


def test_the_smallest_free_volume_that_fits_is_taken_and_each_only_once(cluster):
    cluster.add_claim("one", "1Gi")
    cluster.add_claim("two", "2Gi")
    cluster.add_volume("large", "b", size="5Gi")
    cluster.add_volume("small", "b", size="2Gi")
    cluster.add_volume("elsewhere", "a", size="1Gi")
    found = cluster.place(pod("p", "two", "one"))
    assert isinstance(found, Placement)
    assert found.node.name == "b"
    assert [(claim.name, volume.name) for claim, volume in found.fit.static] == [("one", "small"), ("two", "large")]


def test_small_claims_choose_first(cluster):
    cluster.add_claim("a-large", "2Gi")
    cluster.add_claim("z-small", "1Gi")
    cluster.add_volume("two", "b", size="2Gi")
    cluster.add_volume("five", "b", size="5Gi")
    found = cluster.place(pod("p", "a-large", "z-small"))
    assert isinstance(found, Placement)
    assert [(claim.name, volume.name) for claim, volume in found.fit.static] == [
        ("z-small", "two"),
        ("a-large", "five"),
    ]


def test_a_volume_reserved_for_the_claim_is_the_only_one_and_only_where_it_is(cluster):
    cluster.classes.clear()
    cluster.add_class(provisioner="kubernetes.io/no-provisioner")
    cluster.add_claim("data")
    cluster.add_volume("free", "a")
    reserved = {"namespace": "default", "name": "data"}
    cluster.add_volume("reserved", "b", size="9Gi", storage_class="other", claimRef=reserved)
    found = cluster.place(pod("p", "data"))
    assert isinstance(found, Placement)
    assert (found.node.name, [volume.name for _, volume in found.fit.static]) == ("b", ["reserved"])
    del cluster.nodes["b"]
    assert "didn't find available persistent volumes" in cluster.complaint(pod("p", "data"))


def test_a_claim_that_is_on_its_way_to_a_node_takes_other_pods_there(cluster):
    cluster.add_claim("data")
    cluster.runs("b", "busy", cpu="3")
    assert cluster.node_for(pod("p", "data")) == "a"
    cluster.world.promised_bytes["uid-data"] = ("late", "b", GI)
    assert cluster.node_for(pod("p", "data")) == "b"


def test_a_claim_that_was_promised_a_volume_is_promised_no_other(cluster):
    cluster.add_claim("data")
    cluster.add_volume("first", "a")
    cluster.add_volume("second", "b", size="2Gi")
    cluster.world.promised_volumes["second"] = "uid-data"
    cluster.classes.clear()
    cluster.add_class(provisioner="kubernetes.io/no-provisioner")
    found = cluster.place(pod("p", "data"))
    assert isinstance(found, Placement)
    assert [volume.name for _, volume in found.fit.static] == ["second"]


@pytest.mark.parametrize(
    "volume",
    [
        {"size": "1Gi"},
        {"storage_class": "other"},
        {"volumeMode": "Block"},
        {"volumeAttributesClassName": "gold"},
        {"accessModes": ["ReadOnlyMany"]},
        {"phase": "Released"},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"claimRef": {"namespace": "default", "name": "other"}},
        {"claimRef": {"namespace": "default", "name": "data", "uid": "older"}},
        {"labels": {"tier": "tin"}},
    ],
    ids=lambda volume: next(iter(volume)),
)
def test_volumes_that_a_claim_cannot_have(cluster, volume):
    cluster.classes.clear()
    cluster.add_class(provisioner="kubernetes.io/no-provisioner")
    cluster.add_claim("data", "2Gi", selector={"matchLabels": {"tier": "gold"}})
    plain = {"size": "2Gi", "labels": {"tier": "gold"}}
    cluster.add_volume("volume", "b", **plain)
    assert cluster.node_for(pod("p", "data")) == "b"
    cluster.add_volume("volume", "b", **(plain | volume))
    expected = "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind."
    assert cluster.complaint(pod("p", "data")) == expected


def test_a_volume_promised_to_another_claim_is_not_free(cluster):
    cluster.classes.clear()
    cluster.add_class(provisioner="kubernetes.io/no-provisioner")
    cluster.add_claim("data")
    cluster.add_volume("only", "b")
    assert cluster.node_for(pod("p", "data")) == "b"
    cluster.world.promised_volumes["only"] = "uid-other"
    expected = "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind."
    assert cluster.complaint(pod("p", "data")) == expected


def test_a_claim_whose_node_is_selected_stays_there(cluster):
    cluster.add_claim("data", annotations={SELECTED_NODE: "b"})
    assert cluster.node_for(pod("p", "data")) == "b"
    cluster.add_claim("data", annotations={SELECTED_NODE: "gone"})
    assert cluster.node_for(pod("p", "data")) == "a"  # a node that is no more holds nobody


def test_a_claim_whose_node_is_selected_is_provisioned_there_though_a_volume_is_free(cluster):
    cluster.add_volume("free", "b")
    cluster.add_claim("data", annotations={SELECTED_NODE: "b"})
    found = cluster.place(pod("p", "data"))
    assert isinstance(found, Placement)
    assert (found.fit.static, [claim.name for claim in found.fit.provision]) == ((), ["data"])


@pytest.mark.parametrize(
    ("topologies", "node"),
    [
        ([], "a"),
        ([{"matchLabelExpressions": [{"key": HOST, "values": ["c"]}, {"key": "disk", "values": ["ssd"]}]}], ""),
        ([{"matchLabelExpressions": [{"key": HOST, "values": ["b", "c"]}]}], "b"),
        ([{}], ""),
    ],
    ids=["none", "and", "in", "empty term"],
)
def test_terms_of_allowed_topologies(cluster, topologies, node):
    cluster.add_class("late", allowedTopologies=topologies)
    cluster.add_claim("data")
    found = cluster.place(pod("p", "data"))
    assert (found.node.name if isinstance(found, Placement) else "") == node


def test_allowed_topologies(cluster):
    cluster.add_class("late", allowedTopologies=[{"matchLabelExpressions": [{"key": HOST, "values": ["c"]}]}, {}])
    cluster.add_claim("data")
    assert cluster.node_for(pod("p", "data")) == "c"


def test_capacity_counts_for_all_claims_of_the_pod_together(cluster):
    cluster.reports_capacity()
    cluster.add_capacity("a", "5Gi")
    cluster.add_capacity("b", "10Gi")
    cluster.add_claim("one", "4Gi")
    cluster.add_claim("two", "4Gi")
    assert cluster.node_for(pod("p", "one", "two")) == "b"
    cluster.add_claim("three", "4Gi")
    expected = "0/3 nodes are available: 3 node(s) did not have enough free storage."
    assert cluster.complaint(pod("p", "one", "two", "three")) == expected


def test_capacity_promised_to_other_pods_is_not_given_again(cluster):
    cluster.reports_capacity()
    cluster.add_capacity("a", "5Gi")
    cluster.add_claim("one", "4Gi")
    assert cluster.node_for(pod("p", "one")) == "a"
    cluster.world.promised_bytes["uid-other"] = ("late", "a", 4 * GI)
    assert "enough free storage" in cluster.complaint(pod("p", "one"))


def test_no_single_volume_may_be_larger_than_the_driver_says(cluster):
    cluster.reports_capacity()
    cluster.add_capacity("a", "100Gi", maximumVolumeSize="2Gi")
    cluster.add_claim("one", "2Gi")
    assert cluster.node_for(pod("p", "one")) == "a"
    cluster.add_claim("one", "3Gi")
    assert "enough free storage" in cluster.complaint(pod("p", "one"))


def test_a_driver_that_reports_no_capacity_is_not_asked(cluster):
    cluster.add_claim("one", "4000Gi")
    assert cluster.node_for(pod("p", "one")) == "a"
    spec = {"storageCapacity": False}
    cluster.drivers["csi.example.com"] = made(CSIDriver, {"metadata": {"name": "csi.example.com"}, "spec": spec})
    assert cluster.node_for(pod("p", "one")) == "a"


@pytest.mark.parametrize(
    ("change", "is_enough"),
    [
        ({}, True),
        ({"metadata": {"name": "x", "namespace": "elsewhere"}}, True),
        ({"storageClassName": "other"}, False),
        ({"nodeTopology": None}, False),
        ({"nodeTopology": {"matchLabels": {HOST: "x"}}}, False),
        ({"nodeTopology": {}}, True),
        ({"capacity": None}, False),
        ({"capacity": None, "maximumVolumeSize": "4Gi"}, True),
        ({"capacity": None, "maximumVolumeSize": "3Gi"}, False),
    ],
    ids=lambda value: str(value),
)
def test_which_reported_capacity_counts(cluster, change, is_enough):
    cluster.reports_capacity()
    cluster.add_claim("one", "4Gi")
    cluster.add_capacity("a", "4Gi", **change)
    assert isinstance(cluster.place(pod("p", "one")), Placement) is is_enough


def test_a_class_with_another_default_provisioner_is_not_measured_by_this_driver(cluster):
    cluster.reports_capacity()
    cluster.add_class("late", provisioner="other.example.com")
    cluster.add_claim("one", "4Gi")
    assert cluster.node_for(pod("p", "one")) == "a"


def test_attach_limits_count_pods_attachments_and_new_claims(cluster):
    for name in ("a", "b", "c"):
        drivers = [{"name": "csi.example.com", "nodeID": name, "allocatable": {"count": 2}}]
        cluster.csi_nodes[name] = made(CSINode, {"metadata": {"name": name}, "spec": {"drivers": drivers}})
    for name in ("one", "two", "three", "four"):
        cluster.add_bound(name)
    for node in ("a", "b"):
        cluster.runs(node, f"runs-{node}", "one")
        spec = {"attacher": "csi.example.com", "nodeName": node, "source": {"persistentVolumeName": "pv-two"}}
        cluster.attachments[f"va-{node}"] = made(VolumeAttachment, {"metadata": {"name": f"va-{node}"}, "spec": spec})
    assert cluster.node_for(pod("p", "three")) == "c"
    assert cluster.node_for(pod("p", "one", nodeSelector={HOST: "a"})) == "a"  # it is there already
    cluster.add_claim("new")
    assert cluster.node_for(pod("p", "three", "new")) == "c"
    expected = "0/3 nodes are available: 3 node(s) exceed max volume count."
    assert cluster.complaint(pod("p", "three", "four", "new")) == expected


def test_a_node_over_its_limit_still_takes_pods_whose_volumes_it_has(cluster):
    """The limit may be lowered under running pods; what is attached already needs no room."""
    drivers = [{"name": "csi.example.com", "nodeID": "a", "allocatable": {"count": 1}}]
    cluster.csi_nodes["a"] = made(CSINode, {"metadata": {"name": "a"}, "spec": {"drivers": drivers}})
    for name in ("one", "two"):
        cluster.add_bound(name, "a")
        cluster.runs("a", f"runs-{name}", name)
    assert cluster.node_for(pod("p", "one")) == "a"
    cluster.add_bound("three", "a")
    assert "1 node(s) exceed max volume count" in cluster.complaint(pod("p", "three"))


def test_only_attachments_of_the_driver_itself_count_against_its_limit(cluster):
    drivers = [{"name": "csi.example.com", "nodeID": "a", "allocatable": {"count": 1}}]
    cluster.csi_nodes["a"] = made(CSINode, {"metadata": {"name": "a"}, "spec": {"drivers": drivers}})
    cluster.add_volume("theirs", csi={"driver": "other.example.com", "volumeHandle": "h"})
    spec = {"attacher": "other.example.com", "nodeName": "a", "source": {"persistentVolumeName": "theirs"}}
    cluster.attachments["va"] = made(VolumeAttachment, {"metadata": {"name": "va"}, "spec": spec})
    cluster.add_bound("one", "a")
    assert cluster.node_for(pod("p", "one")) == "a"


def test_a_claim_of_a_migrated_plugin_counts_for_the_driver_that_took_it_over(cluster):
    cluster.add_class("late", provisioner="kubernetes.io/aws-ebs")
    for name in ("a", "b", "c"):
        drivers = [{"name": "ebs.csi.aws.com", "nodeID": name, "allocatable": {"count": 1}}]
        cluster.csi_nodes[name] = made(CSINode, {"metadata": {"name": name}, "spec": {"drivers": drivers}})
    cluster.add_claim("one")
    cluster.add_claim("two")
    assert cluster.node_for(pod("p", "one")) == "a"
    assert "3 node(s) exceed max volume count" in cluster.complaint(pod("p", "one", "two"))


@pytest.mark.parametrize("drivers", [[], [{"name": "csi.example.com", "nodeID": "a"}]], ids=["no driver", "no count"])
def test_a_node_that_names_no_limit_has_none(cluster, drivers):
    for name in ("a", "b", "c"):
        cluster.csi_nodes[name] = made(CSINode, {"metadata": {"name": name}, "spec": {"drivers": drivers}})
    for number in range(5):
        cluster.add_bound(f"claim-{number}", "a")
    assert cluster.node_for(pod("p", *(f"claim-{number}" for number in range(5)))) == "a"


def test_a_driver_may_insist_on_being_installed(cluster):
    spec = {"preventPodSchedulingIfMissing": True}
    cluster.drivers["csi.example.com"] = made(CSIDriver, {"metadata": {"name": "csi.example.com"}, "spec": spec})
    drivers = [{"name": "csi.example.com", "nodeID": "b"}]
    cluster.csi_nodes["b"] = made(CSINode, {"metadata": {"name": "b"}, "spec": {"drivers": drivers}})
    cluster.add_bound("data")
    assert cluster.node_for(pod("p", "data")) == "b"
    del cluster.csi_nodes["b"]
    expected = "0/3 nodes are available: 3 csi.example.com CSI driver is not installed on the node."
    assert cluster.complaint(pod("p", "data")) == expected


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_claim_for_one_pod_is_free_when_its_pod_has_ended(cluster, phase):
    cluster.add_bound("data", modes=["ReadWriteOncePod"])
    first = pod("first", "data", nodeName="b")
    cluster.world.see(first.uid, first)
    ended = msgspec.structs.replace(first, status=msgspec.convert({"phase": phase}, type(first.status)))
    cluster.world.see(first.uid, ended)
    assert cluster.node_for(pod("p", "data")) == "a"


def test_a_claim_for_one_pod_is_held_by_one_that_is_only_promised(cluster):
    cluster.add_bound("data", modes=["ReadWriteOncePod"])
    cluster.world.assume(pod("first", "data"), "b")
    assert "ReadWriteOncePod" in cluster.complaint(pod("p", "data"))
    assert cluster.node_for(pod("first", "data")) == "a"  # it does not stand in its own way
    cluster.world.see("uid-first", pod("first", "data"))
    assert "ReadWriteOncePod" in cluster.complaint(pod("p", "data"))  # a late word of the server takes nothing back
    cluster.world.unassume("uid-first")
    assert cluster.node_for(pod("p", "data")) == "a"


def test_a_claim_for_one_pod_has_one_pod(cluster):
    cluster.add_bound("data", modes=["ReadWriteOncePod"])
    assert cluster.node_for(pod("p", "data")) == "a"
    cluster.runs("b", "first", "data")
    assert cluster.complaint(pod("p", "data")).startswith(
        "0/3 nodes are available: 3 node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod"
    )


def test_a_node_that_was_turned_down_is_tried_last(cluster):
    cluster.add_claim("data")
    assert cluster.node_for(pod("p", "data"), {"a": 1, "b": 1}) == "c"
    assert cluster.node_for(pod("p", "data"), {"a": 1, "b": 2, "c": 2}) == "a"


def test_a_pod_that_ended_takes_no_room(cluster):
    cluster.runs("a", "old", cpu="4")
    ended = msgspec.structs.replace(
        pod("old", nodeName="a"), status=msgspec.convert({"phase": "Succeeded"}, type(pod("x").status))
    )
    cluster.world.see("uid-old", ended)
    assert not cluster.world.uses


def test_broken_quantities_and_selectors_break_nothing(cluster):
    cluster.add_claim("data", size="lots")
    cluster.reports_capacity()
    cluster.add_capacity("a", "much")
    cluster.add_capacity("b", "1Gi")
    assert cluster.node_for(pod("p", "data", cpu="plenty")) == "b"
