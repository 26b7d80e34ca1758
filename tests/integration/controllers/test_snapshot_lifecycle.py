"""Snapshots from their creation to their end, on a real API server; the test plays the snapshotter sidecar."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.controllers.replay import Stage, open_stage

from moorage.controllers.context import ControllerOptions
from moorage.controllers.snapshots.flavour import GROUP, SINGLE, member_suffix
from moorage.kube import names
from moorage.kube.errors import NotFound
from moorage.kube.objects import (
    Event,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeGroupSnapshot,
    VolumeGroupSnapshotClass,
    VolumeGroupSnapshotContent,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.testing import until

DRIVER = "csi.example.com"
TAKEN_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z


class Scene:
    """A stage with claims, their volumes, and classes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.client = stage.client

    async def create(self, kind: Any, name: str, namespace: str = "", **fields: Any) -> Any:
        meta = {"name": name, **fields.pop("metadata", {})}
        return await self.client.create(kind, {"metadata": meta, **fields}, namespace)

    async def add_bound(self, name: str, **labels: str) -> None:
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
            "volumeName": f"pv-{name}",
        }
        claim = await self.create(PersistentVolumeClaim, name, "default", spec=spec, metadata={"labels": labels})
        volume = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": DRIVER, "volumeHandle": f"handle-{name}"},
            "claimRef": {"namespace": "default", "name": name, "uid": claim.uid},
        }
        await self.create(PersistentVolume, f"pv-{name}", spec=volume)
        patch = {"status": {"phase": "Bound"}}
        await self.client.patch(PersistentVolumeClaim, name, patch, "default", subresource="status")

    async def add_class(self, name: str, policy: str = "Delete", *, default: bool = False, **parameters: str) -> None:
        meta = {"annotations": {names.DEFAULT_SNAPSHOT_CLASS: "true"}} if default else {}
        await self.create(
            VolumeSnapshotClass, name, driver=DRIVER, deletionPolicy=policy, parameters=parameters, metadata=meta
        )

    async def snapshot(self, name: str = "snap") -> VolumeSnapshot:
        return await self.client.get(VolumeSnapshot, name, "default")

    async def take(self, source: dict[str, str], class_name: str | None = "fast", name: str = "snap") -> VolumeSnapshot:
        spec: dict[str, Any] = {"source": source}
        if class_name:
            spec["volumeSnapshotClassName"] = class_name
        made = await self.create(VolumeSnapshot, name, "default", spec=spec)
        await self.stage.settle()
        assert isinstance(made, VolumeSnapshot)
        return made

    async def content_of(self, snapshot: VolumeSnapshot) -> VolumeSnapshotContent:
        return await self.client.get(VolumeSnapshotContent, SINGLE.content_name(snapshot.uid))

    async def driver_says(self, content: str, **status: Any) -> None:
        await self.client.patch(VolumeSnapshotContent, content, {"status": status}, subresource="status")
        await self.stage.settle()

    async def driver_finishes(self, content: str) -> None:
        await self.driver_says(content, snapshotHandle="s-1", creationTime=TAKEN_NS, restoreSize=2**30, readyToUse=True)

    async def reasons(self, name: str = "snap") -> list[str]:
        found = await self.client.list(Event, "default")
        return [event.reason for event in found.items if event.involved_object.name == name]

    async def is_gone(self, kind: Any, name: str, namespace: str = "") -> bool:
        return await self.client.find(kind, name, namespace) is None

    async def let_go(self, kind: Any, name: str) -> None:
        """The sidecar is done with a content that is being deleted."""
        await self.client.patch(kind, name, {"metadata": {"finalizers": None}})
        await self.stage.settle()


@pytest.fixture
async def scene(stage_dir: Any) -> AsyncIterator[Scene]:
    async with open_stage(stage_dir) as stage:
        scene = Scene(stage)
        await scene.add_bound("data")
        await scene.add_class("fast")
        await stage.start(("snapshots",))
        yield scene


CLAIM = {"persistentVolumeClaimName": "data"}


async def test_a_snapshot_is_taken_and_becomes_ready(scene: Scene) -> None:
    taken = await scene.take(CLAIM)
    content = await scene.content_of(taken)
    assert content.spec.source.volume_handle == "handle-data"
    assert content.spec.volume_snapshot_ref.uid == taken.uid
    assert (content.spec.driver, content.spec.deletion_policy) == (DRIVER, "Delete")
    assert content.spec.source_volume_mode == "Filesystem"
    assert content.finalizers == [names.SNAPSHOT_CONTENT_BOUND]
    claim = await scene.client.get(PersistentVolumeClaim, "data", "default")
    assert names.CLAIM_AS_SOURCE in claim.finalizers

    await scene.driver_finishes(content.name)
    snapshot = await scene.snapshot()
    assert snapshot.status is not None
    assert snapshot.status.bound_volume_snapshot_content_name == content.name
    assert snapshot.status.creation_time == "2026-01-01T00:00:00Z"
    assert (snapshot.status.ready_to_use, snapshot.status.restore_size) == (True, "1Gi")
    assert sorted(snapshot.finalizers) == sorted([names.SNAPSHOT_AS_SOURCE, names.SNAPSHOT_BOUND])
    claim = await scene.client.get(PersistentVolumeClaim, "data", "default")
    assert names.CLAIM_AS_SOURCE not in claim.finalizers
    assert await scene.reasons() == ["CreatingSnapshot", "SnapshotCreated", "SnapshotReady"]


async def test_the_drivers_error_is_shown_and_cleared(scene: Scene) -> None:
    content = await scene.content_of(await scene.take(CLAIM))
    await scene.driver_says(content.name, readyToUse=False, error={"message": "no space", "time": None})
    snapshot = await scene.snapshot()
    assert snapshot.status is not None
    assert snapshot.status.error is not None
    assert snapshot.status.error.message == "no space"
    assert snapshot.status.ready_to_use is False
    await scene.driver_says(content.name, error=None, readyToUse=True, snapshotHandle="s-1", creationTime=TAKEN_NS)
    snapshot = await scene.snapshot()
    assert snapshot.status is not None
    assert (snapshot.status.error, snapshot.status.ready_to_use) == (None, True)


async def test_deleting_a_snapshot_deletes_its_content_first(scene: Scene) -> None:
    content = await scene.content_of(await scene.take(CLAIM))
    await scene.driver_finishes(content.name)
    await scene.client.delete(VolumeSnapshot, "snap", "default")
    await scene.stage.settle()
    going = await scene.client.get(VolumeSnapshotContent, content.name)
    assert going.is_deleting
    assert going.annotations[names.SNAPSHOT_BEING_DELETED] == "yes"
    assert (await scene.snapshot()).finalizers == [names.SNAPSHOT_BOUND]
    await scene.let_go(VolumeSnapshotContent, content.name)
    assert await scene.is_gone(VolumeSnapshot, "snap", "default")


async def test_a_content_to_be_retained_stays(scene: Scene) -> None:
    await scene.add_class("kept", "Retain")
    content = await scene.content_of(await scene.take(CLAIM, "kept"))
    await scene.driver_finishes(content.name)
    assert (await scene.snapshot()).finalizers == [names.SNAPSHOT_AS_SOURCE]
    await scene.client.delete(VolumeSnapshot, "snap", "default")
    await scene.stage.settle()
    assert await scene.is_gone(VolumeSnapshot, "snap", "default")
    left = await scene.client.get(VolumeSnapshotContent, content.name)
    assert not left.is_deleting
    assert left.annotations[names.SNAPSHOT_BEING_DELETED] == "yes"


async def test_an_existing_snapshot_is_bound(scene: Scene) -> None:
    spec = {
        "deletionPolicy": "Retain",
        "driver": DRIVER,
        "source": {"snapshotHandle": "s-9"},
        "volumeSnapshotRef": {"name": "snap", "namespace": "default"},
    }
    await scene.create(VolumeSnapshotContent, "old", spec=spec)
    await scene.stage.settle()
    assert (await scene.client.get(VolumeSnapshotContent, "old")).finalizers == []
    taken = await scene.take({"volumeSnapshotContentName": "old"}, None)
    content = await scene.client.get(VolumeSnapshotContent, "old")
    assert content.spec.volume_snapshot_ref.uid == taken.uid
    assert content.finalizers == [names.SNAPSHOT_CONTENT_BOUND]
    await scene.driver_finishes("old")
    snapshot = await scene.snapshot()
    assert snapshot.status is not None
    assert snapshot.status.ready_to_use is True


async def test_a_content_of_someone_else_is_refused(scene: Scene) -> None:
    spec = {
        "deletionPolicy": "Retain",
        "driver": DRIVER,
        "source": {"snapshotHandle": "s-9"},
        "volumeSnapshotRef": {"name": "other", "namespace": "default"},
    }
    await scene.create(VolumeSnapshotContent, "old", spec=spec)
    await scene.take({"volumeSnapshotContentName": "old"}, None)
    assert await scene.reasons() == ["SnapshotContentMisbound"]
    snapshot = await scene.snapshot()
    assert snapshot.status is not None
    assert snapshot.status.error is not None
    assert "another snapshot" in (snapshot.status.error.message or "")


async def test_the_default_class_is_filled_in(scene: Scene) -> None:
    await scene.take(CLAIM, None)
    assert await scene.reasons() == ["SetDefaultSnapshotClassFailed"]
    await scene.add_class("usual", default=True)
    await scene.stage.settle()
    assert (await scene.snapshot()).spec.volume_snapshot_class_name == "usual"
    assert "CreatingSnapshot" in await scene.reasons()


async def test_a_class_that_comes_late_is_waited_for(scene: Scene) -> None:
    taken = await scene.take(CLAIM, "later")
    assert await scene.reasons() == ["GetSnapshotClassFailed"]
    await scene.add_class("later")
    await scene.stage.settle()
    assert (await scene.content_of(taken)).spec.volume_snapshot_class_name == "later"


async def test_a_claim_that_comes_late_is_waited_for(scene: Scene) -> None:
    taken = await scene.take({"persistentVolumeClaimName": "slow"})
    assert await scene.reasons() == ["SnapshotPVCSourceMissing"]
    await scene.add_bound("slow")
    await scene.stage.settle()
    assert (await scene.content_of(taken)).spec.source.volume_handle == "handle-slow"


async def test_a_snapshot_that_is_being_restored_is_not_deleted(scene: Scene) -> None:
    content = await scene.content_of(await scene.take(CLAIM))
    await scene.driver_finishes(content.name)
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "snap"},
    }
    await scene.create(PersistentVolumeClaim, "restored", "default", spec=spec)
    await scene.stage.settle()
    await scene.client.delete(VolumeSnapshot, "snap", "default")
    await scene.stage.settle()
    assert "SnapshotDeletePending" in await scene.reasons()
    assert not (await scene.client.get(VolumeSnapshotContent, content.name)).is_deleting
    patch = {"status": {"phase": "Bound"}}
    await scene.client.patch(PersistentVolumeClaim, "restored", patch, "default", subresource="status")
    await scene.stage.settle()
    assert (await scene.client.get(VolumeSnapshotContent, content.name)).is_deleting


async def test_a_ready_snapshot_whose_content_vanished_is_no_longer_ready(scene: Scene) -> None:
    content = await scene.content_of(await scene.take(CLAIM))
    await scene.driver_finishes(content.name)
    await scene.client.delete(VolumeSnapshotContent, content.name)
    await scene.let_go(VolumeSnapshotContent, content.name)
    snapshot = await scene.snapshot()
    assert snapshot.status is not None
    assert snapshot.status.ready_to_use is False
    assert "SnapshotContentMissing" in await scene.reasons()


async def test_a_secret_named_by_the_class_is_noted_for_deletion(scene: Scene) -> None:
    start = "csi.storage.k8s.io/snapshotter-secret-"
    given: dict[str, Any] = {
        f"{start}name": "${volumesnapshot.name}-key",
        f"{start}namespace": "${volumesnapshot.namespace}",
    }
    await scene.add_class("sealed", **given)
    content = await scene.content_of(await scene.take(CLAIM, "sealed"))
    assert content.annotations[names.SNAPSHOT_SECRET_NAME] == "snap-key"
    assert content.annotations[names.SNAPSHOT_SECRET_NAMESPACE] == "default"


async def test_a_restart_in_the_middle_loses_nothing(scene: Scene) -> None:
    content = await scene.content_of(await scene.take(CLAIM))
    await scene.stage.stop()
    status = {"snapshotHandle": "s-1", "creationTime": TAKEN_NS, "readyToUse": True}
    await scene.client.patch(VolumeSnapshotContent, content.name, {"status": status}, subresource="status")
    await scene.stage.start(("snapshots",))

    async def is_ready() -> bool | None:
        status = (await scene.snapshot()).status
        return status is not None and status.ready_to_use

    await until(is_ready, what="the snapshot to be ready")


async def test_each_node_handles_its_own_volumes_when_snapshotting_is_distributed(stage_dir: Any) -> None:
    async with open_stage(stage_dir, ControllerOptions(distributed_snapshotting=True)) as stage:
        scene = Scene(stage)
        for node in ("a", "b"):
            await scene.create(Node, node, metadata={"labels": {"disk": node}})
        await scene.add_bound("data")
        terms = [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["b"]}]}]
        affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}
        await scene.client.patch(PersistentVolume, "pv-data", {"spec": affinity})
        await scene.add_class("fast")
        await stage.start(("snapshots",))
        content = await scene.content_of(await scene.take(CLAIM))
        assert content.labels[names.SNAPSHOT_MANAGED_BY] == "b"


async def test_many_snapshots_with_conflicts_all_become_ready(scene: Scene) -> None:
    """Someone edits every object while the controller works on it."""
    taken = [
        await scene.create(
            VolumeSnapshot, f"snap-{n}", "default", spec={"source": CLAIM, "volumeSnapshotClassName": "fast"}
        )
        for n in range(10)
    ]
    for number in range(10):
        patch = {"metadata": {"labels": {"touched": str(number)}}}
        await asyncio.gather(*(scene.client.patch(VolumeSnapshot, s.name, patch, "default") for s in taken))
    await until_made(scene, [SINGLE.content_name(s.uid) for s in taken])
    for snapshot in taken:
        await scene.driver_finishes(SINGLE.content_name(snapshot.uid))
    async with asyncio.timeout(30):
        for snapshot in taken:
            while not ((found := await scene.snapshot(snapshot.name)).status and found.status.ready_to_use):
                await asyncio.sleep(0.05)
    assert len((await scene.client.list(VolumeSnapshotContent)).items) == 10


async def until_made(scene: Scene, contents: list[str]) -> None:
    async with asyncio.timeout(30):
        for name in contents:
            while await scene.is_gone(VolumeSnapshotContent, name):
                await asyncio.sleep(0.05)


async def take_group(scene: Scene, policy: str = "Delete") -> VolumeGroupSnapshot:
    await scene.add_bound("one", app="db")
    await scene.add_bound("two", app="db")
    await scene.create(VolumeGroupSnapshotClass, "together", driver=DRIVER, deletionPolicy=policy)
    await scene.stage.settle()
    spec = {"source": {"selector": {"matchLabels": {"app": "db"}}}, "volumeGroupSnapshotClassName": "together"}
    made = await scene.create(VolumeGroupSnapshot, "group", "default", spec=spec)
    await scene.stage.settle()
    assert isinstance(made, VolumeGroupSnapshot)
    return made


async def finish_group(scene: Scene, group: VolumeGroupSnapshot) -> str:
    name = GROUP.content_name(group.uid)
    handles = ("handle-one", "handle-two")
    infos = [
        {"volumeHandle": h, "snapshotHandle": f"s-{h}", "creationTime": TAKEN_NS, "readyToUse": True} for h in handles
    ]
    status = {
        "volumeGroupSnapshotHandle": "g-1",
        "creationTime": "2026-01-01T00:00:00Z",
        "readyToUse": True,
        "volumeSnapshotInfoList": infos,
    }
    await scene.client.patch(VolumeGroupSnapshotContent, name, {"status": status}, subresource="status")
    await scene.stage.settle()
    return name


async def test_a_group_is_taken_with_a_snapshot_for_each_volume(scene: Scene) -> None:
    group = await take_group(scene)
    content = await scene.client.get(VolumeGroupSnapshotContent, GROUP.content_name(group.uid))
    assert content.spec.source.volume_handles == ["handle-one", "handle-two"]
    assert content.finalizers == [names.GROUP_CONTENT_BOUND]
    await finish_group(scene, group)
    found = await scene.client.get(VolumeGroupSnapshot, "group", "default")
    assert found.status is not None
    assert (found.status.ready_to_use, found.status.creation_time) == (True, "2026-01-01T00:00:00Z")
    assert found.finalizers == [names.GROUP_BOUND]
    for claim in ("one", "two"):
        suffix = member_suffix(group.uid, f"handle-{claim}")
        member = await scene.snapshot(f"snapshot-{suffix}")
        assert member.spec.source.persistent_volume_claim_name == claim
        assert member.status is not None
        assert (member.status.ready_to_use, member.status.volume_group_snapshot_name) == (True, "group")
        held = await scene.client.get(VolumeSnapshotContent, f"snapcontent-{suffix}")
        assert held.annotations[names.GROUP_HANDLE] == "g-1"
        assert held.status is not None
        assert held.status.snapshot_handle == f"s-handle-{claim}"
        assert held.spec.volume_snapshot_ref.uid == member.uid
    events = await scene.reasons("group")
    assert events == ["CreatingGroupSnapshot", "GroupSnapshotCreated", "GroupSnapshotReady"]


async def test_a_member_cannot_be_deleted_before_its_group(scene: Scene) -> None:
    group = await take_group(scene)
    await finish_group(scene, group)
    member = f"snapshot-{member_suffix(group.uid, 'handle-one')}"
    await scene.client.delete(VolumeSnapshot, member, "default")
    await scene.stage.settle()
    assert names.SNAPSHOT_IN_GROUP in (await scene.snapshot(member)).finalizers
    assert "SnapshotDeletePending" in await scene.reasons(member)


async def test_a_group_goes_with_its_members(scene: Scene) -> None:
    group = await take_group(scene)
    content = await finish_group(scene, group)
    await scene.client.delete(VolumeGroupSnapshot, "group", "default")
    await scene.stage.settle()
    going = await scene.client.get(VolumeGroupSnapshotContent, content)
    assert going.is_deleting
    assert going.annotations[names.GROUP_BEING_DELETED] == "yes"
    await scene.let_go(VolumeGroupSnapshotContent, content)
    assert await scene.is_gone(VolumeGroupSnapshot, "group", "default")
    for handle in ("handle-one", "handle-two"):
        name = f"snapcontent-{member_suffix(group.uid, handle)}"
        await scene.stage.settle()
        assert (await scene.client.get(VolumeSnapshotContent, name)).is_deleting
        await scene.let_go(VolumeSnapshotContent, name)
    await scene.stage.settle()
    assert (await scene.client.list(VolumeSnapshot, "default")).items == []


async def test_a_group_without_claims_says_so(scene: Scene) -> None:
    await scene.create(VolumeGroupSnapshotClass, "together", driver=DRIVER, deletionPolicy="Delete")
    spec = {"source": {"selector": {"matchLabels": {"app": "none"}}}, "volumeGroupSnapshotClassName": "together"}
    await scene.create(VolumeGroupSnapshot, "group", "default", spec=spec)
    await scene.stage.settle()
    found = await scene.client.get(VolumeGroupSnapshot, "group", "default")
    assert found.status is not None
    assert found.status.error is not None
    assert "no claim" in (found.status.error.message or "")
    with pytest.raises(NotFound):
        await scene.client.get(VolumeGroupSnapshotContent, GROUP.content_name(found.uid))
