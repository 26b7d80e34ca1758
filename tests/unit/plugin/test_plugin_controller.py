"""What a caller may expect of the controller: names, sizes, sources, places, lists."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from tests.support.plugin_caller import MIB, Mode, block, from_snapshot, from_volume, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.plugin.io_limits import IoCgroups
from moorage.plugin.metrics import copy_metrics
from moorage.plugin.settings import TOPOLOGY_KEY


def names_of(answer):
    return [entry.volume.volume_id for entry in answer.entries]


async def test_a_name_makes_one_volume_however_often_it_is_asked_for(caller, client):
    first = await caller.create("v", size=10 * MIB)
    again = await caller.create("v", size=10 * MIB)
    assert first == again
    assert first.capacity_bytes == 10 * MIB
    assert names_of(await client.ListVolumes(pb.ListVolumesRequest())) == [first.volume_id]


async def test_a_driver_that_is_slow_to_greet_is_waited_for(parts, tmp_path):
    """As a busy one is: its socket takes the connection, and its first frame comes later."""
    endpoint = parts.settings.endpoint.removeprefix("unix://")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/late.sock")
    listener.listen()

    def late():
        taken, _ = listener.accept()
        with taken, socket.socket(socket.AF_UNIX) as own:
            time.sleep(0.6)
            own.connect(endpoint)
            pipes = [threading.Thread(target=piped, args=ends) for ends in ((taken, own), (own, taken))]
            for pipe in pipes:
                pipe.start()
            for pipe in pipes:
                pipe.join()

    def piped(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    relay = threading.Thread(target=late)
    relay.start()
    async with CsiClient(f"unix://{tmp_path}/late.sock", timeout_s=30) as client:
        assert (await client.NodeGetInfo(pb.NodeGetInfoRequest())).node_id == "node-1"
    await asyncio.to_thread(relay.join, 30)
    listener.close()


async def test_a_volume_keeps_its_filesystem_when_the_default_changes(caller, monkeypatch):
    first = await caller.create("v", size=400 * MIB)
    for default in ("ext4", "xfs", "btrfs"):
        monkeypatch.setattr(
            "moorage.plugin.services.create_request.default_filesystem", lambda size, name=default: name
        )
        assert await caller.create("v", size=400 * MIB) == first


async def test_sixty_four_callers_of_one_name_get_one_volume(caller, client):
    async def create():
        while True:
            try:
                return (await caller.create("v")).volume_id
            except CsiError as error:
                if error.code != "ABORTED":
                    raise
                await asyncio.sleep(0.01)

    found = await asyncio.gather(*(create() for _ in range(64)))
    assert len(set(found)) == 1
    assert names_of(await client.ListVolumes(pb.ListVolumesRequest())) == [found[0]]


async def test_sixty_four_names_at_once_make_sixty_four_volumes(caller, client):
    found = await asyncio.gather(*(caller.create(f"v{number}", size=MIB * 4) for number in range(64)))
    assert len({volume.volume_id for volume in found}) == 64
    assert len(names_of(await client.ListVolumes(pb.ListVolumesRequest()))) == 64


@pytest.mark.parametrize(
    "other",
    [
        {"size": 20 * MIB},
        {"capability": block()},
        {"capability": mounted("xfs"), "size": 310 * MIB},
        {"parameters": {"provisioning": "thick"}},
        {"parameters": {"pool": "second"}},
        {"parameters": {"snapshotInUse": "freeze"}},
    ],
)
async def test_a_name_that_exists_with_other_properties_is_refused(caller, refused, other):
    await caller.create("v", size=10 * MIB)
    with refused("ALREADY_EXISTS", "'v'"):
        await caller.create("v", **{"size": 10 * MIB, **other})
    again = await caller.create("v", size=10 * MIB)
    assert again.capacity_bytes == 10 * MIB  # what was there is as it was


async def test_sizes_are_a_range_rounded_to_whole_mebibytes(client, refused):
    async def create(name, required=0, limit=0):
        capacity = pb.CapacityRange(required_bytes=required, limit_bytes=limit)
        request = pb.CreateVolumeRequest(name=name, capacity_range=capacity, volume_capabilities=[mounted()])
        return (await client.CreateVolume(request)).volume.capacity_bytes

    assert await create("a", required=5 * MIB + 1) == 6 * MIB
    assert await create("b", required=8 * MIB, limit=8 * MIB) == 8 * MIB
    assert await create("c") == 1024 * MIB
    assert await create("d", limit=100 * MIB) == 100 * MIB
    with refused("OUT_OF_RANGE", "limit_bytes"):
        await create("e", required=5 * MIB + 1, limit=5 * MIB + 2)
    with refused("INVALID_ARGUMENT", "negative"):
        await create("f", required=-1)
    with refused("INVALID_ARGUMENT", "smaller"):
        await create("g", required=2 * MIB, limit=MIB)
    with refused("OUT_OF_RANGE"):
        await create("h", required=2**60)
    answer = await client.ListVolumes(pb.ListVolumesRequest())
    assert len(answer.entries) == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "nul\0here"}, "name"),
        ({"name": "x" * 10_000}, "name"),
        ({"capability": pb.VolumeCapability()}, "volume_capabilities[0]"),
        ({"capability": mounted(mode=Mode.UNKNOWN)}, "access_mode"),
        ({"capability": mounted("ntfs")}, "ntfs"),
        ({"capability": mounted(mode=Mode.MULTI_NODE_MULTI_WRITER)}, "kind: directory"),
        ({"capability": block(), "parameters": {"kind": "directory"}}, "block device"),
        ({"parameters": {"colour": "blue"}}, "colour"),
        ({"parameters": {"kind": "cube"}}, "kind"),
        ({"parameters": {"pool": "nowhere"}}, "nowhere"),
        ({"parameters": {"provisioning": "fat"}}, "provisioning"),
        ({"mutable": {"colour": "blue"}}, "colour"),
        ({"mutable": {"readIOPS": "many"}}, "readIOPS"),
        ({"capability": mounted(flags=["a\nb"])}, "mount_flags"),
    ],
)
async def test_bad_requests_name_the_field_and_make_nothing(caller, client, refused, change, field):
    with refused("INVALID_ARGUMENT", field):
        await caller.create(**{"name": "v", **change})
    assert names_of(await client.ListVolumes(pb.ListVolumesRequest())) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "ümläut 漢字", "line\nfeed", "x" * 128, "A", "a"])
async def test_any_name_becomes_an_id_inside_the_pool(caller, parts, name):
    volume = await caller.create(name, size=4 * MIB)
    assert "/" not in volume.volume_id
    found = list(parts.pools.named().directory.glob("volumes/*"))
    assert [each.name for each in found] == [volume.volume_id]
    other = await caller.create(name + "2" if len(name) < 128 else "y" * 128, size=4 * MIB)
    assert other.volume_id != volume.volume_id


@pytest.mark.parametrize("ident", ["", "..", "../../etc", "a/b", "x\0y", "unknown", "volumes", "ephemeral.x"])
async def test_strange_ids_are_not_found_or_gone_already(client, refused, ident):
    if not ident:
        with refused("INVALID_ARGUMENT", "volume_id"):
            await client.DeleteVolume(pb.DeleteVolumeRequest())
        return
    await client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=ident))
    await client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=ident))
    await client.DeleteVolumeGroupSnapshot(pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=ident))
    with refused("NOT_FOUND"):
        await client.ControllerGetVolume(pb.ControllerGetVolumeRequest(volume_id=ident))
    with refused("NOT_FOUND"):
        await client.GetSnapshot(pb.GetSnapshotRequest(snapshot_id=ident))
    with refused("NOT_FOUND"):
        await client.GetVolumeGroupSnapshot(pb.GetVolumeGroupSnapshotRequest(group_snapshot_id=ident))
    with refused("NOT_FOUND"):
        await client.ControllerModifyVolume(pb.ControllerModifyVolumeRequest(volume_id=ident))
    with refused("NOT_FOUND"):
        await client.ControllerGetVolumeHealth(pb.ControllerGetVolumeHealthRequest(volume_id=ident))
    assert not (await client.ListVolumes(pb.ListVolumesRequest())).entries


async def test_sources_must_exist_and_fit(caller, client, refused):
    source = (await caller.create("source", size=20 * MIB)).volume_id
    snapshot = await caller.snapshot(source)
    with refused("NOT_FOUND", "nothing"):
        await caller.create("a", source=from_snapshot("nothing"))
    with refused("NOT_FOUND", "nothing"):
        await caller.create("a", source=from_volume("nothing"))
    with refused("OUT_OF_RANGE"):
        await client.CreateVolume(
            pb.CreateVolumeRequest(
                name="a",
                capacity_range=pb.CapacityRange(limit_bytes=10 * MIB),
                volume_capabilities=[mounted()],
                volume_content_source=from_snapshot(snapshot.snapshot_id),
            )
        )
    with refused("INVALID_ARGUMENT", "btrfs"):
        await caller.create("a", mounted("btrfs"), 400 * MIB, source=from_volume(source))
    with refused("INVALID_ARGUMENT", "directory"):
        await caller.create("a", source=from_volume(source), parameters={"kind": "directory"})
    with refused("INVALID_ARGUMENT", "second"):
        await caller.create("a", source=from_volume(source), parameters={"pool": "second"})
    restored = await caller.create("b", size=30 * MIB, source=from_snapshot(snapshot.snapshot_id))
    assert restored.content_source.snapshot.snapshot_id == snapshot.snapshot_id
    assert restored.capacity_bytes == 30 * MIB
    with refused("ALREADY_EXISTS"):
        await caller.create("b", size=30 * MIB)


async def test_snapshots_are_made_once_by_name_and_source(caller, client, refused):
    one, two = [(await caller.create(name)).volume_id for name in ("one", "two")]
    first = await caller.snapshot(one, "s")
    assert first == await caller.snapshot(one, "s")
    assert first.ready_to_use
    with refused("ALREADY_EXISTS"):
        await caller.snapshot(two, "s")
    with refused("NOT_FOUND"):
        await caller.snapshot("unknown", "t")
    with refused("INVALID_ARGUMENT", "colour"):
        await caller.snapshot(one, "t", {"colour": "blue"})
    for request in (pb.CreateSnapshotRequest(name="s"), pb.CreateSnapshotRequest(source_volume_id=one)):
        with refused("INVALID_ARGUMENT", "is needed"):
            await client.CreateSnapshot(request)
    by_id = await client.ListSnapshots(pb.ListSnapshotsRequest(snapshot_id=first.snapshot_id))
    assert [entry.snapshot for entry in by_id.entries] == [first]
    for nothing in (pb.ListSnapshotsRequest(snapshot_id="x"), pb.ListSnapshotsRequest(source_volume_id=two)):
        assert not (await client.ListSnapshots(nothing)).entries
    assert (await client.GetSnapshot(pb.GetSnapshotRequest(snapshot_id=first.snapshot_id))).snapshot == first


async def test_how_copies_were_made_is_counted_and_told(caller, parts):
    source = (await caller.create("source")).volume_id
    snapshot = (await caller.snapshot(source)).snapshot_id
    restored = await caller.create("restored", source=from_snapshot(snapshot))
    way = restored.volume_context["copyPath"]
    text = copy_metrics(parts.copies)
    assert sum(parts.copies.values()) == 2
    assert f'moorage_copies_total{{path="{way}"}} {parts.copies[way]}' in text


async def test_lists_come_in_pages_that_survive_changes_in_between(caller, client, refused):
    made = [(await caller.create(f"v{n}", size=4 * MIB)).volume_id for n in range(7)]
    second = {"pool": "second"}
    made += [(await caller.create(f"w{n}", size=4 * MIB, parameters=second)).volume_id for n in range(2)]
    found, token = [], ""
    while True:
        page = await client.ListVolumes(pb.ListVolumesRequest(max_entries=2, starting_token=token))
        assert len(page.entries) <= 2
        found += names_of(page)
        if not page.next_token:
            break
        token = page.next_token
        await caller.delete(found[-1])  # the token must not depend on it
    assert sorted(found) == sorted(made)
    for bad in ("invalid-token", "after:", "after:x", "7"):
        with refused("ABORTED", "starting_token"):
            await client.ListVolumes(pb.ListVolumesRequest(starting_token=bad))
        with refused("ABORTED", "starting_token"):
            await client.ListSnapshots(pb.ListSnapshotsRequest(starting_token=bad))
    with refused("INVALID_ARGUMENT", "max_entries"):
        await client.ListVolumes(pb.ListVolumesRequest(max_entries=-1))


async def test_a_volume_is_made_only_where_the_pool_is(client, refused):
    def request(*nodes, preferred=()):
        terms = [pb.Topology(segments={TOPOLOGY_KEY: node}) for node in nodes]
        wanted = [pb.Topology(segments={TOPOLOGY_KEY: node}) for node in preferred]
        return pb.CreateVolumeRequest(
            name="v",
            volume_capabilities=[mounted()],
            accessibility_requirements=pb.TopologyRequirement(requisite=terms, preferred=wanted),
        )

    with refused("RESOURCE_EXHAUSTED", "node-1"):
        await client.CreateVolume(request("node-2", "node-3"))
    volume = (await client.CreateVolume(request("node-2", "node-1"))).volume
    assert [dict(each.segments) for each in volume.accessible_topology] == [{TOPOLOGY_KEY: "node-1"}]
    assert (await client.CreateVolume(request(preferred=["node-2"]))).volume == volume

    elsewhere = pb.TopologyRequirement(requisite=[pb.Topology(segments={TOPOLOGY_KEY: "node-2"})])
    with refused("INVALID_ARGUMENT", "accessibility_requirements"):
        await client.CreateSnapshot(
            pb.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id, accessibility_requirements=elsewhere)
        )
    snapshot = (
        await client.CreateSnapshot(pb.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id))
    ).snapshot
    assert [dict(each.segments) for each in snapshot.accessible_topology] == [{TOPOLOGY_KEY: "node-1"}]


async def test_a_restore_is_promised_only_where_the_snapshot_is(client, caller, refused):
    source = (await caller.create("v")).volume_id
    snapshot = (await caller.snapshot(source)).snapshot_id
    request = pb.CreateVolumeRequest(
        name="r", volume_capabilities=[mounted()], volume_content_source=from_snapshot(snapshot)
    )
    request.accessibility_requirements.requisite.add().segments[TOPOLOGY_KEY] = "node-2"
    with refused("RESOURCE_EXHAUSTED", "node-1"):
        await client.CreateVolume(request)
    request.accessibility_requirements.requisite.add().segments[TOPOLOGY_KEY] = "node-1"
    made = (await client.CreateVolume(request)).volume
    assert [dict(each.segments) for each in made.accessible_topology] == [{TOPOLOGY_KEY: "node-1"}]
    group = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[source])
    (member,) = (await client.CreateVolumeGroupSnapshot(group)).group_snapshot.snapshots
    assert [dict(each.segments) for each in member.accessible_topology] == [{TOPOLOGY_KEY: "node-1"}]


@pytest.mark.parametrize("changed_settings", [{"scope": "shared"}])
async def test_a_snapshot_of_a_shared_pool_is_usable_everywhere(client, caller):
    source = (await caller.create("v")).volume_id
    wish = pb.CreateSnapshotRequest(name="s", source_volume_id=source)
    wish.accessibility_requirements.requisite.add().segments[TOPOLOGY_KEY] = "node-2"
    assert not (await client.CreateSnapshot(wish)).snapshot.accessible_topology


async def test_a_volume_knows_the_claim_that_it_was_made_for(caller, parts):
    names = {"csi.storage.k8s.io/pvc/namespace": "shop", "csi.storage.k8s.io/pvc/name": "data"}
    for parameters, claim in ((names, "shop/data"), ({**names, "csi.storage.k8s.io/pvc/name": ""}, ""), ({}, "")):
        made = await caller.create("v", parameters=parameters)
        assert parts.pools.named().volumes.get(made.volume_id).claim == claim
        assert (
            await caller.create("v")
        ).volume_id == made.volume_id  # the claim makes no difference to a repeated call
        await caller.delete(made.volume_id)


async def test_the_class_decides_how_long_a_deleted_volume_can_come_back(caller, client, parts):
    """A class of its own keeps nothing here; the plugin does for a day, and a later change wins."""
    pool = parts.pools.named()
    kept = (await caller.create("kept")).volume_id
    plain = (await caller.create("plain", parameters={"trashRetention": "0s"})).volume_id
    later = (await caller.create("later")).volume_id
    await client.ControllerModifyVolume(
        pb.ControllerModifyVolumeRequest(volume_id=later, mutable_parameters={"trashRetention": "1d"})
    )
    for volume in (kept, plain, later):
        await caller.delete(volume)
    await asyncio.to_thread(pool.sweep)
    assert sorted(item.name for item in pool.trash.listed()) == ["kept", "later"]
    assert await asyncio.to_thread(pool.undelete, "kept") == kept
    assert (await caller.create("kept")).volume_id == kept
    assert names_of(await client.ListVolumes(pb.ListVolumesRequest())) == [kept]


async def test_capacity_is_the_pools_and_zero_elsewhere(client, caller, refused):
    request = pb.GetCapacityRequest(parameters={"csi.storage.k8s.io/fstype": "xfs", "other": "key"})
    before = await client.GetCapacity(request)
    assert before.available_capacity > 0
    assert before.maximum_volume_size.value > 0
    elsewhere = pb.GetCapacityRequest(accessible_topology=pb.Topology(segments={TOPOLOGY_KEY: "node-2"}))
    assert (await client.GetCapacity(elsewhere)).available_capacity == 0
    with refused("INVALID_ARGUMENT", "nowhere"):
        await client.GetCapacity(pb.GetCapacityRequest(parameters={"pool": "nowhere"}))
    await caller.create("v", size=1024 * MIB)
    assert (await client.GetCapacity(request)).available_capacity <= before.available_capacity - 1024 * MIB


async def test_a_volume_that_does_not_fit_is_refused_and_leaves_nothing(client, caller, refused, parts):
    room = (await client.GetCapacity(pb.GetCapacityRequest())).available_capacity
    with refused("RESOURCE_EXHAUSTED"):
        for number in range(3):
            await caller.create(f"v{number}", size=room * 2 // 3)
    assert len(names_of(await client.ListVolumes(pb.ListVolumesRequest()))) == 1
    assert list((parts.pools.named().directory / "tmp").iterdir()) == []


async def test_capabilities_are_confirmed_or_not_with_a_reason(client, caller, refused):
    volume = await caller.create("v", mounted("ext4"))

    async def validate(*capabilities, **more):
        return await client.ValidateVolumeCapabilities(
            pb.ValidateVolumeCapabilitiesRequest(volume_id=volume.volume_id, volume_capabilities=capabilities, **more)
        )

    good = await validate(mounted("ext4"), mounted(), volume_context=volume.volume_context)
    assert len(good.confirmed.volume_capabilities) == 2
    for capability in (block(), mounted("xfs"), mounted(mode=Mode.MULTI_NODE_MULTI_WRITER)):
        answer = await validate(capability)
        assert not answer.HasField("confirmed")
        assert answer.message
    assert not (await validate(mounted(), parameters={"kind": "directory"})).HasField("confirmed")
    assert not (await validate(mounted(), volume_context={"kind": "directory"})).HasField("confirmed")
    with refused("INVALID_ARGUMENT", "volume_capabilities"):
        await validate()


async def test_modifying_is_all_or_nothing_and_leaves_other_keys_alone(client, caller, refused, parts):
    volume = (await caller.create("v", mutable={"readAheadKiB": "64"})).volume_id

    async def modify(**changes):
        await client.ControllerModifyVolume(
            pb.ControllerModifyVolumeRequest(volume_id=volume, mutable_parameters=changes)
        )

    await modify(directIO="false")
    with refused("INVALID_ARGUMENT", "colour"):
        await modify(directIO="true", colour="blue")
    with refused("INVALID_ARGUMENT", "directIO"):
        await modify(readAheadKiB="1", directIO="perhaps")
    assert dict(parts.pools.named().volumes.get(volume).mutable) == {"readAheadKiB": "64", "directIO": "false"}
    await modify()


async def test_limits_on_a_machine_that_has_none_are_refused_and_nothing_is_changed(
    client, caller, refused, parts, tmp_path
):
    vars(parts.cgroups).update(vars(IoCgroups(tmp_path)))  # a machine without the controllers
    with refused("FAILED_PRECONDITION", "neither the io controller"):
        await caller.create("v", mutable={"readIOPS": "1"})
    volume = (await caller.create("v", mutable={"readAheadKiB": "64"})).volume_id
    with refused("FAILED_PRECONDITION", "neither the io controller"):
        await client.ControllerModifyVolume(
            pb.ControllerModifyVolumeRequest(
                volume_id=volume, mutable_parameters={"writeIOPS": "1", "readAheadKiB": "128"}
            )
        )
    assert dict(parts.pools.named().volumes.get(volume).mutable) == {"readAheadKiB": "64"}


@pytest.mark.parametrize("method", ["ControllerPublishVolume", "ControllerUnpublishVolume"])
async def test_a_nodes_own_pool_has_no_attaching(client, refused, method):
    with refused("UNIMPLEMENTED", "--scope node") as caught:
        await client.call(method, getattr(pb, f"{method}Request")(volume_id="v"))
    assert caught.value.method == method


async def test_damaged_records_are_errors_not_absences(client, caller, refused, parts):
    volume = (await caller.create("v")).volume_id
    record = parts.pools.named().directory / "volumes" / volume / "volume.json"
    for text in ("", "{", "[]", '{"id": "other"}'):
        record.write_text(text)
        with refused("INTERNAL", "damaged"):
            await client.ControllerGetVolume(pb.ControllerGetVolumeRequest(volume_id=volume))
        with refused("INTERNAL", "damaged"):
            await caller.create("v")
        assert record.read_text() == text
    await caller.create("other")  # one bad record harms no other volume
    health = await client.ControllerListVolumeHealth(pb.ControllerListVolumeHealthRequest())
    assert [each.reason for each in health.entries[0].health_statuses] == ["RecordDamaged"]


async def test_a_pool_that_vanished_is_said_so_and_comes_back(client, caller, refused, parts):
    await caller.create("v")
    directory = parts.pools.named().directory
    hidden = directory.with_name("hidden")
    directory.rename(hidden)
    try:
        with refused("UNAVAILABLE", "default"):
            await caller.create("w")
        health = await client.NodeGetStorageHealth(pb.NodeGetStorageHealthRequest())
        assert [each.reason for each in health.backend_health] == ["PoolGone"]
    finally:
        hidden.rename(directory)
    await caller.create("w")
    assert not (await client.NodeGetStorageHealth(pb.NodeGetStorageHealthRequest())).backend_health


async def test_what_is_announced_depends_on_scope_and_version(client):
    kinds = {
        each.rpc.type
        for each in (await client.ControllerGetCapabilities(pb.ControllerGetCapabilitiesRequest())).capabilities
    }
    assert pb.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME not in kinds
    assert max(kinds) <= 15
    info = await client.NodeGetInfo(pb.NodeGetInfoRequest())
    assert info.node_id == "node-1"
    assert dict(info.accessible_topology.segments) == {TOPOLOGY_KEY: "node-1"}


@pytest.mark.parametrize("changed_settings", [{"csi_version": "1.13", "scope": "shared"}])
async def test_a_shared_pool_attaches_and_is_everywhere(client):
    answer = await client.ControllerGetCapabilities(pb.ControllerGetCapabilitiesRequest())
    kinds = {each.rpc.type for each in answer.capabilities}
    assert pb.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME in kinds
    assert pb.ControllerServiceCapability.RPC.LIST_VOLUME_HEALTH in kinds
    assert not (await client.NodeGetInfo(pb.NodeGetInfoRequest())).HasField("accessible_topology")


@pytest.mark.parametrize("changed_settings", [{"services": frozenset({"node"})}])
async def test_a_process_serves_only_what_it_was_told_to(client, refused):
    with refused("UNIMPLEMENTED"):
        await client.ListVolumes(pb.ListVolumesRequest())
    assert (await client.NodeGetInfo(pb.NodeGetInfoRequest())).node_id
