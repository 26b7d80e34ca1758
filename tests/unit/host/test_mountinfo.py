"""mountinfo: parsed as the kernel writes it."""

from moorage.host.mountinfo import mount_at, mounts_below, mounts_of_device, parse

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
