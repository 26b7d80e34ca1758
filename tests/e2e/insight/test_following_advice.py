"""Advice that touches data, carried out literally on a live cluster: it leads out, and the data is there."""

import asyncio
import os
import subprocess

import pytest
import yaml

from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod

pytestmark = pytest.mark.root

WRITE = "echo 42 > /mnt/v0/ledger; sync; echo written; trap exit TERM; sleep 1000 & wait"
READ = "cat /mnt/v0/ledger; trap exit TERM; sleep 1000 & wait"


@pytest.fixture
def sh(up, tmp_path):
    """Run a suggested command in a shell, as a person who pastes it."""

    async def run(text: str) -> str:
        environment = {**os.environ, "KUBECONFIG": str(up / "kubeconfig")}
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", text],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, (text, done.stderr)
        return done.stdout

    return run


async def pod_with(stack, name: str, script: str, claim: str = "data") -> None:
    container = {"name": "main", "image": "host", "command": ["sh", "-c", script]}
    await stack.pod(name, claim, containers=[container])


async def written(stack, sh) -> None:
    await stack.claim("data", None, size="64Mi")
    await pod_with(stack, "web", WRITE)
    await stack.until(Pod, "web", lambda pod: pod.status.phase == "Running")
    while "written" not in await sh("kubectl logs web"):
        await asyncio.sleep(0.1)


async def check_data(stack, sh) -> None:
    """A new pod reads what the first one wrote."""
    await pod_with(stack, "reader", READ)
    await stack.until(Pod, "reader", lambda pod: pod.status.phase == "Running")
    while "42" not in await sh("kubectl logs reader"):
        await asyncio.sleep(0.1)


async def test_a_claim_that_was_deleted_by_mistake(stack, sh):
    await written(stack, sh)
    volume = (await stack.client.get(PersistentVolumeClaim, "data", "default")).spec.volume_name
    await stack.client.delete(PersistentVolumeClaim, "data", "default")
    await stack.check_cause("pod/web", "pod-volume-deleting", "claim data", last="claim-deleting-in-use")
    story = await stack.check_cause("pvc/data", "claim-deleting-in-use")
    assert "nothing is wrong" not in story.sentence
    for command in (story.next_step, *(later.command for later in story.then)):
        await sh(command)
    story = await stack.check_cause(f"pv/{volume}", "volume-released-retained")
    await sh(story.next_step)
    assert story.then[0].command == f"create claim data in namespace default with volumeName: {volume}"
    await stack.claim("data", None, size="64Mi", volumeName=volume)
    await check_data(stack, sh)


async def test_a_volume_object_that_was_deleted_by_mistake(stack, sh, tmp_path):
    await written(stack, sh)
    volume = (await stack.client.get(PersistentVolumeClaim, "data", "default")).spec.volume_name
    await stack.client.delete(PersistentVolume, volume)
    await stack.check_cause("pvc/data", "claim-volume-deleting", last="volume-deleting-bound")
    story = await stack.check_cause(f"pv/{volume}", "volume-deleting-bound")
    await stack.check_cause("pod/web", "pod-volume-deleting", f"volume {volume}", last="volume-deleting-bound")
    for command in (story.next_step, *(later.command for later in story.then)):
        if command.startswith("remove metadata.uid"):
            tidy(tmp_path)
        else:
            await sh(command)
    await stack.until(PersistentVolumeClaim, "data", lambda claim: claim.status.phase == "Bound")
    await check_data(stack, sh)
    await stack.check_well(f"pv/{volume}")


def tidy(folder) -> None:
    """What the step in words says."""
    for file in ("volume.yaml", "claim.yaml"):
        found = yaml.safe_load((folder / file).read_text())
        for key in ("uid", "resourceVersion", "deletionTimestamp"):
            found["metadata"].pop(key, None)
        if file == "volume.yaml":
            found["spec"]["claimRef"].pop("uid")
        else:
            found["metadata"]["annotations"].pop("pv.kubernetes.io/bind-completed")
        (folder / file).write_text(yaml.safe_dump(found))


async def test_a_claim_for_one_pod_that_another_pod_has(stack, sh):
    await stack.claim("data", None, size="64Mi", accessModes=["ReadWriteOncePod"])
    await pod_with(stack, "web", WRITE)
    await stack.until(Pod, "web", lambda pod: pod.status.phase == "Running")
    while "written" not in await sh("kubectl logs web"):
        await asyncio.sleep(0.1)
    await pod_with(stack, "second", READ)
    story = await stack.check_cause("pod/second", "pod-rwop-conflict")
    for command in (story.next_step, *(later.command for later in story.then)):
        await sh(command)
    await stack.until(Pod, "second", lambda pod: pod.status.phase == "Running")
    while "42" not in await sh("kubectl logs second"):
        await asyncio.sleep(0.1)
