"""mountinfo: parsed as the kernel writes it."""

from moorage.host import mountinfo
from moorage.host.mountinfo import mount_at, mounts_below, mounts_of_device, mounts_of_loops, parse

TEXT = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
40 22 7:3 / /var/lib/with\040space\134and\011tab rw,nosuid - xfs /dev/loop3 ro,attr2
41 22 7:3 /sub /pods/a ro,relatime shared:7 master:2 - xfs /dev/loop3 rw
42 22 0:5 /loop3 /pods/block rw - devtmpfs devtmpfs rw
43 40 0:9 / /pods/a rw - tmpfs tmpfs rw
broken line
44 22 0:10 / /x
"""


def test_lines_become_mounts_and_broken_ones_are_left_out():
    found = parse(TEXT)
    assert [mount.mount_id for mount in found] == [22, 40, 41, 42, 43]
    assert found[1].target == "/var/lib/with space\\and\ttab"
    assert found[1].device == (7, 3)
    assert found[2].propagation == ("shared:7", "master:2")
    assert found[2].root == "/sub"


def test_read_only_is_seen_on_the_mount_and_on_the_filesystem():
    found = parse(TEXT)
    assert [mount.is_read_only for mount in found] == [False, True, True, False, False]


def test_the_top_mount_at_a_path_is_the_last():
    found = parse(TEXT)
    top = mount_at("/pods/a/", found)
    assert top is not None
    assert top.fstype == "tmpfs"
    assert mount_at("/pods", found) is None
    assert [mount.mount_id for mount in mounts_below("/pods", found)] == [41, 42, 43]
    assert [mount.mount_id for mount in mounts_of_device((7, 3), found)] == [40, 41]


def test_only_mounts_of_these_loop_devices_or_their_nodes_are_read(tmp_path, monkeypatch):
    more = rb"""50 22 7:33 / /a rw - xfs /dev/loop33 rw
51 22 0:44 / /b rw - btrfs /dev/loop3 rw
52 22 0:45 / /c rw - btrfs /dev/loop31 rw
53 22 254:3 / /d rw - ext4 /dev/vdb rw
54 22 0:5 /loop13 /pods/other rw - devtmpfs devtmpfs rw
"""
    table = tmp_path / "mountinfo"
    table.write_bytes(TEXT + more)
    monkeypatch.setattr(mountinfo, "_MOUNTINFO", str(table))
    assert [mount.mount_id for mount in mounts_of_loops([3])] == [40, 41, 42, 51]
    assert [mount.mount_id for mount in mounts_of_loops([31, 13])] == [52, 54]
    assert [mount.mount_id for mount in mounts_of_device((7, 3))] == [40, 41, 51]
    assert [mount.mount_id for mount in mounts_of_device((254, 3))] == [53]
    assert mounts_of_loops([]) == []
