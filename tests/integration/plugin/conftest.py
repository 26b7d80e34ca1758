"""Real pools on real filesystems, and a plugin on them: in this process, or in one that can be killed."""

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.plugin_caller import Caller
from tests.support.plugin_process import PluginProcess

from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.host import libc, loop, mountinfo, mounts
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings

MIB = 1024 * 1024
GIB = 1024 * MIB
_MKFS = {"ext4": ["-q", "-F"], "xfs": ["-q", "-m", "reflink=1"], "btrfs": ["-q"]}


@contextlib.contextmanager
def filesystem_in_file(fstype: str, directory: Path, size: int = 8 * GIB):
    """A mounted filesystem in a sparse file; everything about it is gone afterwards."""
    image, target = directory / f"{fstype}.img", directory / f"{fstype}-pool"
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run([f"mkfs.{fstype}", *_MKFS[fstype], str(image)], check=True, capture_output=True)
    target.mkdir()
    device = loop.attach(image)
    try:
        mounts.mount(device.path, target, fstype)
        try:
            yield target
        finally:
            mounts.unmount_all(target)
    finally:
        loop.detach(device)
        loop.wait_detached(device)


@pytest.fixture(scope="session")
def filesystems_(tmp_path_factory):
    """Filesystems by name, each made when first asked for."""
    with contextlib.ExitStack() as stack:
        made = {}

        def get(fstype: str) -> Path:
            if fstype not in made:
                directory = tmp_path_factory.mktemp(f"fs-{fstype}")
                made[fstype] = stack.enter_context(filesystem_in_file(fstype, directory))
            return made[fstype]

        yield get


@pytest.fixture
def pool_filesystem():
    """Which filesystem the pool is on; tests override it by parametrizing."""
    return "xfs"


@pytest.fixture
def pool(filesystems_, pool_filesystem, request):
    """A fresh pool directory on the wanted filesystem; afterwards nothing of it is mounted or attached."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[-60:]
    directory = filesystems_(pool_filesystem) / name
    directory.mkdir()
    yield directory
    left = [device.backing_file for device in loop.attached(directory)]
    for device in loop.attached(directory):
        for mount in mountinfo.mounts():
            if mount.source == str(device.path) or mount.device == device.device:
                mounts.unmount_all(mount.target)
        loop.detach(device)
    binds = [mount.target for mount in mountinfo.binds_of(directory)]
    for target in binds:
        mounts.unmount_all(target)
    remove_tree(directory)
    assert left == [], "loop devices were leaked"
    assert binds == [], "bind mounts were leaked"


def remove_tree(directory: Path) -> None:
    """`rm -rf` that also deletes btrfs subvolumes."""
    subprocess.run(["rm", "-rf", "--one-file-system", str(directory)], check=False, capture_output=True)


@pytest.fixture
def small_filesystem(tmp_path):
    """An ext4 of 128 MiB of its own, to be filled or made read-only."""
    with filesystem_in_file("ext4", tmp_path, 128 * MIB) as directory:
        yield directory


@pytest.fixture
def flags():
    return []


@pytest.fixture
def in_own_process():
    """Whether the plugin gets a process of its own; only those tests need one that end it in the middle."""
    return False


@pytest.fixture
def inline_attributes():
    """What pods may say of their inline volumes."""
    return PluginSettings("", "", {}).inline_attributes


@pytest.fixture
async def plugin(pool, flags, tmp_path, in_own_process, inline_attributes):
    """A running plugin on the pool, answering on a socket."""
    directory = tmp_path / "p"
    directory.mkdir()
    if in_own_process:
        async with PluginProcess({"default": pool}, directory=directory, flags=flags) as process:
            yield process
        return
    assert not flags, "flags are for a process"
    settings = PluginSettings(
        f"unix://{directory}/csi.sock", "node-1", {"default": pool}, inline_attributes=inline_attributes
    )
    async with serve(settings), CsiClient(settings.endpoint, timeout_s=120) as client:
        yield Within(client)


@dataclass(frozen=True)
class Within:
    """The plugin in this process."""

    client: CsiClient

    async def is_answering(self) -> bool:
        return True


@pytest.fixture
async def node(plugin, tmp_path):
    """A caller such as kubelet, with paths of its own; what it left is taken away at the end."""
    caller = Caller(plugin.client, tmp_path)
    yield caller
    if await plugin.is_answering():
        await caller.leave()


@pytest.fixture
def refused():
    """`with refused("NOT_FOUND", "words"):` the block must fail with this code and these words."""

    @contextlib.contextmanager
    def check(code: str, match: str = ""):
        with pytest.raises(CsiError) as caught:
            yield caught
        assert caught.value.code == code, str(caught.value)
        assert caught.value.message
        assert match in caught.value.message, caught.value.message

    return check


@pytest.fixture
def write_synced():
    def write(path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)

    return write


@pytest.fixture
def dead_mount():
    """A FUSE mount whose server is gone answers every call with ENOTCONN."""
    made = []

    def make(target):
        fd = os.open("/dev/fuse", os.O_RDWR)
        libc.mount("dead", str(target), "fuse", 0, f"fd={fd},rootmode=40000,user_id=0,group_id=0")
        os.close(fd)
        made.append(target)
        assert mounts.is_corrupted(target)

    yield make
    for target in made:
        while (found := mountinfo.mount_at(target)) is not None and found.source == "dead":
            mounts.unmount(target, lazy=True)
