"""`moorage check` on the real plugin, and the whole stack over a driver that it does not know."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from moorage.cluster.demo import claim, pod
from moorage.cluster.run import Cluster
from moorage.cluster.settings import UpSettings
from moorage.conformance.engine import run_checks
from moorage.conformance.model import CheckConfig
from moorage.kube.objects import CSIDriver, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass

pytestmark = pytest.mark.root


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="moo-"))  # a short path: sockets end at 107 characters
    yield path
    shutil.rmtree(path)


@pytest.fixture
def plugin(folder):
    """A plugin process; call with more flags."""
    started = []

    def start(*flags: str) -> str:
        endpoint = f"unix://{folder}/csi.sock"
        words = [sys.executable, "-m", "moorage.cli.main", "plugin", "--endpoint", endpoint, "--node-id", "n1"]
        words += ["--pool", str(folder / "pool"), *flags]
        started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 30
        while not (folder / "csi.sock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return endpoint

    yield start
    for process in started:
        process.terminate()
        assert process.wait(60) == 0


KINDS = {
    "node": (("--scope", "node"), False, {"snapshotInUse": "freeze"}),  # the pool may have no reflinks
    "shared-block": (("--scope", "shared", "--csi-version", "1.13"), True, {}),
    "directory": ((), False, {"kind": "directory"}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_plugin_keeps_every_promise_that_check_knows(plugin, folder, kind):
    flags, is_block, parameters = KINDS[kind]
    config = CheckConfig(
        plugin(*flags),
        folder / "at",
        size_bytes=16 << 20,
        grown_bytes=32 << 20,
        parameters=parameters,
        mutable_parameters={"trashRetention": "0s"},
        block=is_block,
    )
    outcomes = [outcome async for outcome in run_checks(config)]
    failed = [f"{o.id}: {o.detail}" for o in outcomes if o.result not in ("passed", "skipped")]
    assert failed == []
    assert sum(o.result == "passed" for o in outcomes) >= 150


async def test_a_pod_runs_on_a_driver_that_the_stack_does_not_know(folder):
    words = f"{sys.executable} -m moorage.cli.main plugin --endpoint {{endpoint}} --node-id {{node}} "
    words += f"--pool {folder}/pool --driver-name other.example.org"
    cluster = Cluster(UpSettings(folder / "m", driver=words).checked())
    try:
        report = await cluster.start()
        assert report.driver == "other.example.org"
        async with cluster.client() as client:
            assert (await client.get(CSIDriver, "other.example.org")).spec.attach_required is False
            assert (await client.get(StorageClass, "other")).provisioner == "other.example.org"
            await client.create(PersistentVolumeClaim, claim("c", "16Mi"), "default")
            await client.create(Pod, pod("p", {"data": "c"}, "trap 'exit 0' TERM; sleep infinity & wait"), "default")
            deadline = time.monotonic() + 60
            while (await client.get(Pod, "p", "default")).status.phase != "Running":
                assert time.monotonic() < deadline
            [volume] = (await client.list(PersistentVolume)).items
            assert volume.spec.csi is not None
            assert volume.spec.csi.driver == "other.example.org"
    finally:
        await cluster.stop()
    assert not os.path.ismount(folder / "pool")
