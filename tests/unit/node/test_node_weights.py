"""What pods weigh, on trees that look like those of a kernel."""

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.kube.objects.pods import Pod
from moorage.node.runtime import cpu_shares
from moorage.node.runtime.cgroups import ContainerCgroups


def pod(uid: str, *requests: str, init: tuple[str, ...] = (), limits: bool = False) -> Pod:
    """One whose containers request as much of a processor; "" is nothing."""

    def container(name: str, cpu: str) -> dict[str, object]:
        return {
            "name": name,
            "image": "host",
            "resources": {"limits" if limits else "requests": {"cpu": cpu}} if cpu else {},
        }

    spec = {"containers": [container(f"c{number}", cpu) for number, cpu in enumerate(requests)],
            "initContainers": [container(f"i{number}", cpu) for number, cpu in enumerate(init)]}  # fmt: skip
    return msgspec.convert({"metadata": {"name": uid, "namespace": "ns", "uid": uid}, "spec": spec}, Pod)


@pytest.fixture
def root(tmp_path):
    """The processor's hierarchy of version 1."""
    (tmp_path / "cpu,cpuacct").mkdir()
    return tmp_path / "cpu,cpuacct"


def shares(root: Path, below: str = "") -> int:
    return int((root / "kubepods" / below / "cpu.shares").read_text())


def test_a_pod_weighs_what_it_requests_and_all_together_their_sum(root):
    groups = ContainerCgroups("n1", [(1, root)])
    groups.prepare(pod("u", "500m"))
    groups.prepare(pod("v", "1"))
    assert (shares(root, "n1/podu"), shares(root, "n1/podv")) == (512, 1024)
    assert (shares(root, "n1"), shares(root)) == (1536, 1536)
    groups.remove("v")
    assert (shares(root, "n1"), shares(root)) == (512, 512)


def test_pods_without_a_request_yield_to_those_with_one_and_are_not_starved_by_the_rest_of_the_machine(root):
    groups = ContainerCgroups("n1", [(1, root)])
    groups.prepare(pod("u", ""))
    assert (shares(root, "n1/podu"), shares(root, "n1"), shares(root)) == (2, 256, 256)
    groups.prepare(pod("v", "100m"))
    assert (shares(root, "n1/podu"), shares(root, "n1/podv"), shares(root, "n1")) == (2, 102, 256)


def test_a_limit_stands_for_the_request_that_is_missing(root):
    ContainerCgroups("n1", [(1, root)]).prepare(pod("u", "250m", limits=True))
    assert shares(root, "n1/podu") == 256


def test_containers_share_what_their_pod_has_and_init_containers_are_not_added(root):
    ContainerCgroups("n1", [(1, root)]).prepare(pod("u", "250m", "", init=("100m", "2")))
    found = {name: shares(root, f"n1/podu/{name}") for name in ("c0", "c1", "i0", "i1")}
    assert found == {"c0": 256, "c1": 2, "i0": 102, "i1": 2048}
    assert (shares(root, "n1/podu"), shares(root, "n1")) == (2048, 2048)


def test_an_init_container_that_goes_on_beside_the_others_is_added(root):
    both = pod("u", "250m", init=("500m",))
    sidecar = msgspec.structs.replace(both.spec.init_containers[0], restart_policy="Always")
    ContainerCgroups("n1", [(1, root)]).prepare(
        msgspec.structs.replace(both, spec=msgspec.structs.replace(both.spec, init_containers=[sidecar]))
    )
    assert shares(root, "n1/podu") == 768


def test_a_later_agent_weighs_the_pods_that_it_finds(root):
    ContainerCgroups("n1", [(1, root)]).prepare(pod("gone", "2"))
    later = ContainerCgroups("n1", [(1, root)])
    later.prepare(pod("u", "1"))
    assert (shares(root, "n1"), shares(root)) == (1024, 1024)


def test_agents_beside_each_other_are_added_up(root):
    one, other = ContainerCgroups("n1", [(1, root)]), ContainerCgroups("n2", [(1, root)])
    one.prepare(pod("u", "1"))
    other.prepare(pod("v", "2"))
    assert (shares(root, "n1"), shares(root, "n2"), shares(root)) == (1024, 2048, 3072)


def test_the_level_of_a_kubelet_is_left_as_it_is(root):
    (root / "kubepods/besteffort").mkdir(parents=True)
    (root / "kubepods/cpu.shares").write_text("4096")
    ContainerCgroups("n1", [(1, root)]).prepare(pod("u", "1"))
    assert (shares(root, "n1"), shares(root)) == (1024, 4096)


def test_no_weight_is_written_where_the_processor_has_no_controller(tmp_path):
    (tmp_path / "memory").mkdir()
    ContainerCgroups("n1", [(1, tmp_path / "memory")]).prepare(pod("u", "1"))
    assert list(tmp_path.rglob("cpu.*")) == []


def test_a_request_that_cannot_be_read_stops_nothing(root):
    groups = ContainerCgroups("n1", [(1, root)])
    groups.prepare(pod("u", "much"))
    assert groups.of("u", "c0") == [f"{root}/kubepods/n1/podu"]


def test_weights_of_version_2(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    for level in ("", "kubepods", "kubepods/n1", "kubepods/n1/podu"):
        (tmp_path / level).mkdir(exist_ok=True)
        (tmp_path / level / "cgroup.subtree_control").write_text("cpu memory\n")
    ContainerCgroups("n1", [(2, tmp_path)]).prepare(pod("u", "2"))
    found = [(tmp_path / level / "cpu.weight").read_text() for level in ("kubepods", "kubepods/n1", "kubepods/n1/podu")]
    assert found == ["174", "174", "174"]


@pytest.mark.parametrize(("processors", "expected"), [("0", 1), ("1", 100), ("256", 10_000), ("1000", 10_000)])
def test_the_ends_of_the_scale_and_what_a_group_has_by_itself(processors, expected):
    assert cpu_shares.weight(Decimal(processors)) == expected


@given(*[st.decimals(0, 300, places=3)] * 2)
def test_who_requests_more_never_weighs_less(one, other):
    least, most = sorted((one, other))
    assert 2 <= cpu_shares.shares(least) <= cpu_shares.shares(most) <= 262_144
    assert 1 <= cpu_shares.weight(least) <= cpu_shares.weight(most) <= 10_000
