"""What `moorage gc` takes for garbage: worlds in, findings out."""

from dataclasses import replace

import pytest

from moorage.upkeep.gc.plan import (
    DriverObjects,
    Inventory,
    SeenAttachment,
    SeenClaim,
    SeenDevice,
    SeenFile,
    SeenHold,
    SeenMount,
    SeenPv,
    SeenTrash,
    SeenVolume,
    plan,
)

NOW, OLD, HOUR = 1_000_000.0, 1_000.0, 3600.0
POD = "00000000-0000-0000-0000-000000000001"
VOLUME = SeenVolume("pvc-1-abc", "pvc-1", "/pool", OLD)
PV = SeenPv("pv-1", "u1", "pvc-1-abc", "Bound", OLD, frozenset({"n1"}))
LOST = SeenPv("pv-2", "u2", "gone", "Released", OLD, frozenset({"n1"}))
DEVICE = SeenDevice("/dev/loop9", "/pool", "pvc-1-abc", False, False, OLD)
MOUNT = SeenMount("/x", "/pool", "data", OLD)
CLUSTER = DriverObjects("d", True, (), frozenset(), frozenset(), (), frozenset({"n1"}), frozenset({"id1"}), frozenset())


def world(**parts):
    return Inventory(NOW, ("/pool",), "n1", **parts)


def with_pv(*pvs, **more):
    names, handles = frozenset(pv.name for pv in pvs), frozenset(pv.handle for pv in pvs)
    return replace(CLUSTER, pvs=pvs, pv_names=names, handles=handles, **more)


REMOVABLE = {
    "a volume without PV": (world(volumes=[VOLUME], cluster=CLUSTER), "volume", "no PersistentVolume"),
    "a PV without volume": (world(volumes=[VOLUME], cluster=with_pv(PV, LOST)), "pv", "in none of the pools"),
    "an attachment to no node": (
        world(cluster=with_pv(PV, attachments=(SeenAttachment("a", "u", "pv-1", "n9", OLD),))),
        "attachment",
        "node n9 does not exist",
    ),
    "an attachment of no volume": (
        world(cluster=replace(CLUSTER, attachments=(SeenAttachment("a", "u", "pv-1", "n1", OLD),))),
        "attachment",
        "volume pv-1 does not exist",
    ),
    "a node that is gone from a shared pool": (
        world(holds=[SeenHold("v", "id9", "/pool", OLD)], cluster=CLUSTER),
        "pool-attachment",
        "not in the cluster",
    ),
    "a device that is mounted nowhere": (world(volumes=[VOLUME], devices=[DEVICE]), "loop-device", "mounted nowhere"),
    "a device of no volume": (world(devices=[DEVICE]), "loop-device", "does not exist"),
    "a device of a deleted file": (
        world(volumes=[VOLUME], devices=[replace(DEVICE, is_gone=True)]),
        "loop-device",
        "deleted",
    ),
    "a mount that is dead": (world(mounts=[replace(MOUNT, is_dead=True)]), "mount", "does not answer"),
    "a mount of what was deleted": (world(mounts=[replace(MOUNT, is_gone=True)]), "mount", "was deleted"),
    "a mount of a pod that is gone": (
        world(mounts=[replace(MOUNT, pod_uid=POD)], cluster=CLUSTER),
        "mount",
        "is not in the cluster",
    ),
    "unfinished work": (world(files=[SeenFile("temporary", "t", "/pool", "unfinished", OLD)]), "temporary", "unfin"),
    "trash past its time": (world(trash=[SeenTrash("1-volume-v", "v", "/pool", OLD, OLD)]), "trash", "time"),
}


@pytest.mark.parametrize("name", REMOVABLE)
def test_garbage_is_found_with_its_reason(name):
    seen, kind, reason = REMOVABLE[name]
    findings = [finding for finding in plan(seen, HOUR) if finding.kind == kind]
    assert [finding.held for finding in findings] == [""]
    assert reason in findings[0].why


@pytest.mark.parametrize("name", REMOVABLE)
def test_nothing_is_removed_within_the_grace_period(name):
    seen, kind, _ = REMOVABLE[name]
    findings = plan(seen, NOW)
    assert all(finding.held for finding in findings)
    assert any("younger than the grace period" in finding.held for finding in findings if finding.kind == kind)


HELD = {
    "in use": (world(volumes=[replace(VOLUME, used_by="/dev/loop1")], cluster=CLUSTER), "in use"),
    "made by hand": (world(volumes=[replace(VOLUME, name="mine")], cluster=CLUSTER), "made by hand"),
    "another cluster": (world(volumes=[VOLUME], cluster=replace(CLUSTER, is_installed=False)), "not installed"),
    "a claim without its PV": (
        world(volumes=[VOLUME], cluster=replace(CLUSTER, claims={"pvc-1": SeenClaim("shop/data", "1")})),
        "claim shop/data waits for it, and the provisioner will make its PersistentVolume again",
    ),
    "a claim that has lost its PV": (
        world(
            volumes=[VOLUME], cluster=replace(CLUSTER, claims={"pvc-1": SeenClaim("shop/data", "1", "fast", "pv-1")})
        ),
        "`moorage volume --pool /pool manifest pvc-1-abc --claim shop/data --claim-uid 1 --name pv-1 "
        "--storage-class fast --node n1 | kubectl create -f -` brings it back",
    ),
    "bound PV": (world(cluster=with_pv(replace(LOST, phase="Bound"))), "a claim uses it"),
    "PV of any node": (world(cluster=with_pv(replace(LOST, nodes=frozenset()))), "names no node"),
    "PV being deleted": (world(cluster=with_pv(replace(LOST, is_going=True))), "finalizers"),
    "PV of trash": (
        world(cluster=with_pv(LOST), trash=[SeenTrash("1-volume-gone", "x", "/pool", OLD, NOW + 1)]),
        "undelete",
    ),
    "mounted device": (
        world(devices=[replace(DEVICE, is_gone=True, mounts=("/m",))]),
        "mounted at /m",
    ),
    "open device": (world(devices=[replace(DEVICE, openers=(7,))]), "process 7"),
    "living work": (world(files=[SeenFile("temporary", "t", "/pool", "w", OLD, True)]), "alive"),
    "trash of a served pool": (world(trash=[SeenTrash("e", "v", "/pool", OLD, OLD, "42")]), "pid 42"),
    "by hand": (world(holds=[SeenHold("v", "by-hand-x", "/pool", OLD)], cluster=CLUSTER), "by hand"),
}


@pytest.mark.parametrize("name", HELD)
def test_what_may_have_an_owner_is_kept_with_a_reason(name):
    seen, reason = HELD[name]
    (finding,) = plan(seen, 0.0)
    assert reason in finding.held


OWNED = {
    "volume with PV": world(volumes=[VOLUME], cluster=with_pv(PV)),
    "no cluster asked": world(volumes=[VOLUME]),
    "an ephemeral volume": world(volumes=[replace(VOLUME, id="ephemeral.x-1")], cluster=CLUSTER),
    "PV of another node": world(cluster=with_pv(replace(LOST, nodes=frozenset({"n2"})))),
    "attachment in use": world(
        cluster=with_pv(PV, attachments=(SeenAttachment("a", "u", "pv-1", "n1", OLD),)), volumes=[VOLUME]
    ),
    "mounted volume": world(volumes=[VOLUME], devices=[replace(DEVICE, mounts=("/m",))]),
    "raw volume attached": world(volumes=[VOLUME], devices=[replace(DEVICE, is_raw=True)]),
    "mount of a pod": world(mounts=[replace(MOUNT, pod_uid=POD)], cluster=replace(CLUSTER, pod_uids=frozenset({POD}))),
    "young trash": world(trash=[SeenTrash("e", "v", "/pool", OLD, NOW + 1)]),
    "a node of the cluster": world(holds=[SeenHold("v", "id1", "/pool", OLD)], cluster=CLUSTER),
}


@pytest.mark.parametrize("name", OWNED)
def test_what_has_an_owner_is_not_mentioned(name):
    assert plan(OWNED[name], 0.0) == []
