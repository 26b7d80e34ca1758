"""Control groups of pods, on trees that look like those of a kernel."""

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moorage.host.safe_remove import remove_tree
from moorage.kube.objects.pods import Pod
from moorage.kube.quantity import Quantity
from moorage.node.runtime import cgroups
from moorage.node.runtime.cgroups import ContainerCgroups


def pod(**limits):
    container = {"name": "a", "image": "host", "resources": {"limits": limits}}
    return msgspec.convert(
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [container], "initContainers": [{"name": "i", "image": "host"}]},
        },
        Pod,
    )


@pytest.fixture
def separate(tmp_path):
    """The hierarchies of version 1."""
    for name in ("memory", "cpu,cpuacct", "blkio"):
        (tmp_path / name).mkdir()
    return tmp_path, ContainerCgroups("n1", [(1, tmp_path / name) for name in ("memory", "cpu,cpuacct", "blkio")])


@pytest.fixture
def unified(tmp_path, monkeypatch):
    """One hierarchy of version 2, whose directories have their files at once."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    make = cgroups.os.mkdir

    def with_files(directory, *more):
        make(directory, *more)
        Path(directory, "cgroup.subtree_control").write_text("")

    monkeypatch.setattr(cgroups.os, "mkdir", with_files)
    return tmp_path, ContainerCgroups("n1", [(2, tmp_path)])


def test_limits_of_version_1_are_set_in_the_hierarchy_that_has_them(separate):
    root, groups = separate
    groups.prepare(pod(memory="64Mi", cpu="250m"))
    assert (root / "memory/kubepods/n1/podu/a/memory.limit_in_bytes").read_text() == str(64 << 20)
    assert (root / "cpu,cpuacct/kubepods/n1/podu/a/cpu.cfs_quota_us").read_text() == "25000"
    assert list((root / "blkio/kubepods/n1/podu/a").iterdir()) == []
    assert list((root / "memory/kubepods/n1/podu/i").iterdir()) == []  # says nothing of limits
    assert groups.of("u", "a") == [f"{root}/{name}/kubepods/n1/podu/a" for name in ("memory", "cpu,cpuacct", "blkio")]


def test_limits_of_version_2_are_set_and_controllers_reach_every_level(unified):
    root, groups = unified
    groups.prepare(pod(memory="1Gi", cpu="1500m"))
    group = root / "kubepods/n1/podu/a"
    assert (group / "memory.max").read_text() == str(1 << 30)
    assert (group / "cpu.max").read_text() == "150000 100000"
    for level in ("kubepods", "kubepods/n1", "kubepods/n1/podu"):
        assert (root / level / "cgroup.subtree_control").read_text() == "+cpu +io +memory +pids"
    assert (root / "cgroup.subtree_control").read_text() == "cpu io memory pids\n"  # has them already


@pytest.mark.parametrize(("init", "limit"), [(["i"], "1Gi"), ([], "64Mi")])
def test_what_all_containers_may_have_together_is_the_limit_of_the_pods_group(separate, unified, init, limit):
    """But the only container of a pod may have less, and is in the same group."""
    found = pod(memory="64Mi")
    found = msgspec.convert(
        {
            **msgspec.to_builtins(found),
            "spec": {
                **msgspec.to_builtins(found.spec),
                "initContainers": [{"name": name, "image": "host"} for name in init],
                "resources": {"limits": {"memory": "1Gi", "cpu": "500m"}},
            },
        },
        Pod,
    )
    wanted = str(Quantity.parse(limit).value)
    root, groups = separate
    groups.prepare(found)
    assert (root / "memory/kubepods/n1/podu/memory.limit_in_bytes").read_text() == wanted
    assert (root / "cpu,cpuacct/kubepods/n1/podu/cpu.cfs_quota_us").read_text() == "50000"
    root, groups = unified
    groups.prepare(found)
    assert (root / "kubepods/n1/podu/memory.max").read_text() == wanted
    assert (root / "kubepods/n1/podu/cpu.max").read_text() == "50000 100000"
    if init:
        assert (root / "kubepods/n1/podu/a/memory.max").read_text() == str(64 << 20)


def test_the_only_container_of_a_pod_is_in_the_pods_own_group(separate, unified):
    alone = pod(memory="64Mi")
    alone = msgspec.structs.replace(alone, spec=msgspec.structs.replace(alone.spec, init_containers=()))
    root, groups = separate
    groups.prepare(alone)
    assert groups.of("u", "a") == [f"{root}/{name}/kubepods/n1/podu" for name in ("memory", "cpu,cpuacct", "blkio")]
    assert (root / "memory/kubepods/n1/podu/memory.limit_in_bytes").read_text() == str(64 << 20)
    (root / "memory/kubepods/n1/podu/memory.oom_control").write_text("oom_kill 2\n")
    assert groups.oom_kills("u", "a") == 2
    root, groups = unified
    groups.prepare(alone)
    assert groups.of("u", "a") == [f"{root}/kubepods/n1/podu"]
    assert (root / "kubepods/n1/podu/memory.max").read_text() == str(64 << 20)
    assert (root / "kubepods/n1/podu/cgroup.subtree_control").read_text() == ""  # else no process may be in it


def test_a_share_too_small_for_the_kernel_is_the_smallest_that_it_takes(separate):
    root, groups = separate
    groups.prepare(pod(cpu="1m"))
    assert (root / "cpu,cpuacct/kubepods/n1/podu/a/cpu.cfs_quota_us").read_text() == "1000"


def test_a_limit_that_cannot_be_set_stops_nothing(separate):
    root, groups = separate
    groups.prepare(pod(memory="nonsense", cpu="250m"))
    assert (root / "cpu,cpuacct/kubepods/n1/podu/a").is_dir()
    assert groups.of("u", "a")


@pytest.mark.parametrize(("version", "name"), [(1, "memory.oom_control"), (2, "memory.events")])
def test_kills_for_want_of_memory_are_counted(tmp_path, version, name):
    groups = ContainerCgroups("n1", [(version, tmp_path)])
    group = tmp_path / "kubepods/n1/podu/a"
    assert groups.oom_kills("u", "a") == 0
    group.mkdir(parents=True)
    (group / name).write_text("under_oom 0\noom 5\noom_kill 3\n")
    assert groups.oom_kills("u", "a") == 3


def test_groups_go_with_their_pod_and_the_level_of_the_node_with_the_last(tmp_path):
    groups = ContainerCgroups("n1", [(1, tmp_path)])
    groups.prepare(pod())
    groups.remove("u")
    assert groups.of("u", "a") == []
    groups.remove_own()
    assert list(tmp_path.iterdir()) == []


def test_groups_go_however_many_a_container_has_made_in_one_another(tmp_path):
    groups = ContainerCgroups("n1", [(1, tmp_path)])
    groups.prepare(pod())
    inner = tmp_path / "kubepods/n1/podu/a"
    for directory in [f"{inner}{'/b' * depth}" for depth in range(1, 1200)]:
        os.mkdir(directory)
    try:
        groups.remove("u")
        groups.remove_own()
        assert list(tmp_path.iterdir()) == []
    finally:
        remove_tree(tmp_path / "kubepods")  # pytest could not


def test_a_machine_without_control_groups_runs_pods_all_the_same():
    groups = ContainerCgroups("n1", [])
    groups.prepare(pod(memory="1Gi"))
    assert (groups.of("u", "a"), groups.oom_kills("u", "a")) == ([], 0)
    groups.remove("u")


def test_only_hierarchies_in_which_a_limit_can_be_set_are_used(tmp_path, monkeypatch):
    kinds = {"memory": ("cgroup", "memory"), "freezer": ("cgroup", "freezer"),
             "useful": ("cgroup2", ""), "useless": ("cgroup2", ""), "tmp": ("tmpfs", "")}  # fmt: skip
    for name in kinds:
        (tmp_path / name).mkdir()
    (tmp_path / "useful/cgroup.controllers").write_text("hugetlb memory\n")
    (tmp_path / "useless/cgroup.controllers").write_text("hugetlb\n")
    table = [
        SimpleNamespace(target=str(tmp_path / name), fstype=fstype, super_options=frozenset(("rw", options)))
        for name, (fstype, options) in kinds.items()
    ]
    monkeypatch.setattr(cgroups.mountinfo, "mounts", lambda: table)
    assert cgroups.find_hierarchies() == [(1, tmp_path / "memory"), (2, tmp_path / "useful")]
