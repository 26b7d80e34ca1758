"""A cluster for the manifests: API server with RBAC, controllers and a node agent, all Moorage's own, and kubectl.

The controllers and the node agent stand for Kubernetes' own and are the administrator; what the manifests deploy has
only the rights of its accounts. Every request of an account is kept.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from manifest_pods import ManifestPod

from moorage.apiserver.errors import StatusError
from moorage.apiserver.run import ApiServer, Config
from moorage.cluster.layout import DataLayout
from moorage.cluster.pool import ensure_pool, release_pool
from moorage.controllers import run as controllers
from moorage.host import loop, mountinfo, mounts
from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client

KUBERNETES = Path(__file__).parents[4] / "deploy" / "kubernetes"
NODE = "node-1"
RUNTIME_NODE = "stands-for-a-runtime"
# The snapshot controller is among what is deployed.
CONTROLLERS = tuple(name for name in controllers.CONTROLLERS if name != "snapshots")

Request = tuple[str, str, str, str, str, str]  # verb, group, resource, subresource, namespace, name


class Stage:
    """Use as a context manager; `apply` deploys manifests, `pod_of` starts a workload's pod."""

    def __init__(self, directory: Path, image: Path) -> None:
        self.directory = directory
        self.image = image
        self.kubelet = directory / "k"
        self.layout = DataLayout(directory)
        self.requests: dict[str, set[Request]] = {}
        self.refused: list[str] = []
        self._disturbed: set[tuple[str, str, str]] = set()
        self.pods: list[ManifestPod] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="stage")
        self._ready = threading.Event()

    def __enter__(self) -> "Stage":
        self.kubelet.mkdir()
        mounts.bind(self.kubelet, self.kubelet)
        subprocess.run(["mount", "--make-shared", str(self.kubelet)], check=True)
        ensure_pool(self.layout, None, 2 << 30)
        self._thread.start()
        assert self._ready.wait(30)
        self.start_agent()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_agent()  # which still needs the plugin, to unmount
        for pod in self.pods:
            pod.clean()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        for mount in reversed(mountinfo.mounts_below(self.kubelet)):
            with contextlib.suppress(OSError):
                mounts.unmount_all(Path(mount.target))
        for device in loop.attached(self.layout.pool):
            loop.detach(device)
        release_pool(self.layout)

    async def _serve(self) -> None:
        self.server = ApiServer(Config(self.directory / "api", in_memory=True, enforces_rbac=True))
        await self.server.start()
        self._record()
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        api = kube_config.from_kubeconfig(self.server.kubeconfig)
        async with Client(api, identity="stage") as client, asyncio.TaskGroup() as tasks:
            work = tasks.create_task(controllers.run(client, controllers.ControllerSettings(CONTROLLERS)))
            self._ready.set()
            await self._stop.wait()
            work.cancel()
        await self.server.stop()

    def _record(self) -> None:
        """Keep what accounts ask for; a request that RBAC refuses stays refused."""
        decide = self.server.authorizer.allow

        def allow(user, asked) -> None:
            if not user.name.startswith("system:serviceaccount:") or not asked.resource:
                return decide(user, asked)
            place = (asked.verb, asked.group, asked.resource, asked.subresource, asked.namespace, asked.name)
            self.requests.setdefault(user.name, set()).add(place)
            try:
                decide(user, asked)
            except StatusError as error:
                self.refused.append(str(error))
                raise
            return self._disturb(user.name, asked)

        self.server.authorizer.allow = allow

    def _disturb(self, account: str, asked) -> None:
        """The first change of each resource by each account meets a conflict, as if somebody else had been quicker."""
        place = (account, asked.resource, asked.subresource)
        if asked.verb in ("update", "patch") and place not in self._disturbed:
            self._disturbed.add(place)
            raise StatusError(409, "Conflict", f"the {asked.resource} has been modified; read it anew")

    # -- what a kubelet and kubectl do ---------------------------------------------------------------------------------

    def start_agent(self) -> None:
        words = ["node", "--node-name", NODE, "--root-dir", str(self.kubelet), "--kubeconfig", self.kubeconfig]
        words += ["--client-ca-file", str(self.server.identity.ca), "--node-labels", f"kubernetes.io/hostname={NODE}"]
        words += ["--hide", str(self.directory), "--on-stop", "drain"]
        with (self.directory / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "moorage.cli.main", *words], stdout=log, stderr=log, start_new_session=True
            )
        self.wait(lambda: NODE in self.kubectl("get", "nodes", "-o", "name"), "the node to be there")

    def stop_agent(self) -> None:
        if self.agent.poll() is None:
            self.agent.send_signal(signal.SIGTERM)
            try:
                self.agent.wait(90)
            except subprocess.TimeoutExpired:
                self.agent.kill()
                self.agent.wait(10)

    @property
    def kubeconfig(self) -> str:
        return str(self.server.kubeconfig)

    @property
    def api_address(self) -> str:
        return self.server.url.removeprefix("https://")

    @property
    def authority(self) -> str:
        return self.server.identity.ca.read_text()

    def token(self, namespace: str, account: str) -> str:
        return self.kubectl("create", "token", account, "-n", namespace, "--duration=1h").strip()

    def kubectl(self, *words: str, stdin: str = "") -> str:
        done = subprocess.run(
            ["kubectl", *words], input=stdin, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "KUBECONFIG": self.kubeconfig, "HOME": str(self.directory)},
        )  # fmt: skip
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def get(self, *words: str) -> dict:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, *documents: dict) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.dump_all(documents))

    # -- the manifests -------------------------------------------------------------------------------------------------

    def deploy(self, folder: str, namespace: str = "") -> list[dict]:
        """Apply a folder of manifests, with this machine's paths as settings where it has any; returns its objects."""
        source = KUBERNETES / folder
        if namespace:
            source = self._overlay(folder, namespace)
        self.kubectl("apply", "-k", str(source))
        return list(yaml.safe_load_all(self.kubectl("kustomize", str(source))))

    def _overlay(self, folder: str, namespace: str) -> Path:
        """An overlay as docs/how-to/install.md shows it: the settings, and nothing else, are this cluster's."""
        overlay = self.directory / "overlay" / folder
        (overlay / "here").mkdir(parents=True)
        settings = {"kubeletDir": str(self.kubelet), "poolDir": str(self.layout.pool)}
        patch = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "moorage-settings", "namespace": namespace},
            "data": settings,
        }
        header = "apiVersion: kustomize.config.k8s.io/"
        component = f"{header}v1alpha1\nkind: Component\npatches:\n  - patch: '{json.dumps(patch)}'\n"
        (overlay / "here/kustomization.yaml").write_text(component)
        base = os.path.relpath(KUBERNETES, overlay)
        (overlay / "kustomization.yaml").write_text(
            f"{header}v1beta1\nkind: Kustomization\nresources: [{base}/{folder}]\ncomponents: [here, {base}/settings]\n"
        )
        return overlay

    def pod_of(self, workload: dict, image: Path | None = None, replica: str = NODE) -> ManifestPod:
        """Start a pod of the workload on the node, with an object for it as its controller would make."""
        pod = ManifestPod(self.directory / "pods", workload, image or self.image, NODE, self, replica)
        owner = self.get(workload["kind"].lower(), workload["metadata"]["name"], "-n", pod.namespace)
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        # Pods of a node that is not there are deleted; this one takes no others.
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": RUNTIME_NODE},
                "spec": {"unschedulable": True},
            }
        )
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod.name, "namespace": pod.namespace, "ownerReferences": [reference]},
                # Not on the node: the agent runs no images, this object only says whose the processes are.
                "spec": {
                    "nodeName": RUNTIME_NODE,
                    "containers": [{"name": "c", "image": "none"}],
                    "tolerations": [{"operator": "Exists"}],  # no agent renews the lease of its node
                },
            }
        )
        self.pods.append(pod)
        pod.start()
        return pod

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, holds: Callable[[], object], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.logs()}"
            time.sleep(0.1)

    def pod_runs(self, name: str) -> None:
        def phase() -> bool:
            return self.get("pod", name)["status"].get("phase") == "Running"

        self.wait(phase, f"pod {name} to run")

    def log_has(self, pod: str, text: str) -> str:
        self.pod_runs(pod)
        self.wait(lambda: text in self.kubectl("logs", pod), f"pod {pod} to say {text}")
        return self.kubectl("logs", pod)

    def gone(self, *kinds: str) -> None:
        for kind in kinds:
            self.wait(lambda kind=kind: not self.get(kind)["items"], f"every {kind} to go")

    def logs(self) -> str:
        parts = [container.tail() for pod in self.pods for container in pod.containers.values()]
        agent = self.directory / "agent.log"
        refused = "\n".join(self.refused[-10:])
        return "\n".join(
            [*parts, f"agent:\n{agent.read_text()[-3000:] if agent.exists() else ''}", f"refused:\n{refused}"]
        )


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
