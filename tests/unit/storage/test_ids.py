"""Ids: safe as file names whatever the caller's name, stable, and different for different names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.storage import InvalidValue, ephemeral_id_from, id_from, is_ephemeral
from moorage.storage.ids import GroupId, group_of, is_id, is_volume_id, member_id

NAMES = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=300)


@given(NAMES)
def test_every_name_gives_a_safe_id(name):
    ident = id_from(name)
    assert is_id(ident)
    assert len(ident.encode()) <= 100
    assert "/" not in ident
    assert ident not in (".", "..")
    assert ident == id_from(name)


@given(NAMES, NAMES)
def test_different_names_have_different_ids(first, second):
    assert (id_from(first) == id_from(second)) == (first == second)


@pytest.mark.parametrize("name", ["", "a\0b", "a\x07", "x" * 10_000, "\x7f", "\ud800"])
def test_bad_names_are_refused_by_field(name):
    with pytest.raises(InvalidValue, match=r"^name: "):
        id_from(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", ".", "a\nb", "ÄÖÜ", "-", "A" * 128])
def test_odd_names_become_plain_ids(name):
    assert is_id(id_from(name))


@pytest.mark.parametrize(
    "ident", ["", ".", "..", "a/b", "../x", "A", "a\n", "a\0", "a" * 101, "-a", "a-", "a.b", "ä", "a b"]
)
def test_what_is_no_id_is_recognised(ident):
    assert not is_id(ident)
    assert not is_volume_id(ident)


def test_the_group_can_be_read_from_a_members_id():
    group = GroupId(id_from("nightly"))
    assert group_of(member_id(group, 12)) == (group, 12)
    for other in (group, f"{group}.", f"{group}.x", f"{group}.01", "../a.1", f"{group}.1/..", ".1"):
        assert group_of(other) is None


def test_an_ephemeral_id_is_never_a_persistent_one():
    assert is_ephemeral(ephemeral_id_from("csi-1"))
    assert is_volume_id(ephemeral_id_from("csi-1"))
    assert not is_ephemeral(id_from("ephemeral.csi-1"))
