"""The processes of a pod template, started with exactly the arguments, environment and mounts that it gives them.

It stands for the DaemonSet controller, the kubelet and the container runtime, which the embedded cluster has not.
"""

import copy
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

_ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_ACCOUNT = {
    "name": "account",
    "projected": {
        "sources": [
            {"serviceAccountToken": {"path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        ]
    },
}
ENTRY = Path(__file__).with_name("container_entry.py")


class Container:
    """One running container; `restart` gives it another image if asked, as an upgrade does."""

    def __init__(self, pod: "ManifestPod", spec: dict) -> None:
        self._pod = pod
        self.spec = spec
        self.name = f"{pod.name}-{spec['name']}"
        self.log = pod.directory / f"{self.name}.log"
        self._count = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Exactly as the template says; `more` are arguments for what a test cannot wait for."""
        self._count += 1
        home = self._pod.directory / f"{self.name}-{self._count}"
        for part in ("root", "upper", "work"):
            (home / part).mkdir(parents=True)
        entry = {
            **{part: str(home / part) for part in ("root", "upper", "work")},
            **self._powers(),
            "image": str(self._pod.image),
            "mounts": [self._mount(mount) for mount in self.spec.get("volumeMounts", [])],
            "relay_port": int(self._pod.api_address.rpartition(":")[2]) if self._has_account() else 0,
            "argv": ["/usr/bin/moorage", *(self._expanded(word) for word in self.spec["args"]), *more],
            "env": self.environment(),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, str(ENTRY), json.dumps(entry)], stdout=log, stderr=log)

    def _powers(self) -> dict:
        context = {**self._pod.template["spec"].get("securityContext", {}), **self.spec["securityContext"]}
        return {
            "privileged": bool(context.get("privileged")),
            "capabilities": context.get("capabilities", {}).get("add", []),
            "user": context["runAsUser"],
            "group": context["runAsGroup"],
            "no_new_privileges": context.get("allowPrivilegeEscalation") is False,
            "read_only_root": context["readOnlyRootFilesystem"],
        }

    def environment(self) -> dict[str, str]:
        made = dict(self._pod.image_environment)
        for each in self.spec.get("env", []):
            made[each["name"]] = each.get("value") or self._pod.field(each["valueFrom"]["fieldRef"]["fieldPath"])
        host, _, port = self._pod.api_address.rpartition(":")
        return {**made, "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def _expanded(self, word: str) -> str:
        environment = self.environment()
        return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word)

    def _mount(self, mount: dict) -> dict:
        source = self._pod.volume(mount["name"])
        if mount.get("subPath"):
            source = source / mount["subPath"]
            source.mkdir(parents=True, exist_ok=True, mode=0o750)
        return {
            "source": str(source),
            "target": mount["mountPath"],
            "read_only": bool(mount.get("readOnly")),
            "propagation": mount.get("mountPropagation", "None"),
        }

    def _has_account(self) -> bool:
        return any(m["mountPath"].endswith("serviceaccount") for m in self.spec.get("volumeMounts", []))

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """SIGTERM and wait, as the kubelet does; it must end by itself."""
        if self.is_running:
            self.process.terminate()
            assert self.process.wait(70) in (0, -15), self.tail()
        self.process = None

    def kill(self) -> None:
        if self.is_running:
            self.process.kill()
            self.process.wait(20)
        self.process = None

    def http(self, path: str) -> str:
        """What its port answers, asked from inside its network; empty when it does not answer with 200."""
        port = self.spec["ports"][0]["containerPort"]
        program = (
            f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}{path}', timeout=5).read().decode())"
        )
        done = subprocess.run(
            ["nsenter", "-t", str(self.process.pid), "-n", sys.executable, "-c", program],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        return done.stdout

    def tail(self) -> str:
        return f"{self.name}:\n{self.log.read_text()[-4000:]}"


class ManifestPod:
    """A pod of a workload on one node."""

    def __init__(self, directory: Path, workload: dict, image: Path, node: str, stage, replica: str) -> None:
        self.template = copy.deepcopy(workload["spec"]["template"])
        if self.template["spec"].get("automountServiceAccountToken") is not False:
            self._automount()
        self.namespace = workload["metadata"]["namespace"]
        self.name = f"{workload['metadata']['name']}-{replica}"
        self.directory = directory / self.namespace / self.name
        self.directory.mkdir(parents=True)
        self.node = node
        self.image = image
        self.image_environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}
        self.stage = stage
        self.api_address = stage.api_address
        self.containers = {c["name"]: Container(self, c) for c in self.template["spec"]["containers"]}

    def _automount(self) -> None:
        """What admission adds to a pod that does not refuse it."""
        self.template["spec"].setdefault("volumes", []).append(_ACCOUNT)
        for container in self.template["spec"]["containers"]:
            container.setdefault("volumeMounts", []).append({"name": "account", "mountPath": _ACCOUNT_PATH})

    def field(self, path: str) -> str:
        return {"spec.nodeName": self.node, "metadata.name": self.name, "metadata.namespace": self.namespace}[path]

    def volume(self, name: str) -> Path:
        (volume,) = [v for v in self.template["spec"]["volumes"] if v["name"] == name]
        if "hostPath" in volume:
            return self._host_path(volume["hostPath"])
        folder = self.directory / f"volume-{name}"
        folder.mkdir(exist_ok=True)
        if "projected" in volume:
            self._project(volume["projected"]["sources"], folder)
        return folder

    @staticmethod
    def _host_path(wanted: dict) -> Path:
        path = Path(wanted["path"])
        if wanted["type"] == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        assert path.is_dir(), f"{path} is not there, and the pod would wait for it"
        return path

    def _project(self, sources: list[dict], folder: Path) -> None:
        account = self.template["spec"]["serviceAccountName"]
        for source in sources:
            if "serviceAccountToken" in source:
                (folder / source["serviceAccountToken"]["path"]).write_text(self.stage.token(self.namespace, account))
            elif "configMap" in source:
                (folder / source["configMap"]["items"][0]["path"]).write_text(self.stage.authority)
            else:
                for item in source["downwardAPI"]["items"]:
                    (folder / item["path"]).write_text(self.field(item["fieldRef"]["fieldPath"]))

    def start(self) -> None:
        for container in self.containers.values():
            container.start()

    def stop(self) -> None:
        for container in self.containers.values():
            container.stop()

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not all(self._is_ready(c) for c in self.containers.values()):
            ended = [c.tail() for c in self.containers.values() if not c.is_running]
            assert not ended, f"a container ended: {ended}"
            assert time.monotonic() < deadline, "\n".join(c.tail() for c in self.containers.values())
            time.sleep(0.1)

    @staticmethod
    def _is_ready(container: Container) -> bool:
        probe = container.spec.get("readinessProbe") or container.spec.get("startupProbe")
        return bool(container.is_running and (probe is None or container.http(probe["httpGet"]["path"])))

    def clean(self) -> None:
        for container in self.containers.values():
            container.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024
