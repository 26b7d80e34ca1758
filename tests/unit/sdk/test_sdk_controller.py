"""What the library does around a driver's hooks, over a real socket."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.errors import UsageError
from moorage.sdk import (
    Attachment,
    CreateSnapshot,
    CreateVolume,
    Driver,
    Environment,
    Expanded,
    Health,
    ResourceExhausted,
    Snapshot,
    Volume,
)
from moorage.sdk.process import serve

GIB = 1 << 30
Mode = pb.VolumeCapability.AccessMode
WRITER = Mode(mode=Mode.SINGLE_NODE_WRITER)
MOUNT = pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume(), access_mode=WRITER)
BLOCK = pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=WRITER)


class Memory(Driver):
    """Volumes that exist by name only."""

    name = "memory.example.org"

    def __init__(self) -> None:
        self.made: list[str] = []
        self.seen: list[CreateVolume] = []
        self.go = asyncio.Event()
        self.go.set()

    async def create_volume(self, request: CreateVolume) -> Volume:
        self.seen.append(request)
        await self.go.wait()
        if request.parameters.get("full"):
            raise ResourceExhausted("no room")
        if request.parameters.get("bug"):
            raise RuntimeError("the password is hunter2")
        self.made.append(request.name)
        return request.volume(request.size.choose(default=GIB), context={"made": "here"})

    async def copy_volume(self, request: CreateVolume) -> Volume:
        return await self.create_volume(request)

    async def delete_volume(self, volume_id: str) -> None:
        self.made.append(f"-{volume_id}")

    async def expand_volume(self, volume, size):
        return Expanded(size.required)

    async def create_snapshot(self, request: CreateSnapshot) -> Snapshot:
        return request.snapshot()

    async def delete_snapshot(self, snapshot_id: str) -> None:
        self.made.append(f"-{snapshot_id}")

    async def attach(self, volume, node_id, access, is_read_only):
        return Attachment({"device": f"{volume.id}@{node_id}"})

    async def detach(self, volume_id, node_id):
        self.made.append(f"-{volume_id}@{node_id}")

    def has_node(self, node_id):
        return node_id in ("n1", "n2")

    async def volume_health(self, volume):
        return [Health("broken")] if "sick" in volume.id else []


@asynccontextmanager
async def served(tmp_path, driver):
    endpoint = f"unix://{tmp_path}/csi.sock"
    async with (
        serve(driver, endpoint, Environment("n1", tmp_path / "state")),
        CsiClient(endpoint, timeout_s=10) as client,
    ):
        yield client


@pytest.fixture
def driver():
    return Memory()


@pytest.fixture
async def client(tmp_path, driver):
    async with served(tmp_path, driver) as client:
        yield client


def wanted(name="v", size=0, limit=0, capability=MOUNT, **more):
    return pb.CreateVolumeRequest(
        name=name,
        capacity_range=pb.CapacityRange(required_bytes=size, limit_bytes=limit),
        volume_capabilities=[capability],
        **more,
    )


async def refused(code, call):
    with pytest.raises(CsiError) as caught:
        await call
    assert caught.value.code == code, caught.value
    return caught.value.message


async def test_a_hook_is_called_once_for_a_name(client, driver):
    first = await client.CreateVolume(wanted(size=2 * GIB))
    again = await client.CreateVolume(wanted(size=2 * GIB))
    assert first == again
    assert driver.made == ["v"]
    assert dict(first.volume.volume_context) == {"made": "here"}


async def test_records_survive_a_restart(tmp_path, driver):
    async with served(tmp_path, driver) as client:
        first = await client.CreateVolume(wanted())
    async with served(tmp_path, Memory()) as client:
        assert await client.CreateVolume(wanted()) == first
        assert [entry.volume for entry in (await client.ListVolumes(pb.ListVolumesRequest())).entries] == [first.volume]


@pytest.mark.parametrize(
    "other",
    [wanted(size=2 * GIB), wanted(limit=GIB // 2), wanted(parameters={"a": "b"})],
    ids=["larger", "smaller", "parameters"],
)
async def test_another_request_for_the_name_is_refused(client, other):
    await client.CreateVolume(wanted())
    await refused("ALREADY_EXISTS", client.CreateVolume(other))


async def test_a_call_for_a_volume_that_is_being_made_is_aborted(client, driver):
    driver.go.clear()
    first = asyncio.create_task(client.CreateVolume(wanted()))
    while not driver.seen:
        await asyncio.sleep(0.01)
    await refused("ABORTED", client.CreateVolume(wanted()))
    driver.go.set()
    await first


async def test_a_call_outlives_its_caller(client, driver):
    driver.go.clear()
    first = asyncio.create_task(client.CreateVolume(wanted()))
    while not driver.seen:
        await asyncio.sleep(0.01)
    first.cancel()
    driver.go.set()
    async with asyncio.timeout(10):
        while not (await client.ListVolumes(pb.ListVolumesRequest())).entries:
            await asyncio.sleep(0.01)
    assert driver.made == ["v"]


async def test_errors_keep_their_code_and_bugs_keep_their_text_to_themselves(client):
    assert await refused("RESOURCE_EXHAUSTED", client.CreateVolume(wanted(parameters={"full": "1"}))) == "no room"
    message = await refused("INTERNAL", client.CreateVolume(wanted("w", parameters={"bug": "1"})))
    assert "hunter2" not in message


async def test_secrets_have_no_representation(client, driver, caplog):
    await client.CreateVolume(wanted(secrets={"password": "hunter2"}))
    request = driver.seen[0]
    assert request.secrets["password"] == "hunter2"
    assert "hunter2" not in repr(request)
    assert "hunter2" not in caplog.text


async def test_what_is_not_defined_is_not_offered(client):
    found = await client.ControllerGetCapabilities(pb.ControllerGetCapabilitiesRequest())
    names = {pb.ControllerServiceCapability.RPC.Type.Name(one.rpc.type) for one in found.capabilities}
    assert {"CREATE_DELETE_VOLUME", "CLONE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "EXPAND_VOLUME"} <= names
    assert "GET_CAPACITY" not in names
    assert "MODIFY_VOLUME" not in names
    await refused("UNIMPLEMENTED", client.GetCapacity(pb.GetCapacityRequest()))
    await refused("INVALID_ARGUMENT", client.CreateVolume(wanted(capability=BLOCK)))


async def test_pages_continue_after_the_last_entry_whatever_happens_between(client):
    for number in range(5):
        await client.CreateVolume(wanted(f"v{number}"))
    first = await client.ListVolumes(pb.ListVolumesRequest(max_entries=2))
    await client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=first.entries[-1].volume.volume_id))
    rest = await client.ListVolumes(pb.ListVolumesRequest(starting_token=first.next_token))
    assert len(rest.entries) == 3
    assert rest.next_token == ""
    await refused("ABORTED", client.ListVolumes(pb.ListVolumesRequest(starting_token="7")))
    await refused("INVALID_ARGUMENT", client.ListVolumes(pb.ListVolumesRequest(max_entries=-1)))


async def test_a_copy_is_as_large_as_its_source(client):
    source = (await client.CreateVolume(wanted(size=3 * GIB))).volume
    content = pb.VolumeContentSource(volume=pb.VolumeContentSource.VolumeSource(volume_id=source.volume_id))
    copy = (await client.CreateVolume(wanted("copy", volume_content_source=content))).volume
    assert copy.capacity_bytes == 3 * GIB
    assert copy.content_source == content
    await refused("OUT_OF_RANGE", client.CreateVolume(wanted("small", limit=GIB, volume_content_source=content)))
    content.volume.volume_id = "none"
    await refused("NOT_FOUND", client.CreateVolume(wanted("lost", volume_content_source=content)))


async def test_snapshots_are_kept_and_found(client):
    volume = (await client.CreateVolume(wanted())).volume
    request = pb.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
    first = (await client.CreateSnapshot(request)).snapshot
    assert (await client.CreateSnapshot(request)).snapshot == first
    listed = await client.ListSnapshots(pb.ListSnapshotsRequest(source_volume_id=volume.volume_id))
    assert [entry.snapshot for entry in listed.entries] == [first]
    other = (await client.CreateVolume(wanted("other"))).volume
    request.source_volume_id = other.volume_id
    await refused("ALREADY_EXISTS", client.CreateSnapshot(request))
    await client.DeleteSnapshot(pb.DeleteSnapshotRequest(snapshot_id=first.snapshot_id))
    await refused("NOT_FOUND", client.GetSnapshot(pb.GetSnapshotRequest(snapshot_id=first.snapshot_id)))


async def test_a_volume_is_attached_to_one_node_at_a_time(client, driver):
    volume = (await client.CreateVolume(wanted())).volume
    request = pb.ControllerPublishVolumeRequest(volume_id=volume.volume_id, node_id="n1", volume_capability=MOUNT)
    answer = await client.ControllerPublishVolume(request)
    assert dict(answer.publish_context) == {"device": f"{volume.volume_id}@n1"}
    assert await client.ControllerPublishVolume(request) == answer
    request.node_id = "n2"
    assert "attached to n1" in await refused("FAILED_PRECONDITION", client.ControllerPublishVolume(request))
    request.node_id = "n3"
    await refused("NOT_FOUND", client.ControllerPublishVolume(request))
    await refused("FAILED_PRECONDITION", client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=volume.volume_id)))
    for _ in range(2):
        await client.ControllerUnpublishVolume(pb.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id))
    assert driver.made[-1] == f"-{volume.volume_id}@n1"
    await client.DeleteVolume(pb.DeleteVolumeRequest(volume_id=volume.volume_id))


async def test_growth_is_recorded_and_a_large_enough_volume_is_left_alone(client):
    volume = (await client.CreateVolume(wanted())).volume
    request = pb.ControllerExpandVolumeRequest(volume_id=volume.volume_id)
    await refused("INVALID_ARGUMENT", client.ControllerExpandVolume(request))
    request.capacity_range.required_bytes = 2 * GIB
    assert (await client.ControllerExpandVolume(request)).capacity_bytes == 2 * GIB
    request.capacity_range.required_bytes = GIB
    assert (await client.ControllerExpandVolume(request)).capacity_bytes == 2 * GIB


async def test_health_is_reported_for_sick_volumes_only(client):
    for name in ("sick", "well"):
        await client.CreateVolume(wanted(name))
    found = await client.ControllerListVolumeHealth(pb.ControllerListVolumeHealthRequest())
    assert [entry.health_statuses[0].message for entry in found.entries] == ["broken"]


async def test_half_of_a_pair_of_hooks_is_refused_at_the_start(tmp_path):
    class Half(Driver):
        name = "half.example.org"

        def create_volume(self, request):
            return request.volume(1)

    with pytest.raises(UsageError, match="defines create_volume but not delete_volume"):
        async with serve(Half(), f"unix://{tmp_path}/csi.sock", Environment("n1", tmp_path / "state")):
            pass


async def test_two_processes_cannot_share_a_state_directory(tmp_path, client):
    with pytest.raises(Exception, match="in use by another process"):
        async with serve(Memory(), f"unix://{tmp_path}/other.sock", Environment("n1", tmp_path / "state")):
            pass


async def test_a_volume_that_would_be_elsewhere_or_too_small_is_removed_again(tmp_path):
    class Here(Memory):
        async def create_volume(self, request):
            return request.volume(GIB, topology=[{"Zone": "a"}])

    driver = Here()
    async with served(tmp_path, driver) as client:
        elsewhere = pb.TopologyRequirement(requisite=[pb.Topology(segments={"zone": "b"})])
        here = pb.TopologyRequirement(
            requisite=[*elsewhere.requisite, pb.Topology(segments={"zone": "a", "rack": "1"})]
        )
        await refused("RESOURCE_EXHAUSTED", client.CreateVolume(wanted(accessibility_requirements=elsewhere)))
        await refused("OUT_OF_RANGE", client.CreateVolume(wanted(size=2 * GIB)))
        assert len(driver.made) == 2
        assert all(each.startswith("-") for each in driver.made)
        made = await client.CreateVolume(wanted(accessibility_requirements=here))
        assert made.volume.accessible_topology[0].segments == {"Zone": "a"}
