"""`moorage csi` as a person types it, against a driver on a socket: answers, streams, secrets and what goes wrong."""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.csi.server import CsiServer
from moorage.testing import ScriptedDriver

SECRET = "hunter2-never-shown"
CREATE = (
    "CreateVolume",
    "name=v1",
    "capacity_range.required_bytes=1048576",
    "volume_capabilities.0.mount.fs_type=ext4",
    "volume_capabilities.0.access_mode.mode=SINGLE_NODE_WRITER",
)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="csi-") as made:  # sockets want short paths
        yield Path(made)


async def typed(*words, **options):
    argv = [sys.executable, "-m", "moorage.cli.main", "csi", *map(str, words)]
    return await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, check=False, timeout=60, **options
    )


async def test_fields_documents_and_secrets_reach_the_driver_and_no_secret_is_printed(folder):
    (folder / "secrets.json").write_text(json.dumps({"password": SECRET}))
    endpoint = f"unix://{folder}/csi.sock"
    async with ScriptedDriver(endpoint) as driver:
        done = await typed(*CREATE, "--secrets-file", folder / "secrets.json", "--endpoint", endpoint)
        assert done.returncode == 0, done.stderr
        (request,) = driver.requests("CreateVolume")
        assert (request.name, request.capacity_range.required_bytes) == ("v1", 1048576)
        assert dict(request.secrets) == {"password": SECRET}
        assert json.loads(done.stdout)["volume"]["capacity_bytes"]

        driver.fail("CreateVolume", "INTERNAL")
        failed = await typed(*CREATE, "--secrets-file", folder / "secrets.json", "--endpoint", endpoint)
        assert failed.returncode == 1
        assert failed.stderr.startswith("Error: CreateVolume: INTERNAL")
        assert SECRET not in done.stdout + done.stderr + failed.stdout + failed.stderr

        body = json.dumps({"name": "v2"})
        done = await typed(
            *CREATE[:1], *CREATE[2:], "--json-file", "-", "--endpoint", endpoint, "-o", "json", input=body
        )
        assert (done.returncode, done.stdout.count("\n")) == (0, 1)
        assert driver.requests("CreateVolume")[-1].name == "v2"


class _Changes(csi_pb2_grpc.SnapshotMetadataServicer):
    async def GetMetadataAllocated(self, request, context):
        for number in range(request.max_results):
            blocks = [pb.BlockMetadata(byte_offset=number * 4096, size_bytes=4096)]
            yield pb.GetMetadataAllocatedResponse(volume_capacity_bytes=1 << 20, block_metadata=blocks)


async def test_every_message_of_a_stream_is_a_line(folder):
    endpoint = f"unix://{folder}/csi.sock"
    server = CsiServer(endpoint, driver_name="d")
    csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(_Changes(), server.grpc)
    async with server:
        done = await typed("GetMetadataAllocated", "snapshot_id=s", "max_results=3", "--endpoint", endpoint)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [int(line["block_metadata"][0].get("byte_offset", 0)) for line in lines] == [0, 4096, 8192]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (f'{{"password": "{SECRET}"', "not JSON"),
        (f'["{SECRET}"]', "want a JSON object"),
        (json.dumps({"password": [SECRET]}), "the value of password is no string"),
    ],
)
async def test_bad_secrets_are_a_sentence_without_them_and_exit_code_2(folder, content, said):
    if content is not None:
        (folder / "secrets.json").write_text(content)
    done = await typed(*CREATE, "--secrets-file", folder / "secrets.json", "--endpoint", f"unix://{folder}/none")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert SECRET not in done.stdout + done.stderr


async def test_a_request_file_that_is_not_there_is_a_sentence(folder):
    done = await typed("CreateVolume", "--json-file", folder / "none.json")
    assert (done.returncode, done.stderr) == (
        2,
        f"Error: {folder}/none.json: cannot be read: No such file or directory\n",
    )
