"""Sizes: a table of requests and what they become."""

import pytest

from moorage.storage import CreateVolume, InvalidValue, SizeOutOfRange, VolumeKind
from moorage.storage.sizes import DEFAULT_BYTES, MIB, minimum_for, plan_size


@pytest.mark.parametrize(
    ("required", "limit", "source", "expected"),
    [
        (0, 0, 0, DEFAULT_BYTES),
        (10 * MIB, 0, 0, 10 * MIB),
        (10 * MIB + 1, 0, 0, 11 * MIB),
        (10 * MIB, 10 * MIB, 0, 10 * MIB),
        (0, 10 * MIB + 5, 0, 10 * MIB),
        (1, 0, 0, 2 * MIB),  # the smallest ext4
        (0, 0, 5 * MIB, 5 * MIB),
        (6 * MIB, 0, 5 * MIB, 6 * MIB),
        (0, 8 * MIB, 5 * MIB, 5 * MIB),
    ],
)
def test_a_request_becomes_a_size(required, limit, source, expected):
    assert plan_size(CreateVolume("v", required, limit), source) == expected


@pytest.mark.parametrize(
    ("required", "limit", "source", "why"),
    [
        (10 * MIB + 1, 10 * MIB + 2, 0, "whole MiB"),
        (4 * MIB, 0, 5 * MIB, "smaller than the source"),
        (0, 4 * MIB, 5 * MIB, "limit_bytes"),
        (0, MIB, 0, "smallest size of ext4"),
        (1 << 62, 0, 0, "largest volume"),
    ],
)
def test_what_no_size_satisfies_is_out_of_range(required, limit, source, why):
    with pytest.raises(SizeOutOfRange, match=why):
        plan_size(CreateVolume("v", required, limit), source)


@pytest.mark.parametrize(("required", "limit"), [(-1, 0), (0, -1), (2, 1)])
def test_impossible_ranges_name_their_field(required, limit):
    with pytest.raises(InvalidValue, match=r"capacity_range\."):
        plan_size(CreateVolume("v", required, limit))


def test_each_filesystem_has_a_smallest_size():
    assert minimum_for(VolumeKind.IMAGE, "xfs") == 300 * MIB
    assert minimum_for(VolumeKind.IMAGE, "") == MIB
    assert minimum_for(VolumeKind.DIRECTORY, "ignored") == MIB
    with pytest.raises(InvalidValue, match="filesystem: 'zfs' is unknown"):
        minimum_for(VolumeKind.IMAGE, "zfs")
