"""Changed ranges from extents: compared with a block-by-block model."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moorage.host.extents import ENCODED, UNWRITTEN, Range
from moorage.storage.changes import changed_ranges, merged

BLOCKS = 24
# Each block of a file is a hole (0), or lies at a physical block number.
FILES = st.lists(st.sampled_from([0, 0, 100, 101, 102, 103, 200, 201, 202]), min_size=BLOCKS, max_size=BLOCKS)


def extents_from(blocks, unit=4096):
    """The longest runs that a filesystem would report."""
    found = []
    for index, physical in enumerate(blocks):
        if not physical:
            continue
        if found and found[-1][0] + found[-1][2] == index * unit and found[-1][1] + found[-1][2] == physical * unit:
            logical, start, length, flags = found[-1]
            found[-1] = (logical, start, length + unit, flags)
        else:
            found.append((index * unit, physical * unit, unit, 0))
    return found


@given(FILES, FILES, st.integers(0, BLOCKS - 1))
def test_exactly_the_blocks_that_lie_elsewhere_differ(old, new, first):
    start = first * 4096
    found = set()
    for piece, is_doubtful in changed_ranges(iter(extents_from(old)), iter(extents_from(new)), start):
        assert not is_doubtful
        found.update(range(piece.offset // 4096, piece.end // 4096))
    assert found == {n for n in range(first, BLOCKS) if old[n] != new[n]}


def test_an_unwritten_extent_is_a_hole():
    assert list(changed_ranges(iter([(0, 4096, 8192, UNWRITTEN)]), iter([]))) == []


def test_an_encoded_extent_can_only_be_decided_by_its_bytes():
    same = [(0, 4096, 8192, ENCODED)]
    assert list(changed_ranges(iter(same), iter(same))) == [(Range(0, 8192), True)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9))))
def test_merged_ranges_cover_the_same_and_never_touch(pieces):
    ordered = [Range(*piece) for piece in sorted(pieces)]
    result = list(merged(iter(ordered)))
    cover = {n for piece in ordered for n in range(piece.offset, piece.end)}
    assert {n for piece in result for n in range(piece.offset, piece.end)} == cover
    assert all(left.end < right.offset for left, right in itertools.pairwise(result))
