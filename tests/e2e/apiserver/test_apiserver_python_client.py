"""The official Python client: typed, dynamic, watching, and electing a leader."""

import threading
import warnings

import pytest

warnings.filterwarnings("ignore", category=DeprecationWarning)

kubernetes = pytest.importorskip("kubernetes")
from kubernetes import client, config, dynamic, watch  # noqa: E402
from kubernetes.client.rest import ApiException  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
def api_client(cluster):
    made = config.new_client_from_config(str(cluster.kubeconfig))
    yield made
    made.close()


def claim(name):
    resources = client.V1VolumeResourceRequirements(requests={"storage": "1Gi"})
    spec = client.V1PersistentVolumeClaimSpec(access_modes=["ReadWriteOnce"], resources=resources)
    return client.V1PersistentVolumeClaim(metadata=client.V1ObjectMeta(name=name, labels={"t": "typed"}), spec=spec)


def test_the_typed_client_does_all_verbs(api_client):
    core = client.CoreV1Api(api_client)
    made = core.create_namespaced_persistent_volume_claim("default", claim("typed"))
    assert made.status.phase == "Pending"
    made.metadata.annotations = {"a": "b"}
    core.replace_namespaced_persistent_volume_claim("typed", "default", made)
    core.patch_namespaced_persistent_volume_claim("typed", "default", {"metadata": {"labels": {"x": "y"}}})
    found = core.list_namespaced_persistent_volume_claim("default", label_selector="t=typed,x=y").items
    assert [c.metadata.annotations for c in found] == [{"a": "b"}]
    with pytest.raises(ApiException) as refusal:
        core.replace_namespaced_persistent_volume_claim("typed", "default", made)
    assert refusal.value.status == 409
    core.delete_namespaced_persistent_volume_claim("typed", "default")
    storage = client.StorageV1Api(api_client)
    storage.create_csi_node(client.V1CSINode(metadata={"name": "n"}, spec=client.V1CSINodeSpec(drivers=[])))
    assert storage.read_csi_node("n").spec.drivers == []


def test_the_dynamic_client_finds_custom_kinds(api_client):
    dyn = dynamic.DynamicClient(api_client)
    snapshots = dyn.resources.get(api_version="snapshot.storage.k8s.io/v1", kind="VolumeSnapshot")
    body = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": "dyn"},
            "spec": {"source": {"persistentVolumeClaimName": "c"}}}  # fmt: skip
    made = snapshots.create(body=body, namespace="default")
    assert made.spec.source.persistentVolumeClaimName == "c"
    applied = snapshots.server_side_apply(
        body={**body, "metadata": {"name": "dyn", "labels": {"a": "b"}}}, namespace="default", name="dyn",
        field_manager="me", force_conflicts=True,
    )  # fmt: skip
    assert applied.metadata.labels.a == "b"
    snapshots.delete(name="dyn", namespace="default")


def test_a_watch_sees_what_happens(api_client):
    core = client.CoreV1Api(api_client)
    version = core.list_namespaced_config_map("default").metadata.resource_version

    def change():
        core.create_namespaced_config_map("default", client.V1ConfigMap(metadata={"name": "watched"}))
        core.patch_namespaced_config_map("watched", "default", {"data": {"a": "b"}})
        core.delete_namespaced_config_map("watched", "default")

    worker = threading.Thread(target=change)
    worker.start()
    seen = []
    stream = watch.Watch().stream(
        core.list_namespaced_config_map, "default", resource_version=version, timeout_seconds=30,
        field_selector="metadata.name=watched",
    )  # fmt: skip
    for event in stream:
        seen.append(event["type"])
        if event["type"] == "DELETED":
            break
    worker.join()
    assert seen == ["ADDED", "MODIFIED", "DELETED"]


def test_leader_election_on_leases(cluster):
    from kubernetes.leaderelection import electionconfig, leaderelection
    from kubernetes.leaderelection.resourcelock import leaselock

    config.load_kube_config(str(cluster.kubeconfig))
    election = leaderelection.LeaderElection(
        electionconfig.Config(
            leaselock.LeaseLock("election", "default", "me"), lease_duration=4, renew_deadline=3, retry_period=1,
            onstarted_leading=print, onstopped_leading=None,
        )
    )  # fmt: skip
    assert election.acquire()
    lease = client.CoordinationV1Api().read_namespaced_lease("election", "default")
    assert lease.spec.holder_identity == "me"
