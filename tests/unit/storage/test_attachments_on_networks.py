"""Attachments on filesystems that lose answers, have no links to symbolic links, or whose replicas disagree.

The errors are those that clients of GlusterFS 10 were seen to get; `os` is replaced for the one module that makes
the calls.
"""

import errno
import os
import time

import pytest

from moorage.storage import (
    AttachedElsewhere,
    AttachmentsUnreadable,
    CreateVolume,
    Pool,
    PoolConfig,
    PoolScope,
    attachment_state,
)

MIB = 1 << 20
ONE = "SINGLE_NODE_WRITER"


class Calls:
    """`os`, with some calls replaced."""

    def __init__(self, **replaced):
        self._replaced = replaced

    def __getattr__(self, name):
        return self._replaced.get(name) or getattr(os, name)


def error(number, *paths):
    return OSError(number, os.strerror(number), *paths)


@pytest.fixture
def pool(tmp_path):
    config = PoolConfig("shared", tmp_path / "pool", scope=PoolScope.SHARED, overcommit=1000.0, background=False)
    with Pool.open(config) as opened:
        for node in ("n1", "n2"):
            opened.attachments.register_node(node)
        yield opened


@pytest.fixture
def volume(pool):
    return pool.create_volume(CreateVolume("v", MIB, filesystem="")).id


@pytest.fixture
def states(pool, volume):
    return pool.volumes.get(volume).data.parent / "attach"


@pytest.fixture
def with_calls(monkeypatch):
    return lambda **replaced: monkeypatch.setattr(attachment_state, "os", Calls(**replaced))


def is_number(path):
    return os.path.basename(os.fsdecode(path)).isdigit()


def test_nothing_is_made_under_a_name_that_others_look_up(pool, volume, states, with_calls):
    """A brick gives up a directory or symbolic link that is looked up while it is made; a link it does not."""
    made = []

    def symlink(text, path):
        made.append(path)
        os.symlink(text, path)

    def mkdir(path, mode):
        if not os.path.isdir(path):
            made.append(path)
        os.mkdir(path, mode)

    assert states.is_dir()  # made with the volume, before anybody knows of it
    with_calls(symlink=symlink, mkdir=mkdir)
    token = pool.attachments.attach(volume, "n1", ONE).token
    pool.attachments.detach(volume)
    assert len(made) == 2
    assert not any(is_number(path) for path in made)
    assert sorted(os.listdir(states)) == [str(token), str(token + 1)]


def test_a_draft_of_another_writer_is_not_looked_up_and_goes_when_it_is_old(pool, volume, states, with_calls):
    young, old = f".{int(time.time())}-aa", f".{int(time.time()) - 4000}-bb"
    for name in (young, old):
        (states / name).symlink_to("x")

    def lstat(path):
        raise AssertionError(f"{path} was looked up")

    with_calls(lstat=lstat)
    pool.attachments.attach(volume, "n1", ONE)
    assert (states / young).is_symlink()
    assert not (states / old).is_symlink()


def test_a_filesystem_without_links_to_symbolic_links_gets_the_symbolic_link_itself(pool, volume, states, with_calls):
    def link(source, target, **_):
        raise error(errno.EPERM, source, None, target)

    with_calls(link=link)
    first = pool.attachments.attach(volume, "n1", ONE)
    with pytest.raises(AttachedElsewhere, match="n1"):
        pool.attachments.attach(volume, "n2", ONE)
    pool.attachments.detach(volume)
    assert pool.attachments.attach(volume, "n2", ONE).token > first.token
    assert all(name.isdigit() for name in os.listdir(states))


@pytest.mark.parametrize("lost", ["symlink", "link"])
def test_an_answer_that_was_lost_and_repeated_is_recognised(pool, volume, states, with_calls, lost):
    def twice(*args, **options):
        getattr(os, lost)(*args, **options)
        getattr(os, lost)(*args, **options)  # fails with EEXIST, by its own doing

    with_calls(**{lost: twice})
    held = pool.attachments.attach(volume, "n1", ONE)
    assert held.token == 1
    assert pool.attachments.verify(volume, "n1", 1) == held
    assert os.listdir(states) == ["1"]


def test_a_number_taken_by_another_and_stale_for_a_moment_is_read_again(pool, volume, with_calls):
    stale = []

    def link(source, target, **options):
        if not stale:  # the other node was faster
            stale.append(target)
            attachment_state.os = os
            try:
                pool.attachments.attach(volume, "n2", ONE)
            finally:
                with_calls(link=link, readlink=readlink)
        os.link(source, target, **options)

    def readlink(path):
        if len(stale) == 1:
            stale.append(path)
            raise error(errno.ESTALE, path)
        return os.readlink(path)

    with_calls(link=link, readlink=readlink)
    with pytest.raises(AttachedElsewhere, match="n2"):
        pool.attachments.attach(volume, "n1", ONE)
    assert len(stale) == 2
    assert [held.node_id for held in pool.attachments.of_volume(volume)] == ["n2"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN])
def test_a_state_that_the_replicas_do_not_agree_on_is_never_passed_over(pool, volume, states, with_calls, number):
    held = pool.attachments.attach(volume, "n1", ONE)

    def readlink(path):
        raise error(number, path)

    with_calls(readlink=readlink)
    for call in (
        lambda: pool.attachments.attach(volume, "n2", ONE),
        lambda: pool.attachments.detach(volume, "n1"),
        lambda: pool.delete_volume(volume),
        lambda: pool.attachments.verify(volume, "n1", held.token),
    ):
        with pytest.raises(AttachmentsUnreadable, match=r"attach/1 \(.*replicas disagree") as refused:
            call()
        assert refused.value.code == "UNAVAILABLE"
    assert os.listdir(states) == ["1"]
    with_calls()  # healed
    assert pool.attachments.verify(volume, "n1", held.token) == held


def test_a_number_that_half_of_the_replicas_have_is_refused_and_leaves_no_draft(pool, volume, states, with_calls):
    def link(source, target, **_):
        raise error(errno.ENOTCONN, source, None, target)

    with_calls(link=link)
    with pytest.raises(AttachmentsUnreadable, match="attach/1"):
        pool.attachments.attach(volume, "n1", ONE)
    assert os.listdir(states) == []
    with_calls()
    assert pool.attachments.attach(volume, "n1", ONE).token == 1
