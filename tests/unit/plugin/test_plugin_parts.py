"""The plugin's small decisions: settings, access, places, limits, paths, metrics."""

import asyncio
import dataclasses
import os

import pytest

from moorage.csi.http_endpoint import HttpEndpoint
from moorage.csi.metrics import CallMetrics
from moorage.csi.sizes import size_from
from moorage.errors import InvalidRequest, UsageError
from moorage.host.targets import Target, TargetRefused, check_path
from moorage.plugin.access import why_unsupported
from moorage.plugin.io_limits import IoCgroups, IoLimits, LimitsUnsupported, pod_uid_from
from moorage.plugin.node.observe import vfs_words, wanted_words
from moorage.plugin.node.tuning import volume_id_behind
from moorage.plugin.parameters import ClassParameters
from moorage.plugin.settings import PluginSettings, duration_s_from, fraction_from, pools_from
from moorage.sdk.model import Access, AccessMode, why_inconsistent
from moorage.storage import InUse, VolumeKind

RWO = Access(AccessMode.SINGLE_NODE_WRITER)


def test_pools_are_named_or_the_default():
    assert [*pools_from(["/a", "fast=/b=c"])] == ["default", "fast"]
    assert str(pools_from(["fast=/b=c"])["fast"]) == "/b=c"
    for bad in (["relative"], ["x=relative"], ["/a", "/b"], ["bad.name=/a"], ["=/a"], ["x" * 33 + "=/a"]):
        with pytest.raises(UsageError, match="--pool"):
            pools_from(bad)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"node_id": "bad/id"}, "--node-id"),
        ({"node_id": "x" * 64}, "--node-id"),
        ({"pools": {}}, "--pool"),
        ({"scope": "galaxy"}, "--scope"),
        ({"services": frozenset({"coffee"})}, "--services"),
        ({"services": frozenset()}, "--services"),
        ({"driver_name": "-x"}, "--driver-name"),
        ({"reserve_fraction": 1.0}, "--reserve"),
        ({"overcommit": 0.0}, "--overcommit"),
        ({"max_volumes_per_node": -1}, "--max-volumes-per-node"),
        ({"csi_version": "2.0"}, "--csi-version"),
    ],
)
def test_wrong_settings_name_their_flag(settings, change, flag):
    with pytest.raises(UsageError, match=flag):
        dataclasses.replace(settings, **change).checked()


def test_settings_survive_the_way_to_the_process(settings):
    assert PluginSettings.from_json(settings.as_json()) == settings


def test_durations_and_shares():
    assert [duration_s_from(text) for text in ("90", "90s", "15m", "1d12h", "0s")] == [90, 90, 900, 129600, 0]
    assert (fraction_from("5%"), fraction_from("0.05")) == (0.05, 0.05)
    for bad in ("", "soon", "-1s", "1w"):
        with pytest.raises(ValueError, match="duration"):
            duration_s_from(bad)
        with pytest.raises(ValueError, match="share"):
            fraction_from(bad)


@pytest.mark.parametrize(
    ("access", "is_directory", "filesystem", "word"),
    [
        (RWO, False, "", ""),
        (RWO, True, "", ""),
        (dataclasses.replace(RWO, mode=AccessMode.MULTI_NODE_MULTI_WRITER), True, "", ""),
        (dataclasses.replace(RWO, mode=AccessMode.MULTI_NODE_READER_ONLY), False, "ext4", ""),
        (dataclasses.replace(RWO, mode=AccessMode.MULTI_NODE_MULTI_WRITER), False, "", "kind: directory"),
        (dataclasses.replace(RWO, is_block=True), True, "", "block device"),
        (dataclasses.replace(RWO, is_block=True), False, "ext4", "block device"),
        (RWO, False, "block", "cannot be mounted"),
        (dataclasses.replace(RWO, fs_type="xfs"), False, "ext4", "ext4, not xfs"),
        (dataclasses.replace(RWO, fs_type="zfs"), False, "", "zfs"),
        (dataclasses.replace(RWO, fs_type="ext4"), True, "", "no filesystem of its own"),
        (dataclasses.replace(RWO, mount_flags=("data=journal",)), True, "", "general mount flags"),
    ],
)
def test_a_use_is_possible_or_refused_with_a_reason(access, is_directory, filesystem, word):
    why = why_unsupported(access, is_directory=is_directory, filesystem=filesystem)
    assert (word in why) if word else why == ""


def test_one_volume_cannot_be_everything():
    assert why_inconsistent([RWO, RWO]) == ""
    assert "block" in why_inconsistent([RWO, dataclasses.replace(RWO, is_block=True)])
    filesystems = [dataclasses.replace(RWO, fs_type=each) for each in ("ext4", "xfs")]
    assert "ext4, xfs" in why_inconsistent(filesystems)


def test_mount_flags_are_kept_out_of_logs():
    assert "hunter2" not in repr(dataclasses.replace(RWO, mount_flags=("password=hunter2",)))


def test_class_parameters_are_decoded_and_mutable_ones_win():
    parameters = {"kind": "directory", "readIOPS": "1", "csi.storage.k8s.io/pvc/name": "x", "snapshotInUse": "live"}
    found = ClassParameters.parse(parameters, {"readIOPS": "2"})
    assert (found.kind, found.in_use, dict(found.mutable)) == (VolumeKind.DIRECTORY, InUse.LIVE, {"readIOPS": "2"})
    assert ClassParameters.parse({"csi.storage.k8s.io/fstype": "xfs"}, {}).fs_type == "xfs"


def test_sizes_are_quantities():
    assert [size_from("size", text) for text in ("5", "1k", "2Mi", "1Gi")] == [5, 1000, 2**21, 2**30]
    for bad in ("", "0", "-1", "1.5Gi", "1KiB", "x"):
        with pytest.raises(InvalidRequest, match="size"):
            size_from("size", bad)


def test_pods_are_known_by_kubelets_paths():
    root = "/var/lib/kubelet"
    assert pod_uid_from(f"{root}/pods/abc-1/volumes/kubernetes.io~csi/pv/mount") == "abc-1"
    publish = f"{root}/plugins/kubernetes.io/csi/volumeDevices/publish/pv-1/abc-2"
    assert pod_uid_from(publish) == "abc-2"
    assert pod_uid_from("/mnt/data") == ""


def test_limits_are_written_to_a_pods_cgroup_of_version_two(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu io memory")
    uid = "11-22"
    pods = [
        tmp_path / "kubepods.slice" / "kubepods-burstable.slice" / "kubepods-burstable-pod11_22.slice",
        tmp_path / "kubepods" / "besteffort" / "pod11-22",
    ]
    for pod in pods:
        pod.mkdir(parents=True)
        (pod / "io.max").write_text("")
    (tmp_path / "kubepods" / "besteffort" / "pod11-223").mkdir()
    cgroups = IoCgroups(tmp_path)
    assert cgroups.apply(uid, (7, 3), IoLimits(read_iops=100, write_bytes_per_second=5)) == 2
    assert [(pod / "io.max").read_text() for pod in pods] == ["7:3 rbps=max wbps=5 riops=100 wiops=max"] * 2
    assert not (tmp_path / "kubepods" / "besteffort" / "pod11-223" / "io.max").exists()


class KernelOfVersionTwo:
    """What the kernel does to a tree of cgroups: `io.max` is there where the level above hands `io` down."""

    def __init__(self, root):
        self.root, self.written = root, []
        self.has_io(root)

    def has_io(self, cgroup):
        (cgroup / "cgroup.controllers").write_text("cpu io memory")
        (cgroup / "cgroup.subtree_control").touch()

    def write(self, file, text):
        self.written.append((file.relative_to(self.root).as_posix(), text))
        if file.name == "cgroup.subtree_control":
            if not (file.parent / "cgroup.controllers").exists():
                return 0
            for child in file.parent.iterdir():
                if child.is_dir():
                    self.has_io(child)
                    (child / "io.max").touch()
            return 1
        if not file.exists():
            return 0
        file.write_text(text)
        return 1


def test_the_io_controller_is_handed_down_to_a_pod_of_version_two(tmp_path, monkeypatch):
    root = tmp_path / "cgroup"
    pod = root / "kubepods.slice" / "kubepods-besteffort.slice" / "kubepods-besteffort-pod11_22.slice"
    pod.mkdir(parents=True)
    kernel = KernelOfVersionTwo(root)
    monkeypatch.setattr("moorage.plugin.io_limits._write", kernel.write)
    cgroups = IoCgroups(root)
    assert cgroups.apply("11-22", (7, 3), IoLimits(read_iops=100)) == 1
    assert (pod / "io.max").read_text() == "7:3 rbps=max wbps=max riops=100 wiops=max"
    asked = [file for file, text in kernel.written if text == "+io"]
    above = ["kubepods.slice", "kubepods.slice/kubepods-besteffort.slice"]
    assert asked == ["cgroup.subtree_control", *(f"{level}/cgroup.subtree_control" for level in above)]
    kernel.written.clear()
    assert cgroups.apply("11-22", (7, 3), IoLimits()) == 1
    assert (pod / "io.max").read_text() == "7:3 rbps=max wbps=max riops=max wiops=max"
    assert len(kernel.written) == 1, "a pod that has the controller needs nothing else"


def test_a_pod_that_does_not_get_the_controller_is_not_counted(tmp_path):
    """Nothing hands `io` down here, as with a real directory: the write of the limit fails, and is not claimed."""
    (tmp_path / "cgroup.controllers").write_text("io")
    pod = tmp_path / "pod11-22"
    pod.mkdir()
    (pod / "io.max").mkdir()  # a write that the kernel refuses
    assert IoCgroups(tmp_path).apply("11-22", (7, 3), IoLimits(read_iops=1)) == 0


def test_limits_of_version_one_reach_every_container(tmp_path):
    root = tmp_path / "blkio"
    names = ("read_bps", "write_bps", "read_iops", "write_iops")
    pod = root / "kubepods" / "pod11-22"
    for directory in (root, pod, pod / "container"):
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            (directory / f"blkio.throttle.{name}_device").write_text("")
    assert IoCgroups(tmp_path).apply("11-22", (7, 3), IoLimits(read_iops=9)) == 2
    assert (pod / "container" / "blkio.throttle.read_iops_device").read_text() == "7:3 9"
    assert (root / "blkio.throttle.read_iops_device").read_text() == ""


def test_a_machine_without_either_says_so(tmp_path):
    cgroups = IoCgroups(tmp_path)
    assert "cgroup" in cgroups.why_unsupported()
    with pytest.raises(LimitsUnsupported, match="cgroup"):
        cgroups.apply("x", (7, 0), IoLimits(read_iops=1))


@pytest.mark.parametrize("path", ["", "relative", "/a/../b", "/", "//", "/a\0b"])
def test_paths_that_cannot_be_targets(path):
    with pytest.raises(InvalidRequest, match="target_path"):
        check_path("target_path", path)


def test_a_target_resolves_far_links_and_refuses_near_ones(tmp_path):
    (tmp_path / "real" / "pods" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    target = Target.from_request("target_path", str(tmp_path / "link" / "pods" / "x" / "mount"))
    assert target.path == str(tmp_path / "real" / "pods" / "x" / "mount")
    (tmp_path / "real" / "pods" / "near").symlink_to("/etc")
    with pytest.raises(TargetRefused, match="symbolic link"):
        Target.from_request("target_path", str(tmp_path / "real" / "pods" / "near" / "mount"))


def test_removing_a_target_never_takes_data(tmp_path):
    for make in (lambda p: p.mkdir(), lambda p: p.touch(), lambda p: p.symlink_to("/etc")):
        make(tmp_path / "t")
        Target(str(tmp_path / "t")).remove()
        assert not os.path.lexists(tmp_path / "t")
    Target(str(tmp_path / "t")).remove()
    (tmp_path / "t").write_text("data")
    with pytest.raises(TargetRefused, match="left alone"):
        Target(str(tmp_path / "t")).remove()
    assert (tmp_path / "t").read_text() == "data"


def test_mount_words_compare_what_a_caller_can_ask_for():
    from moorage.host.mountinfo import parse

    line = b"36 35 7:3 / /mnt ro,noatime,relatime shared:1 - ext4 /dev/loop3 rw,errors=remount-ro\n"
    assert vfs_words(parse(line)[0]) == {"ro", "noatime"}
    assert wanted_words(["noatime,errors=continue", "rw"], read_only=True) == {"ro", "noatime"}


async def test_metrics_and_health_are_served_and_nothing_else(parts):
    metrics, healthy = CallMetrics(), [True]
    metrics.observe("d", "/m", "OK", 0.01)

    async def get(port, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    async with HttpEndpoint("127.0.0.1:0", metrics.render, lambda: healthy[0]) as http:
        answer = await get(http.port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert (
            b'csi_plugin_operations_seconds_count{driver_name="d",method_name="/m",grpc_status_code="OK"} 1' in answer
        )
        assert b"200 OK" in await get(http.port, b"GET /healthz HTTP/1.1\r\n\r\n")
        healthy[0] = False
        assert b"503" in await get(http.port, b"GET /healthz HTTP/1.1\r\n\r\n")
        assert b"404" in await get(http.port, b"GET /etc/passwd HTTP/1.1\r\n\r\n")
        assert b"405" in await get(http.port, b"POST /metrics HTTP/1.1\r\n\r\n")
    for bad in ("nonsense", "host:port", ":99999"):
        with pytest.raises(UsageError, match="--http-endpoint"):
            HttpEndpoint(bad, metrics.render, lambda: True)
    pool = parts.pools.named()
    assert volume_id_behind(pool, f"{pool.directory}/volumes/v-1/data") == "v-1"
    assert volume_id_behind(pool, "/elsewhere/volumes/v-1/data") == ""
