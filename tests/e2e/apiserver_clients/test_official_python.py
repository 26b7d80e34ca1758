"""The official Python client, unmodified, against `moorage apiserver`: typed, dynamic, custom objects, watch, YAML."""

import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path

import kubernetes
import pytest
import yaml
from kubernetes import client, utils, watch
from kubernetes.client.rest import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from moorage.kube.api import config as ours
from moorage.kube.api.client import Client
from moorage.kube.objects import ConfigMap, PersistentVolumeClaim


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apiserver")
    command = [
        str(Path(sys.executable).with_name("moorage")),
        "apiserver",
        "--data-dir",
        str(folder / "data"),
        "--port",
        "0",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        found = [line.split(": ", 1)[1].strip() for line in _until_kubeconfig(process)]
        assert found, (folder / "log").read_text()
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        process.stdout.close()


def _until_kubeconfig(process):
    for line in process.stdout:
        if line.startswith("kubeconfig: "):
            yield line
            return


@pytest.fixture(scope="module")
def api(kubeconfig):
    with kubernetes.config.new_client_from_config(kubeconfig) as api:
        yield api


@pytest.fixture
def core(api):
    return client.CoreV1Api(api)


@pytest.fixture
def namespace(core, request):
    name = "t-" + "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[-40:].strip("-")
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)


def _claim(name, **labels):
    return client.V1PersistentVolumeClaim(
        metadata=client.V1ObjectMeta(name=name, labels=labels),
        spec=client.V1PersistentVolumeClaimSpec(
            access_modes=["ReadWriteOnce"],
            storage_class_name="fast",
            resources=client.V1VolumeResourceRequirements(requests={"storage": "1Gi"}),
        ),
    )


def test_a_claim_lives_through_every_typed_verb(core, namespace):
    made = core.create_namespaced_persistent_volume_claim(namespace, _claim("data", app="x"))
    assert made.metadata.uid
    assert made.metadata.creation_timestamp is not None
    assert made.status.phase == "Pending"
    assert made.spec.volume_mode == "Filesystem"
    assert made.spec.resources.requests["storage"] == "1Gi"

    body = {"status": {"phase": "Bound", "capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteOnce"]}}
    bound = core.patch_namespaced_persistent_volume_claim_status("data", namespace, body)
    assert (bound.status.phase, bound.status.capacity) == ("Bound", {"storage": "2Gi"})
    merged = core.patch_namespaced_persistent_volume_claim("data", namespace, {"metadata": {"labels": {"tier": "db"}}})
    assert merged.metadata.labels == {"app": "x", "tier": "db"}
    assert merged.status.phase == "Bound"

    listed = core.list_persistent_volume_claim_for_all_namespaces(
        label_selector="tier=db", field_selector="metadata.name=data"
    )
    assert [item.metadata.uid for item in listed.items] == [made.metadata.uid]
    core.delete_namespaced_persistent_volume_claim("data", namespace)
    with contextlib.suppress(ApiException):  # a claim may be protected until nobody uses it
        assert core.read_namespaced_persistent_volume_claim("data", namespace).metadata.deletion_timestamp is not None


def test_a_replace_with_an_old_version_conflicts(core, namespace):
    first = core.create_namespaced_config_map(namespace, {"metadata": {"name": "a"}, "data": {"k": "1"}})
    first.data = {"k": "2"}
    second = core.replace_namespaced_config_map("a", namespace, first)
    assert int(second.metadata.resource_version) > int(first.metadata.resource_version)
    with pytest.raises(ApiException) as caught:
        core.replace_namespaced_config_map("a", namespace, first)
    assert (caught.value.status, "Conflict" in caught.value.body) == (409, True)


@pytest.mark.parametrize(
    ("call", "status", "reason"),
    [
        (lambda core, ns: core.read_namespaced_config_map("missing", ns), 404, "NotFound"),
        (lambda core, ns: core.create_namespaced_config_map(ns, {"metadata": {"name": "Not Valid"}}), 422, "Invalid"),
        (lambda core, ns: core.list_namespaced_pod(ns, label_selector="a in (b"), 400, "BadRequest"),
        (lambda core, ns: core.list_namespaced_pod(ns, field_selector="spec.nonsense=x"), 400, "BadRequest"),
        (
            lambda core, ns: core.create_namespaced_config_map("no-such-namespace", {"metadata": {"name": "a"}}),
            404,
            "NotFound",
        ),
    ],
)
def test_errors_are_the_status_objects_of_kubernetes(core, namespace, call, status, reason):
    with pytest.raises(ApiException) as caught:
        call(core, namespace)
    answer = yaml.safe_load(caught.value.body)
    assert (caught.value.status, answer["kind"], answer["code"], answer["reason"]) == (status, "Status", status, reason)


def test_a_list_is_paged(core, namespace):
    for number in range(12):
        core.create_namespaced_config_map(
            namespace, {"metadata": {"name": f"m{number:02d}", "labels": {"paged": "yes"}}}
        )
    names, token = [], None
    while True:
        page = core.list_namespaced_config_map(namespace, limit=5, _continue=token, label_selector="paged=yes")
        names += [item.metadata.name for item in page.items]
        token = page.metadata._continue
        if not token:
            break
        assert len(page.items) == 5
    assert names == [f"m{number:02d}" for number in range(12)]


def test_a_watch_tells_every_change_and_resumes(core, namespace):
    start = core.list_namespaced_config_map(namespace).metadata.resource_version
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "a"}})
    core.patch_namespaced_config_map("a", namespace, {"data": {"k": "v"}})
    core.delete_namespaced_config_map("a", namespace)

    def first(count, version):
        watcher, seen = watch.Watch(), []
        for event in watcher.stream(
            core.list_namespaced_config_map, namespace, resource_version=version, timeout_seconds=20
        ):
            if event["object"].metadata.name == "a":
                seen.append((event["type"], event["object"].metadata.resource_version))
            if len(seen) == count:
                watcher.stop()
        return seen

    events = first(3, start)
    assert [kind for kind, _ in events] == ["ADDED", "MODIFIED", "DELETED"]
    assert first(2, events[0][1]) == events[1:]


def test_a_watch_sees_what_another_client_does_meanwhile(core, namespace):
    version = core.list_namespaced_config_map(namespace).metadata.resource_version
    timer = threading.Timer(0.3, core.create_namespaced_config_map, (namespace, {"metadata": {"name": "late"}}))
    timer.start()
    watcher = watch.Watch()
    seen = []
    for event in watcher.stream(
        core.list_namespaced_config_map, namespace, resource_version=version, timeout_seconds=30
    ):
        seen.append(event["object"].metadata.name)
        if seen[-1] == "late":
            watcher.stop()
    timer.join()
    assert seen[-1] == "late"


def test_the_dynamic_client_discovers_kinds_and_applies(api, namespace):
    dynamic = DynamicClient(api)
    maps = dynamic.resources.get(api_version="v1", kind="ConfigMap")
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": namespace},
        "data": {"k": "1"},
    }
    assert maps.create(body=body, namespace=namespace).data.k == "1"
    applied = {**body, "data": {"k": "2"}}
    with pytest.raises(ConflictError):
        maps.server_side_apply(body=applied, name="a", namespace=namespace, field_manager="one")
    forced = maps.server_side_apply(
        body=applied, name="a", namespace=namespace, field_manager="one", force_conflicts=True
    )
    assert forced.data.k == "2"
    assert {"one"} <= {entry.manager for entry in forced.metadata.managedFields}
    patched = maps.patch(
        body=[{"op": "add", "path": "/data/l", "value": "3"}],
        name="a",
        namespace=namespace,
        content_type="application/json-patch+json",
    )
    assert patched.data.to_dict() == {"k": "2", "l": "3"}
    maps.delete(name="a", namespace=namespace)
    with pytest.raises(NotFoundError):
        maps.get(name="a", namespace=namespace)


def test_snapshot_kinds_are_there_for_dynamic_and_custom_objects(api, namespace):
    snapshots = DynamicClient(api).resources.get(api_version="snapshot.storage.k8s.io/v1", kind="VolumeSnapshot")
    body = {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": {"name": "s", "namespace": namespace},
        "spec": {"source": {"persistentVolumeClaimName": "data"}},
    }
    snapshots.create(body=body, namespace=namespace)
    custom = client.CustomObjectsApi(api)
    group = ("snapshot.storage.k8s.io", "v1", namespace, "volumesnapshots")
    custom.patch_namespaced_custom_object_status(*group, "s", {"status": {"readyToUse": True}})
    found = custom.get_namespaced_custom_object(*group, "s")
    assert (found["status"]["readyToUse"], found["spec"]["source"]["persistentVolumeClaimName"]) == (True, "data")
    custom.delete_namespaced_custom_object(*group, "s")


def test_a_manifest_of_several_documents_is_created(api, core, namespace):
    documents = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"password": "x"}},
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": f"class-of-{namespace}"[:60].strip("-")},
            "provisioner": "csi.moorage.dev",
        },
    ]
    utils.create_from_yaml(api, yaml_objects=documents, namespace=namespace)
    assert core.read_namespaced_secret("s", namespace).data == {"password": "eA=="}
    made = client.StorageV1Api(api).read_storage_class(documents[1]["metadata"]["name"])
    assert (made.reclaim_policy, made.volume_binding_mode) == ("Delete", "Immediate")
    client.StorageV1Api(api).delete_storage_class(made.metadata.name)


def test_without_the_right_token_nothing_is_told(api, kubeconfig):
    with kubernetes.config.new_client_from_config(kubeconfig) as stranger:
        stranger.configuration.refresh_api_key_hook = None
        stranger.configuration.api_key = {"authorization": "Bearer wrong"}
        stranger.configuration.cert_file = stranger.configuration.key_file = None
        stranger.rest_client = type(stranger.rest_client)(stranger.configuration)
        with pytest.raises(ApiException) as caught:
            client.CoreV1Api(stranger).list_namespace()
    assert caught.value.status == 401
    assert client.VersionApi(api).get_code().major == "1"


async def test_our_own_client_and_the_official_one_see_the_same(kubeconfig, core, namespace):
    async with Client(ours.load(kubeconfig)) as mine:
        core.create_namespaced_persistent_volume_claim(namespace, _claim("both"))
        claim = await mine.get(PersistentVolumeClaim, "both", namespace)
        theirs = core.read_namespaced_persistent_volume_claim("both", namespace)
        assert (claim.uid, claim.metadata.resource_version) == (theirs.metadata.uid, theirs.metadata.resource_version)
        await mine.create(ConfigMap, {"metadata": {"name": "mine"}, "data": {"k": "v"}}, namespace)
        assert core.read_namespaced_config_map("mine", namespace).data == {"k": "v"}
