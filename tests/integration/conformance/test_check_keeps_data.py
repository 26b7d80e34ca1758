"""`moorage check` on drivers that leave mounts behind: nothing behind a mount is ever removed."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi import csi_pb2_grpc
from moorage.host import mountinfo, mounts

pytestmark = pytest.mark.root

ONLY = "NodePublishVolume.works"


class LeavingDriver(csi_pb2_grpc.IdentityServicer, csi_pb2_grpc.ControllerServicer, csi_pb2_grpc.NodeServicer):
    """Binds a directory with data over each target, or below it, and never unmounts it."""

    def __init__(self, data: Path, below: str = "") -> None:
        self.data = data
        self.below = below

    async def GetPluginCapabilities(self, request, context):
        kind = pb.PluginCapability.Service.CONTROLLER_SERVICE
        return pb.GetPluginCapabilitiesResponse(
            capabilities=[pb.PluginCapability(service=pb.PluginCapability.Service(type=kind))]
        )

    async def Probe(self, request, context):
        return pb.ProbeResponse()

    async def ControllerGetCapabilities(self, request, context):
        rpc = pb.ControllerServiceCapability.RPC(type=pb.ControllerServiceCapability.RPC.CREATE_DELETE_VOLUME)
        return pb.ControllerGetCapabilitiesResponse(capabilities=[pb.ControllerServiceCapability(rpc=rpc)])

    async def NodeGetCapabilities(self, request, context):
        return pb.NodeGetCapabilitiesResponse()

    async def NodeGetInfo(self, request, context):
        return pb.NodeGetInfoResponse(node_id="n1")

    async def CreateVolume(self, request, context):
        return pb.CreateVolumeResponse(volume=pb.Volume(volume_id="v1", capacity_bytes=1 << 20))

    async def DeleteVolume(self, request, context):
        return pb.DeleteVolumeResponse()

    async def NodePublishVolume(self, request, context):
        place = os.path.join(request.target_path, self.below)
        os.makedirs(place, exist_ok=True)
        mounts.bind(self.data, place)
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(self, request, context):
        return pb.NodeUnpublishVolumeResponse()


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="moo-"))
    yield path
    for mount in reversed(mountinfo.mounts_below(path)):
        mounts.unmount(mount.target)
    shutil.rmtree(path)


async def checked(folder: Path, below: str, *flags: str) -> tuple[int, str]:
    data = folder / "precious"
    data.mkdir()
    (data / "ledger").write_text("42")
    server = grpc.aio.server()
    driver = LeavingDriver(data, below)  # type: ignore[abstract]  # all other calls are UNIMPLEMENTED
    csi_pb2_grpc.add_IdentityServicer_to_server(driver, server)
    csi_pb2_grpc.add_ControllerServicer_to_server(driver, server)
    csi_pb2_grpc.add_NodeServicer_to_server(driver, server)
    endpoint = f"unix://{folder}/csi.sock"
    server.add_insecure_port(endpoint)
    await server.start()
    (folder / "tmp").mkdir()
    words = [sys.executable, "-m", "moorage.cli.main", "check", "--endpoint", endpoint, "--only", ONLY, *flags]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    try:
        done = await asyncio.to_thread(
            subprocess.run, words, capture_output=True, text=True, timeout=60, check=False, env=environment
        )
    finally:
        await server.stop(None)
    assert (data / "ledger").read_text() == "42"
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("flags", [(), ("--workdir",)], ids=["temporary", "named"])
async def test_a_mount_that_the_driver_left_at_a_target_is_unmounted_and_fails_the_check(folder, flags):
    named = (flags[0], str(folder / "work")) if flags else ()
    code, shown = await checked(folder, "", *named)
    assert code == 1
    assert "the driver left its mount at" in shown
    assert "1 failed" in shown
    assert mountinfo.mounts_below(folder) == []
    assert list((folder / "tmp").iterdir()) == []


async def test_a_mount_elsewhere_in_the_scratch_directory_stays_and_fails_the_check(folder):
    code, shown = await checked(folder, "deep/inside")
    assert code == 1
    assert "it stays, unmount it by hand" in shown
    [left] = mountinfo.mounts_below(folder)
    assert left.target in shown
    assert (Path(left.target) / "ledger").read_text() == "42"
