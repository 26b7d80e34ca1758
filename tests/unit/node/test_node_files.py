"""Files: atomic payloads, ownership, logs, volume data, fields, figures."""

import os
import stat
from dataclasses import replace

import msgspec
import pytest

from moorage.errors import InvalidRequest
from moorage.kube.objects.pods import Pod
from moorage.node import downward
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.pods.container_spec import expand
from moorage.node.pods.errors import BadContainer
from moorage.node.pods.identity import identity
from moorage.node.serve import metrics
from moorage.node.serve.logs import LogOptions, stream
from moorage.node.volumes.mounters import ownership, vol_data
from moorage.node.volumes.mounters.payload import File, write_payload
from moorage.node.volumes.observe import observe
from moorage.node.volumes.state import CsiSource, MountState
from moorage.node.volumes.stats import Usage


def test_a_payload_changes_all_at_once_and_leaves_nothing_old(tmp_path):
    assert write_payload(tmp_path, {"a": File(b"1", 0o644), "sub/b": File(b"2", 0o600)})
    assert (tmp_path / "a").read_bytes() == b"1"
    assert (tmp_path / "sub" / "b").read_bytes() == b"2"
    first = os.readlink(tmp_path / "..data")
    assert not write_payload(tmp_path, {"a": File(b"1", 0o644), "sub/b": File(b"2", 0o600)})
    assert write_payload(tmp_path, {"a": File(b"3", 0o644)})
    assert (tmp_path / "a").read_bytes() == b"3"
    assert not (tmp_path / "sub").exists()
    assert not (tmp_path / first).exists()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ""])
def test_a_payload_cannot_leave_its_directory(tmp_path, path):
    with pytest.raises(InvalidRequest):
        write_payload(tmp_path, {path: File(b"", 0o644)})


def test_files_go_to_the_group_the_top_last_and_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o600)
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d" / "f").write_text("x")
    (root / "d" / "f").chmod(0o400)
    (root / "link").symlink_to(outside)
    gid = os.getgid()
    assert ownership.apply_group(root, gid) == 4
    assert stat.S_IMODE((root / "d" / "f").stat().st_mode) == 0o660
    assert (root / "d").stat().st_mode & stat.S_ISGID
    assert stat.S_IMODE(outside.stat().st_mode) == 0o600
    assert ownership.has_group(root, gid)
    assert ownership.apply_group(root, gid, only_on_root_mismatch=True) == 0


def test_volume_data_survives_and_nonsense_is_told_apart_from_absence(tmp_path):
    source = CsiSource("drv", "h", "pv")
    assert vol_data.read(tmp_path) is None
    vol_data.write(tmp_path, vol_data.for_pod(source, "n", "csi-1"))
    assert vol_data.source_from(vol_data.read(tmp_path)) == source
    (tmp_path / vol_data.NAME).write_text("{")
    with pytest.raises(vol_data.UnreadableVolumeData):
        vol_data.read(tmp_path)
    (tmp_path / vol_data.NAME).write_text('{"driverName": "x"}')
    with pytest.raises(vol_data.UnreadableVolumeData):
        vol_data.read(tmp_path)


def test_volume_data_has_the_keys_that_a_kubelet_writes():
    claimed, inline = CsiSource("drv", "h", "pv"), CsiSource("drv", "h", "v", is_ephemeral=True)
    device = {"volumeHandle": "h", "driverName": "drv"}
    pod = {**device, "specVolID": "pv", "nodeName": "n", "attachmentID": "csi-1"}
    assert vol_data.for_device(claimed) == device
    assert vol_data.for_device(claimed, "label") == {**device, "seLinuxMountContext": "label"}
    assert vol_data.for_pod(claimed, "n", "csi-1") == {**pod, "volumeLifecycleMode": "Persistent"}
    assert vol_data.for_pod(inline, "n", "csi-1") == {**pod, "specVolID": "v", "volumeLifecycleMode": "Ephemeral"}
    assert vol_data.for_pod(replace(claimed, is_block=True), "n", "csi-1") == pod


def test_volume_data_is_whole_or_not_there_and_its_directories_are_for_root(tmp_path, monkeypatch):
    directory = tmp_path / "a" / "b" / "c"
    old = vol_data.for_device(CsiSource("drv", "h", "pv"))
    vol_data.write(directory, old)
    for made in (directory, directory.parent, directory.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o750

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vol_data.os, "replace", no_room)
    with pytest.raises(OSError, match="No space left"):
        vol_data.write(directory, vol_data.for_device(CsiSource("drv", "other", "pv")))
    assert vol_data.read(directory) == old
    assert os.listdir(directory) == [vol_data.NAME]


def test_everything_on_disk_is_found_again_as_uncertain(tmp_path):
    layout = NodeLayout(tmp_path)
    claimed, inline = CsiSource("d", "h", "pv"), CsiSource("d", "e", "v", is_ephemeral=True)
    block, left = CsiSource("d", "b", "pvb", is_block=True), CsiSource("d", "left", "pvl")
    vol_data.write(layout.csi_volume("u1", "pv"), vol_data.for_pod(claimed, "n", "a"))
    vol_data.write(layout.csi_volume("u2", "pv"), vol_data.for_pod(claimed, "n", "a"))
    vol_data.write(layout.csi_volume("u1", "v"), vol_data.for_pod(inline, "n", "a"))
    vol_data.write(layout.block_data("pvb"), vol_data.for_pod(block, "n", "a"))
    layout.block_link("u1", "pvb").parent.mkdir(parents=True)
    layout.block_link("u1", "pvb").symlink_to("/nowhere")
    vol_data.write(layout.staging("d", "left"), vol_data.for_device(left))
    layout.plain_volume("u1", "kubernetes.io/empty-dir", "tmp").mkdir(parents=True)
    layout.csi_volume("u3", "broken").mkdir(parents=True)

    found = observe(layout)
    by_name = found.volumes
    assert set(by_name["kubernetes.io/csi/d^h"].pods) == {"u1", "u2"}
    assert by_name["kubernetes.io/csi/d^h"].device is MountState.UNCERTAIN
    assert by_name["kubernetes.io/csi/u1-v"].device is MountState.ABSENT
    assert by_name["kubernetes.io/csi/d^b"].source.is_block
    assert by_name["kubernetes.io/csi/d^left"].pods == {}
    assert by_name["kubernetes.io/csi/d^left"].device is MountState.UNCERTAIN
    assert by_name["kubernetes.io/empty-dir/u1-tmp"].state_of(PodUid("u1")) is MountState.UNCERTAIN
    assert found.unreadable == [layout.csi_volume("u3", "broken")]


def test_a_block_volume_is_found_by_its_link_by_its_published_device_and_by_its_data(tmp_path):
    layout = NodeLayout(tmp_path)
    for name in ("linked", "published", "staged"):
        source = CsiSource("d", name, f"pv-{name}", is_block=True)
        vol_data.write(layout.block_data(source.spec_name), vol_data.for_pod(source, "n", "a"))
    layout.block_link("u1", "pv-linked").parent.mkdir(parents=True)
    layout.block_link("u1", "pv-linked").symlink_to("/nowhere")
    layout.block_publish("pv-published", "u2").parent.mkdir(parents=True)
    layout.block_publish("pv-published", "u2").touch()  # the agent died before the pod had its link
    layout.block_staging("pv-staged").mkdir(parents=True)

    by_name = observe(layout).volumes
    assert {name: set(volume.pods) for name, volume in by_name.items()} == {
        "kubernetes.io/csi/d^linked": {"u1"},
        "kubernetes.io/csi/d^published": {"u2"},
        "kubernetes.io/csi/d^staged": set(),
    }
    assert all(volume.device is MountState.UNCERTAIN and volume.source.is_block for volume in by_name.values())
    assert all(volume.device_is_reconstructed for volume in by_name.values())


def test_what_cannot_be_read_is_reported_and_nothing_is_made_up(tmp_path):
    layout = NodeLayout(tmp_path)
    places = [layout.csi_volume("u1", "cut"), layout.block_data("pv-cut"), layout.staging("d", "cut")]
    for place in places:
        place.mkdir(parents=True)
        (place / vol_data.NAME).write_text("{")
    layout.block_link("u1", "pv-cut").parent.mkdir(parents=True)
    layout.block_link("u1", "pv-cut").symlink_to("/nowhere")
    (layout.pods / "stray").write_text("no pod")
    found = observe(layout)
    assert found.volumes == {}
    assert found.unreadable == [layout.csi_volume("u1", "cut"), layout.block_link("u1", "pv-cut")]
    assert sorted(found.staged_unreadable) == sorted([layout.staging("d", "cut"), layout.block_data("pv-cut")])
    assert found.pods == {"u1"}


def test_the_label_of_a_mount_is_found_again(tmp_path):
    layout = NodeLayout(tmp_path)
    source = CsiSource("d", "h", "pv")
    vol_data.write(layout.csi_volume("u1", "pv"), vol_data.for_pod(source, "n", "a", "label"))
    vol_data.write(layout.staging("d", "only"), vol_data.for_device(replace(source, handle="only"), "other"))
    by_name = observe(layout).volumes
    assert by_name["kubernetes.io/csi/d^h"].se_linux_label == "label"
    assert by_name["kubernetes.io/csi/d^only"].se_linux_label == "other"


def test_nothing_on_disk_is_nothing_found(tmp_path):
    found = observe(NodeLayout(tmp_path / "new"))
    assert (found.volumes, found.unreadable, found.staged_unreadable, found.pods) == ({}, [], [], set())


def test_references_in_arguments_are_replaced_once():
    assert expand("$(A)-$$(A)-$(B)-$", {"A": "1"}) == "1-$(A)-$(B)-$"


def test_the_containers_user_counts_before_the_pods():
    found = identity(None, {"runAsUser": 5, "runAsGroup": 6}, "c")
    assert found == {"uid": 5, "gid": 6, "groups": [6]}
    with pytest.raises(BadContainer, match="runAsNonRoot"):
        identity(None, {"runAsNonRoot": True}, "c")


def test_fields_of_a_pod_are_shown_as_text():
    document = {
        "metadata": {"name": "p", "namespace": "ns", "labels": {"b": 'x"y', "a": "1"}},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"memory": "2Mi", "cpu": "1500m"}}}]},
    }
    pod = msgspec.convert(document, Pod)
    assert downward.field_of(pod, "metadata.labels") == 'a="1"\nb="x\\"y"'
    assert downward.field_of(pod, "metadata.labels['a']") == "1"
    container = pod.spec.containers[0]
    assert downward.resource_of(pod, {"resource": "limits.memory", "divisor": "1Mi"}, container) == "2"
    assert downward.resource_of(pod, {"resource": "limits.cpu"}, container) == "2"
    with pytest.raises(downward.UnknownField):
        downward.field_of(pod, "spec.nonsense")


async def read_log(path, running=lambda: False, **options):
    return b"".join([piece async for piece in stream(path, LogOptions(**options), running)])


async def test_logs_are_printed_without_their_frame(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(
        b"2026-01-01T00:00:00.000000001Z stdout F one\n"
        b"2026-01-01T00:00:05.000000000Z stderr F two\n"
        b"2026-01-01T00:00:10.000000000Z stdout P thr\n"
        b"2026-01-01T00:00:10.000000000Z stdout F ee\n"
    )
    assert await read_log(path) == b"one\ntwo\nthree\n"
    assert await read_log(path, tail=1) == b"ee\n"
    assert await read_log(path, timestamps=True, tail=1) == b"2026-01-01T00:00:10.000000000Z ee\n"
    assert await read_log(path, stream="Stderr") == b"two\n"
    assert await read_log(path, since=1767225604.0) == b"two\nthree\n"
    assert await read_log(path, limit_bytes=5) == b"one\nt"
    assert await read_log(tmp_path / "none.log") == b""


async def test_following_ends_with_the_container(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(b"2026-01-01T00:00:00Z stdout F one\n")
    asked = []

    def running():
        asked.append(1)
        if len(asked) == 1:
            with path.open("ab") as file:
                file.write(b"2026-01-01T00:00:00Z stdout F two\n")
        return len(asked) < 3

    assert await read_log(path, running, follow=True) == b"one\ntwo\n"


def test_figures_are_one_series_for_each_claim():
    usages = [Usage(PodUid(u), "ns", u, ("v",), "claim", capacity=10, used=4, available=6) for u in ("a", "b")]
    text = metrics.prometheus([*usages, Usage(PodUid("c"), "ns", "c", ("inline",), "")])
    assert text.count('kubelet_volume_stats_used_bytes{namespace="ns",persistentvolumeclaim="claim"} 4') == 1
    body = metrics.summary("n", usages)
    assert body["pods"][0]["volume"][0]["pvcRef"] == {"name": "claim", "namespace": "ns"}
    assert len(body["pods"]) == 2
