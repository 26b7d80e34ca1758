"""Where a volume is asked to be: terms, their order, and the rotation that spreads a StatefulSet's claims."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.kube.objects import StorageClass, TopologyTerm
from moorage.kube.objects.storage import TopologyRequirement
from moorage.sidecars.errors import ProvisionError
from moorage.sidecars.provisioner import topology
from moorage.sidecars.provisioner.topology import NodeTopology, Selected


def cluster(**zones):
    return NodeTopology({node: ("zone",) for node in zones}, {node: {"zone": zone} for node, zone in zones.items()})


def allowed(*zones):
    term = TopologyTerm(match_label_expressions=[TopologyRequirement(key="zone", values=list(zones))])
    return StorageClass(allowed_topologies=[term])


def zones_of(terms):
    return [term.segments["zone"] for term in terms]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("web", (1181096325, 0)),
        ("data-web-2", (1181096325, 2)),
        ("myclaim", (1862193917, 0)),
        ("vol-7", (543694016, 7)),
        ("a", (84696446, 0)),
        ("x-99999999999", (topology.fnv1_32("x-99999999999"), 0)),  # no uint32: a name like any other
    ],
)
def test_the_hash_and_index_of_a_claim_are_those_of_the_official_provisioner(name, expected):
    assert topology.hash_and_index(name) == expected


def test_immediate_binding_rotates_all_places_by_hash_and_index():
    found = []
    for index in range(3):
        around = cluster(n1="a", n2="b", n3="c")
        required = topology.requirement(StorageClass(), f"data-web-{index}", None, around, strict=False, immediate=True)
        assert required is not None
        found.append(zones_of(required.preferred))
    start = 1181096325 % 3
    assert [order[0] for order in found] == ["abc"[(start + index) % 3] for index in range(3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in found)


def test_strict_topology_sends_the_selected_place_only():
    node = Selected("n2", ("zone",), {"zone": "b"})
    found = topology.requirement(StorageClass(), "x", node, cluster(n1="a", n2="b"), strict=True, immediate=True)
    assert found is not None
    assert zones_of(found.requisite) == zones_of(found.preferred) == ["b"]
    with pytest.raises(ProvisionError, match="allowedTopologies"):
        topology.requirement(allowed("a"), "x", node, cluster(n1="a", n2="b"), strict=True, immediate=True)


def test_late_binding_puts_the_selected_place_first_and_refuses_what_is_not_allowed():
    node = Selected("n2", ("zone",), {"zone": "b"})
    found = topology.requirement(allowed("c", "b", "a"), "x", node, cluster(), strict=False, immediate=True)
    assert found is not None
    assert zones_of(found.requisite) == ["a", "b", "c"]
    assert zones_of(found.preferred) == ["b", "c", "a"]
    with pytest.raises(ProvisionError, match="none of the topologies"):
        topology.requirement(allowed("a"), "x", node, cluster(), strict=False, immediate=True)


def test_without_immediate_topology_the_driver_is_free():
    assert topology.requirement(StorageClass(), "x", None, cluster(n1="a"), strict=False, immediate=False) is None


def test_what_is_missing_is_named():
    with pytest.raises(ProvisionError, match="no available topology"):
        topology.requirement(StorageClass(), "x", None, NodeTopology({}, {}), strict=False, immediate=True)
    with pytest.raises(ProvisionError, match="registered no topology keys"):
        topology.requirement(StorageClass(), "x", Selected("n", (), {}), cluster(), strict=False, immediate=True)
    with pytest.raises(ProvisionError, match="lacks the topology labels zone"):
        topology.requirement(StorageClass(), "x", Selected("n", ("zone",), {}), cluster(), strict=False, immediate=True)


def test_allowed_topologies_are_multiplied_out():
    term = TopologyTerm(
        match_label_expressions=[
            TopologyRequirement(key="zone", values=["a", "b"]),
            TopologyRequirement(key="rack", values=["1", "2"]),
        ]
    )
    assert len(topology.flattened([term, term])) == 8
    assert topology.ordered(topology.flattened([term, term]))[0] == (("rack", "1"), ("zone", "a"))


terms = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), min_size=1).map(lambda d: tuple(sorted(d.items()))),
    min_size=1,
)


@given(terms, st.integers(0, 100))
def test_a_rotation_keeps_every_term_once(found, by):
    ordered = topology.ordered(found)
    assert topology.ordered(reversed(found)) == ordered
    assert sorted(topology.rotated(ordered, by % len(ordered))) == sorted(ordered)
