"""A process that reaches the plugin's socket sends what no kubelet would send.

The socket is root's alone, so this is the second line: no call ends in an unexpected error, touches a path outside of
the kubelet's directory, or takes memory without bound.
"""

import asyncio
import os
import random
import stat
import tempfile
from pathlib import Path

import grpc
import pytest
from tests.support.plugin_caller import MIB, Caller, mounted
from tests.support.stall import no_stall

from moorage.cluster.layout import DataLayout
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.csi.http_endpoint import HttpEndpoint
from moorage.host import mountinfo
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings

pytestmark = pytest.mark.root

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE", "ALREADY_EXISTS", "ABORTED"}


@pytest.fixture
def kubelet(tmp_path):
    place = tmp_path / "kubelet"
    place.mkdir()
    return place


@pytest.fixture
def settings(tmp_path, kubelet):
    pools = {"default": tmp_path / "pool"}
    return PluginSettings(f"unix://{tmp_path}/csi.sock", "node-1", pools, overcommit=1000.0, kubelet_dir=str(kubelet))


@pytest.fixture
async def client(settings):
    async with serve(settings), CsiClient(settings.endpoint, timeout_s=30) as opened:
        yield opened


@pytest.fixture
async def volume(client, kubelet):
    caller = Caller(client, kubelet)
    found = (await caller.create("v", size=16 * MIB)).volume_id
    yield found
    await caller.leave()


def hostile_paths(base):
    """Paths that no mount point may have, and one that is only not there."""
    return {
        "long name": f"{base}/{'n' * 300}/mount",
        "long last name": f"{base}/{'n' * 300}",
        "long path": f"{base}{'/n' * 2500}",
        "64 KiB": f"{base}/{'n/' * 32768}",
        "64 KiB name": f"{base}/{'n' * 65536}",
        "upwards": f"{base}/../../etc",
        "not absolute": "etc/passwd",
        "root": "/",
        "root in words": "/./././",
        "NUL": f"{base}/a\0b",
        "new line": f"{base}/a\nb",
        "escape": f"{base}/\x1b[2J",
        "right to left": f"{base}/\u202etxt",
        "process": "/proc/1/root/etc",
        "own process": "/proc/self/cwd/x",
        "kernel": "/sys/fs/cgroup/x",
        "host": "/etc",
        "file of the host": "/etc/passwd",
        "devices": "/dev/loop0",
        "beside": f"{base}-2/x",
        "not there": f"{base}/a/b/c/d",
    }


def node_calls(volume_id, path, good):
    """Every node call that names a path."""
    capability = mounted()
    return [
        (
            "NodeStageVolume",
            pb.NodeStageVolumeRequest(volume_id=volume_id, staging_target_path=path, volume_capability=capability),
        ),
        ("NodeUnstageVolume", pb.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=path)),
        (
            "NodePublishVolume",
            pb.NodePublishVolumeRequest(
                volume_id=volume_id, staging_target_path=good, target_path=path, volume_capability=capability
            ),
        ),
        (
            "NodePublishVolume",
            pb.NodePublishVolumeRequest(
                volume_id=volume_id, staging_target_path=path, target_path=f"{good}/x", volume_capability=capability
            ),
        ),
        (
            "NodePublishVolume",
            pb.NodePublishVolumeRequest(
                volume_id="inline",
                target_path=path,
                volume_capability=capability,
                volume_context={"csi.storage.k8s.io/ephemeral": "true", "size": "8Mi"},
            ),
        ),
        ("NodeUnpublishVolume", pb.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=path)),
        ("NodeGetVolumeStats", pb.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=path)),
        ("NodeExpandVolume", pb.NodeExpandVolumeRequest(volume_id=volume_id, volume_path=path)),
        ("NodeGetVolumeHealth", pb.NodeGetVolumeHealthRequest(volume_id=volume_id, volume_publish_path=path)),
    ]


async def outcome(client, method, request):
    try:
        await getattr(client, method)(request)
    except CsiError as error:
        return error.code, error.message
    return "OK", ""


def mounts_made(folder):
    """The mounts of this machine, without those that other tests make meanwhile in temporary folders of their own."""
    elsewhere = (f"{tempfile.gettempdir()}/", "/dev/shm/")
    return [
        each
        for each in mountinfo.mounts()
        if each.target.startswith(f"{folder}/") or not each.target.startswith(elsewhere)
    ]


@pytest.mark.parametrize("kind", hostile_paths("/x"))
async def test_a_hostile_path_is_an_invalid_argument(client, volume, kubelet, kind):
    path = hostile_paths(kubelet)[kind]
    good = kubelet / "good"
    good.mkdir()
    before = mounts_made(kubelet)
    for ident in (volume, "unknown"):
        for method, request in node_calls(ident, path, str(good)):
            code, message = await outcome(client, method, request)
            allowed = {"INVALID_ARGUMENT"}
            if ident == "unknown" or (
                kind in ("not absolute", "root") and method in ("NodeGetVolumeStats", "NodeExpandVolume")
            ):
                allowed.add("NOT_FOUND")
            if kind == "not there":
                allowed |= {"OK", "NOT_FOUND", "FAILED_PRECONDITION"}
            assert code in allowed, (method, code, message)
            assert len(message) < 1000
            assert message.isprintable()
    assert mounts_made(kubelet) == before


async def test_links_on_the_way_lead_no_mount_out_of_the_kubelets_directory(client, volume, kubelet, tmp_path):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (kubelet / "way").symlink_to(outside)
    (kubelet / "real").mkdir()
    (kubelet / "real" / "last").symlink_to(outside)
    for path in ("way/deep/x", "way/deep/x/y", "way/x", "real/last"):
        for method, request in node_calls(volume, str(kubelet / path), str(kubelet / "real" / "last")):
            code, message = await outcome(client, method, request)
            if path == "real/last" and method in ("NodeUnstageVolume", "NodeUnpublishVolume"):
                (kubelet / "real" / "last").unlink(missing_ok=True)  # it removes the link itself, nothing behind it
                (kubelet / "real" / "last").symlink_to(outside)
                continue
            assert code in {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND"}, (method, path, code, message)
    assert [os.path.relpath(place, outside) for place, _, _ in os.walk(outside)] == [".", "deep"]
    assert [each.target for each in mountinfo.mounts() if each.target.startswith(str(tmp_path))] == []


IDS = [
    "",
    ".",
    "..",
    "../../etc",
    "a/b",
    "x\0y",
    "\n",
    "\x1b[2J",
    "-rf",
    "v" * 129,
    "ж" * 60,
    "ephemeral.",
    "ephemeral...",
    "s.9",
    "%s%n",
    "a" * 64 * 1024,
]


@pytest.mark.parametrize("ident", IDS, ids=range(len(IDS)))
async def test_a_hostile_id_is_refused_or_not_found(client, kubelet, ident):
    good = kubelet / "good"
    good.mkdir()
    others = [
        ("DeleteVolume", pb.DeleteVolumeRequest(volume_id=ident)),
        ("DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=ident)),
        ("CreateSnapshot", pb.CreateSnapshotRequest(source_volume_id=ident, name="s")),
        (
            "ControllerExpandVolume",
            pb.ControllerExpandVolumeRequest(volume_id=ident, capacity_range=pb.CapacityRange(required_bytes=MIB)),
        ),
        ("ListSnapshots", pb.ListSnapshotsRequest(snapshot_id=ident, source_volume_id=ident)),
        (
            "ValidateVolumeCapabilities",
            pb.ValidateVolumeCapabilitiesRequest(volume_id=ident, volume_capabilities=[mounted()]),
        ),
        ("ListVolumes", pb.ListVolumesRequest(starting_token=ident)),
        (
            "CreateVolume",
            pb.CreateVolumeRequest(
                name="c",
                volume_capabilities=[mounted()],
                volume_content_source=pb.VolumeContentSource(
                    volume=pb.VolumeContentSource.VolumeSource(volume_id=ident)
                ),
            ),
        ),
    ]
    for method, request in [*node_calls(ident, f"{good}/mount", str(good)), *others]:
        code, message = await outcome(client, method, request)
        is_gone_already = method in (
            "DeleteVolume",
            "DeleteSnapshot",
            "NodeUnpublishVolume",
            "NodeUnstageVolume",
            "ListSnapshots",
            "ListVolumes",
        )
        assert code in REFUSALS or (code == "OK" and (is_gone_already or "inline" in str(request))), (
            method,
            code,
            message,
        )
        assert len(message) < 1000
        if method == "NodePublishVolume" and code == "OK":
            await client.NodeUnpublishVolume(
                pb.NodeUnpublishVolumeRequest(volume_id="inline", target_path=f"{good}/mount")
            )


def random_text(chance):
    return "".join(chance.choice("a/.-%\0\n\x1b{}$`;ж😀 ") for _ in range(chance.choice((0, 1, 5, 40, 120, 5000))))


def filled(message, chance, depth=0):
    """A message with random fields."""
    for field in message.DESCRIPTOR.fields:
        if depth > 4 or chance.random() < 0.4:
            continue
        for _ in range(chance.choice((1, 1, 3)) if field.is_repeated else 1):
            value = getattr(message, field.name)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                if field.message_type.fields_by_name["value"].message_type is None:
                    value[chance.choice((random_text(chance), "csi.storage.k8s.io/ephemeral", "kind", "size"))] = (
                        random_text(chance)
                    )
            elif field.message_type is not None:
                filled(value.add() if field.is_repeated else value, chance, depth + 1)
                if not field.is_repeated:
                    value.SetInParent()
            elif field.is_repeated:
                value.append(random_text(chance) if field.type == field.TYPE_STRING else 1)
            elif field.type == field.TYPE_STRING:
                setattr(message, field.name, chance.choice((random_text(chance), "v", "/tmp", str(chance.random()))))
            elif field.type == field.TYPE_BOOL:
                setattr(message, field.name, chance.random() < 0.5)
            elif field.type == field.TYPE_ENUM:
                setattr(message, field.name, chance.randrange(20))
            elif field.type == field.TYPE_INT64:
                setattr(message, field.name, chance.choice((-1, 0, 1, MIB, 1 << 40, (1 << 63) - 1, -(1 << 63))))
            elif field.type == field.TYPE_INT32:
                setattr(message, field.name, chance.choice((-1, 0, 1, (1 << 31) - 1)))
    return message


async def test_random_requests_end_in_no_unexpected_error(client, volume, kubelet):
    chance = random.Random(26)
    services = pb.DESCRIPTOR.services_by_name
    methods = [
        method
        for service in ("Identity", "Controller", "Node", "GroupController")
        for method in services[service].methods
    ]
    seen = set()
    for _ in range(1200):
        method = chance.choice(methods)
        request = filled(getattr(pb, method.input_type.name)(), chance)
        if "volume_id" in request.DESCRIPTOR.fields_by_name and chance.random() < 0.5 and "Delete" not in method.name:
            request.volume_id = volume
        code, message = await outcome(client, method.name, request)
        seen.add(code)
        assert code not in ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"), (method.name, code, message)
        assert len(message) < 2000
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= seen


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Controller/CreateVolume", pb.CreateVolumeRequest(name="v" * (5 << 20))),
        ("Controller/CreateVolume", pb.CreateVolumeRequest(name="v", volume_capabilities=[mounted()] * 300_000)),
        ("Controller/CreateVolume", pb.CreateVolumeRequest(name="v", parameters={str(n): "v" for n in range(100_000)})),
        (
            "GroupController/CreateVolumeGroupSnapshot",
            pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=["v"] * 900_000),
        ),
        (
            "Node/NodeStageVolume",
            pb.NodeStageVolumeRequest(volume_id="v", volume_capability=mounted(flags=[""] * 1_000_000)),
        ),
        ("Controller/CreateVolume", b"\xff" * 1000),
        ("Controller/CreateVolume", b"\x0a\xff\xff\xff\xff\x0f"),
        ("Controller/CreateVolume", bytes(3 << 20)),
    ],
    ids=["text", "messages", "map", "texts", "flags", "noise", "length", "zeros"],
)
async def test_messages_of_any_size_are_refused_in_words_and_hold_no_loop(settings, caplog, method, request_):
    raw = request_ if isinstance(request_, bytes) else request_.SerializeToString()
    options = [("grpc.max_send_message_length", -1)]
    async with serve(settings), grpc.aio.insecure_channel(settings.endpoint, options=options) as channel:
        probe = channel.unary_unary("/csi.v1.Identity/Probe")
        await probe(b"")
        with no_stall(0.5), pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/csi.v1.{method}")(raw)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        await probe(b"")
    assert "Traceback" not in caplog.text
    assert len(caplog.text) < 100_000


async def test_only_root_reaches_the_socket_the_pool_and_what_is_in_it(settings, kubelet, tmp_path):
    before = os.umask(0)
    try:
        async with serve(settings), CsiClient(settings.endpoint) as client:
            caller = Caller(client, kubelet)
            image = (await caller.create("v", size=16 * MIB)).volume_id
            await caller.create("d", parameters={"kind": "directory"})
            await caller.snapshot(image)
            assert stat.S_IMODE(os.stat(tmp_path / "csi.sock").st_mode) == 0o600
            pool = settings.pools["default"]
            assert stat.S_IMODE(os.stat(pool).st_mode) == 0o700
            open_to_others = [
                path
                for path in Path(pool).rglob("*")
                if path.is_file() and stat.S_IMODE(os.lstat(path).st_mode) & 0o077
            ]
            assert open_to_others == []
    finally:
        os.umask(before)


def test_folders_of_moorage_up_that_were_open_are_closed(tmp_path):
    layout = DataLayout(tmp_path)
    for folder in (layout.api, layout.logs, layout.run):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    layout.make()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (layout.api, layout.logs, layout.run)} == {0o700}


async def test_many_idle_clients_of_the_metrics_keep_no_probe_out():
    """Any pod reaches that address. A probe of the kubelet that fails would restart the plugin."""
    async with HttpEndpoint("127.0.0.1:0", lambda: "", lambda: True) as endpoint:
        idle = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(300)]
        try:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
                writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
            async with asyncio.timeout(10):
                while sum(1 for reader, _ in idle if not reader.at_eof()) > 64:
                    await asyncio.sleep(0.01)
        finally:
            for _, writer in idle:
                writer.close()
