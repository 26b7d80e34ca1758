"""Advice that touches data, carried out literally on a live cluster: it leads out, and the data is there."""

import asyncio
import functools
import json

import pytest
import yaml

from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod

pytestmark = pytest.mark.root

WRITE = "echo 42 > /mnt/v0/ledger; sync; echo written; trap exit TERM; sleep 1000 & wait"
READ = "cat /mnt/v0/ledger; trap exit TERM; sleep 1000 & wait"


async def pod_with(stack, name: str, script: str, claim: str = "data") -> None:
    container = {"name": "main", "image": "host", "command": ["sh", "-c", script]}
    await stack.pod(name, claim, containers=[container])


async def says(stack, pod: str, word: str) -> None:
    while word not in await stack.shell.run(f"kubectl logs {pod}"):
        await asyncio.sleep(0.1)


async def written(stack) -> None:
    await stack.claim("data", None, size="64Mi")
    await pod_with(stack, "web", WRITE)
    await stack.until(Pod, "web", lambda pod: pod.status.phase == "Running")
    await says(stack, "web", "written")


async def check_data(stack) -> None:
    """A new pod reads what the first one wrote."""
    await pod_with(stack, "reader", READ)
    await stack.until(Pod, "reader", lambda pod: pod.status.phase == "Running")
    await says(stack, "reader", "42")


async def test_a_claim_that_was_deleted_by_mistake(stack):
    await written(stack)
    volume = (await stack.client.get(PersistentVolumeClaim, "data", "default")).spec.volume_name
    await stack.client.delete(PersistentVolumeClaim, "data", "default")
    await stack.check_cause("pod/web", "pod-volume-deleting", "claim data", last="claim-deleting-in-use")
    story = await stack.check_cause("pvc/data", "claim-deleting-in-use", leaves=True)
    assert "nothing is wrong" not in story.sentence
    create = functools.partial(stack.claim, "data", None, size="64Mi", volumeName=volume)
    story = await stack.check_cause(f"pv/{volume}", "volume-released-retained", then=create)
    assert story.then[0].command == f"create claim data in namespace default with volumeName: {volume}"
    await check_data(stack)


async def test_a_volume_object_that_was_deleted_by_mistake(stack, tmp_path):
    await written(stack)
    volume = (await stack.client.get(PersistentVolumeClaim, "data", "default")).spec.volume_name
    await stack.client.delete(PersistentVolume, volume)
    await stack.check_cause("pvc/data", "claim-volume-deleting", last="volume-deleting-bound")
    await stack.check_cause("pod/web", "pod-volume-deleting", f"volume {volume}", last="volume-deleting-bound")
    words = {"remove metadata.uid": functools.partial(tidy, tmp_path)}
    await stack.check_cause(f"pv/{volume}", "volume-deleting-bound", in_words=words)
    await stack.until(PersistentVolumeClaim, "data", lambda claim: claim.status.phase == "Bound")
    await check_data(stack)
    await stack.check_well(f"pv/{volume}")


async def test_a_claim_that_lost_its_volume_object_gets_it_back_with_the_command_that_gc_names(stack, up):
    await written(stack)
    await stack.shell.run("kubectl delete pod web")
    volume = (await stack.client.get(PersistentVolumeClaim, "data", "default")).spec.volume_name
    await stack.client.delete(PersistentVolume, volume)
    await stack.client.patch(PersistentVolume, volume, {"metadata": {"finalizers": None}})
    await stack.check_cause("pvc/data", "claim-lost", f"its volume {volume} does not exist any more", shows="Lost")
    told = await stack.shell.run(f"moorage gc --pool {up / 'pool'} --node node-1 --driver csi.moorage.dev -o json")
    [held] = [one["held"] for one in json.loads(told)["findings"] if "default/data has lost it" in one["held"]]
    await stack.shell.run(held.split("`")[1])
    await stack.check_well("pvc/data")
    await check_data(stack)
    await stack.patch_policy("Delete")


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


async def test_a_claim_for_one_pod_that_another_pod_has(stack):
    await stack.claim("data", None, size="64Mi", accessModes=["ReadWriteOncePod"])
    await pod_with(stack, "web", WRITE)
    await stack.until(Pod, "web", lambda pod: pod.status.phase == "Running")
    await says(stack, "web", "written")
    await pod_with(stack, "second", READ)
    await stack.check_cause("pod/second", "pod-rwop-conflict", leaves=True)
    await stack.until(Pod, "second", lambda pod: pod.status.phase == "Running")
    await says(stack, "second", "42")
