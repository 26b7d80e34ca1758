"""Directory volumes: faithful copies, enforced sizes where the pool can, and plain words where not."""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct

import pytest

from moorage.host import mounts
from moorage.storage import (
    CopyPath,
    CreateSnapshot,
    CreateVolume,
    InUse,
    InUseCopyRefused,
    Pool,
    PoolConfig,
    Source,
    VolumeInUse,
    VolumeKind,
)

MIB = 1 << 20
# A POSIX ACL as the kernel stores it: version 2; user::rwx, user:1234:r--, group::r-x, mask::r-x, other::---
ACL = bytes.fromhex("0200000001000700ffffffff02000400d204000004000500ffffffff10000500ffffffff20000000ffffffff")


@pytest.fixture
def pool(any_pool_dir):
    with Pool.open(PoolConfig("default", any_pool_dir / "pool", trash_retention_s=0, background=False)) as opened:
        yield opened


def directory(name, **more):
    return CreateVolume(name, 64 * MIB, kind=VolumeKind.DIRECTORY, **more)


def plant(base):
    """One of everything that a directory can hold."""
    (base / "sub").mkdir()
    (base / "sub" / "plain").write_text("plain")
    os.link(base / "sub" / "plain", base / "hard")
    (base / "soft").symlink_to("sub/plain")
    with open(base / "sparse", "wb") as sparse:
        sparse.seek(8 * MIB)
        sparse.write(b"end")
    os.mkfifo(base / "fifo", 0o640)
    os.mknod(base / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(base)
        made.bind("socket")
        os.chdir("/")
    os.setxattr(base / "sub" / "plain", "user.colour", b"blue")
    os.setxattr(base / "sub", "system.posix_acl_access", ACL)
    os.chmod(base / "sub", 0o2750)
    os.chown(base / "sparse", 1234, 5678)
    os.chmod(base / "sparse", 0o4711)
    os.utime(base / "sparse", ns=(10**18, 10**18 + 5))
    os.utime(base / "sub", ns=(10**18, 10**18 + 7))


def check(base):
    assert (base / "sub" / "plain").read_text() == "plain"
    assert os.stat(base / "hard").st_ino == os.stat(base / "sub" / "plain").st_ino
    assert os.readlink(base / "soft") == "sub/plain"
    sparse = os.stat(base / "sparse")
    assert sparse.st_size == 8 * MIB + 3
    assert sparse.st_blocks * 512 < MIB
    assert (sparse.st_uid, sparse.st_gid, stat.S_IMODE(sparse.st_mode)) == (1234, 5678, 0o4711)
    assert sparse.st_mtime_ns == 10**18 + 5
    assert stat.S_ISFIFO(os.stat(base / "fifo").st_mode)
    assert os.stat(base / "null").st_rdev == os.makedev(1, 3)
    assert stat.S_ISSOCK(os.stat(base / "socket").st_mode)
    assert os.getxattr(base / "sub" / "plain", "user.colour") == b"blue"
    assert os.getxattr(base / "sub", "system.posix_acl_access") == ACL
    assert os.stat(base / "sub").st_mtime_ns == 10**18 + 7
    assert os.stat(base / "sub").st_mode & 0o2000


def write(path, mib):
    with open(path, "wb", buffering=0) as big:
        for _ in range(mib):
            big.write(b"x" * MIB)
            os.fsync(big.fileno())


EXPECTED = {
    "ext4": CopyPath.COPY_FILES,
    "xfs": CopyPath.REFLINK_FILES,
    "btrfs": CopyPath.BTRFS_SNAPSHOT,
}


def test_everything_survives_snapshot_restore_and_clone(pool):
    volume = pool.create_volume(directory("v"))
    plant(volume.data)
    cut = pool.create_snapshot(CreateSnapshot("s", volume.id))
    assert cut.copy_path is EXPECTED[pool.filesystem]
    (volume.data / "sub" / "plain").write_text("changed later")
    check(cut.data)
    restored = pool.create_volume(directory("r", source=Source.snapshot(cut.id)))
    assert restored.copy_path is EXPECTED[pool.filesystem]
    check(restored.data)
    clone = pool.create_volume(directory("c", source=Source.volume(restored.id)))
    check(clone.data)
    for ident in (volume.id, restored.id, clone.id):
        assert pool.delete_volume(ident)
    assert pool.delete_snapshot(cut.id)
    assert pool.sweep() == 4
    assert os.listdir(pool.directory / "trash") == []
    assert os.listdir(pool.directory / "tmp") == []


def test_the_size_is_enforced_or_said_not_to_be(pool):
    volume = pool.create_volume(directory("v"))
    if pool.filesystem == "btrfs":
        assert volume.size_enforced
        assert pool.health.of(volume.id) == ()
        with pytest.raises(OSError, match="quota"):
            write(volume.data / "big", 100)
        (volume.data / "big").unlink()
        pool.expand_volume(volume.id, 256 * MIB)
        write(volume.data / "big", 100)
    else:
        assert not volume.size_enforced
        (entry,) = pool.health.of(volume.id)
        assert entry.reason == "SizeNotEnforced"
        assert "size not enforced" in entry.message


class ProjectQuotas:
    """A kernel with project quotas, for those that have none: it takes limits and answers like quotactl."""

    def __init__(self):
        self.limits, self.refuses = {}, False

    def quotactl(self, command, device, project, limit):
        assert command & 0xFF == 2, "not a project's quota"
        assert os.path.exists(device)
        if self.refuses:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        is_xfs = hasattr(limit, "blk_hardlimit")
        assert ctypes.sizeof(limit) == (112 if is_xfs else 72)
        self.limits[project] = limit.blk_hardlimit * 512 if is_xfs else limit.bhardlimit * 1024


def project_of(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return struct.unpack("=IIIII8x", fcntl.ioctl(fd, 0x801C581F, bytes(28)))[3]
    finally:
        os.close(fd)


def test_a_project_holds_a_directory_where_the_kernel_has_them(xfs_pool_dir, monkeypatch):
    """The directory's project is real here; the limit goes to a kernel that is not."""
    kernel = ProjectQuotas()
    monkeypatch.setattr("moorage.host.quota.has_project_quota", lambda path: True)
    monkeypatch.setattr("moorage.host.libc.quotactl", kernel.quotactl)
    with Pool.open(PoolConfig("default", xfs_pool_dir / "pool", background=False)) as pool:
        one, two = pool.create_volume(directory("one")), pool.create_volume(directory("two"))
        assert one.size_enforced
        assert pool.health.of(one.id) == ()
        (one.data / "sub").mkdir()
        (one.data / "sub" / "file").write_text("x")
        projects = [project_of(each.data) for each in (one, two)]
        assert len(set(projects)) == 2
        assert project_of(one.data / "sub" / "file") == projects[0], "what is made inside is not counted"
        assert kernel.limits == dict.fromkeys(projects, 64 * MIB)
        pool.expand_volume(one.id, 128 * MIB)
        assert kernel.limits == {projects[0]: 128 * MIB, projects[1]: 64 * MIB}

        kernel.refuses = True
        three = pool.create_volume(directory("three"))
        assert [entry.reason for entry in pool.health.of(three.id)] == ["SizeNotEnforced"]
        kernel.refuses = False
        pool.expand_volume(three.id, 128 * MIB)
        assert pool.health.of(three.id) == ()


def test_a_directory_in_use_is_copied_in_one_moment_or_refused(pool, tmp_path):
    volume = pool.create_volume(directory("v"))
    (volume.data / "f").write_text("x")
    target = tmp_path / "pod"
    target.mkdir()
    mounts.bind(volume.data, target)
    try:
        with pytest.raises(VolumeInUse, match="pod"):
            pool.delete_volume(volume.id)
        if pool.filesystem != "btrfs":
            with pytest.raises(InUseCopyRefused, match="snapshotInUse: live"):
                pool.create_snapshot(CreateSnapshot("s", volume.id))
            with pytest.raises(InUseCopyRefused):
                pool.create_snapshot(CreateSnapshot("s", volume.id, in_use=InUse.FREEZE))
        cut = pool.create_snapshot(CreateSnapshot("s", volume.id, in_use=InUse.LIVE))
        assert (cut.data / "f").read_text() == "x"
    finally:
        mounts.unmount(target)
    assert pool.delete_volume(volume.id)
