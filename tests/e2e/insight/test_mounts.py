"""Why a pod on its node does not run, made for real on the whole stack: mounts, filesystems, containers."""

import asyncio
import os
import subprocess

import msgspec
import pytest

from moorage.host import loop
from moorage.kube.objects import CSIDriver, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass

pytestmark = pytest.mark.root

DRIVER = "csi.moorage.dev"


def container(**more):
    stay = ["sh", "-c", "trap exit TERM; sleep 1000 & wait"]  # until told to go, and then at once
    return {"containers": [{"name": "main", "image": "host", "command": stay, **more}]}


async def running(stack, name):
    await stack.until(Pod, name, lambda pod: pod.status.phase == "Running")


async def remove_pod(stack, name):
    await stack.client.delete(Pod, name, "default", grace_s=1)
    async with asyncio.timeout(30):
        while await stack.client.find(Pod, name, "default") is not None:
            await asyncio.sleep(0.05)


async def test_a_secret_or_config_map_of_the_pod_is_missing(stack):
    await stack.pod("a", volumes=[{"name": "x", "secret": {"secretName": "gone"}}])
    await stack.check_cause(
        *("pod/a", "pod-secret-missing", "a secret that it needs does not exist"),
        step="kubectl get secrets -A",
        shows="",
    )
    await stack.pod("b", volumes=[{"name": "x", "configMap": {"name": "gone"}}])
    words, step = "a config map that it needs", "get configmaps"
    await stack.check_cause("pod/b", "pod-configmap-missing", words, step=step, shows="kube-root-ca.crt")


async def test_a_container_has_no_image_cannot_be_made_or_fails(stack):
    await stack.pod("a", **container(image="nginx:1"))
    words, step = "container main has no image", "describe pod a"
    await stack.check_cause("pod/a", "pod-image", words, step=step, shows="nginx:1")
    key = {"secretKeyRef": {"name": "gone", "key": "k"}}
    await stack.pod("b", **container(env=[{"name": "K", "valueFrom": key}]))
    words, step = "container main cannot be made", "describe pod b"
    await stack.check_cause("pod/b", "pod-container-config", words, step=step, shows="gone")
    await stack.pod("c", **container(command=["sh", "-c", "echo cannot go on; exit 1"]))
    await stack.check_cause(
        *("pod/c", "pod-crashing", "container main ends with code 1"),
        step="logs c -c main --previous",
        shows="cannot go on",
    )


async def test_the_kernel_refuses_the_mount_options(stack):
    body = {"metadata": {"name": "odd"}, "provisioner": DRIVER, "mountOptions": ["nonsense=1"]}
    if await stack.client.find(StorageClass, "odd") is None:
        await stack.client.create(StorageClass, body)
    await stack.claim("data", "odd", size="64Mi")
    await stack.pod("web", "data")
    words, step = "with nonsense=1 is refused", "mountOptions"
    await stack.check_cause("pod/web", "pod-mount-option-refused", words, step=step, shows="nonsense=1")


async def test_the_volume_is_unknown_to_the_driver(stack):
    affinity = {"key": "topology.moorage.dev/node", "operator": "In", "values": ["node-1"]}
    where = {"required": {"nodeSelectorTerms": [{"matchExpressions": [affinity]}]}}
    source = {"driver": DRIVER, "volumeHandle": "nobody-knows-it"}
    reference = {"namespace": "default", "name": "data"}
    await stack.volume("ghost", csi=source, claimRef=reference, nodeAffinity=where)
    await stack.claim("data", "")
    await stack.pod("web", "data")
    words, step = "nobody-knows-it", "describe pod web"
    await stack.check_cause("pod/web", "pod-mount-fails", words, step=step, shows=words)


async def test_the_filesystem_is_damaged_or_gone(stack, up):
    for name, spoil in (("damaged", spoil_tables), ("blank", spoil_start)):
        await ext4_class(stack)
        await stack.claim(name, "ext4", size="64Mi")
        await stack.pod(f"{name}-1", name)
        await running(stack, f"{name}-1")
        await remove_pod(stack, f"{name}-1")
        image = await image_of(stack, up, name)
        spoil(image)
    await stack.pod("damaged-2", "damaged")
    await stack.check_cause(
        *("pod/damaged-2", "pod-filesystem-damaged", "filesystem needs repair"),
        step="describe pod damaged-2",
        shows="FailedMount",
    )
    await stack.pod("blank-2", "blank")
    words, step = "could not be formatted", "describe pod blank-2"
    await stack.check_cause("pod/blank-2", "pod-format-failed", words, step=step, shows="FailedMount")


async def test_the_volume_holds_another_filesystem(stack, up):
    await ext4_class(stack)
    await stack.claim("data", "ext4", size="320Mi")
    await stack.pod("first", "data")
    await running(stack, "first")
    await remove_pod(stack, "first")
    subprocess.run(["mkfs.xfs", "-q", "-f", await image_of(stack, up, "data")], check=True)
    await stack.pod("second", "data")
    await stack.check_cause(
        *("pod/second", "pod-filesystem-differs", "holds xfs and not ext4"),
        step="describe pod second",
        shows="holds xfs and not ext4",
    )


async def test_an_fs_group_is_ignored_and_the_container_fails(stack):
    driver = await stack.client.request("GET", f"/apis/storage.k8s.io/v1/csidrivers/{DRIVER}")
    kept = {"metadata": {"name": DRIVER}, "spec": msgspec.json.decode(driver)["spec"]}
    await replace_driver(stack, {**kept, "spec": {**kept["spec"], "fsGroupPolicy": "None"}})
    try:
        await stack.claim("data", None, size="64Mi")
        await stack.pod("web", "data", securityContext={"fsGroup": 2000}, **container(command=["false"]))
        await stack.check_cause(
            "pod/web",
            "pod-fs-group-ignored",
            "fsGroup 2000 is not applied to volume pvc-",
            f"fsGroupPolicy of {DRIVER} is None",
            step="kubectl get csidrivers",
            shows="None",
        )
    finally:
        await replace_driver(stack, kept)


async def replace_driver(stack, body):
    await stack.client.delete(CSIDriver, DRIVER)
    await stack.client.create(CSIDriver, body)


async def ext4_class(stack):
    body = {"metadata": {"name": "ext4"}, "provisioner": DRIVER, "parameters": {"csi.storage.k8s.io/fstype": "ext4"}}
    if await stack.client.find(StorageClass, "ext4") is None:
        await stack.client.create(StorageClass, body)


async def image_of(stack, up, claim):
    """The file behind a claim's volume, once the node has let it go: a pod is gone before its volume is unstaged."""
    found = await stack.client.get(PersistentVolumeClaim, claim, "default")
    volume = await stack.client.get(PersistentVolume, found.spec.volume_name)
    image = up / "pool" / "volumes" / volume.spec.csi.volume_handle / "data"
    async with asyncio.timeout(30):
        while loop.find(image):
            await asyncio.sleep(0.05)
    return image


def spoil_tables(image):
    with image.open("r+b") as file:  # the superblock stays; what it points at does not
        file.seek(4096)
        file.write(os.urandom(6 << 20))


def spoil_start(image):
    with image.open("r+b") as file:
        file.write(os.urandom(16 << 20))
