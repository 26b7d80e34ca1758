"""Loop devices and mounts of this machine, and the signs of trouble that they show."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from moorage.host import HostError, LoopGone, block_devices, filesystems, loop, mountinfo, mounts
from moorage.storage import CreateVolume, HealthStatus, Pool, PoolConfig
from moorage.storage.health import node_signs

MIB = 1 << 20
pytestmark = pytest.mark.root


@pytest.fixture
def pool(any_pool_dir):
    with Pool.open(PoolConfig("default", any_pool_dir / "pool", background=False)) as opened:
        yield opened


@pytest.fixture
def image(pool):
    return pool.create_volume(CreateVolume("v", 64 * MIB)).data


def test_a_device_in_use_or_unknown_is_not_removed(image):
    device = loop.attach(image)
    try:
        assert device.number in loop.numbers()
        assert not loop.remove(device.number)
        assert loop.find(image) == [device]
    finally:
        loop.detach(device)
    assert not loop.remove(max(loop.numbers()) + 1000)


def test_a_device_is_found_by_its_file_grown_and_released(image):
    assert loop.find(image) == []
    device = loop.attach(image)
    try:
        assert device.direct_io
        assert loop.find(image) == [device]
        moved = image.with_name("moved")
        image.rename(moved)
        assert [found.number for found in loop.find(moved)] == [device.number]
        moved.rename(image)
        assert block_devices.size_of(device.path) == 64 * MIB
        os.truncate(image, 96 * MIB)
        loop.grow(device, 96 * MIB)
        assert block_devices.size_of(device.path) == 96 * MIB
        os.truncate(image, 112 * MIB)
        loop.grow_all(image)
        assert block_devices.size_of(device.path) == 112 * MIB
        assert device in loop.attached(image.parent)
        assert loop.set_direct_io(device.number, False) is False
        assert loop.set_direct_io(device.number, True) is True
        block_devices.set_read_ahead(device.path, 256)
        assert Path(f"/sys/block/loop{device.number}/queue/read_ahead_kb").read_text() == "256\n"
    finally:
        assert loop.detach(device)
    assert loop.wait_detached(device)
    assert loop.detach(device) is False
    assert loop.find(image) == []


def test_a_device_is_found_that_was_attached_through_another_mount(image, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = image.parent.with_name("other")
    other.mkdir()
    with open(other / image.name, "wb") as file:
        file.truncate(64 * MIB)
    mounts.bind(image.parent, elsewhere)
    try:
        device = loop.attach(elsewhere / image.name)
        beside = loop.attach(other / image.name)
        assert device.backing_file == str(elsewhere / image.name)
        assert loop.find(image) == [device]
        assert loop.find(other / image.name) == [beside]
        for each in (device, beside):
            loop.detach(each)
            assert loop.wait_detached(each)
    finally:
        mounts.unmount_all(elsewhere)


def test_a_device_that_is_held_stays_with_its_file_whoever_releases_it(image):
    device = loop.attach(image)
    with loop.held(device):
        assert loop.detach(device)
        assert loop.at(device.number) == replace(device, autoclear=True)
        assert not loop.wait_detached(device, timeout_s=0)
    assert loop.wait_detached(device)
    with pytest.raises(LoopGone, match=f"loop{device.number} shows {image} no more"), loop.held(device):
        pass


def test_a_number_that_is_another_files_by_now_is_left_alone(image):
    another = image.with_name("another")
    with open(another, "wb") as file:
        file.truncate(64 * MIB)
    device = loop.attach(another)
    try:
        earlier = replace(device, file=(image.stat().st_dev, image.stat().st_ino), backing_file=str(image))
        os.truncate(another, 96 * MIB)
        assert loop.wait_detached(earlier, timeout_s=0)
        assert loop.detach(earlier) is False
        with pytest.raises(LoopGone):
            loop.grow(earlier, 96 * MIB)
        assert block_devices.size_of(device.path) == 64 * MIB
        assert loop.at(device.number) == device
    finally:
        loop.detach(device)
        loop.wait_detached(device)


def test_a_read_only_device_refuses_writes(image):
    device = loop.attach(image, read_only=True)
    try:
        assert device.read_only
        with pytest.raises(PermissionError):
            Path(device.path).write_bytes(b"x")
    finally:
        loop.detach(device)
        loop.wait_detached(device)


def test_missing_files_and_wrong_devices_are_named(tmp_path):
    with pytest.raises(HostError, match="No such"):
        loop.attach(tmp_path / "missing")
    with pytest.raises(HostError, match="not a loop device"):
        loop.number_of("/dev/null")
    assert loop.find(tmp_path / "missing") == []


def test_binds_are_read_only_when_asked_and_removed_when_told(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target with space"
    source.mkdir()
    target.mkdir()
    mounts.bind(source, target, ["ro"])
    try:
        found = mountinfo.mount_at(target)
        assert found is not None
        assert "ro" in found.options
        assert [bind.target for bind in mountinfo.binds_of(source)] == [str(target)]
        with pytest.raises(OSError, match="Read-only"):
            (target / "f").write_text("x")
        mounts.bind(source, target)
    finally:
        assert mounts.unmount_all(target) == 2
    assert mounts.unmount(target) is False


def test_signs_appear_and_go(pool, mounted, tmp_path):
    volume = pool.create_volume(CreateVolume("w", 64 * MIB))
    assert node_signs(volume) == []
    with mounted(pool, volume, tmp_path / "m") as place:
        assert node_signs(volume) == []
        device = loop.find(volume.data)[0]
        loop.set_direct_io(device.number, False)
        assert [entry.reason for entry in node_signs(volume)] == ["DirectIOLost"]
        assert node_signs(volume, wants_direct_io=False) == []
        loop.set_direct_io(device.number, True)
        away = volume.data.with_name("away")
        os.link(volume.data, away)
        volume.data.unlink()
        (entry,) = node_signs(volume)
        assert (entry.status, entry.reason) == (HealthStatus.DATA_LOSS, "BackingFileDeleted")
        os.rename(away, volume.data)
        assert node_signs(volume) == []
        mounts.remount(place, "ext4", ["abort"])  # as after an error
        assert "RemountedReadOnly" in [entry.reason for entry in node_signs(volume)]
    device = loop.attach(volume.data)
    try:
        assert "FilesystemErrors" in [entry.reason for entry in node_signs(volume)]
        filesystems.check(device.path, "ext4")
        assert node_signs(volume) == []
    finally:
        loop.detach(device)
        loop.wait_detached(device)
