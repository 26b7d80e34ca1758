"""Files, commands and signatures, as far as they need no root."""

import errno
import os
import subprocess

import pytest

from moorage.host import (
    CommandFailed,
    FilesystemDamaged,
    HostError,
    NotEmpty,
    UnknownFilesystem,
    extents,
    filesystems,
    mounts,
)
from moorage.host.commands import run
from moorage.host.extents import Range
from moorage.host.probe import probe, probe_known

MIB = 1 << 20


def blank(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def test_a_failing_command_says_what_it_said():
    with pytest.raises(CommandFailed, match="cannot access") as caught:
        run(["ls", "/no/such/place"])
    assert caught.value.status == 2
    assert run(["ls", "/no/such/place"], accept=(2,)).returncode == 2
    with pytest.raises(CommandFailed, match="not installed"):
        run(["no-such-program-anywhere"])
    with pytest.raises(CommandFailed, match="no result after"):
        run(["sleep", "30"], timeout_s=0.05)


def test_no_shell_ever_sees_an_argument():
    assert run(["echo", "$HOME; `id` && x"]).stdout == "$HOME; `id` && x\n"


@pytest.mark.parametrize("fstype", ["ext4", "xfs", "btrfs"])
def test_signatures_are_read_as_the_tools_write_them(tmp_path, fstype):
    image = blank(tmp_path / "image", 512 * MIB)
    assert probe(image) is None
    filesystems.format_blank(image, fstype)
    found = probe_known(image)
    assert found is not None
    assert (found.fstype, found.unit_bytes, found.has_errors) == (fstype, 4096, False)
    assert found.size_bytes == 512 * MIB
    assert found.uuid == run(["blkid", "-p", "-o", "value", "-s", "UUID", image]).stdout.strip()
    assert filesystems.is_full_size(image, fstype)
    os.truncate(image, 1024 * MIB)
    assert not filesystems.is_full_size(image, fstype)
    with pytest.raises(NotEmpty, match=fstype):
        filesystems.format_blank(image, "ext4")


def test_anything_with_a_signature_is_not_formatted(tmp_path):
    image = blank(tmp_path / "image", 64 * MIB)
    subprocess.run(["mkswap", image], check=True, capture_output=True)
    with pytest.raises(NotEmpty, match="swap"):
        filesystems.format_blank(image, "ext4")
    with pytest.raises(UnknownFilesystem, match="ntfs"):
        filesystems.mkfs(image, "ntfs")


def test_a_damaged_ext4_is_not_repaired_in_secret(tmp_path):
    image = blank(tmp_path / "image", 64 * MIB)
    filesystems.mkfs(image, "ext4")
    assert not filesystems.check(image, "ext4").repaired
    with open(image, "r+b") as file:
        file.seek(1024 + 58)
        file.write(b"\x02\x00")  # the kernel noticed errors
        file.seek(4096 * 2)
        file.write(b"\xff" * 4096 * 400)  # and the tables are overwritten
    damaged = image.read_bytes()[: 8 * MIB]
    with pytest.raises((FilesystemDamaged, CommandFailed), match=r"by hand|e2fsck"):
        filesystems.check(image, "ext4")
    assert probe_known(image) is not None
    assert image.read_bytes()[:1024] == damaged[:1024]


def test_small_damage_is_preened(tmp_path):
    image = blank(tmp_path / "image", 64 * MIB)
    filesystems.mkfs(image, "ext4")
    run(["debugfs", "-w", "-R", "set_super_value state 0", image])  # not unmounted cleanly
    run(["debugfs", "-w", "-R", "set_super_value free_blocks_count 1", image])
    assert filesystems.check(image, "ext4").repaired
    assert not filesystems.check(image, "ext4").repaired


def test_an_ext4_image_grows_unmounted(tmp_path):
    image = blank(tmp_path / "image", 64 * MIB)
    filesystems.mkfs(image, "ext4")
    os.truncate(image, 128 * MIB)
    assert filesystems.grow(image, "ext4", None)
    assert not filesystems.grow(image, "ext4", None)
    filesystems.mkfs(image, "btrfs")
    os.truncate(image, 256 * MIB)
    with pytest.raises(HostError, match="only be grown while it is mounted"):
        filesystems.grow(image, "btrfs", None)


def test_mount_options_become_flags_and_the_rest_stays_text():
    assert mounts.flags_from(["ro,nosuid", "noatime"]) == (1 | 2 | 1024, "")
    assert mounts.flags_from(["defaults", "nouuid", "discard", "ro", "rw"]) == (0, "nouuid,discard")
    with pytest.raises(HostError, match="cannot take the options"):
        mounts.bind("/a", "/b", ["discard"])


def test_a_sparse_copy_keeps_data_and_holes(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    with open(source, "wb") as file:
        file.truncate(10 * MIB)
        for offset in (0, 3 * MIB + 5, 10 * MIB - 1):
            file.seek(offset)
            file.write(b"x")
    told = []
    with open(source, "rb") as old, open(target, "wb+") as new:
        for share in (True, False):
            extents.copy_sparse(old.fileno(), new.fileno(), lambda *n: told.append(n), share=share)
            assert target.read_bytes() == source.read_bytes()
    assert os.stat(target).st_blocks * 512 < MIB
    assert told
    assert all(done <= total for done, total in told)


def test_data_ranges_are_what_is_not_a_hole(tmp_path):
    path = blank(tmp_path / "a", 4 * MIB)
    with open(path, "r+b") as file:
        assert list(extents.data_ranges(file.fileno())) == []
        file.seek(MIB)
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
        assert list(extents.data_ranges(file.fileno())) == [Range(MIB, 4096)]
        ((logical, _, length, _),) = extents.extents_of(file.fileno())
        assert (logical, length) == (MIB, 4096)


@pytest.mark.parametrize(
    ("call", "number", "is_dead"),
    [
        ("stat", errno.EACCES, True),
        ("stat", errno.EIO, True),
        ("scandir", errno.EIO, True),
        ("scandir", errno.EACCES, False),  # root may not list a directory of somebody else on an NFS export
    ],
)
def test_corruption_is_not_a_directory_that_root_may_not_list(tmp_path, monkeypatch, call, number, is_dead):
    def fail(_path):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert mounts.is_corrupted(tmp_path) is is_dead


def test_corruption_is_not_mere_absence(tmp_path):
    assert not mounts.is_corrupted(tmp_path / "missing")
    assert not mounts.is_corrupted(tmp_path)
    assert mounts.unmount(tmp_path / "missing") is False
    assert mounts.space_of(tmp_path).total_bytes > 0
