"""The order of the binder's writes, what it tells when, and whom a change wakes."""

from typing import Any, cast

import msgspec
import pytest
from tests.unit.controllers.binder.binder_objects import claim, merged, storage_class, volume

from moorage.controllers.binder.execute import BinderExecutor, NotNow
from moorage.controllers.binder.plan import EmitEvent, SetClaimPhase, SetVolumePhase, TellMissing, TryLater, Unbind
from moorage.controllers.binder.state import BinderState
from moorage.kube.api.client import Client
from moorage.kube.cache.informer import Informer
from moorage.kube.cache.informers import Informers
from moorage.kube.control.events import Recorder
from moorage.kube.control.writer import Writer
from moorage.kube.errors import Conflict
from moorage.kube.names import BIND_COMPLETED, BOUND_BY_CONTROLLER, DEFAULT_CLASS
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod, StorageClass

MINE = {"claim": "claim", "claim_uid": "uid-of-claim"}


class Api:
    """Takes writes that name the version they were decided on, gives each object a new one, and refuses the n-th."""

    def __init__(self, refuses: int = 0) -> None:
        self.writes: list[str] = []
        self.refuses = refuses
        self.objects: dict[str, Any] = {}

    async def find(self, kind: Any, name: str, namespace: str = "") -> Any:
        found = self.objects.get(name)
        return found if isinstance(found, kind) else None

    async def patch(self, kind: Any, name: str, patch: Any, namespace: str = "", **how: Any) -> Any:
        known = self.objects[name]
        assert how["version"] == known.metadata.resource_version
        self.writes.append(f"{name} {how['subresource']}".strip())
        if len(self.writes) == self.refuses:
            raise Conflict(409, "Conflict", name)
        version = {"metadata": {"resourceVersion": str(int(how["version"]) + 100)}}
        document = merged(merged(msgspec.to_builtins(known), patch), version)
        self.objects[name] = msgspec.convert(document, kind)
        return self.objects[name]


class Scene:
    """An executor over copies of one claim and one volume."""

    def __init__(self, asked: PersistentVolumeClaim, held: PersistentVolume, refuses: int = 0) -> None:
        self.api = Api(refuses)
        self.told: list[Any] = []
        self.api.objects = {asked.name: asked, held.name: held}
        self.claims, self.volumes = copies(asked), copies(held)
        client, recorder = cast(Client, self.api), cast(Recorder, self)
        informers = Informers(client)
        informers.share(self.claims)
        informers.share(self.volumes)
        self.executor = BinderExecutor(client, Writer(client, informers), recorder)

    def event(self, subject: Any, kind: str, reason: str, message: str) -> None:
        self.told.append((subject.name, kind, reason))


def copies(*objects: Any, kind: Any = None) -> Informer[Any]:
    informer: Informer[Any] = Informer(cast(Client, None), kind or type(objects[0]))
    informer._replace({obj.key: obj for obj in objects}, 1)
    return informer


async def test_a_binding_writes_the_volume_first_and_each_status_after_its_object() -> None:
    asked, held = claim(), volume()
    scene = Scene(asked, held)
    await scene.executor.bind(asked, held)
    assert scene.api.writes == ["volume", "volume status", "claim", "claim status"]
    known = scene.claims.get(asked.key)
    assert known is not None
    assert known.status.phase == "Bound"  # what a write returned is known before the watch tells of it


async def test_a_binding_that_is_done_is_not_written_again() -> None:
    asked, held = claim(), volume()
    scene = Scene(asked, held)
    await scene.executor.bind(asked, held)
    await scene.executor.bind(scene.api.objects["claim"], scene.api.objects["volume"])
    assert len(scene.api.writes) == 4


@pytest.mark.parametrize("refuses", [1, 2, 3, 4])
async def test_the_first_write_that_is_refused_ends_a_binding(refuses: int) -> None:
    asked, held = claim(), volume()
    scene = Scene(asked, held, refuses)
    with pytest.raises(Conflict):
        await scene.executor.bind(asked, held)
    assert len(scene.api.writes) == refuses
    assert (BIND_COMPLETED in scene.api.objects["claim"].annotations) is (refuses == 4)


async def test_unbinding_frees_the_volume_and_then_calls_it_available() -> None:
    held = volume(phase="Bound", notes={BOUND_BY_CONTROLLER: "yes"}, **MINE)
    scene = Scene(claim(), held)
    await scene.executor.on_volume(Unbind(), held, None)
    assert scene.api.writes == ["volume", "volume status"]


async def test_a_change_of_phase_is_told_once() -> None:
    lost = SetClaimPhase("Lost", EmitEvent("claim", "Warning", "ClaimLost", "why"))
    failed = SetVolumePhase("Failed", EmitEvent("volume", "Warning", "VolumeFailedDelete", "why"))
    scene = Scene(claim(), volume())
    asked = await scene.executor.on_claim(lost, claim())
    held = await scene.executor.on_volume(failed, volume(), None)
    assert scene.told == [("claim", "Warning", "ClaimLost"), ("volume", "Warning", "VolumeFailedDelete")]
    await scene.executor.on_claim(lost, asked)
    await scene.executor.on_volume(failed, held, None)
    assert len(scene.told) == 2
    assert scene.api.writes == ["claim status", "volume status"]


async def test_a_class_is_called_missing_only_if_the_api_does_not_know_it_either() -> None:
    scene, why = Scene(claim(), volume()), EmitEvent("claim", "Warning", "ProvisioningFailed", "why")
    scene.api.objects["late"] = storage_class("late")
    await scene.executor.on_claim(TellMissing("late", why), claim())
    assert scene.told == []
    await scene.executor.on_claim(TellMissing("missing", why), claim())
    assert scene.told == [("claim", "Warning", "ProvisioningFailed")]


async def test_what_nobody_will_tell_the_end_of_is_tried_again() -> None:
    scene = Scene(claim(), volume())
    with pytest.raises(NotNow):
        await scene.executor.on_claim(TryLater("it belongs to another"), claim())


# Whom a change concerns


def world(*objects: Any) -> BinderState:
    kinds: Any = (PersistentVolumeClaim, PersistentVolume, StorageClass, Pod)
    return BinderState(*(copies(*(o for o in objects if isinstance(o, kind)), kind=kind) for kind in kinds))


def pod(name: str, node: str = "", phase: str = "Pending", named: str = "claim") -> Pod:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": named}}]
    document = {
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"nodeName": node, "volumes": volumes},
        "status": {"phase": phase},
    }
    return msgspec.convert(document, Pod)


def test_pods_are_waited_for_while_they_have_neither_a_node_nor_an_end() -> None:
    known = world(pod("b"), pod("a"), pod("placed", "node-1"), pod("ended", phase="Failed"), pod("other", named="x"))
    assert known.unscheduled_pods(claim()) == ["a", "b"]
    assert known.pods_using("default/claim") == ["default/a", "default/b", "default/placed"]


def test_a_volume_that_goes_wakes_the_claim_it_named_and_the_claim_that_names_it() -> None:
    known = world(claim("namer", volumeName="volume"))
    assert known.keys_for_volume(volume(**MINE), None).claims == ["default/claim", "default/namer"]


def test_a_claim_that_goes_wakes_its_volume_and_those_that_name_it() -> None:
    named, namer = volume("named"), volume("namer", **MINE)
    known = world(named, namer)
    known.free.see(None, named)
    known.free.see(None, namer)
    assert known.keys_for_claim(claim(volumeName="named"), None).volumes == ["named", "namer"]


def test_a_default_class_wakes_claims_that_name_none_and_every_class_those_that_name_it() -> None:
    known = world(
        claim("none", storageClassName=None), claim("empty"), claim("fast", storageClassName="fast"), claim("slow")
    )
    usual = storage_class("fast", annotations={DEFAULT_CLASS: "true"})
    assert known.keys_for_class(None, usual).claims == ["default/fast", "default/none"]
    assert known.keys_for_class(None, storage_class("fast")).claims == ["default/fast"]


def test_what_is_bound_is_left_alone_and_what_is_not_is_looked_at_from_time_to_time() -> None:
    status = {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}}
    bound = claim(volumeName="volume", notes={BIND_COMPLETED: "yes"}, phase="Bound", status=status)
    waiting, failed = claim("waiting"), volume("failed", phase="Failed", claim="gone", claim_uid="uid-of-gone")
    known = world(bound, volume(phase="Bound", **MINE), waiting, failed, volume("free"))
    concerned = known.unsettled()
    assert (concerned.claims, concerned.volumes) == (["default/waiting"], ["failed"])
