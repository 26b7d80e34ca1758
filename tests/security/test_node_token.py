"""The token of one node tries to change what belongs to others; deploy/kubernetes/node-limits has the policies.

The expressions are evaluated by the CEL library that the embedded API server uses for validation rules. The embedded
server itself has no admission policies.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moorage.kube import names

cel = pytest.importorskip("cel_expr_python.cel")
POLICIES = Path(__file__).parents[2] / "deploy/kubernetes/node-limits/policies.yaml"
NODE_KEY, TOPOLOGY, DRIVER = "authentication.kubernetes.io/node-name", "topology.moorage.dev/node", "csi.moorage.dev"
ACCOUNT = "system:serviceaccount:moorage-system:moorage-node"
SELECTED, PROVISIONER = "volume.kubernetes.io/selected-node", "volume.kubernetes.io/storage-provisioner"
MANAGER = "snapshot.storage.kubernetes.io/managed-by"
CLAIM = {"namespace": "default", "name": "c", "uid": "11111111-1111-4111-8111-111111111111"}


@pytest.fixture(scope="module")
def policies():
    found = [one for one in yaml.safe_load_all(POLICIES.read_text()) if one]
    made = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "ValidatingAdmissionPolicy"}
    bound = {one["spec"]["policyName"] for one in found if one["kind"] == "ValidatingAdmissionPolicyBinding"}
    assert bound == set(made)
    return made


def evaluated(expression, values):
    known = dict.fromkeys(values, cel.Type.DYN)
    found = cel.NewEnv(variables=known).compile(expression).eval(data=values)
    assert found.type().name() != "ERROR", (expression, found.value())
    return found.plain_value()


def is_allowed(policies, operation, resource, old, new, node="n1", user=ACCOUNT):
    """Whether every policy that concerns a request allows it."""
    subresource = resource.partition("/")[2]
    extra = {"extra": {NODE_KEY: [node]}} if node else {}
    request = {"operation": operation, "subResource": subresource, "userInfo": {"username": user, **extra}}
    values = {"request": request, "object": new, "oldObject": old, "variables": {}}
    concerned = [policy for policy in policies.values() if (operation, resource) in limited_by(policy)]
    assert concerned, f"no policy concerns {operation} {resource}"
    for policy in concerned:
        if not all(evaluated(one["expression"], values) for one in policy["matchConditions"]):
            continue
        values["variables"] = {}
        for variable in policy["variables"]:
            values["variables"][variable["name"]] = evaluated(variable["expression"], values)
        if not all(evaluated(one["expression"], values) for one in policy["validations"]):
            return False
    return True


def limited_by(policy):
    rules = policy["matchConstraints"]["resourceRules"]
    return {
        (operation, resource) for rule in rules for operation in rule["operations"] for resource in rule["resources"]
    }


def volume(node="n1", driver=DRIVER, **spec):
    terms = [{"matchExpressions": [{"key": TOPOLOGY, "operator": "In", "values": [node]}]}]
    made = {"csi": {"driver": driver}, "nodeAffinity": {"required": {"nodeSelectorTerms": terms}}, "claimRef": CLAIM}
    return {"metadata": {"name": "v"}, "spec": {**made, **spec}}


def without_nodes(terms):
    return volume(nodeAffinity={"required": {"nodeSelectorTerms": terms}})


NO_CSI = {"metadata": {"name": "v"}, "spec": {"hostPath": {"path": "/"}}}
FOREIGN_VOLUMES = [
    volume("n2"), volume(driver="other"), NO_CSI, without_nodes([]), without_nodes([{}]), volume(nodeAffinity={}),
    without_nodes([*volume()["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"], {"matchExpressions": []}]),
    without_nodes([{"matchExpressions": [{"key": TOPOLOGY, "operator": "In", "values": ["n1", "n2"]}]}]),
    without_nodes([{"matchExpressions": [{"key": TOPOLOGY, "operator": "NotIn", "values": ["n1"]}]}]),
]  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN_VOLUMES)
def test_a_node_writes_no_volume_of_others(policies, foreign):
    assert not is_allowed(policies, "CREATE", "persistentvolumes", None, foreign)
    assert not is_allowed(policies, "DELETE", "persistentvolumes", foreign, None)
    assert not is_allowed(policies, "UPDATE", "persistentvolumes", foreign, foreign)
    assert not is_allowed(policies, "UPDATE", "persistentvolumes", volume(), foreign), "not even by making its own so"
    assert not is_allowed(policies, "UPDATE", "persistentvolumes", foreign, volume()), "nor by making it its own"


def test_a_node_writes_its_own_volumes(policies):
    for old, new, operation in ((None, volume(), "CREATE"), (volume(), volume(), "UPDATE"), (volume(), None, "DELETE")):
        assert is_allowed(policies, operation, "persistentvolumes", old, new)
        assert not is_allowed(policies, operation, "persistentvolumes", old, new, node=""), "a token without a node"
        assert is_allowed(policies, operation, "persistentvolumes", old, new, node="", user="admin"), "others are free"


def test_a_node_makes_a_volume_for_one_claim_and_gives_it_to_no_other(policies):
    nobodys = volume()
    del nobodys["spec"]["claimRef"]
    unreserved = volume(claimRef={"namespace": "default", "name": "c"})
    for foreign in (nobodys, unreserved, volume(claimRef={**CLAIM, "uid": ""})):
        assert not is_allowed(policies, "CREATE", "persistentvolumes", None, foreign)
        assert not is_allowed(policies, "UPDATE", "persistentvolumes", volume(), foreign)
        assert not is_allowed(policies, "UPDATE", "persistentvolumes", foreign, volume())
        assert is_allowed(policies, "UPDATE", "persistentvolumes", foreign, foreign), "an administrator's may grow"


def claim(selected="", provisioner=DRIVER, **spec):
    given = {SELECTED: selected, PROVISIONER: provisioner}
    annotations = {key: value for key, value in given.items() if value}
    metadata = {"name": "c", **({"annotations": annotations} if annotations else {})}
    return {"metadata": metadata, "spec": {"storageClassName": "c", **spec}}


CLAIMS = [
    ("persistentvolumeclaims", claim("n1"), claim("n1"), True),
    ("persistentvolumeclaims", claim("n1"), claim(), True),  # it gives the claim back
    ("persistentvolumeclaims", claim(), claim("n1"), True),  # it takes the claim
    ("persistentvolumeclaims", claim(), claim("n2"), False),
    ("persistentvolumeclaims", claim("n1"), claim("n2"), False),
    ("persistentvolumeclaims", claim("n2"), claim("n1"), False),
    ("persistentvolumeclaims", claim("n2"), claim("n2"), False),
    ("persistentvolumeclaims", claim(provisioner="other"), claim("n1", "other"), False),
    ("persistentvolumeclaims", claim(provisioner=""), claim("n1", ""), False),
    ("persistentvolumeclaims", claim(), claim(), False),
    ("persistentvolumeclaims", claim(provisioner=""), claim(provisioner=""), False),  # not even to clone it
    ("persistentvolumeclaims", claim("n1"), claim("n1", volumeName="v"), False),
    ("persistentvolumeclaims/status", claim("n1"), claim("n1"), True),
    ("persistentvolumeclaims/status", claim("n2"), claim("n2"), False),
    ("persistentvolumeclaims/status", claim(provisioner=""), claim(provisioner=""), True),  # bound by an administrator
    ("persistentvolumeclaims/status", claim(provisioner="other"), claim(provisioner="other"), False),
]


@pytest.mark.parametrize(("resource", "old", "new", "expected"), CLAIMS)
def test_a_node_writes_the_claims_that_were_given_to_it(policies, resource, old, new, expected):
    assert is_allowed(policies, "UPDATE", resource, old, new) is expected
    assert not is_allowed(policies, "UPDATE", resource, old, new, node="")


def content(node="n1", driver=DRIVER, **spec):
    labels = {"labels": {MANAGER: node}} if node else {}
    return {"metadata": {"name": "s", **labels}, "spec": {"driver": driver, **spec}}


@pytest.mark.parametrize("kind", ["volumesnapshotcontents", "volumegroupsnapshotcontents"])
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (content(), content(), True),
        (content(""), content(), True),
        (content("n2"), content("n2"), False),
        (content("n2"), content(), False),
        (content(), content("n2"), False),
        (content(driver="other"), content(driver="other"), False),
        (content(), content(deletionPolicy="Delete"), False),
    ],
)
def test_a_node_writes_the_contents_of_its_snapshots(policies, kind, old, new, expected):
    for resource in (kind, f"{kind}/status"):
        assert is_allowed(policies, "UPDATE", resource, old, new) is expected


def test_a_node_changes_only_the_finalizers_of_a_snapshot(policies):
    bound = names.SNAPSHOT_BOUND
    metadata = {"name": "s", "labels": {"a": "b"}, "annotations": {"c": "d"}, "finalizers": [bound]}
    old: dict[str, Any] = {"metadata": metadata, "spec": {"source": {}}}
    protected = copy.deepcopy(old)
    protected["metadata"]["finalizers"] = [bound, names.RESTORE_PROTECTION]
    assert is_allowed(policies, "UPDATE", "volumesnapshots", old, protected)
    assert is_allowed(policies, "UPDATE", "volumesnapshots", protected, old)
    for part, key, value in (
        ("spec", "volumeSnapshotClassName", "x"),
        ("metadata", "labels", {"x": "y"}),
        ("metadata", "annotations", {"x": "y"}),
        ("metadata", "ownerReferences", [{"apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": "u"}]),
        ("metadata", "finalizers", [names.RESTORE_PROTECTION]),
        ("metadata", "finalizers", [bound, "x/y"]),
    ):
        changed = copy.deepcopy(protected)
        changed[part][key] = value
        assert not is_allowed(policies, "UPDATE", "volumesnapshots", old, changed), (part, key)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [({TOPOLOGY: "n1"}, True), ({TOPOLOGY: "n2"}, False), ({}, False), ({TOPOLOGY: "n1", "zone": "a"}, False)],
)
def test_a_node_publishes_its_own_room(policies, labels, expected):
    found = {"metadata": {"name": "c"}, "nodeTopology": {"matchLabels": labels}, "capacity": "1Gi"}
    for operation, old, new in (("CREATE", None, found), ("UPDATE", found, found), ("DELETE", found, None)):
        assert is_allowed(policies, operation, "csistoragecapacities", old, new) is expected
    everywhere = {"metadata": {"name": "c"}, "capacity": "100Ti"}
    assert not is_allowed(policies, "CREATE", "csistoragecapacities", None, everywhere)


def test_a_node_writes_its_own_notes(policies):
    for name, expected in (("n1", True), ("n2", False), ("n1-x", False)):
        lease = {"metadata": {"name": f"{names.lease_name('provisioner', DRIVER)}-intents-{name}"}}
        for operation, old in (("CREATE", None), ("UPDATE", lease)):
            assert is_allowed(policies, operation, "leases", old, lease) is expected


def test_every_right_to_write_volumes_is_limited(policies):
    """Each verb that the role of the nodes has on these kinds has a policy."""
    rbac = yaml.safe_load_all((POLICIES.parents[1] / "node-local/rbac.yaml").read_text())
    rules = [rule for one in rbac if one["kind"] in ("ClusterRole", "Role") for rule in one["rules"]]
    operations = {"create": "CREATE", "update": "UPDATE", "patch": "UPDATE", "delete": "DELETE"}
    limited = set().union(*map(limited_by, policies.values()))
    free = {"events"}
    wanted = {(operations[v], r) for rule in rules for v in rule["verbs"] for r in rule["resources"] if v in operations}
    assert {one for one in wanted if one[1] not in free} <= limited


def test_a_list_in_an_expression_holds_only_literals():
    """Kubernetes refuses a policy with a list of several types, as text and a variable of no known type."""
    lists = re.findall(r"\bin (\[[^\]]*\])", POLICIES.read_text())
    assert lists
    for found in lists:
        assert re.fullmatch(r"\[('[^']*'(, )?)+\]", found), found
