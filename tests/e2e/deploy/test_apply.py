"""The manifests go in and out of the embedded API server with the real kubectl."""

import asyncio
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from moorage.apiserver.run import ApiServer, Config

FOLDERS = Path(__file__).parents[3] / "deploy" / "kubernetes"
PART_OF = "app.kubernetes.io/part-of=moorage"


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory):
    """kubectl against a server of its own, in a thread because kubectl blocks this one."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on the PATH")
    directory = tmp_path_factory.mktemp("apply")
    ready, stop = threading.Event(), []

    async def serve() -> None:
        server = ApiServer(Config(directory, in_memory=True))
        await server.start()
        ended = asyncio.Event()
        stop.append((asyncio.get_running_loop(), ended))
        ready.set()
        await ended.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="apiserver")
    thread.start()
    assert ready.wait(30)

    def run(*words: str) -> str:
        environment = {**os.environ, "KUBECONFIG": str(directory / "kubeconfig"), "HOME": str(directory)}
        done = subprocess.run(
            ["kubectl", *words], capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
        warnings = [line for line in done.stderr.splitlines() if "Warning" in line]
        assert all("runs no controller for" in line for line in warnings), done.stderr  # as it is here
        return done.stdout

    yield run
    loop, ended = stop[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(30)


@pytest.mark.parametrize(
    "folder",
    [
        "node-local",
        "shared",
        "distributions/microk8s",
        "snapshot-classes/node-local",
        "snapshot-classes/shared",
    ],
)
def test_a_folder_is_applied_twice_without_change_and_then_deleted(kubectl, folder):
    path = str(FOLDERS / folder)
    first = kubectl("apply", "-k", path).splitlines()
    assert len(first) >= 2
    second = kubectl("apply", "-k", path).splitlines()
    changed = [line for line in second if not line.endswith("unchanged")]
    assert changed == []
    kubectl("delete", "-k", path, "--ignore-not-found")
    left = kubectl("get", "namespaces,csidrivers,storageclasses,clusterroles", "-l", PART_OF, "-o", "name")
    assert left == ""


def test_a_cluster_without_snapshots_gets_the_kinds_the_controller_and_a_class(kubectl):
    kubectl("delete", "customresourcedefinitions", "--all")  # the embedded server has them from its start
    for folder in ("snapshot-support", "snapshot-classes/node-local"):
        kubectl("apply", "-k", str(FOLDERS / folder))
        again = kubectl("apply", "-k", str(FOLDERS / folder)).splitlines()
        assert [line for line in again if not line.endswith("unchanged")] == []
    assert kubectl("get", "volumesnapshotclasses,volumegroupsnapshotclasses", "-o", "name").split() == [
        "volumesnapshotclass.snapshot.storage.k8s.io/moorage",
        "volumegroupsnapshotclass.groupsnapshot.storage.k8s.io/moorage",
    ]
    kubectl("delete", "-k", str(FOLDERS / "snapshot-support"), "--ignore-not-found")
    assert kubectl("get", "customresourcedefinitions,namespaces", "-l", PART_OF, "-o", "name") == ""


def test_both_scopes_are_applied_together_and_one_is_removed(kubectl):
    for folder in ("node-local", "shared"):
        kubectl("apply", "-k", str(FOLDERS / folder))
    kubectl("delete", "-k", str(FOLDERS / "node-local"), "--ignore-not-found")
    assert kubectl("get", "csidrivers", "-o", "name").split() == ["csidriver.storage.k8s.io/shared.csi.moorage.dev"]
    assert kubectl("get", "statefulsets", "-n", "moorage-shared", "-o", "name").split() == [
        "statefulset.apps/moorage-controller"
    ]


def test_the_claim_and_the_pod_of_the_page_are_taken(kubectl, tmp_path):
    text = (FOLDERS.parents[1] / "docs/how-to/install.md").read_text()
    (example,) = re.findall(r"kubectl apply -f - <<'END'\n(.*?)\nEND\n", text, re.S)
    (tmp_path / "example.yaml").write_text(example)
    made = kubectl("apply", "-f", str(tmp_path / "example.yaml")).split()
    assert made[::2] == ["persistentvolumeclaim/data", "pod/writer"]
    (grow,) = re.findall(r"`kubectl patch pvc data --type merge -p\s+'([^']+)'`", text)
    kubectl("patch", "pvc", "data", "--type", "merge", "-p", grow, "--dry-run=client")
    kubectl("delete", "-f", str(tmp_path / "example.yaml"), "--wait=false")
