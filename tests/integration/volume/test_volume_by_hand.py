"""A person mounts, snapshots, exports and checks volumes on real filesystems, also beside a running plugin."""

import json
import os
import signal

import pytest
from tests.support.plugin_caller import Caller, mounted
from tests.support.plugin_process import PluginProcess

from moorage.host import loop, mountinfo
from moorage.storage.transfer.export import PARTIAL

pytestmark = pytest.mark.root
MIB = 1 << 20


def test_a_volume_is_formatted_once_mounted_written_and_found_again(moorage, xfs_pool_dir, tmp_path):
    by_hand = moorage(xfs_pool_dir / "pool")
    record = by_hand.ok("create", "a", "--size", "64Mi", "--new-pool")
    assert by_hand.ok("mount", "a", tmp_path / "m")["formatted"]
    (tmp_path / "m" / "file").write_text("kept")
    again = by_hand.ok("mount", "a", tmp_path / "m")
    assert not again["formatted"]
    seen = by_hand.ok("inspect", "a")
    assert seen["mounts"] == [str(tmp_path / "m")]
    assert by_hand.run("remove", "a").returncode == 1  # in use

    by_hand.ok("unmount", "a", tmp_path / "m")
    assert mountinfo.mount_at(tmp_path / "m") is None
    assert loop.find(record["data"]) == []
    assert not by_hand.ok("mount", "a", tmp_path / "m", "--read-only")["formatted"]
    assert (tmp_path / "m" / "file").read_text() == "kept"
    with pytest.raises(OSError, match="Read-only"):
        (tmp_path / "m" / "other").write_text("no")
    by_hand.ok("unmount", "a", tmp_path / "m")


def test_data_of_no_known_filesystem_is_never_formatted_over(moorage, xfs_pool_dir, tmp_path):
    by_hand = moorage(xfs_pool_dir / "pool")
    record = by_hand.ok("create", "a", "--size", "64Mi", "--new-pool")
    with open(record["data"], "r+b") as image:
        image.seek(20 * MIB)
        image.write(b"precious")
    done = by_hand.run("mount", "a", tmp_path / "m")
    assert done.returncode == 1
    assert "left as it is" in done.stderr
    with open(record["data"], "rb") as image:
        image.seek(20 * MIB)
        assert image.read(8) == b"precious"
    assert loop.find(record["data"]) == []


def test_raw_and_directory_volumes_are_shown_where_asked(moorage, xfs_pool_dir, tmp_path):
    by_hand = moorage(xfs_pool_dir / "pool")
    record = by_hand.ok("create", "raw", "--size", "8Mi", "--filesystem", "block", "--new-pool")
    by_hand.ok("mount", "raw", tmp_path / "device")
    with open(tmp_path / "device", "r+b") as device:
        device.write(b"x" * 4096)
        os.fsync(device.fileno())
    by_hand.ok("unmount", "raw", tmp_path / "device")
    assert loop.find(record["data"]) == []
    with open(record["data"], "rb") as image:
        assert image.read(4096) == b"x" * 4096

    directory = by_hand.ok("create", "d", "--kind", "directory", "--size", "8Mi")
    by_hand.ok("mount", "d", tmp_path / "d")
    (tmp_path / "d" / "file").write_text("there")
    by_hand.ok("unmount", "d", tmp_path / "d")
    with open(os.path.join(directory["data"], "file")) as file:
        assert file.read() == "there"


def test_a_backup_with_increments_comes_back_on_another_filesystem(moorage, xfs_pool_dir, ext4_pool_dir, tmp_path):
    here, there = moorage(xfs_pool_dir / "pool"), moorage(ext4_pool_dir / "pool")
    here.ok("create", "a", "--size", "64Mi", "--new-pool")
    here.ok("mount", "a", tmp_path / "m")
    (tmp_path / "m" / "one").write_bytes(os.urandom(5 * MIB))
    here.ok("snapshot", "a", "s1")
    (tmp_path / "m" / "two").write_text("second")
    here.ok("snapshot", "a", "s2")
    shared = next(row for row in here.ok("list") if row["name"] == "a")
    assert 5 * MIB <= shared["shared_bytes"] <= shared["used_bytes"]
    full = here.ok("export", "s1", tmp_path / "full")["result"]
    delta = here.ok("export", "s2", tmp_path / "delta", "--since", "s1")["result"]
    assert delta["data_bytes"] < full["data_bytes"] / 4

    there.ok("create", "unused", "--size", "2Mi", "--new-pool")
    there.ok("import", tmp_path / "full", "--name", "b")
    there.ok("import", tmp_path / "delta", "--onto", "b")
    assert there.run("check", "b").returncode == 0
    there.ok("mount", "b", tmp_path / "n")
    assert (tmp_path / "n" / "one").read_bytes() == (tmp_path / "m" / "one").read_bytes()
    assert (tmp_path / "n" / "two").read_text() == "second"
    refused = there.run("import", tmp_path / "delta", "--onto", "b")
    assert refused.returncode == 1
    there.ok("unmount", "b", tmp_path / "n")
    here.ok("unmount", "a", tmp_path / "m")


def test_a_damaged_filesystem_is_found_and_left_alone(moorage, xfs_pool_dir, tmp_path):
    by_hand = moorage(xfs_pool_dir / "pool")
    record = by_hand.ok("create", "a", "--size", "64Mi", "--new-pool")
    by_hand.ok("mount", "a", tmp_path / "m")
    by_hand.ok("unmount", "a", tmp_path / "m")
    assert by_hand.run("check", "a").returncode == 0
    with open(record["data"], "r+b") as image:
        image.seek(4096)  # the group descriptors
        image.write(os.urandom(4096))
    before = _beginning(record)
    done = by_hand.run("check", "a")
    assert done.returncode == 1
    assert "filesystem FAILED" in done.stdout
    assert _beginning(record) == before


def _beginning(record):
    with open(record["data"], "rb") as image:
        return image.read(MIB)


async def test_everything_works_beside_a_running_plugin(moorage, xfs_pool_dir, tmp_path):
    by_hand = moorage(xfs_pool_dir / "pool")
    async with PluginProcess({"default": xfs_pool_dir / "pool"}) as plugin:
        caller = Caller(plugin.client, tmp_path)
        volume = await caller.create("pvc-1", mounted("xfs"), 300 * MIB)
        pod = await caller.up(volume.volume_id, mounted("xfs"))
        (pod / "file").write_text("from the pod")
        by_hand.ok("mount", "pvc-1", tmp_path / "m")
        assert (tmp_path / "m" / "file").read_text() == "from the pod"
        by_hand.ok("snapshot", "pvc-1", "s1")
        by_hand.ok("export", "pvc-1", tmp_path / "stream")  # frozen for a moment, while the pod has it
        assert [cut["name"] for cut in by_hand.ok("snapshots")] == ["s1"]
        assert by_hand.ok("resize", "pvc-1", "400Mi")["size_bytes"] == 400 * MIB
        assert os.statvfs(pod).f_blocks * os.statvfs(pod).f_frsize > 320 * MIB
        by_hand.ok("unmount", "pvc-1", tmp_path / "m")
        assert (pod / "file").read_text() == "from the pod"  # the pod keeps its mount
        by_hand.ok("import", tmp_path / "stream", "--name", "pvc-2")
        twin = by_hand.ok("inspect", "pvc-2")["volume"]["id"]
        copied = await caller.up(twin, mounted("xfs"))
        assert (copied / "file").read_text() == "from the pod"
        assert by_hand.run("remove", "pvc-2").returncode == 1
        await caller.leave()
        by_hand.ok("remove", "pvc-2")
        by_hand.ok("undelete", "pvc-2")


@pytest.fixture
def large(moorage, ext4_pool_dir):
    """A pool with a raw volume of 160 MiB of data and a snapshot of it."""
    by_hand = moorage(ext4_pool_dir / "pool")
    record = by_hand.ok("create", "a", "--size", "400Mi", "--filesystem", "block", "--new-pool")
    with open(record["data"], "r+b") as image:
        for piece in range(5):
            image.seek(piece * 80 * MIB)
            image.write(os.urandom(32 * MIB))
    by_hand.ok("snapshot", "a", "s")
    return by_hand


def test_an_export_that_is_killed_goes_on_to_the_same_stream(large, tmp_path, wait_until):
    large.ok("export", "s", tmp_path / "whole")
    partial = tmp_path / f"killed{PARTIAL}"
    process = large.start("export", "s", tmp_path / "killed")
    wait_until(lambda: (partial.exists() and partial.stat().st_size > 8 * MIB) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if partial.exists():  # else it was faster than we
        assert large.run("export", "s", tmp_path / "killed").returncode == 2
        assert large.ok("export", "s", tmp_path / "killed", "--resume")["result"]["resumed_at"] > 0
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_an_import_that_is_killed_again_and_again_ends_whole(large, tmp_path, wait_until):
    large.ok("export", "s", tmp_path / "whole")
    place = large.pool / "imports"
    for step in range(3):
        process = large.start("import", tmp_path / "whole", "--name", "b", "--checkpoint", "4Mi")
        wait_until(lambda step=step, process=process: _progress(place) > step * 24 * MIB or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = large.ok("import", tmp_path / "whole", "--name", "b")
    assert done["resumed_at"] > 0 or done["was_complete"]
    source = large.ok("inspect", "a")["volume"]
    with open(source["data"], "rb") as wanted, open(done["volume"]["data"], "rb") as got:
        assert wanted.read() == got.read()
    assert os.listdir(place) == []


def _progress(place):
    found = list(place.glob("*/progress.json"))
    try:
        return json.loads(found[0].read_text())["at"] if found else 0
    except FileNotFoundError:  # it ended between the two
        return 0


def test_an_export_of_a_volume_that_is_killed_leaves_a_snapshot_that_the_next_one_uses(
    moorage, xfs_pool_dir, tmp_path, wait_until
):
    by_hand = moorage(xfs_pool_dir / "pool")
    record = by_hand.ok("create", "a", "--size", "300Mi", "--filesystem", "block", "--new-pool")
    with open(record["data"], "r+b") as image:
        image.write(os.urandom(100 * MIB))
    partial = tmp_path / f"file{PARTIAL}"
    process = by_hand.start("export", "a", tmp_path / "file")
    wait_until(lambda: (partial.exists() and partial.stat().st_size > 4 * MIB) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with open(record["data"], "r+b") as image:
        image.write(b"later")
    if partial.exists():
        assert len(by_hand.ok("snapshots")) == 1
        by_hand.ok("export", "a", tmp_path / "file", "--resume")
    assert by_hand.ok("snapshots") == []
    assert by_hand.ok("trash") == []
    copy = by_hand.ok("import", tmp_path / "file", "--name", "b")["volume"]
    with open(copy["data"], "rb") as got:
        assert got.read(5) != b"later"
