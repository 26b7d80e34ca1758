"""The contract sentence by sentence: repeats, required fields, lists, what is announced, how long answers are."""

import os

import pytest
from tests.support.plugin_caller import MIB, Mode, block, from_snapshot, from_volume, mounted

from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError
from moorage.csi.inflight import group_key, snapshot_key, volume_key
from moorage.plugin.settings import TOPOLOGY_KEY
from moorage.storage import ids

SECOND = {"pool": "second"}


async def volumes_of(client):
    return [entry.volume for entry in (await client.ListVolumes(pb.ListVolumesRequest())).entries]


async def snapshots_of(client):
    return list((await client.ListSnapshots(pb.ListSnapshotsRequest())).entries)


# --- a name stays one object -------------------------------------------------------------------


async def test_a_name_is_one_volume_over_all_pools_also_when_it_is_asked_for_as_a_copy(caller, client, refused):
    first = await caller.create("v", size=10 * MIB)
    source = (await caller.create("source", size=10 * MIB, parameters=SECOND)).volume_id
    snapshot = (await caller.snapshot(source)).snapshot_id
    for origin in (from_volume(source), from_snapshot(snapshot)):
        with refused("ALREADY_EXISTS", "'v'"):
            await caller.create("v", size=10 * MIB, source=origin)
    assert [each for each in await volumes_of(client) if each.volume_id == first.volume_id] == [first]


@pytest.mark.parametrize("capability", [mounted(), block()])
async def test_a_copy_is_found_again_after_its_source_has_gone(caller, client, refused, capability):
    """A lost answer is asked for again, and nothing promises that the source is kept until then."""
    source = (await caller.create("source", capability, 10 * MIB, parameters=SECOND)).volume_id
    snapshot = (await caller.snapshot(source)).snapshot_id
    restored = await caller.create("restored", capability, 10 * MIB, source=from_snapshot(snapshot))
    cloned = await caller.create("cloned", capability, 10 * MIB, source=from_volume(source))
    await client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=snapshot))
    await caller.delete(source)
    assert await caller.create("restored", capability, 10 * MIB, source=from_snapshot(snapshot)) == restored
    assert await caller.create("cloned", capability, 10 * MIB, source=from_volume(source)) == cloned
    with refused("ALREADY_EXISTS"):
        await caller.create("cloned", capability, 10 * MIB, source=from_snapshot(snapshot))
    with refused("NOT_FOUND"):
        await caller.create("new", capability, 10 * MIB, source=from_snapshot(snapshot))


async def test_a_snapshot_is_found_again_after_its_volume_has_gone(caller, client, refused):
    source = (await caller.create("source", parameters=SECOND)).volume_id
    other = (await caller.create("other")).volume_id
    snapshot = await caller.snapshot(source)
    group = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[source])
    made = (await client.CreateVolumeGroupSnapshot(group)).group_snapshot
    await caller.delete(source)
    assert await caller.snapshot(source) == snapshot
    assert (await client.CreateVolumeGroupSnapshot(group)).group_snapshot == made
    with refused("ALREADY_EXISTS"):
        await caller.snapshot(other)
    with refused("ALREADY_EXISTS"):
        await client.CreateVolumeGroupSnapshot(pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[other]))
    with refused("NOT_FOUND"):
        await caller.snapshot(source, "another")


async def test_repeats_are_not_counted_as_copies(caller, client, parts):
    source = (await caller.create("source")).volume_id
    group = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[source])
    for _ in range(2):
        snapshot = (await caller.snapshot(source)).snapshot_id
        await caller.create("restored", source=from_snapshot(snapshot))
        await client.CreateVolumeGroupSnapshot(group)
    assert sum(parts.copies.values()) == 3


async def test_a_range_that_is_left_open_fits_every_size(client):
    async def create(name, required=0, limit=0):
        capacity = pb.CapacityRange(required_bytes=required, limit_bytes=limit)
        request = pb.CreateVolumeRequest(name=name, capacity_range=capacity, volume_capabilities=[mounted()])
        return (await client.CreateVolume(request)).volume.capacity_bytes

    assert await create("v", required=10 * MIB) == 10 * MIB
    assert await create("v") == 10 * MIB
    assert await create("v", limit=100 * MIB) == 10 * MIB
    assert await create("w", limit=100 * MIB + 1) == 100 * MIB


async def test_other_secrets_do_not_make_another_request(client):
    def request(word):
        return pb.CreateVolumeRequest(name="v", volume_capabilities=[mounted()], secrets={"password": word})

    first = (await client.CreateVolume(request("one"))).volume
    assert (await client.CreateVolume(request("two"))).volume == first


@pytest.mark.parametrize(
    ("sizes", "code"),
    [
        ((5 * MIB, 0), "OUT_OF_RANGE"),
        ((0, 5 * MIB), "OUT_OF_RANGE"),
        ((20 * MIB + 1, 20 * MIB + 2), "OUT_OF_RANGE"),
    ],
)
async def test_a_copy_smaller_than_its_source_is_out_of_range(caller, client, refused, sizes, code):
    source = (await caller.create("source", size=10 * MIB)).volume_id
    capacity = pb.CapacityRange(required_bytes=sizes[0], limit_bytes=sizes[1])
    with refused(code):
        await client.CreateVolume(
            pb.CreateVolumeRequest(
                name="v",
                capacity_range=capacity,
                volume_capabilities=[mounted()],
                volume_content_source=from_volume(source),
            )
        )
    assert [each.volume_id for each in await volumes_of(client)] == [source]


async def test_a_source_of_no_known_type_never_makes_an_empty_volume(client, refused):
    """A caller of a later version may name a source that this plugin does not know."""
    unknown = pb.VolumeContentSource.FromString(b"\x1a\x00")  # field 3
    request = pb.CreateVolumeRequest(name="v", volume_capabilities=[mounted()], volume_content_source=unknown)
    with refused("INVALID_ARGUMENT", "volume_content_source"):
        await client.CreateVolume(request)
    assert await volumes_of(client) == []


async def test_keys_of_a_place_that_differ_in_case_alone_are_refused(client, refused):
    request = pb.CreateVolumeRequest(name="v", volume_capabilities=[mounted()])
    segments = {TOPOLOGY_KEY: "node-1", TOPOLOGY_KEY.upper(): "node-2"}
    request.accessibility_requirements.requisite.add(segments=segments)
    with refused("INVALID_ARGUMENT", "accessibility_requirements"):
        await client.CreateVolume(request)
    assert await volumes_of(client) == []
    del request.accessibility_requirements.requisite[0].segments[TOPOLOGY_KEY.upper()]
    volume = (await client.CreateVolume(request)).volume
    assert await volumes_of(client) == [volume]


async def test_keys_of_a_place_are_compared_without_regard_to_case(client):
    request = pb.CreateVolumeRequest(name="v", volume_capabilities=[mounted()])
    request.accessibility_requirements.requisite.add(segments={TOPOLOGY_KEY.upper(): "node-1"})
    volume = (await client.CreateVolume(request)).volume
    assert dict(volume.accessible_topology[0].segments) == {TOPOLOGY_KEY: "node-1"}


# --- groups ------------------------------------------------------------------------------------


async def test_a_group_is_got_and_deleted_only_by_one_who_names_its_members(caller, client, refused):
    source = (await caller.create("source")).volume_id
    create = pb.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=[source])
    group = (await client.CreateVolumeGroupSnapshot(create)).group_snapshot
    for request in (pb.GetVolumeGroupSnapshotRequest, pb.DeleteVolumeGroupSnapshotRequest):
        method = request.DESCRIPTOR.name.removesuffix("Request")
        with refused("INVALID_ARGUMENT", "snapshot_ids"):
            await client.call(method, request(group_snapshot_id=group.group_snapshot_id))
    members = [each.snapshot_id for each in group.snapshots]
    assert [each.snapshot.snapshot_id for each in await snapshots_of(client)] == members
    await client.DeleteVolumeGroupSnapshot(
        pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=group.group_snapshot_id, snapshot_ids=members)
    )
    assert await snapshots_of(client) == []


async def test_what_a_group_needs_and_what_it_cannot_be(caller, client, refused):
    one = (await caller.create("one")).volume_id
    two = (await caller.create("two", parameters=SECOND)).volume_id

    async def create(name, *volumes, **more):
        request = pb.CreateVolumeGroupSnapshotRequest(name=name, source_volume_ids=volumes, **more)
        return (await client.CreateVolumeGroupSnapshot(request)).group_snapshot

    for name, volumes in (("", [one]), ("g", []), ("g", [""]), ("g", [one, one])):
        with refused("INVALID_ARGUMENT"):
            await create(name, *volumes)
    with refused("INVALID_ARGUMENT", "colour"):
        await create("g", one, parameters={"colour": "blue"})
    with refused("FAILED_PRECONDITION", "several pools"):
        await create("g", one, two)
    assert not (await client.ListSnapshots(pb.ListSnapshotsRequest())).entries
    made = await create("g", one)
    assert made.ready_to_use
    assert made.creation_time == made.snapshots[0].creation_time
    with refused("ALREADY_EXISTS", "parameters"):
        await create("g", one, parameters={"snapshotInUse": "freeze"})
    with refused("INVALID_ARGUMENT", "group"):
        await client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=made.snapshots[0].snapshot_id))
    got = await client.GetSnapshot(pb.GetSnapshotRequest(snapshot_id=made.snapshots[0].snapshot_id))
    assert got.snapshot.group_snapshot_id == made.group_snapshot_id


# --- capabilities, capacity --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "mutable", "word"),
    [
        ({}, {"colour": "blue"}, "colour"),
        ({}, {"readIOPS": "many"}, "readIOPS"),
        ({"colour": "blue"}, {}, "colour"),
        ({"pool": "second"}, {}, "second"),
        ({"provisioning": "thick"}, {}, "provisioning"),
        ({"fsType": "xfs"}, {}, "xfs"),
        ({"snapshotInUse": "freeze"}, {}, "snapshotInUse"),
    ],
)
async def test_parameters_that_the_volume_does_not_have_are_not_confirmed(caller, client, parameters, mutable, word):
    volume = (await caller.create("v", mounted("ext4"))).volume_id
    answer = await client.ValidateVolumeCapabilities(
        pb.ValidateVolumeCapabilitiesRequest(
            volume_id=volume, volume_capabilities=[mounted()], parameters=parameters, mutable_parameters=mutable
        )
    )
    assert not answer.HasField("confirmed")
    assert word in answer.message


async def test_what_is_confirmed_is_told_back(caller, client, refused):
    volume = await caller.create("v", mounted("ext4"), parameters=SECOND, mutable={"directIO": "false"})
    request = pb.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_context={**volume.volume_context, "storage.kubernetes.io/csiProvisionerIdentity": "x"},
        volume_capabilities=[mounted("ext4", Mode.SINGLE_NODE_MULTI_WRITER)],
        parameters=SECOND,
        mutable_parameters={"directIO": "false"},
    )
    confirmed = (await client.ValidateVolumeCapabilities(request)).confirmed
    for field in ("volume_context", "volume_capabilities", "parameters", "mutable_parameters"):
        assert getattr(confirmed, field) == getattr(request, field)
    request.volume_id = "unknown"
    with refused("NOT_FOUND"):
        await client.ValidateVolumeCapabilities(request)
    request.volume_id = ""
    with refused("INVALID_ARGUMENT", "volume_id"):
        await client.ValidateVolumeCapabilities(request)


async def test_capacity_looks_at_capabilities_and_at_the_class(client):
    async def ask(*capabilities, **parameters):
        return await client.GetCapacity(pb.GetCapacityRequest(volume_capabilities=capabilities, parameters=parameters))

    for impossible in (
        [mounted(mode=Mode.MULTI_NODE_MULTI_WRITER)],
        [mounted("ntfs")],
        [mounted(), block()],
        [mounted("ext4"), mounted("xfs")],
    ):
        assert (await ask(*impossible)).available_capacity == 0
    assert (await ask(mounted(mode=Mode.MULTI_NODE_MULTI_WRITER), kind="directory")).available_capacity > 0
    assert (await ask(mounted("xfs"))).minimum_volume_size.value == 300 * MIB
    assert (await ask(fsType="xfs")).minimum_volume_size.value == 300 * MIB
    assert (await ask(**{"csi.storage.k8s.io/fstype": "btrfs"})).minimum_volume_size.value == 128 * MIB
    assert (await ask(block(), fsType="xfs")).minimum_volume_size.value == MIB


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ControllerExpandVolumeRequest(capacity_range=pb.CapacityRange(required_bytes=1)), "volume_id"),
        (pb.ControllerExpandVolumeRequest(volume_id="unknown"), "capacity_range"),
        (
            pb.ControllerExpandVolumeRequest(volume_id="unknown", capacity_range=pb.CapacityRange(required_bytes=-1)),
            "negative",
        ),
        (pb.ControllerModifyVolumeRequest(mutable_parameters={"directIO": "true"}), "volume_id"),
        (pb.ControllerGetVolumeRequest(), "volume_id"),
        (pb.ControllerGetVolumeHealthRequest(), "volume_id"),
        (pb.GetSnapshotRequest(), "snapshot_id"),
        (pb.DeleteSnapshotRequest(), "snapshot_id"),
        (pb.GetVolumeGroupSnapshotRequest(), "group_snapshot_id"),
        (pb.DeleteVolumeGroupSnapshotRequest(), "group_snapshot_id"),
        (pb.ListSnapshotsRequest(max_entries=-1), "max_entries"),
        (pb.ListSnapshotsRequest(max_entries=-1, snapshot_id="unknown"), "max_entries"),
        (pb.ControllerListVolumeHealthRequest(max_entries=-1), "max_entries"),
        (pb.NodeGetVolumeHealthRequest(), "volume_id"),
        (pb.NodeGetVolumeHealthRequest(volume_id="v", volume_publish_path="some/path"), "volume_publish_path"),
        (pb.NodeGetVolumeHealthRequest(volume_id="v", staging_target_path="some/path"), "staging_target_path"),
        (pb.NodeExpandVolumeRequest(volume_path="/x"), "volume_id"),
        (pb.NodeExpandVolumeRequest(volume_id="v"), "volume_path"),
        (pb.NodeGetVolumeStatsRequest(volume_path="/x"), "volume_id"),
        (pb.NodeGetVolumeStatsRequest(volume_id="v"), "volume_path"),
        (pb.NodeStageVolumeRequest(staging_target_path="/x", volume_capability=mounted()), "volume_id"),
        (pb.NodeStageVolumeRequest(volume_id="v", volume_capability=mounted()), "staging_target_path"),
        (pb.NodeStageVolumeRequest(volume_id="v", staging_target_path="/x"), "volume_capability"),
        (pb.NodePublishVolumeRequest(target_path="/x", volume_capability=mounted()), "volume_id"),
        (pb.NodePublishVolumeRequest(volume_id="v", volume_capability=mounted()), "target_path"),
        (pb.NodePublishVolumeRequest(volume_id="v", target_path="/x"), "volume_capability"),
        (pb.NodeUnstageVolumeRequest(staging_target_path="/x"), "volume_id"),
        (pb.NodeUnstageVolumeRequest(volume_id="v"), "staging_target_path"),
        (pb.NodeUnpublishVolumeRequest(target_path="/x"), "volume_id"),
        (pb.NodeUnpublishVolumeRequest(volume_id="v"), "target_path"),
    ],
)
async def test_what_is_missing_is_said_before_anything_is_looked_up(client, refused, request_, field):
    method = request_.DESCRIPTOR.name.removesuffix("Request")
    with refused("INVALID_ARGUMENT", field) as caught:
        await client.call(method, request_)
    assert caught.value.method == method


@pytest.mark.parametrize("ident", ["unknown", "..", "a/b", "x\x01y", "line\nfeed", "ephemeral.x"])
async def test_a_node_knows_no_volume_by_a_strange_id(client, refused, tmp_path, ident):
    target = str(tmp_path / "target")
    await client.NodeUnpublishVolume(pb.NodeUnpublishVolumeRequest(volume_id=ident, target_path=target))
    await client.NodeUnstageVolume(pb.NodeUnstageVolumeRequest(volume_id=ident, staging_target_path=target))
    for request in (
        pb.NodeGetVolumeStatsRequest(volume_id=ident, volume_path="some/path"),
        pb.NodeExpandVolumeRequest(volume_id=ident, volume_path="some/path"),
        pb.NodeGetVolumeHealthRequest(volume_id=ident),
        pb.NodeStageVolumeRequest(volume_id=ident, staging_target_path=target, volume_capability=mounted()),
        pb.NodePublishVolumeRequest(volume_id=ident, target_path=target, volume_capability=mounted()),
    ):
        with refused("NOT_FOUND"):
            await client.call(request.DESCRIPTOR.name.removesuffix("Request"), request)
    assert not os.path.lexists(target)


@pytest.mark.parametrize("changed_settings", [{"scope": "shared"}])
@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ControllerPublishVolumeRequest(node_id="n", volume_capability=mounted()), "volume_id"),
        (pb.ControllerPublishVolumeRequest(volume_id="v", volume_capability=mounted()), "node_id"),
        (pb.ControllerPublishVolumeRequest(volume_id="v", node_id="n"), "volume_capability"),
        (pb.ControllerUnpublishVolumeRequest(node_id="n"), "volume_id"),
    ],
)
async def test_what_is_missing_from_an_attach_is_said_first(client, refused, request_, field):
    method = request_.DESCRIPTOR.name.removesuffix("Request")
    with refused("INVALID_ARGUMENT", field) as caught:
        await client.call(method, request_)
    assert caught.value.method == method


async def test_growth_keeps_to_its_range_and_to_the_volumes_use(caller, client, refused):
    volume = (await caller.create("v", mounted("ext4"), 10 * MIB)).volume_id

    async def expand(required=0, limit=0, capability=None):
        capacity = pb.CapacityRange(required_bytes=required, limit_bytes=limit)
        request = pb.ControllerExpandVolumeRequest(
            volume_id=volume, capacity_range=capacity, volume_capability=capability
        )
        return (await client.ControllerExpandVolume(request)).capacity_bytes

    assert await expand(5 * MIB) == 10 * MIB
    with refused("OUT_OF_RANGE"):
        await expand(5 * MIB, 6 * MIB)
    with refused("OUT_OF_RANGE"):
        await expand(12 * MIB + 1, 12 * MIB + 2)
    with refused("INVALID_ARGUMENT", "volume_capability"):
        await expand(20 * MIB, capability=block())
    assert await expand(20 * MIB, 20 * MIB, mounted("ext4")) == 20 * MIB
    with refused("OUT_OF_RANGE"):
        await expand(2**60)


# --- one at a time -----------------------------------------------------------------------------

V, S = ids.id_from("v"), ids.id_from("s")
CAPACITY = pb.CapacityRange(required_bytes=MIB)


@pytest.mark.parametrize("changed_settings", [{"scope": "shared"}])
@pytest.mark.parametrize(
    ("request_", "key"),
    [
        (pb.CreateVolumeRequest(name="v", volume_capabilities=[mounted()]), volume_key(V)),
        (pb.DeleteVolumeRequest(volume_id=V), volume_key(V)),
        (pb.ControllerExpandVolumeRequest(volume_id=V, capacity_range=CAPACITY), volume_key(V)),
        (pb.ControllerModifyVolumeRequest(volume_id=V, mutable_parameters={"directIO": "true"}), volume_key(V)),
        (
            pb.ControllerPublishVolumeRequest(volume_id=V, node_id="node-1", volume_capability=mounted()),
            volume_key(V),
        ),
        (pb.ControllerUnpublishVolumeRequest(volume_id=V), volume_key(V)),
        (pb.NodeStageVolumeRequest(volume_id=V, staging_target_path="/x", volume_capability=mounted()), volume_key(V)),
        (pb.NodeUnstageVolumeRequest(volume_id=V, staging_target_path="/x"), volume_key(V)),
        (pb.NodePublishVolumeRequest(volume_id=V, target_path="/x", volume_capability=mounted()), volume_key(V)),
        (pb.NodeUnpublishVolumeRequest(volume_id=V, target_path="/x"), volume_key(V)),
        (pb.NodeExpandVolumeRequest(volume_id=V, volume_path="/x"), volume_key(V)),
        (pb.CreateSnapshotRequest(name="s", source_volume_id=V), snapshot_key(S)),
        (pb.DeleteSnapshotRequest(snapshot_id=S), snapshot_key(S)),
        (pb.CreateVolumeGroupSnapshotRequest(name="s", source_volume_ids=[V]), group_key(S)),
        (pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=S), group_key(S)),
    ],
)
async def test_a_call_on_what_another_is_working_on_is_aborted_and_the_next_is_not(
    client, parts, refused, request_, key
):
    method = request_.DESCRIPTOR.name.removesuffix("Request")
    with parts.in_flight.claim("Another", key), refused("ABORTED", "Another is still running"):
        await client.call(method, request_)
    code = "OK"
    try:
        await client.call(method, request_)
    except CsiError as error:
        code = error.code
    assert code in ("OK", "NOT_FOUND")
