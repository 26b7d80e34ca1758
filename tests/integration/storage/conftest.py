"""What the storage tests share: a mounted image, as a node would have it."""

from contextlib import contextmanager

import pytest

from moorage.host import filesystems, freeze, loop, mounts


@pytest.fixture(scope="session", autouse=True)
def guard_ends_with_the_tests():
    """The freeze guard is a child of this process; it goes when the tests do."""
    yield
    freeze.stop_guard()


@pytest.fixture
def mounted():
    """`with mounted(pool, volume, target)`: attach, format if blank, grow, mount; undone afterwards."""

    @contextmanager
    def hold(pool, volume, target, options=()):
        target.mkdir(exist_ok=True)
        device = loop.attach(volume.data)
        try:
            if filesystems.content_of(device.path) is None:
                pool.volumes.format_begin(volume.id)
                filesystems.mkfs(device.path, volume.filesystem)
                pool.volumes.format_end(volume.id)
            filesystems.check(device.path, volume.filesystem)
            if volume.filesystem == "ext4":  # growing it mounted needs a capability that not every root has
                filesystems.grow(device.path, "ext4", None)
            own = filesystems.mount_options(volume.filesystem)
            mounts.mount(device.path, target, volume.filesystem, (*own, *options))
            try:
                filesystems.grow(device.path, volume.filesystem, target)
                yield target
            finally:
                mounts.unmount_all(target)
        finally:
            loop.detach(device)
            assert loop.wait_detached(device)

    return hold
