"""Whatever goes wrong, at the end the back end holds exactly what the API server says: many random runs."""

import asyncio
import random

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolumeClaim, VolumeSnapshotClass, VolumeSnapshotContent
from moorage.sidecars.roles import Role
from moorage.testing import Fault

CODES = ["CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED", "INTERNAL", "UNKNOWN", "FAILED_PRECONDITION"]

QUICK = {"timeout_s": 0.5}  # an instance counts as gone when it has written nothing for twice as long
LEADING = {
    "leader_election": True,
    "leader_election_lease_duration_s": 1.0,
    "leader_election_renew_deadline_s": 0.6,
    "leader_election_retry_period_s": 0.1,
}
SPOILT = ("CreateVolume", "DeleteVolume", "CreateSnapshot", "DeleteSnapshot")


class Chaos:
    """A share of the calls fails with some code; half of those have done their work all the same."""

    def __init__(self, rng, share, backend):
        self._rng, self._share, self._backend = rng, share, backend
        self.spoilt = 0

    def __call__(self, method, request):
        if method not in SPOILT or self._rng.random() >= self._share:
            return None
        self.spoilt += 1
        code = self._rng.choice(CODES)
        is_made = getattr(request, "name", "") in self._backend.ids_by_name
        is_made = is_made or f"snap-{getattr(request, 'name', '')}" in self._backend.snapshots
        if code == "FAILED_PRECONDITION" and is_made:
            code = "INTERNAL"  # no driver refuses for good what it has already made
        is_open = code in CODES[:4]
        return Fault(code, is_done=is_open and self._rng.random() < 0.5, delay_s=self._rng.choice([0, 0, 0.01]))


async def more_calls(lab, method, before):
    """However slow the machine, the driver has been asked before anything is taken away again."""

    async def is_asked():
        return lab.driver.count(method) > before

    await lab.until(is_asked)


async def delete(lab, name):
    try:
        await lab.client.delete(PersistentVolumeClaim, name, "default")
    except NotFound:
        return


async def live_through(lab, rng, generation, settings):
    """Claims come and go while processes are killed and the driver restarts; then everything is let settle."""
    running = [lab.start(Role.PROVISIONER, host=f"h{generation}-0", **settings)]
    if rng.random() < 0.4:
        running.append(lab.start(Role.PROVISIONER, host=f"h{generation}-1", **settings))
    names = [f"g{generation}-c{number}" for number in range(6)]
    before = lab.driver.count("CreateVolume")
    for name in names:
        await lab.make_claim(name)
        await asyncio.sleep(rng.random() * 0.01)
    await more_calls(lab, "CreateVolume", before)
    kept = {name for name in names if rng.random() < 0.4}
    for step in range(6):
        await asyncio.sleep(rng.random() * 0.04)
        if step < len(names) and names[step] not in kept:
            await delete(lab, names[step])
        if rng.random() < 0.25:
            await lab.kill(running.pop())
            running.append(lab.start(Role.PROVISIONER, host=f"h{generation}-{step + 2}", **settings))
        if rng.random() < 0.1:
            await lab.driver.restart()
    lab.driver.chooser = None
    for name in kept:
        await lab.bound(name)

    async def is_exact():
        volumes = await lab.volumes()
        handles = {v.spec.csi.volume_handle for v in volumes}
        claims = {v.spec.claim_ref.name for v in volumes}
        return handles == set(lab.driver.backend.volumes) and claims == kept and len(volumes) == len(kept)

    try:
        await lab.until(is_exact)
    except TimeoutError:
        volumes = {
            v.name: (v.spec.csi.volume_handle, v.status.phase, v.spec.claim_ref.name) for v in await lab.volumes()
        }
        pytest.fail(f"volumes {volumes}, back end {lab.driver.backend.ids_by_name}, kept {kept}")
    for name in kept:
        await delete(lab, name)
    await lab.gone()
    for task in running:
        await lab.kill(task)


@pytest.mark.parametrize("seed", range(12))
async def test_no_volume_is_leaked_and_none_in_use_is_lost(make_lab, seed):
    """Ten runs each; every third seed with leader election, where two instances take turns instead of both working."""
    rng = random.Random(seed)
    settings = LEADING if seed % 3 == 2 else QUICK
    async with make_lab() as lab:
        await lab.make_class()
        chaos = Chaos(rng, 0.3, lab.driver.backend)
        for generation in range(10):
            lab.driver.chooser = chaos
            await live_through(lab, rng, generation, settings)
        assert chaos.spoilt > 0


BEING_DELETED = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"
CONTENT_FINALIZER = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"


async def make_content(lab, name, number):
    reference = {"name": name, "namespace": "default", "uid": f"0ec7e21e-0000-4000-8000-{number:012d}"}
    spec = {
        "volumeSnapshotRef": reference,
        "deletionPolicy": "Delete",
        "driver": lab.driver.name,
        "volumeSnapshotClassName": "snaps",
        "source": {"volumeHandle": "h1"},
    }
    body = {"metadata": {"name": name, "finalizers": [CONTENT_FINALIZER]}, "spec": spec}
    await lab.client.create(VolumeSnapshotContent, body)


async def remove_content(lab, name):
    patch = {"metadata": {"annotations": {BEING_DELETED: "yes"}}}
    await lab.client.patch(VolumeSnapshotContent, name, patch)
    await lab.client.delete(VolumeSnapshotContent, name)


@pytest.mark.parametrize("seed", range(12))
async def test_no_snapshot_is_leaked_and_none_in_use_is_lost(make_lab, seed):
    rng = random.Random(seed)
    async with make_lab(names=("binder",)) as lab:
        lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
        body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
        await lab.client.create(VolumeSnapshotClass, body)
        running = lab.start(Role.SNAPSHOTTER)
        chaos = Chaos(rng, 0.4, lab.driver.backend)
        for generation in range(8):
            lab.driver.chooser = chaos
            before = lab.driver.count("CreateSnapshot")
            names = [f"g{generation}-s{number}" for number in range(6)]
            for number, name in enumerate(names):
                await make_content(lab, name, generation * 100 + number)
            await more_calls(lab, "CreateSnapshot", before)
            for name in names[:4]:
                await asyncio.sleep(rng.random() * 0.05)
                await remove_content(lab, name)
                if rng.random() < 0.3:
                    await lab.kill(running)
                    running = lab.start(Role.SNAPSHOTTER)
            lab.driver.chooser = None

            async def is_exact(kept=frozenset(names[4:])):
                contents = (await lab.client.list(VolumeSnapshotContent)).items
                ready = [c for c in contents if c.status is not None and c.status.ready_to_use]
                handles = {c.status.snapshot_handle for c in ready}
                return {c.name for c in contents} == kept and handles == set(lab.driver.backend.snapshots)

            await lab.until(is_exact)
            for name in names[4:]:
                await remove_content(lab, name)
        assert chaos.spoilt > 0
