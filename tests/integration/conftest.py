"""Real filesystems for the integration tests: ext4, XFS (with reflink) and btrfs in loop files.

One filesystem of each type is made when a run first asks for it and is shared by all tests; each test
gets a directory of its own on it. `make_filesystem` gives a test one of its own, of any size. All of
them are unmounted, detached and removed at the end.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.host import filesystems, loop, mountinfo, mounts
from moorage.host.safe_remove import remove_tree

GIB = 1 << 30
MakeFilesystem = Callable[[str, int], Path]


def pytest_collection_modifyitems(items):
    """Tests that use these filesystems need root; `tests/conftest.py` skips them without it."""
    wanted = {"xfs_pool_dir", "ext4_pool_dir", "btrfs_pool_dir", "make_filesystem", "any_pool_dir"}
    for item in items:
        if wanted & set(getattr(item, "fixturenames", ())) and item.get_closest_marker("root") is None:
            item.add_marker(pytest.mark.root)


@contextlib.contextmanager
def filesystem(base: Path, fstype: str, size: int) -> Iterator[Path]:
    """A mounted filesystem of this type in a sparse file below `base`; gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for real mounts and loop devices")
    image, target = base / "image", base / "mnt"
    target.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(size)
    filesystems.mkfs(image, fstype)
    device = loop.attach(image, direct_io=False)
    try:
        mounts.mount(device.path, target, fstype, filesystems.mount_options(fstype))
        try:
            yield target
        finally:
            release_below(target)
            mounts.unmount_all(target)
    finally:
        loop.detach(device)
        loop.wait_detached(device)
        shutil.rmtree(base, ignore_errors=True)


def release_below(directory: Path) -> None:
    """Unmount and detach everything that lies on files or directories below `directory`."""
    root = os.path.realpath(directory)
    for device in loop.attached(root):
        for mount in reversed(mountinfo.mounts_of_device(device.device)):
            mounts.unmount(mount.target, lazy=True)
        loop.detach(device)
        loop.wait_detached(device)
    for mount in reversed(mountinfo.mounts_below(root)):
        if mount.target != root:
            mounts.unmount(mount.target, lazy=True)


def _shared(fstype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with filesystem(tmp_path_factory.mktemp(f"{fstype}-base"), fstype, 128 * GIB) as target:
        yield target


@pytest.fixture(scope="session")
def xfs_base(tmp_path_factory):
    yield from _shared("xfs", tmp_path_factory)


@pytest.fixture(scope="session")
def ext4_base(tmp_path_factory):
    yield from _shared("ext4", tmp_path_factory)


@pytest.fixture(scope="session")
def btrfs_base(tmp_path_factory):
    yield from _shared("btrfs", tmp_path_factory)


def _own_directory(base: Path) -> Iterator[Path]:
    directory = base / f"test-{os.urandom(6).hex()}"
    directory.mkdir()
    yield directory
    release_below(directory)
    remove_tree(os.fspath(directory))


@pytest.fixture
def xfs_pool_dir(xfs_base):
    """An empty directory on an XFS with reflink."""
    yield from _own_directory(xfs_base)


@pytest.fixture
def ext4_pool_dir(ext4_base):
    """An empty directory on an ext4: no reflink, so copies are real copies."""
    yield from _own_directory(ext4_base)


@pytest.fixture
def btrfs_pool_dir(btrfs_base):
    """An empty directory on a btrfs: reflink, subvolumes and qgroups."""
    yield from _own_directory(btrfs_base)


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def any_pool_dir(request):
    """An empty directory on each of the three filesystems in turn."""
    return request.getfixturevalue(f"{request.param}_pool_dir")


@pytest.fixture
def make_filesystem(tmp_path) -> Iterator[MakeFilesystem]:
    """A function that makes a filesystem of a type and size for this test alone."""
    with contextlib.ExitStack() as stack:
        count = 0

        def make(fstype: str, size: int) -> Path:
            nonlocal count
            count += 1
            return stack.enter_context(filesystem(tmp_path / f"fs-{count}", fstype, size))

        yield make
