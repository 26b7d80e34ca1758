"""Hundreds of random operations on a cluster of two nodes; every byte that was acknowledged is read back."""

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (Debian: kubernetes-client)"),
]

OPERATIONS = int(os.environ.get("MOORAGE_SOAK_OPERATIONS", "300"))
PEOPLE = 2  # who work on the cluster at the same time, each on what is theirs
MOST_CLAIMS = 6

POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {selector}
  containers:
    - name: main
      image: host
      command:
        - sh
        - -c
        - |
          trap 'exit 0' TERM
          echo "has $(tr '\\n' ' ' </data/words 2>/dev/null)."
          echo {word} >>/data/words && sync /data/words && echo "wrote {word}"
          sleep infinity & wait
      volumeMounts: [{{name: v, mountPath: /data}}]
  volumes: [{{name: v, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: {size}Mi}}}}
  {source}
---
"""
SNAPSHOT = """
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {{name: {name}}}
spec: {{source: {{persistentVolumeClaimName: {claim}}}}}
"""


@dataclass
class Claim:
    size: int
    words: list[str] = field(default_factory=list)
    pod: str = ""


class Soak:
    """One person at work, and the model beside the cluster: what each of their claims and snapshots must hold."""

    def __init__(self, stack, person: int, seed: int) -> None:
        self.stack = stack
        self.person = "ab"[person]
        self.random = random.Random(seed + person)
        self.claims: dict[str, Claim] = {}
        self.snapshots: dict[str, Claim] = {}
        self.count = 0

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.person}{self.count}"

    def run_pod(self, name: str, documents: str = "") -> None:
        """Start a pod on the claim: it must find exactly the words that were acknowledged, and adds one."""
        claim, word = self.claims[name], self.fresh("w")
        pod = self.fresh("p")
        node = self.random.choice(["node-1", "node-2", None])
        selector = f"{{kubernetes.io/hostname: {node}}}" if node else "{}"
        document = POD.format(name=pod, claim=name, word=word, selector=selector)
        self.stack.kubectl("apply", "-f", "-", stdin=documents + document)
        log = self.stack.log_of(pod, f"wrote {word}")
        found = log.split("has ")[1].split(".")[0].split()
        assert found == claim.words, f"claim {name} holds {found}, acknowledged were {claim.words}"
        claim.words.append(word)
        claim.pod = pod

    def create(self) -> None:
        name, size = self.fresh("c"), self.random.choice([32, 64, 96])
        self.claims[name] = Claim(size)
        self.run_pod(name, CLAIM.format(name=name, size=size, source=""))

    def restart(self) -> None:
        name = self.random.choice(list(self.claims))
        self.stop_pod(name)
        self.run_pod(name)

    def stop_pod(self, name: str) -> None:
        claim = self.claims[name]
        if claim.pod:
            self.stack.kubectl("delete", "pod", claim.pod, "--wait=false")
            claim.pod = ""

    def snapshot(self) -> None:
        source = self.random.choice(list(self.claims))
        name = self.fresh("s")
        self.stack.kubectl("apply", "-f", "-", stdin=SNAPSHOT.format(name=name, claim=source))
        ready = "--for=jsonpath={.status.readyToUse}=true"
        self.stack.kubectl("wait", ready, f"volumesnapshot/{name}", "--timeout=60s")
        self.snapshots[name] = Claim(self.claims[source].size, list(self.claims[source].words))

    def restore(self) -> None:
        if not self.snapshots:
            return self.snapshot()
        origin = self.random.choice(list(self.snapshots))
        source = f"dataSource: {{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: {origin}}}"
        self.copy(self.snapshots[origin], source)
        return None

    def clone(self) -> None:
        origin = self.random.choice(list(self.claims))
        self.copy(self.claims[origin], f"dataSource: {{kind: PersistentVolumeClaim, name: {origin}}}")

    def copy(self, origin: Claim, source: str) -> None:
        name = self.fresh("c")
        self.claims[name] = Claim(origin.size, list(origin.words))
        self.run_pod(name, CLAIM.format(name=name, size=origin.size, source=source))

    def grow(self) -> None:
        name = self.random.choice(list(self.claims))
        claim = self.claims[name]
        if not claim.pod:
            self.run_pod(name)
        claim.size += 16
        patch = f'{{"spec":{{"resources":{{"requests":{{"storage":"{claim.size}Mi"}}}}}}}}'
        self.stack.kubectl("patch", "pvc", name, "-p", patch)
        self.stack.kubectl(
            "wait", f"--for=jsonpath={{.status.capacity.storage}}={claim.size}Mi", f"pvc/{name}", "--timeout=60s"
        )

    def delete(self) -> None:
        name = self.random.choice(list(self.claims))
        if not self.claims[name].pod:
            self.run_pod(name)  # read back once more before it goes
        self.stop_pod(name)
        self.stack.kubectl("delete", "pvc", name, "--wait=false")
        del self.claims[name]

    def delete_snapshot(self) -> None:
        if self.snapshots:
            name = self.random.choice(list(self.snapshots))
            self.stack.kubectl("delete", "volumesnapshot", name, "--wait=false")
            del self.snapshots[name]

    def step(self) -> None:
        if not self.claims:
            return self.create()
        choices = [self.restart] * 4 + [self.snapshot, self.grow, self.grow, self.delete_snapshot, self.delete]
        if len(self.claims) < MOST_CLAIMS:
            choices += [self.create, self.create, self.restore, self.clone]
        else:
            choices += [self.delete] * 3
        self.random.choice(choices)()
        return None

    def work(self) -> int:
        """Do this person's share of the operations, read back what is left, and return how many objects there were."""
        for _ in range(OPERATIONS // PEOPLE):
            self.step()
        for name in list(self.claims):
            self.stop_pod(name)
            self.run_pod(name)
        return self.count


def test_hundreds_of_random_operations_leave_nothing_and_lose_nothing(stack_at):
    stack = stack_at("soak", "--nodes", "2", "--pool-size", "4Gi")
    seed = int(os.environ.get("MOORAGE_SOAK_SEED", "7"))
    people = [Soak(stack, person, seed) for person in range(PEOPLE)]
    with ThreadPoolExecutor(PEOPLE) as threads:
        made = sum(threads.map(Soak.work, people))
    stack.kubectl("delete", "pods", "--all")
    stack.kubectl("delete", "volumesnapshots", "--all", "--wait=false")
    stack.kubectl("delete", "pvc", "--all", "--wait=false")
    stack.gone("pods", "pvc", "volumesnapshots", "pv", "volumesnapshotcontents", "volumeattachments")
    pool = stack.data_dir / "pool"
    stack.wait(
        lambda: not [*(pool / "volumes").iterdir(), *(pool / "snapshots").iterdir(), *(pool / "tmp").iterdir()],
        "the pool to be empty",
    )
    assert made > OPERATIONS // 2
