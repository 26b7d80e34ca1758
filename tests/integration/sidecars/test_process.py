"""The process around the roles: driver restarts, leader election, registration, endpoints, one process per node."""

import asyncio
import socket

import aiohttp
import pytest

from moorage.csi.client import CsiClient
from moorage.errors import UsageError
from moorage.kube.objects import (
    CSIDriver,
    Lease,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.sidecars.errors import SidecarError
from moorage.sidecars.registrar import Registrar, RegistrationRefused
from moorage.sidecars.roles import Role
from moorage.sidecars.run import WantedRoles, run
from moorage.sidecars.settings import SidecarEnvironment, SidecarSettings
from moorage.testing import Abilities

SELECTED = "volume.kubernetes.io/selected-node"
LOCAL = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))


async def test_by_default_every_role_that_the_driver_calls_for_is_at_work(lab):
    lab.start()
    await lab.make_class(allowVolumeExpansion=True)
    await lab.make_node("node-1")
    await lab.make_claim("data")
    claim = await lab.bound("data")
    await lab.attach("va", claim.spec.volume_name)

    async def is_attached():
        return (await lab.attachment("va")).status.attached

    await lab.until(is_attached)
    patch = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
    await lab.client.patch(PersistentVolumeClaim, "data", patch, "default")

    async def is_larger():
        return (await lab.claim("data")).status.capacity["storage"] == "2Gi"

    await lab.until(is_larger)
    assert [volume.spec.capacity for volume in await lab.volumes()] == [{"storage": "2Gi"}]


async def test_a_driver_that_needs_no_attach_gets_no_attacher(lab):
    await lab.client.create(CSIDriver, {"metadata": {"name": lab.driver.name}, "spec": {"attachRequired": False}})
    lab.start()
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")
    await lab.attach("va", claim.spec.volume_name)
    await asyncio.sleep(0.3)
    assert not (await lab.attachment("va")).status.attached


async def test_a_restarted_driver_is_found_again_and_asked_what_it_can_do(lab):
    lab.start()
    await lab.make_class()
    await lab.make_claim("before")
    await lab.bound("before")
    asked = lab.driver.count("ControllerGetCapabilities")
    await lab.driver.stop()
    await lab.make_claim("meanwhile")
    await lab.client.delete(PersistentVolumeClaim, "before", "default")
    await asyncio.sleep(0.2)
    await lab.driver.start()
    await lab.bound("meanwhile")
    await lab.nothing_left()
    assert lab.driver.count("ControllerGetCapabilities") > asked


async def test_another_driver_on_the_same_socket_is_served_under_its_own_name(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("first")
    await lab.bound("first")
    lab.driver.name = "other.csi.moorage.dev"
    await lab.driver.restart()
    await lab.make_class("other", provisioner="other.csi.moorage.dev")
    await lab.make_claim("second", storageClassName="other")
    await lab.bound("second")
    drivers = {volume.spec.csi.driver for volume in await lab.volumes()}
    assert drivers == {"test.csi.moorage.dev", "other.csi.moorage.dev"}


async def test_only_the_leader_works_and_another_takes_over(lab):
    times = {
        "leader_election": True,
        "leader_election_lease_duration_s": 1.5,
        "leader_election_renew_deadline_s": 1.0,
        "leader_election_retry_period_s": 0.1,
    }
    first = lab.start(Role.PROVISIONER, host="a", **times)

    async def holder():
        lease = await lab.client.find(Lease, "test-csi-moorage-dev", "default")
        return lease.spec.holder_identity if lease is not None else ""

    async def is_a():
        return await holder() == "a"

    await lab.until(is_a)
    lab.start(Role.PROVISIONER, host="b", **times)
    await lab.make_class()
    await lab.make_claim("one")
    await lab.bound("one")
    assert lab.driver.count("CreateVolume") == 1
    await lab.kill(first)
    await lab.make_claim("two")
    await lab.bound("two")
    assert await holder() == "b"


async def test_registration_tells_the_kubelet_where_the_driver_is(tmp_path):
    registrar = Registrar("d.example", "/kubelet/csi.sock", str(tmp_path))
    serving = asyncio.create_task(registrar.run())
    async with CsiClient(f"unix://{registrar.socket}", timeout_s=5) as kubelet:
        await kubelet.wait_connected(10)
        info = await kubelet.registration_info()
        assert (info.type, info.name, info.endpoint) == ("CSIPlugin", "d.example", "/kubelet/csi.sock")
        assert list(info.supported_versions) == ["1.0.0"]
        await kubelet.notify_registration(True)
        assert await registrar.check() == (200, "ok")
        await kubelet.notify_registration(False, f"bad version: {'x' * 300}")  # longer than a string of CSI
    with pytest.raises(RegistrationRefused, match="bad version"):
        await serving
    assert not registrar.socket.exists()
    assert (await registrar.check())[0] == 404


async def test_only_a_dead_predecessors_socket_is_taken_away(tmp_path):
    registrar = Registrar("d.example", "/kubelet/csi.sock", str(tmp_path))
    registrar.socket.write_text("somebody's notes")
    with pytest.raises(SidecarError, match="is not a socket"):
        await registrar.run()
    assert registrar.socket.read_text() == "somebody's notes"
    registrar.socket.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(registrar.socket))
    serving = asyncio.create_task(registrar.run())
    async with CsiClient(f"unix://{registrar.socket}", timeout_s=5) as kubelet:
        await kubelet.wait_connected(10)
        assert (await kubelet.registration_info()).name == "d.example"
    assert registrar.socket.stat().st_mode & 0o077 == 0
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert not registrar.socket.exists()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_endpoints_tell_health_and_metrics(lab):
    port = free_port()
    lab.start(Role.PROVISIONER, Role.LIVENESS, http_endpoint=f"127.0.0.1:{port}")
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok")
        async with session.get("/healthz/leader-election") as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            page = await answer.text()
        await lab.driver.stop()
        async with session.get("/healthz") as answer:
            assert answer.status == 500
    labels = f'driver_name="{lab.driver.name}",grpc_status_code="OK",method_name="/csi.v1.Controller/CreateVolume"'
    assert f"csi_sidecar_operations_seconds_count{{{labels}}} 1.0" in page
    assert 'controller_persistentvolumeclaim_provision_total{class="fast",source=""} 1.0' in page
    assert "controller_persistentvolumeclaim_provision_duration_seconds_bucket" in page
    for queue in ("claims", "volumes"):
        assert f'workqueue_adds_total{{name="{queue}"}}' in page
    assert "process_start_time_seconds" in page


async def test_each_role_has_its_own_health(lab):
    port = free_port()
    lab.start(Role.PROVISIONER, Role.CAPACITY, Role.LIVENESS, pod="absent", http_endpoint=f"127.0.0.1:{port}")
    await lab.make_class()
    await lab.make_claim("data")
    await lab.bound("data")
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def says(role, status, words):
            async def check():
                async with session.get(f"/healthz/{role}") as answer:
                    return answer.status == status and words in await answer.text()

            await lab.until(check)

        async with session.get("/metrics") as answer:
            page = await answer.text()
        for gauge in ("desired_goal", "desired_current", "obsolete"):
            assert f"csistoragecapacities_{gauge} 0.0" in page
        await says("provisioner", 200, "ok")
        await says("capacity", 500, '"absent" not found')
        await says("attacher", 404, "not run here")
        await says("liveness", 200, "ok")
        await says("registrar", 404, "not run here")
        await lab.driver.stop()
        await says("liveness", 500, "does not answer")
        await says("provisioner", 500, "the driver has not said what it can do")


async def test_with_node_deployment_each_node_handles_its_own_claims_only(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"zone": "a"}
        await lab.make_node("node-1", keys=("zone",), zone="a")
        await lab.make_node("node-2", keys=("zone",), zone="b")
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        lab.start(Role.PROVISIONER, node="node-1", node_deployment=True)
        await lab.make_claim("mine", annotations={SELECTED: "node-1"})
        await lab.make_claim("theirs", annotations={SELECTED: "node-2"})
        claim = await lab.bound("mine")
        assert (await lab.claim("theirs")).status.phase == "Pending"
        foreign = (await lab.client.get(PersistentVolume, claim.spec.volume_name)).spec
        assert foreign.node_affinity.required.node_selector_terms[0].match_expressions[0].values == ["a"]
        await lab.client.delete(PersistentVolumeClaim, "mine", "default")
        await lab.gone()


async def test_immediate_claims_are_shared_among_the_nodes_without_a_race(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"zone": "a"}
        for number in range(3):
            await lab.make_node(f"node-{number}", keys=("zone",), zone="a")
            lab.start(Role.PROVISIONER, node=f"node-{number}", node_deployment=True, node_deployment_base_delay_s=5.0)
        await lab.make_class()
        for number in range(12):
            await lab.make_claim(f"c{number}")
        nodes = {(await lab.bound(f"c{number}")).annotations[SELECTED] for number in range(12)}
        assert len(nodes) > 1
        assert lab.driver.count("CreateVolume") == 12


async def test_a_dead_nodes_turn_passes_to_the_next(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"zone": "a"}
        for number in range(3):
            await lab.make_node(f"node-{number}", keys=("zone",), zone="a")
        lab.start(Role.PROVISIONER, node="node-1", node_deployment=True, node_deployment_base_delay_s=0.1)
        await lab.make_class()
        for number in range(6):
            await lab.make_claim(f"c{number}")
        for number in range(6):
            assert (await lab.bound(f"c{number}")).annotations[SELECTED] == "node-1"


@pytest.mark.parametrize(
    ("settings", "roles", "message"),
    [
        (SidecarSettings(node_deployment=True), (), "NODE_NAME"),
        (SidecarSettings(node_deployment=True, leader_election=True), (), "exclude each other"),
        (SidecarSettings(http_endpoint=":1", metrics_address=":2"), (), "exclude each other"),
        (SidecarSettings(http_endpoint="8080"), (), "want an address"),
        (SidecarSettings(feature_gates="Topology=maybe"), (), "must be true or false"),
    ],
)
async def test_a_wrong_set_up_is_told_before_anything_starts(settings, roles, message):
    with pytest.raises(UsageError, match=message):
        await run(WantedRoles(settings, SidecarEnvironment(), frozenset(roles)))


async def test_with_node_deployment_only_local_contents_and_volumes_are_touched(make_lab):
    from moorage.csi import csi_pb2 as pb

    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"zone": "a"}
        await lab.make_node("node-1", keys=("zone",), zone="a")
        lab.driver.backend.volumes["h1"] = pb.Volume(volume_id="h1", capacity_bytes=1 << 30)
        body = {"metadata": {"name": "snaps"}, "driver": lab.driver.name, "deletionPolicy": "Delete"}
        await lab.client.create(VolumeSnapshotClass, body)
        for number, node in enumerate(("node-1", "node-2")):
            reference = {"name": "s", "namespace": "default", "uid": f"0ec7e21e-0000-4000-8000-00000000000{number}"}
            spec = {
                "volumeSnapshotRef": reference,
                "deletionPolicy": "Delete",
                "driver": lab.driver.name,
                "volumeSnapshotClassName": "snaps",
                "source": {"volumeHandle": "h1"},
            }
            labels = {"snapshot.storage.kubernetes.io/managed-by": node}
            await lab.client.create(VolumeSnapshotContent, {"metadata": {"name": node, "labels": labels}, "spec": spec})
        lab.start(Role.SNAPSHOTTER, Role.RESIZER, Role.PROVISIONER, node="node-1", node_deployment=True)

        async def is_ready():
            found = await lab.client.get(VolumeSnapshotContent, "node-1")
            return found.status is not None and found.status.ready_to_use

        await lab.until(is_ready)
        assert (await lab.client.get(VolumeSnapshotContent, "node-2")).status is None

        elsewhere = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}]
        await lab.make_class(allowVolumeExpansion=True)
        await lab.make_claim("theirs", volumeName="theirs")
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "persistentVolumeReclaimPolicy": "Delete",
            "csi": {"driver": lab.driver.name, "volumeHandle": "h1"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": elsewhere}},
        }
        await lab.client.create(PersistentVolume, {"metadata": {"name": "theirs"}, "spec": spec})
        await lab.bound("theirs")
        patch = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
        await lab.client.patch(PersistentVolumeClaim, "theirs", patch, "default")
        await lab.make_claim("mine", annotations={SELECTED: "node-1"})
        await lab.bound("mine")
        assert lab.driver.count("ControllerExpandVolume") == 0
