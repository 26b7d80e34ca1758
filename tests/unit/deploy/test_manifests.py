"""Every manifest is what Kubernetes 1.31 to 1.37 accept, and keeps the rules that its comments promise."""

import re

import kubernetes_validate
import pytest
import yaml
from tests.support.scripts import load_script

import moorage
from moorage.apiserver.kinds.snapshot_crds import snapshot_definitions

FOLDERS = [
    "node-local",
    "node-limits",
    "shared",
    "snapshot-support",
    "snapshot-classes/node-local",
    "snapshot-classes/shared",
    "distributions/microk8s",
    "distributions/k0s",
]
VERSIONS = ["1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
WORKLOADS = ("DaemonSet", "StatefulSet", "Deployment")


def pods_of(objects):
    return [(o["metadata"]["name"], o["spec"]["template"]["spec"]) for o in objects if o["kind"] in WORKLOADS]


def containers_of(objects):
    return [(f"{name}/{c['name']}", c) for name, pod in pods_of(objects) for c in pod["containers"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_object_has_the_shape_that_the_version_defines(manifests, folder, version):
    checked = 0
    for document in manifests(folder):
        if document["apiVersion"].split("/")[0].endswith("snapshot.storage.k8s.io"):
            continue  # its definition is among our own manifests, and the embedded API server checks it
        kubernetes_validate.validate(document, version, strict=True)
        checked += 1
    assert checked or folder.startswith("snapshot-classes")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_object_has_a_name_of_its_own_and_says_what_it_is_part_of(manifests, folder):
    objects = manifests(folder)
    names = [(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    for document in objects:
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "moorage", document["metadata"]["name"]


def test_the_two_scopes_can_stand_side_by_side(manifests):
    def names(folder):
        return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in manifests(folder)}

    assert not names("node-local") & names("shared")
    assert not names("snapshot-classes/node-local") & names("snapshot-classes/shared")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_image_is_this_version_and_names_no_registry(manifests, folder):
    for name, container in containers_of(manifests(folder)):
        assert container["image"] == f"localhost/moorage:{moorage.__version__}", name


@pytest.mark.parametrize("folder", ["node-local", "shared", "snapshot-support"])
def test_only_plugins_that_mount_are_privileged_and_they_have_no_account(manifests, folder):
    for name, pod in pods_of(manifests(folder)):
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            if context.get("privileged"):
                assert "plugin" in container["args"]
                assert any("node" in word for word in container["args"] if word.startswith("--services=")), name
            else:
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"]["drop"] == ["ALL"]
                assert "add" not in context["capabilities"] or "plugin" in container["args"], name
            if "plugin" in container["args"]:
                assert pod["automountServiceAccountToken"] is False
                assert "account" not in mounts, name


@pytest.mark.parametrize("folder", ["node-local", "shared", "snapshot-support"])
def test_every_process_is_confined_as_far_as_it_can_be(manifests, folder):
    """Bounded memory, the runtime's system calls, and no token that it does not use."""
    objects = manifests(folder)
    may_mount = {
        o["metadata"]["name"]: o.get("automountServiceAccountToken", True)
        for o in objects
        if o["kind"] == "ServiceAccount"
    }
    bound = {subject["name"] for o in objects if o["kind"].endswith("RoleBinding") for subject in o["subjects"]}
    for name, pod in pods_of(objects):
        account = pod["serviceAccountName"]
        mounts_token = pod.get("automountServiceAccountToken", may_mount[account])
        assert not mounts_token or len(pod["containers"]) == 1, name  # with several, only one of them gets it
        assert account in bound or not (mounts_token or any(v["name"] == "account" for v in pod["volumes"])), name
        assert not any(c.get("privileged") for c in pod.get("initContainers", [])), name
        for container in pod["containers"]:
            context = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert "memory" in container["resources"]["limits"], container["name"]
            if not context.get("privileged"):  # Kubernetes filters no system calls of a privileged container
                assert context["seccompProfile"] == {"type": "RuntimeDefault"}, container["name"]
                assert context.get("runAsNonRoot") or context["capabilities"]["drop"] == ["ALL"], container["name"]


@pytest.mark.parametrize("folder", ["node-local", "shared", "distributions/microk8s", "distributions/k0s"])
def test_plugins_of_nodes_mount_below_the_kubelet_only_and_limit_inline_volumes(manifests, folder):
    found = 0
    for name, container in containers_of(manifests(folder)):
        if container["securityContext"].get("privileged"):
            found += 1
            assert "--kubelet-dir=$(KUBELET_DIR)" in container["args"], name
            assert "--inline-attributes=size,fsType" in container["args"], name
            assert "--inline-max-size=10Gi" in container["args"], name
    assert found == 1


@pytest.mark.parametrize("folder", ["node-local", "shared", "snapshot-support"])
def test_no_pod_shares_the_hosts_network_or_processes(manifests, folder):
    for _, pod in pods_of(manifests(folder)):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


@pytest.mark.parametrize("folder", ["node-local", "shared"])
def test_sidecars_see_two_folders_of_the_kubelets_and_no_more(manifests, folder):
    for name, pod in pods_of(manifests(folder)):
        hostile = {v["name"] for v in pod["volumes"] if "hostPath" in v}
        for container in pod["containers"]:
            if container["name"] == "sidecars":
                for mount in container["volumeMounts"]:
                    assert mount["name"] not in hostile or mount.get("subPath", "").startswith("plugins"), name


@pytest.mark.parametrize("folder", ["node-local", "shared", "snapshot-support"])
def test_every_process_has_requests_and_probes_on_the_port_it_listens_on(manifests, folder):
    for name, container in containers_of(manifests(folder)):
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}, name
        (port,) = container["ports"]
        assert f"--http-endpoint=:{port['containerPort']}" in container["args"], name
        probes = [container["livenessProbe"], container.get("readinessProbe") or container["startupProbe"]]
        assert [probe["httpGet"]["port"] for probe in probes] == [port["name"]] * 2, name


@pytest.mark.parametrize(
    ("folder", "kubelet"),
    [
        ("node-local", "/var/lib/kubelet"),
        ("distributions/microk8s", "/var/snap/microk8s/common/var/lib/kubelet"),
        ("distributions/k0s", "/var/lib/k0s/kubelet"),
    ],
)
def test_the_kubelets_folder_is_set_in_one_place(manifests, folder, kubelet):
    objects = manifests(folder)
    settings = next(o for o in objects if o["metadata"]["name"] == "moorage-settings")
    assert settings["data"]["kubeletDir"] == kubelet
    ((_, pod),) = pods_of(objects)
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["kubelet"]["hostPath"]["path"] == kubelet
    plugin, sidecars = pod["containers"]
    (mount,) = [m for m in plugin["volumeMounts"] if m["name"] == "kubelet"]
    assert (mount["mountPath"], mount["mountPropagation"]) == (kubelet, "Bidirectional")
    for container in (plugin, sidecars):
        assert {"name": "KUBELET_DIR", "value": kubelet} in container["env"]
        # No other path of the kubelet's is written out, so nothing else has to be changed.
        assert not [word for word in container["args"] if "/kubelet" in word]
    # sun_path ends at 107 bytes, and the kubelet's folder may be deep.
    assert len(f"{kubelet}/plugins/csi.moorage.dev/csi.sock") <= 107


@pytest.mark.parametrize("folder", ["node-local", "shared"])
def test_two_plugins_of_one_node_never_overlap(manifests, folder):
    for document in manifests(folder):
        if document["kind"] == "DaemonSet":
            assert document["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
            pod = document["spec"]["template"]["spec"]
            grace = next(word for word in pod["containers"][0]["args"] if word.startswith("--stop-grace="))
            assert pod["terminationGracePeriodSeconds"] > int(grace.removeprefix("--stop-grace=").removesuffix("s"))


def test_the_snapshot_kinds_are_those_of_the_embedded_api_server(deploy_folder):
    folder = deploy_folder / "kubernetes/snapshot-support/crds"
    generate = load_script(folder / "generate.py")
    for name, document in generate.documents().items():
        assert (folder / name).read_text() == generate.text_of(document), f"run {folder}/generate.py"
    written = [
        yaml.safe_load((folder / f"{d['spec']['names']['plural']}.yaml").read_text()) for d in snapshot_definitions()
    ]
    assert [d["spec"] for d in written] == [d["spec"] for d in snapshot_definitions()]


@pytest.mark.parametrize("page", ["install.md", "upgrade-and-remove.md", "monitor.md"])
def test_what_the_pages_for_operators_name_is_there(deploy_folder, page):
    root = deploy_folder.parent
    named = set(re.findall(r"\bdeploy/[\w./-]*\w", (root / "docs" / "how-to" / page).read_text()))
    assert named
    assert not [name for name in named if not (root / name).exists()]
