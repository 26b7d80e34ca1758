"""Whatever is killed, and whenever, data stays and everything converges."""

import os
import shutil
import signal

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (Debian: kubernetes-client)"),
]

CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 64Mi}}}}}}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: host
      command:
        - sh
        - -c
        - |
          trap 'exit 0' TERM
          test -f /data/n && echo "found $(cat /data/n)"
          echo {name} >/data/n && sync /data/n && echo "wrote {name}"
          sleep infinity & wait
      volumeMounts: [{{name: v, mountPath: /data}}]
  volumes: [{{name: v, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""


def test_killing_each_process_in_turn_loses_nothing(stack_at):
    stack = stack_at("k", "--pool-size", "2Gi")
    stack.kubectl("apply", "-f", "-", stdin=CLAIM.format(name="c") + "---" + POD.format(name="first", claim="c"))
    stack.ready("first")
    stack.log_of("first", "wrote first")

    for name in ("plugin", "worker"):
        os.kill(stack.children()[name], signal.SIGKILL)
        claim = f"after-{name}"
        pod = f"p-{name}"
        stack.kubectl("apply", "-f", "-", stdin=CLAIM.format(name=claim) + "---" + POD.format(name=pod, claim=claim))
        stack.ready(pod)
        stack.log_of(pod, f"wrote {pod}")

    stack.kill()
    stack.start()
    stack.ready("first")
    restarts = stack.get("pod", "first")["status"]["containerStatuses"][0]["restartCount"]
    assert restarts == 0, "a container must outlive the agent that started it"
    stack.kubectl("delete", "pods", "--all")
    stack.kubectl("apply", "-f", "-", stdin=POD.format(name="second", claim="c"))
    assert "found first" in stack.log_of("second", "wrote second")
    stack.kubectl("delete", "pods,pvc", "--all")
    stack.gone("pods", "pvc", "pv")


@pytest.mark.parametrize("phase", ["claim", "pod", "delete"])
def test_the_whole_stack_restarts_in_the_middle_of_a_phase(stack_at, phase):
    stack = stack_at("m", "--nodes", "2", "--pool-size", "2Gi")
    stack.kubectl("apply", "-f", "-", stdin=CLAIM.format(name="c"))
    if phase == "claim":
        stack.kill()
        stack.start()
    stack.kubectl("apply", "-f", "-", stdin=POD.format(name="p", claim="c"))
    if phase == "pod":
        stack.kill()
        stack.start()
    stack.ready("p")
    stack.log_of("p", "wrote p")
    stack.kubectl("delete", "pod", "p", "--wait=false")
    stack.kubectl("delete", "pvc", "c", "--wait=false")
    if phase == "delete":
        stack.kill()
        stack.start()
    stack.gone("pods", "pvc", "pv", "volumeattachments")
    assert not any((stack.data_dir / "pool" / "volumes").iterdir())


def test_ctrl_c_ends_pods_and_unmounts_and_the_next_start_carries_on(stack_at):
    stack = stack_at("c", "--pool-size", "2Gi")
    stack.kubectl("apply", "-f", "-", stdin=CLAIM.format(name="c") + "---" + POD.format(name="p", claim="c"))
    stack.log_of("p", "wrote p")
    stack.stop()
    assert stack.left_behind() == []
    stack.start()
    assert "found p" in stack.log_of("p", "found p")
    stack.kubectl("delete", "pods,pvc", "--all")
    stack.gone("pods", "pvc", "pv")
