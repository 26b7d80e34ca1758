"""`moorage volume` and `moorage gc` beside a whole running stack, as a person would use them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from moorage.host import loop, mounts
from moorage.kube.api import config
from moorage.kube.api.client import Client
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod

pytestmark = pytest.mark.root
CLAIM = {
    "metadata": {"name": "data"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "320Mi"}}},
}
POD = {
    "metadata": {"name": "writer"},
    "spec": {
        "containers": [
            {
                "name": "c",
                "image": "host",
                "command": ["sh", "-c", "echo from-the-pod > /data/file; sync; exec sleep 1000"],
                "volumeMounts": [{"name": "d", "mountPath": "/data"}],
            }
        ],
        "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}],
    },
}


def moorage(*arguments):
    argv = [sys.executable, "-m", "moorage.cli.main", *map(str, arguments), "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def stack():
    """`moorage up` with a pool of its own; its data directory. Short, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="volume-") as base:
        data = Path(base) / "d"
        argv = [sys.executable, "-m", "moorage.cli.main", "up", "--data-dir", str(data), "--pool-size", "4Gi"]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if b"Moorage is up" in line:
                    break
            else:
                pytest.fail("the stack did not come up")
            yield data
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=90)
            _release(data)


def _release(data):
    """The pool's own mount, where the stack leaves it for its next start."""
    mounts.unmount_all(data / "pool")
    for device in loop.attached(data):
        loop.detach(device)
        loop.wait_detached(device)


async def test_a_claims_volume_is_seen_exported_and_owned(stack, tmp_path):
    pool = stack / "pool"
    async with Client(config.load(str(stack / "kubeconfig"))) as client:
        await client.create(PersistentVolumeClaim, CLAIM, "default")
        await client.create(Pod, POD, "default")
        deadline = time.monotonic() + 60
        while (await client.get(Pod, "writer", "default")).status.phase != "Running":
            assert time.monotonic() < deadline, "the pod does not run"
            await asyncio.sleep(0.05)
        (pv,) = (await client.list(PersistentVolume)).items
        (row,) = moorage("volume", "--pool", pool, "list")
        assert pv.spec.csi is not None
        assert (row["name"], row["id"]) == (pv.name, pv.spec.csi.volume_handle)

        moorage("volume", "--pool", pool, "mount", pv.name, tmp_path / "m")
        while not (tmp_path / "m" / "file").exists():
            assert time.monotonic() < deadline, "the pod has not written"
            await asyncio.sleep(0.05)
        moorage("volume", "--pool", pool, "unmount", pv.name, tmp_path / "m")
        moorage("volume", "--pool", pool, "export", pv.name, tmp_path / "stream")
        moorage("volume", "--pool", pool, "import", tmp_path / "stream", "--name", "copy")
        moorage("volume", "--pool", pool, "mount", "copy", tmp_path / "m")
        assert (tmp_path / "m" / "file").read_text() == "from-the-pod\n"
        moorage("volume", "--pool", pool, "unmount", "copy", tmp_path / "m")

        found = moorage("gc", "--pool", pool, "--kubeconfig", stack / "kubeconfig", "--grace", "0s", "--yes")
        assert found["removed"] == []
        assert [item["kind"] for item in found["findings"]] == ["volume"]  # the copy, made by hand and kept
        assert "by hand" in found["findings"][0]["held"]
        assert os.path.exists(pool / "volumes" / row["id"] / "data")
        await client.delete(Pod, "writer", "default", grace_s=0)
        while await client.find(Pod, "writer", "default") is not None:
            assert time.monotonic() < deadline + 60, "the pod does not go"
            await asyncio.sleep(0.05)
