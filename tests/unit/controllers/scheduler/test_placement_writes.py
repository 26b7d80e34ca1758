"""What is written for a placement, in which order, and when it is given up."""

from typing import Any

import msgspec
import pytest
from tests.unit.controllers.scheduler.scheduler_objects import GI, Cluster, made, pod

from moorage.controllers.scheduler.execute import PlacementFailed, Reservation, SchedulerExecutor
from moorage.controllers.scheduler.plan import Placement
from moorage.kube.control.writer import Writer
from moorage.kube.errors import Conflict
from moorage.kube.names import BIND_COMPLETED, BOUND_BY_CONTROLLER, SELECTED_NODE
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim

POD = pod("p", "data")


class Api:
    """Takes writes and applies the few that matter here, or refuses them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.writes: list[str] = []
        self.refusal: Exception | None = None

    async def patch(self, kind: Any, name: str, patch: dict[str, Any], namespace: str = "", **how: Any) -> Any:
        objects: Any = self.cluster.volumes if kind is PersistentVolume else self.cluster.claims
        key = f"{namespace}/{name}" if namespace else name
        self._note(f"{kind.__name__} {name}")
        assert how["version"] == objects[key].metadata.resource_version
        document = msgspec.to_builtins(objects[key])
        for part, fields in patch.items():
            for field, value in fields.items():
                document[part][field] = {**document[part].get(field, {}), **value} if field == "annotations" else value
        return made(kind, document)

    async def request(self, method: str, path: str, body: dict[str, Any]) -> bytes:
        self._note(f"{method} {path.rpartition('/')[2]} {body['target']['name']} {body['metadata']['uid']}")
        return b"{}"

    async def find(self, kind: Any, name: str, namespace: str = "") -> Pod:
        return POD

    def _note(self, write: str) -> None:
        self.writes.append(write)
        if self.refusal is not None:
            raise self.refusal


class Scene:
    """A cluster, an executor over it, and a clock."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.api, self.now = cluster, Api(cluster), 0.0
        self.events: list[tuple[str, str]] = []
        writer = Writer(self.api, self)  # type: ignore[arg-type]
        self.executor = SchedulerExecutor(cluster.world, self, self.api, writer, self, lambda: self.now, 600.0)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def remember(self, obj: PersistentVolumeClaim | PersistentVolume) -> None:
        table = self.cluster.volumes if isinstance(obj, PersistentVolume) else self.cluster.claims
        table[obj.key] = obj

    def normal(self, _: Pod, reason: str, message: str) -> None:
        self.events.append((reason, message))

    warning = normal

    def reserve(self) -> Reservation:
        found = self.cluster.place(POD)
        assert isinstance(found, Placement), found
        return self.executor.reserve(POD, found)

    def bind_claim(self, volume: str) -> None:
        claim = self.cluster.claims["default/data"]
        selected = claim.annotations.get(SELECTED_NODE)
        notes = {BIND_COMPLETED: "yes"} | ({SELECTED_NODE: selected} if selected else {})
        self.cluster.add_claim("data", volume=volume, annotations=notes)

    def is_given_up(self) -> bool:
        world = self.cluster.world
        return not (self.executor.reservations or world.uses or world.promised_bytes or world.promised_volumes)


@pytest.fixture
def scene(cluster: Cluster) -> Scene:
    cluster.add_claim("data")
    return Scene(cluster)


async def test_volumes_are_written_before_claims_and_the_pod_last(scene):
    scene.cluster.add_claim("small", "1Gi")
    scene.cluster.add_volume("volume", "b", size="1Gi")
    scene.cluster.add_claim("data", "5Gi")
    asking = pod("p", "data", "small")
    found = scene.cluster.place(asking)
    reservation = scene.executor.reserve(asking, found)
    assert await scene.executor.advance(asking, reservation) == 600.0
    assert scene.api.writes == ["PersistentVolume volume", "PersistentVolumeClaim data"]
    volume = scene.cluster.volumes["volume"]
    assert (volume.spec.claim_ref.uid, volume.annotations[BOUND_BY_CONTROLLER]) == ("uid-small", "yes")
    assert scene.cluster.claims["default/data"].annotations == {SELECTED_NODE: "b"}


async def test_a_pod_is_bound_when_its_claim_is(scene):
    reservation = scene.reserve()
    await scene.executor.advance(POD, reservation)
    scene.cluster.add_volume("made", reservation.node)
    scene.bind_claim("made")
    assert await scene.executor.advance(POD, reservation) is None
    assert scene.api.writes == ["PersistentVolumeClaim data", f"POST binding {reservation.node} uid-p"]
    assert scene.events == [("Scheduled", f"Successfully assigned default/p to {reservation.node}")]
    assert not scene.executor.reservations


async def test_a_volume_that_a_person_reserved_is_not_marked_as_chosen(scene):
    scene.cluster.add_volume("mine", "b", claimRef={"namespace": "default", "name": "data"})
    await scene.executor.advance(POD, scene.reserve())
    volume = scene.cluster.volumes["mine"]
    assert volume.spec.claim_ref.uid == "uid-data"
    assert BOUND_BY_CONTROLLER not in volume.annotations


@pytest.mark.parametrize(
    "change",
    [
        {"claimRef": {"namespace": "default", "name": "thief", "uid": "uid-thief"}},
        {"claimRef": {"namespace": "default", "name": "data", "uid": "uid-older"}},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
    ids=["another's", "an older claim's", "going"],
)
async def test_a_volume_that_went_elsewhere_before_it_was_written_is_left_alone(scene, change):
    scene.cluster.add_volume("volume", "b")
    reservation = scene.reserve()
    scene.cluster.add_volume("volume", "b", **change)
    with pytest.raises(PlacementFailed):
        await scene.executor.advance(POD, reservation)
    assert scene.api.writes == []
    assert scene.is_given_up()


@pytest.mark.parametrize(
    "reference",
    [
        None,
        {"namespace": "default", "name": "data"},
        {"namespace": "default", "name": "thief", "uid": "uid-thief"},
    ],
    ids=["nobody's", "without uid", "another's"],
)
async def test_a_promised_volume_that_is_taken_back_ends_the_wait(scene, reference):
    scene.cluster.add_volume("volume", "b")
    reservation = scene.reserve()
    await scene.executor.advance(POD, reservation)
    scene.cluster.add_volume("volume", "b", claimRef=reference)
    with pytest.raises(PlacementFailed):
        await scene.executor.advance(POD, reservation)
    assert scene.is_given_up()
    assert scene.events[0][0] == "FailedScheduling"


@pytest.mark.parametrize("notes", [{}, {SELECTED_NODE: "c"}], ids=["removed", "changed"])
async def test_a_selected_node_that_is_taken_back_ends_the_wait_and_is_remembered(scene, notes):
    reservation = scene.reserve()
    await scene.executor.advance(POD, reservation)
    scene.cluster.add_claim("data", annotations=notes)
    with pytest.raises(PlacementFailed, match='provisioning failed for PVC "data"'):
        await scene.executor.advance(POD, reservation)
    assert scene.is_given_up()
    assert scene.executor.rejected == {"uid-p": {reservation.node: 1}}


async def test_a_volume_made_where_the_pod_cannot_reach_it_ends_the_wait(scene):
    reservation = scene.reserve()
    await scene.executor.advance(POD, reservation)
    scene.cluster.add_volume("made", "c" if reservation.node != "c" else "a")
    scene.bind_claim("made")
    with pytest.raises(PlacementFailed, match="node affinity doesn't match"):
        await scene.executor.advance(POD, reservation)
    assert scene.is_given_up()


@pytest.mark.parametrize("change", ["gone", "replaced", "deleting"])
async def test_a_claim_that_goes_ends_the_wait(scene, change):
    reservation = scene.reserve()
    await scene.executor.advance(POD, reservation)
    claim = scene.cluster.claims.pop("default/data")
    meta = claim.metadata
    if change == "replaced":
        meta = msgspec.structs.replace(meta, uid="newer")
    if change == "deleting":
        meta = msgspec.structs.replace(meta, deletion_timestamp="2026-01-01T00:00:00Z")
    if change != "gone":
        scene.cluster.claims[claim.key] = msgspec.structs.replace(claim, metadata=meta)
    with pytest.raises(PlacementFailed):
        await scene.executor.advance(POD, reservation)
    assert scene.is_given_up()


async def test_ten_minutes_are_enough(scene):
    reservation = scene.reserve()
    await scene.executor.advance(POD, reservation)
    scene.now = 599.0
    assert await scene.executor.advance(POD, reservation) == 1.0
    scene.now = 600.0
    with pytest.raises(PlacementFailed, match="timed out waiting for default/data"):
        await scene.executor.advance(POD, reservation)
    assert scene.is_given_up()


async def test_a_conflict_gives_the_place_up_and_takes_nothing_back(scene):
    reservation = scene.reserve()
    scene.api.refusal = Conflict(409, "Conflict", "the object has been modified")
    with pytest.raises(Conflict):
        await scene.executor.advance(POD, reservation)
    assert scene.is_given_up()
    assert scene.events == []  # it is tried again in a moment


def test_promises_count_from_the_moment_a_node_is_chosen(scene):
    reservation = scene.reserve()
    assert scene.cluster.world.promised_bytes == {"uid-data": ("late", reservation.node, GI)}
    assert list(scene.cluster.world.uses) == [reservation.node]
    scene.executor.release(POD.key)
    assert scene.is_given_up()
