"""What the plugin tells: lists and their pages, what it announces of itself, health, and how long words are."""

import asyncio
import dataclasses
import os
import threading

import pytest
from tests.support.plugin_caller import MIB, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.plugin.run import identity_of, serve
from moorage.sdk.identity import IdentityService
from moorage.storage import CreateVolume, HealthEntry, HealthStatus, VolumeHealth, ids


async def volumes_of(client):
    return [entry.volume for entry in (await client.ListVolumes(pb.ListVolumesRequest())).entries]


# --- lists -------------------------------------------------------------------------------------


async def test_a_list_says_that_more_follows_only_when_more_follows(caller, client, parts):
    """Volumes that live with a pod are between the others in the pool, and never in the list."""
    pool = parts.pools.named()
    for number in range(3):
        pool.create_volume(CreateVolume(name=f"pod{number}", required_bytes=4 * MIB, ephemeral=f"/pods/{number}"))
    made = sorted([(await caller.create(name, size=4 * MIB)).volume_id for name in ("a", "z1", "z2")])
    found, token = [], ""
    for page in range(3):
        answer = await client.ListVolumes(pb.ListVolumesRequest(max_entries=1, starting_token=token))
        found += [entry.volume.volume_id for entry in answer.entries]
        assert len(found) == page + 1
        token = answer.next_token
        assert bool(token) == (page < 2)
    assert found == made
    for entry in ("a", "z1"):
        await caller.delete(ids.id_from(entry))
    await caller.delete(ids.id_from("z2"))
    one = (await caller.create("a", size=4 * MIB)).volume_id
    answer = await client.ListVolumes(pb.ListVolumesRequest(max_entries=1))
    assert ([entry.volume.volume_id for entry in answer.entries], answer.next_token) == ([one], "")


async def test_the_list_of_the_unwell_pages_past_volumes_of_pods(caller, client, parts, refused):
    pool = parts.pools.named()
    pool.create_volume(CreateVolume(name="pod", required_bytes=4 * MIB, ephemeral="/pods/1"))
    made = sorted([(await caller.create(name, size=4 * MIB)).volume_id for name in ("a", "z")])
    for ident in (*made, ids.ephemeral_id_from("pod")):
        os.truncate(pool.volumes.get(ident).data, MIB)
    found, token = [], ""
    for page in range(2):
        request = pb.ControllerListVolumeHealthRequest(max_entries=1, starting_token=token)
        answer = await client.ControllerListVolumeHealth(request)
        found += [entry.volume_id for entry in answer.entries]
        token = answer.next_token
        assert bool(token) == (page < 1)
    assert found == made
    with refused("ABORTED", "starting_token"):
        await client.ControllerListVolumeHealth(pb.ControllerListVolumeHealthRequest(starting_token="7"))


@pytest.mark.parametrize("changed_settings", [{}, {"scope": "shared"}])
async def test_a_volume_that_goes_while_it_is_listed_is_left_out(caller, client, parts, monkeypatch):
    made = {name: (await caller.create(name, size=4 * MIB)).volume_id for name in ("a", "b")}
    pool = parts.pools.named()
    page = pool.volumes.page

    def slow(after="", limit=0):
        found = page(after=after, limit=limit)
        pool.delete_volume(made["a"])
        return found

    monkeypatch.setattr(pool.volumes, "page", slow)
    assert [each.volume_id for each in await volumes_of(client)] == [made["b"]]


async def test_a_bad_token_is_aborted_also_beside_a_filter(caller, client, refused):
    source = (await caller.create("v")).volume_id
    snapshot = (await caller.snapshot(source)).snapshot_id
    for wanted in ({"snapshot_id": snapshot}, {"source_volume_id": source}):
        with refused("ABORTED", "starting_token"):
            await client.ListSnapshots(pb.ListSnapshotsRequest(starting_token="invalid-token", **wanted))
        assert len((await client.ListSnapshots(pb.ListSnapshotsRequest(**wanted))).entries) == 1


async def test_snapshots_are_filtered_and_paged(caller, client):
    one, two = [(await caller.create(name)).volume_id for name in ("one", "two")]
    of_one = sorted([(await caller.snapshot(one, f"s{number}")).snapshot_id for number in range(5)])
    of_two = (await caller.snapshot(two, "t")).snapshot_id

    async def listed(**wanted):
        answer = await client.ListSnapshots(pb.ListSnapshotsRequest(**wanted))
        return [entry.snapshot.snapshot_id for entry in answer.entries], answer.next_token

    assert (await listed(source_volume_id=one)) == (of_one, "")
    first, token = await listed(source_volume_id=one, max_entries=2)
    assert (first, bool(token)) == (of_one[:2], True)
    assert (await listed(source_volume_id=one, starting_token=token)) == (of_one[2:], "")
    assert (await listed(snapshot_id=of_two, source_volume_id=one)) == ([], "")
    assert (await listed(snapshot_id=of_two, source_volume_id=two)) == ([of_two], "")
    assert (await listed(snapshot_id="unknown")) == ([], "")
    assert sorted((await listed())[0]) == sorted([*of_one, of_two])


# --- who we are --------------------------------------------------------------------------------

_NODE_SCOPE = {1, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15}
_SHARED_SCOPE = _NODE_SCOPE | {2, 8, 10}


@pytest.mark.parametrize(
    ("changed_settings", "services", "controller", "node"),
    [
        ({}, {1, 2, 3, 4}, _NODE_SCOPE, {1, 2, 3, 4, 5}),
        ({"scope": "shared"}, {1, 3, 4}, _SHARED_SCOPE, {1, 2, 3, 4, 5}),
        ({"csi_version": "1.13"}, {1, 2, 3, 4, 5}, _NODE_SCOPE | {16, 17}, {1, 2, 3, 4, 5, 7, 8}),
        (
            {"scope": "shared", "csi_version": "1.13"},
            {1, 3, 4},
            _SHARED_SCOPE | {16, 17},
            {1, 2, 3, 4, 5, 7, 8},
        ),
    ],
)
async def test_exactly_this_is_announced(client, services, controller, node):
    plugin = (await client.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest())).capabilities
    assert {each.service.type for each in plugin if each.HasField("service")} == services
    assert [each.volume_expansion.type for each in plugin if each.HasField("volume_expansion")] == [1]  # ONLINE
    found = (await client.ControllerGetCapabilities(pb.ControllerGetCapabilitiesRequest())).capabilities
    assert sorted(each.rpc.type for each in found) == sorted(controller)
    found = (await client.NodeGetCapabilities(pb.NodeGetCapabilitiesRequest())).capabilities
    assert sorted(each.rpc.type for each in found) == sorted(node)
    found = (await client.GroupControllerGetCapabilities(pb.GroupControllerGetCapabilitiesRequest())).capabilities
    assert [each.rpc.type for each in found] == [1]


@pytest.mark.parametrize("changed_settings", [{"services": frozenset({"controller"})}])
async def test_every_process_of_one_version_says_the_same_of_itself(client, settings, tmp_path):
    mine = await client.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest())
    info = await client.GetPluginInfo(pb.GetPluginInfoRequest())
    assert (info.name, bool(info.vendor_version)) == ("csi.moorage.dev", True)
    other = IdentityService(identity_of(dataclasses.replace(settings, services=frozenset({"node"}), node_id="node-2")))
    assert await other.GetPluginCapabilities(pb.GetPluginCapabilitiesRequest(), None) == mine
    assert await other.GetPluginInfo(pb.GetPluginInfoRequest(), None) == info


async def test_a_plugin_that_is_starting_is_not_ready_and_not_failing(settings, monkeypatch):
    """Sidecars end at an error of Probe, and wait at `ready: false`."""
    may_go_on, stop = threading.Event(), asyncio.Event()
    monkeypatch.setattr("moorage.plugin.run._prepare", lambda parts: may_go_on.wait(60))

    async def run():
        async with serve(settings):
            await stop.wait()

    running = asyncio.create_task(run())
    async with CsiClient(settings.endpoint, timeout_s=60) as client:
        try:
            await client.wait_connected(60)
            assert (await client.Probe(pb.ProbeRequest())).ready.value is False
            may_go_on.set()
            await client.wait_ready(60)
            assert (await client.Probe(pb.ProbeRequest())).ready.value is True
        finally:
            may_go_on.set()
            stop.set()
            await running


async def test_nothing_but_the_socket_is_put_beside_it(settings, tmp_path):
    directory = tmp_path / "only"
    async with serve(dataclasses.replace(settings, endpoint=f"unix://{directory}/csi.sock")):
        assert [each.name for each in directory.iterdir()] == ["csi.sock"]
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("changed_settings", [{"max_volumes_per_node": 7}])
async def test_a_node_tells_its_limit(client):
    assert (await client.NodeGetInfo(pb.NodeGetInfoRequest())).max_volumes_per_node == 7


# --- health ------------------------------------------------------------------------------------


async def test_storage_health_names_each_trouble_once_with_every_pool(client, parts):
    """No two entries share status, reason and capability."""
    moved = []
    for pool in parts.pools:
        pool.directory.rename(pool.directory.with_name(f"{pool.name}-hidden"))
        moved.append(pool)
    try:
        found = (await client.NodeGetStorageHealth(pb.NodeGetStorageHealthRequest())).backend_health
    finally:
        for pool in moved:
            pool.directory.with_name(f"{pool.name}-hidden").rename(pool.directory)
    assert [(each.status, each.reason) for each in found] == [(pb.STORAGE_UNREACHABLE, "PoolGone")]
    assert "default" in found[0].message
    assert "second" in found[0].message


async def test_messages_of_answers_keep_to_the_size_of_a_string(caller, client, parts, monkeypatch):
    """A string of CSI has 128 bytes in answers too."""
    volume = (await caller.create("v")).volume_id
    pool = parts.pools.named()
    long = tuple(HealthEntry(HealthStatus.DEGRADED, f"Reason{number}", "ü" * 100) for number in range(2))
    monkeypatch.setattr(pool.health, "of", lambda ident: long)
    monkeypatch.setattr(pool.health, "pool", lambda: long)
    monkeypatch.setattr(
        pool.health, "unhealthy", lambda after="", limit=0: type(pool.volumes.page())((VolumeHealth(volume, long),))
    )
    condition = (await client.ListVolumes(pb.ListVolumesRequest())).entries[0].status.volume_condition
    texts = [condition.message]
    answer = await client.ControllerGetVolumeHealth(pb.ControllerGetVolumeHealthRequest(volume_id=volume))
    texts += [each.message for each in answer.volume_health.health_statuses]
    storage = await client.NodeGetStorageHealth(pb.NodeGetStorageHealthRequest())
    texts += [each.message for each in storage.backend_health]
    refusal = await client.ValidateVolumeCapabilities(
        pb.ValidateVolumeCapabilitiesRequest(
            volume_id=volume, volume_capabilities=[mounted()], parameters={"x" * 300: "y"}
        )
    )
    texts.append(refusal.message)
    assert len(texts) == 6
    for text in texts:
        assert 100 < len(text.encode()) <= 128
    assert condition.message.startswith("Reason0: ü")
    assert "; Reason1: ü" in condition.message  # every reason is there, whatever it costs the words
