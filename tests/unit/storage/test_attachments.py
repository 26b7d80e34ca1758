"""Attachments of a shared pool: one owner at a time, growing tokens, limits, many processes."""

import json
import multiprocessing
import os
import random

import pytest

from moorage.storage import (
    AttachedDifferently,
    AttachedElsewhere,
    CreateVolume,
    Fenced,
    LimitReached,
    NodeNotFound,
    Pool,
    PoolConfig,
    PoolScope,
    VolumeInUse,
    VolumeNotFound,
    failpoints,
)

MIB = 1 << 20
ONE, MANY, READERS = "SINGLE_NODE_WRITER", "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_READER_ONLY"


def shared(directory, owner=True):
    config = PoolConfig(
        "shared",
        directory,
        scope=PoolScope.SHARED,
        owner=owner,
        overcommit=1000.0,
        trash_retention_s=60,
        background=False,
    )
    return Pool.open(config)


@pytest.fixture
def pool(tmp_path):
    with shared(tmp_path / "pool") as opened:
        for node in ("n1", "n2", "n3"):
            opened.attachments.register_node(node)
        yield opened


@pytest.fixture
def volume(pool):
    return pool.create_volume(CreateVolume("v", MIB, filesystem="")).id


def test_a_volume_goes_from_node_to_node_with_a_higher_token(pool, volume):
    first = pool.attachments.attach(volume, "n1", ONE)
    assert pool.attachments.attach(volume, "n1", ONE) == first
    with pytest.raises(AttachedElsewhere, match="n1"):
        pool.attachments.attach(volume, "n2", ONE)
    with pytest.raises(AttachedDifferently):
        pool.attachments.attach(volume, "n1", ONE, readonly=True)
    assert pool.attachments.verify(volume, "n1", first.token) == first

    assert pool.attachments.detach(volume, "n1")
    assert not pool.attachments.detach(volume, "n1")
    second = pool.attachments.attach(volume, "n2", ONE)
    assert second.token > first.token
    with pytest.raises(Fenced, match="not attached to node n1"):
        pool.attachments.verify(volume, "n1", first.token)
    pool.attachments.detach(volume)
    third = pool.attachments.attach(volume, "n1", ONE)
    with pytest.raises(Fenced, match=f"token {first.token}"):
        pool.attachments.verify(volume, "n1", first.token)
    assert third.token > second.token


def test_readers_and_writers_of_many_nodes(pool, volume):
    pool.attachments.attach(volume, "n1", READERS, readonly=True)
    pool.attachments.attach(volume, "n2", READERS, readonly=True)
    with pytest.raises(AttachedElsewhere):
        pool.attachments.attach(volume, "n3", ONE)
    assert [held.node_id for held in pool.attachments.of_volume(volume)] == ["n1", "n2"]
    assert pool.attachments.detach(volume)
    assert pool.attachments.of_volume(volume) == []
    single = "MULTI_NODE_SINGLE_WRITER"
    pool.attachments.attach(volume, "n1", single)
    pool.attachments.attach(volume, "n2", single, readonly=True)
    with pytest.raises(AttachedElsewhere, match="writes"):
        pool.attachments.attach(volume, "n3", single)


def test_unknown_volumes_and_nodes(pool, volume):
    with pytest.raises(NodeNotFound, match="n9"):
        pool.attachments.attach(volume, "n9", ONE)
    with pytest.raises(VolumeNotFound):
        pool.attachments.attach("no-such", "n1", ONE)
    assert pool.attachments.detach("no-such", "n1") is False
    assert pool.attachments.detach(volume, "n9") is False
    pool.attachments.forget_node("n3")
    assert set(pool.attachments.nodes()) == {"n1", "n2"}


def test_a_node_that_is_gone_gives_its_volumes_back(pool, volume):
    held = pool.attachments.attach(volume, "n1", ONE)
    pool.attachments.forget_node("n1")
    with pytest.raises(AttachedElsewhere, match="n1"):
        pool.attachments.attach(volume, "n2", ONE)
    assert pool.attachments.detach(volume, "n1")
    assert pool.attachments.attach(volume, "n2", ONE).token > held.token


def test_a_node_takes_no_more_than_its_limit(pool):
    pool.attachments.register_node("small", limit=2)
    volumes = [pool.create_volume(CreateVolume(f"v{n}", MIB, filesystem="")).id for n in range(3)]
    pool.attachments.attach(volumes[0], "small", ONE)
    pool.attachments.attach(volumes[1], "small", ONE)
    with pytest.raises(LimitReached, match="small"):
        pool.attachments.attach(volumes[2], "small", ONE)
    assert pool.attachments.of_volume(volumes[2]) == []
    assert pool.attachments.attach(volumes[1], "small", ONE)  # the same again is not one more
    pool.attachments.detach(volumes[0])
    pool.attachments.attach(volumes[2], "small", ONE)


def test_an_attached_volume_is_not_deleted_and_a_deleted_one_not_attached(pool, volume):
    pool.attachments.attach(volume, "n1", ONE)
    with pytest.raises(VolumeInUse, match="n1"):
        pool.delete_volume(volume)
    pool.attachments.detach(volume)
    assert pool.delete_volume(volume)
    with pytest.raises(VolumeNotFound):
        pool.attachments.attach(volume, "n1", ONE)
    pool.undelete("v")
    assert pool.attachments.attach(volume, "n1", ONE).token > 1


def test_old_generations_are_removed(pool, volume):
    for _ in range(20):
        pool.attachments.attach(volume, "n1", ONE)
        pool.attachments.detach(volume)
    assert len(os.listdir(pool.volumes.get(volume).data.parent / "attach")) <= 4


def test_a_state_too_long_for_a_link_is_a_file_and_becomes_a_link_again(pool, volume):
    nodes = [f"node-{number}-{'x' * 200}" for number in range(8)]
    states = pool.volumes.get(volume).data.parent / "attach"
    tokens = []
    for node in nodes:
        pool.attachments.register_node(node)
        tokens.append(pool.attachments.attach(volume, node, READERS).token)
    assert tokens == sorted(set(tokens))
    assert {held.node_id for held in pool.attachments.of_volume(volume)} == set(nodes)
    assert not (states / str(tokens[-1])).is_symlink()
    pool.attachments.detach(volume)
    assert pool.attachments.of_volume(volume) == []
    token = pool.attachments.attach(volume, "n1", ONE).token
    assert token > tokens[-1]
    assert (states / str(token)).is_symlink()
    assert [name for name in os.listdir(states) if name.startswith(".")] == []


def test_a_state_that_an_earlier_version_wrote_as_a_file_is_believed(pool, volume):
    states = pool.volumes.get(volume).data.parent / "attach"
    states.mkdir(exist_ok=True)
    held = {"n2": {"token": 7, "readonly": False, "mode": ONE}}
    (states / "7").write_text(json.dumps({"nodes": held, "nonce": "a"}))
    with pytest.raises(AttachedElsewhere, match="n2"):
        pool.attachments.attach(volume, "n1", ONE)
    pool.attachments.detach(volume, "n2")
    assert pool.attachments.attach(volume, "n1", ONE).token == 9


def _controller(directory, seed, rounds, log):
    """Attach, hold, detach, at random; every hold is written down with its token."""
    chance = random.Random(seed)
    node = f"n{seed % 3 + 1}"
    with shared(directory, owner=False) as pool:
        volume = pool.volumes.page().items[0].id
        for _ in range(rounds):
            try:
                held = pool.attachments.attach(volume, node, ONE)
            except AttachedElsewhere:
                continue
            os.write(log, f"{held.token} {node}\n".encode())
            if chance.random() < 0.7:
                pool.attachments.detach(volume, node)


def test_no_token_is_ever_given_to_two_nodes(pool, volume, tmp_path):
    processes = multiprocessing.get_context("fork")
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    hammers = [processes.Process(target=_controller, args=(pool.directory, seed, 60, log)) for seed in range(8)]
    for hammer in hammers:
        hammer.start()
    hammers[3].kill()  # one dies in the middle of something
    for hammer in hammers:
        hammer.join(timeout=120)
    os.close(log)
    owner_of: dict[str, set[str]] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        token, node = line.split()
        owner_of.setdefault(token, set()).add(node)
    assert len(owner_of) > 10
    assert all(len(nodes) == 1 for nodes in owner_of.values())
    pool.attachments.detach(volume)
    assert pool.attachments.attach(volume, "n1", ONE).token > max(int(token) for token in owner_of)


def _mortal(directory, seed, log):
    """Attach and detach until a step kills it."""
    chance = random.Random(seed)
    failpoints.install(lambda step: os.kill(os.getpid(), 9) if chance.random() < 0.08 else None)
    _controller(directory, seed, 1000, log)


def test_controllers_that_die_at_any_step_never_share_a_token(pool, volume, tmp_path):
    processes = multiprocessing.get_context("fork")
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for generation in range(4):
        seeds = range(generation * 8, generation * 8 + 8)
        mortals = [processes.Process(target=_mortal, args=(pool.directory, seed, log)) for seed in seeds]
        for mortal in mortals:
            mortal.start()
        for mortal in mortals:
            mortal.join(timeout=60)
            assert mortal.exitcode in (-9, 0)
        assert any(mortal.exitcode == -9 for mortal in mortals)
        pool.attachments.detach(volume)  # the dead hold nothing for ever
    os.close(log)
    owner_of: dict[int, set[str]] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        token, node = line.split()
        owner_of.setdefault(int(token), set()).add(node)
    assert len(owner_of) > 4
    assert all(len(nodes) == 1 for nodes in owner_of.values())
    assert pool.attachments.attach(volume, "n1", ONE).token > max(owner_of)
