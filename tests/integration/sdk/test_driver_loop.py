"""`moorage driver run`: the driver is restarted on save, its calls are shown, and what breaks the contract is named."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from moorage.authoring.loop import DriverLoop, LoopSettings
from moorage.authoring.project import Project, files_of
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.host.safe_remove import temporary_directory
from moorage.testing import until

pytestmark = pytest.mark.root

PROGRAM = files_of(Project("loops"))["driver.py"]
MOUNT = pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume(), access_mode=pb.VolumeCapability.AccessMode(mode=1))
FORGETFUL = """
    def find_volume(self, volume_id):
        return Volume(id=volume_id, size_bytes=1 << 30, context={"run": "other"})

    def list_volumes(self):
        return []

"""


class Session:
    """One run of the loop: what it printed, and the author's file."""

    def __init__(self, directory, has_cluster):
        self.lines = []
        self.script = directory / "driver.py"
        self.script.write_text(PROGRAM)
        flags = ("--only", "Identity.*")
        self.settings = LoopSettings(self.script, directory / "run", has_cluster=has_cluster, check_flags=flags)
        self.stop = asyncio.Event()
        self.loop = DriverLoop(self.settings, lambda text, style: self.lines.append(text), self.stop)

    def save(self, text):
        self.script.write_text(text)

    async def shows(self, text, since=0):
        """Wait for a line, and return the number of lines until now."""
        await until(lambda: any(text in line for line in self.lines[since:]), what=f"{text!r} in {self.lines}")
        return len(self.lines)


@asynccontextmanager
async def session(has_cluster=False):
    with temporary_directory("loop-") as directory:
        one = Session(directory, has_cluster)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.loop.run())
            try:
                yield one
            finally:
                one.stop.set()


async def create(client):
    return await client.CreateVolume(pb.CreateVolumeRequest(name="v", volume_capabilities=[MOUNT]))


async def test_the_loop_goes_on_over_mistakes_and_names_what_breaks_the_contract():
    async with session() as author:
        await author.shows("The driver answers on")
        async with CsiClient(str(author.settings.proxy_socket), timeout_s=20) as client:
            made = await create(client)
            await author.shows("provisioner    CreateVolume                OK")

            author.save(PROGRAM + "\ndef (")
            await author.shows("invalid syntax")
            assert await create(client) == made  # by the driver from before

            author.save("raise RuntimeError('broken on purpose')\n" + PROGRAM)
            await author.shows("RuntimeError: broken on purpose")
            seen = await author.shows("The driver ended with status 1")
            with pytest.raises(CsiError, match="UNAVAILABLE"):
                await create(client)

            author.save(PROGRAM)
            await author.shows("was saved", seen)
            await client.wait_ready(20)
            assert await create(client) == made
            seen = len(author.lines)

            author.save(PROGRAM.replace("    def publish(", FORGETFUL + "    def publish("))
            await author.shows("was saved", seen)
            await client.wait_ready(20)
            await create(client)
            await author.shows("Contract: CreateVolume v: volume_context is {'run': 'other'}, and was {}")

        author.loop.press("c")
        await author.shows("The driver passed every check.")


async def test_the_driver_runs_under_a_cluster_of_its_own():
    async with session(has_cluster=True) as author:
        await author.shows("A cluster runs with loops.example.org")
        author.loop.press("q")
        await author.shows("Stopping")
    assert not [line for line in author.lines if line.startswith("Contract")]
