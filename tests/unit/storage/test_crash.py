"""Killed at every step: what was acknowledged is there, what was not is whole or gone.

Each operation runs in a child process that kills itself with SIGKILL at the n-th step. Then the
pool is opened again, as the next plugin would, and the operation is repeated: the end must be the
same as if nothing had happened.
"""

import os
from dataclasses import dataclass

import pytest
from tests.support.crash import killed_at

from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, PoolScope, Source, VolumeKind, id_from
from moorage.storage.ids import ephemeral_id_from
from moorage.storage.model import CopyPath

MIB = 1 << 20
MODE, MANY = "SINGLE_NODE_WRITER", "MULTI_NODE_READER_ONLY"


def image(name, size=MIB, **more):
    return CreateVolume(name, size, filesystem="", **more)


@dataclass(frozen=True)
class Story:
    """`before` prepares, `act` is killed and repeated, `told` describes the end."""

    name: str
    act: object
    told: object
    scope: PoolScope = PoolScope.NODE
    retention_s: float = 3600.0


def prepare(pool):
    volume = pool.create_volume(image("kept", 2 * MIB))
    with open(volume.data, "r+b") as data:
        data.write(b"acknowledged")
    directory = pool.create_volume(CreateVolume("tree", MIB, kind=VolumeKind.DIRECTORY))
    (directory.data / "file").write_text("in a tree")
    pool.create_snapshot(CreateSnapshot("snap", volume.id))
    pool.create_group("group", [volume.id])
    pool.create_volume(image("doomed"))
    pool.create_volume(image("gone"))
    pool.delete_volume(id_from("gone"))
    pool.create_snapshot(CreateSnapshot("lost", volume.id))
    pool.delete_snapshot(id_from("lost"))
    pool.create_group("parted", [volume.id, directory.id])
    pool.delete_group(id_from("parted"))
    pool.create_volume(image("pod", ephemeral="/pods/kept"))
    if pool.config.scope is PoolScope.SHARED:
        pool.attachments.register_node("n1")
        pool.attachments.register_node("n2")
        pool.attachments.attach(id_from("doomed"), "n2", MODE)


KEPT, TREE = id_from("kept"), id_from("tree")


def detach_told(pool):
    return pool.attachments.of_volume(id_from("doomed"))


def attach_told(pool):
    held = pool.attachments.of_volume(KEPT)
    return [(each.node_id, pool.attachments.verify(KEPT, each.node_id, each.token).mode) for each in held]


STORIES = [
    Story(
        "create", lambda p: p.create_volume(image("new", 3 * MIB)), lambda p: p.volumes.get(id_from("new")).size_bytes
    ),
    Story("thick", lambda p: p.create_volume(image("new", thick=True)), lambda p: p.volumes.get(id_from("new")).thick),
    Story(
        "clone",
        lambda p: p.create_volume(image("new", 3 * MIB, source=Source.volume(KEPT))),
        lambda p: p.volumes.get(id_from("new")).data.read_bytes()[:12],
    ),
    Story(
        "restore",
        lambda p: p.create_volume(image("new", 3 * MIB, source=Source.snapshot(id_from("snap")))),
        lambda p: p.volumes.get(id_from("new")).data.read_bytes()[:12],
    ),
    Story(
        "clone of a directory",
        lambda p: p.create_volume(CreateVolume("new", MIB, kind=VolumeKind.DIRECTORY, source=Source.volume(TREE))),
        lambda p: (p.volumes.get(id_from("new")).data / "file").read_text(),
    ),
    Story("delete", lambda p: p.delete_volume(id_from("doomed")), lambda p: p.volumes.find(id_from("doomed"))),
    Story(
        "delete and reclaim",
        lambda p: (p.delete_volume(id_from("doomed")), p.sweep()),
        lambda p: (p.volumes.find(id_from("doomed")), p.trash.listed()),
        retention_s=0.0,
    ),
    Story("expand", lambda p: p.expand_volume(KEPT, 5 * MIB), lambda p: p.volumes.get(KEPT).size_bytes),
    Story("modify", lambda p: p.volumes.modify(KEPT, {"readIOPS": "9"}), lambda p: p.volumes.get(KEPT).mutable),
    Story(
        "snapshot",
        lambda p: p.create_snapshot(CreateSnapshot("new", KEPT)),
        lambda p: p.snapshots.get(id_from("new")).data.read_bytes()[:12],
    ),
    Story("delete snapshot", lambda p: p.delete_snapshot(id_from("snap")), lambda p: p.snapshots.find(id_from("snap"))),
    Story(
        "group",
        lambda p: p.create_group("new", [KEPT, TREE]),
        lambda p: [found.volume_id for found in p.snapshots.get_group(id_from("new")).snapshots],
    ),
    Story(
        "delete group", lambda p: p.delete_group(id_from("group")), lambda p: p.snapshots.find_group(id_from("group"))
    ),
    Story(
        "undelete",
        lambda p: p.volumes.find(id_from("gone")) or p.undelete("gone"),
        lambda p: p.volumes.get(id_from("gone")).size_bytes,
    ),
    Story(
        "undelete a snapshot",
        lambda p: p.snapshots.find(id_from("lost")) or p.undelete("lost", "snapshot"),
        lambda p: p.snapshots.get(id_from("lost")).data.read_bytes()[:12],
    ),
    Story(
        "undelete a group",
        lambda p: p.snapshots.find_group(id_from("parted")) or p.undelete("parted", "group"),
        lambda p: [found.volume_id for found in p.snapshots.get_group(id_from("parted")).snapshots],
    ),
    Story(
        "undelete in a shared pool",
        lambda p: p.volumes.find(id_from("gone")) or p.undelete("gone"),
        lambda p: p.attachments.attach(id_from("gone"), "n1", MODE).mode,
        scope=PoolScope.SHARED,
    ),
    Story(
        "a pod's volume",
        lambda p: p.create_volume(image("new", ephemeral="/pods/1")),
        lambda p: [(found.id, found.ephemeral) for found in p.volumes.ephemerals()],
    ),
    Story(
        "a pod's volume goes",
        lambda p: (p.delete_volume(ephemeral_id_from("pod")), p.sweep()),
        lambda p: (p.volumes.ephemerals(), [item.name for item in p.trash.listed() if item.name == "pod"]),
    ),
    Story(
        "create a directory",
        lambda p: p.create_volume(CreateVolume("new", MIB, kind=VolumeKind.DIRECTORY)),
        lambda p: os.listdir(p.volumes.get(id_from("new")).data),
    ),
    Story("expand a directory", lambda p: p.expand_volume(TREE, 5 * MIB), lambda p: p.volumes.get(TREE).size_bytes),
    Story(
        "snapshot of a directory",
        lambda p: p.create_snapshot(CreateSnapshot("new", TREE)),
        lambda p: (p.snapshots.get(id_from("new")).data / "file").read_text(),
    ),
    Story(
        "format",
        lambda p: (p.volumes.format_begin(KEPT), p.volumes.format_end(KEPT)),
        lambda p: p.volumes.is_half_formatted(KEPT),
    ),
    Story(
        "detach from one of two",
        lambda p: (
            p.attachments.attach(KEPT, "n1", MANY),
            p.attachments.attach(KEPT, "n2", MANY),
            p.attachments.detach(KEPT, "n1"),
        ),
        attach_told,
        scope=PoolScope.SHARED,
    ),
    Story("attach", lambda p: p.attachments.attach(KEPT, "n1", MODE), attach_told, scope=PoolScope.SHARED),
    Story("detach", lambda p: p.attachments.detach(id_from("doomed")), detach_told, scope=PoolScope.SHARED),
    Story(
        "delete in a shared pool",
        lambda p: (p.attachments.detach(id_from("doomed")), p.delete_volume(id_from("doomed"))),
        lambda p: p.volumes.find(id_from("doomed")),
        scope=PoolScope.SHARED,
    ),
]


def config_for(directory, story):
    return PoolConfig(
        "default",
        directory,
        scope=story.scope,
        overcommit=1000.0,
        trash_retention_s=story.retention_s,
        background=False,
    )


def check_whole(pool):
    """Nothing unfinished, nothing half, and the acknowledged bytes are there."""
    if pool.config.scope is PoolScope.NODE:
        assert os.listdir(pool.directory / "tmp") == []
    assert os.listdir(pool.directory / "frozen") == []
    assert pool.health.damaged() == []
    for volume in pool.volumes.page().items:
        assert pool.health.of(volume.id) == () or volume.kind is VolumeKind.DIRECTORY
        assert volume.source is None or volume.copy_path is not CopyPath.NONE
    for cut in pool.snapshots.page().items:
        assert cut.kind is VolumeKind.DIRECTORY or os.stat(cut.data).st_size == cut.size_bytes
    assert pool.volumes.get(KEPT).data.read_bytes()[:12] == b"acknowledged"
    assert (pool.volumes.get(TREE).data / "file").read_text() == "in a tree"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_killed_at_any_step_and_repeated_ends_the_same(story, tmp_path):
    with Pool.open(config_for(tmp_path / "calm", story)) as calm:
        prepare(calm)
        story.act(calm)
        expected, promised = story.told(calm), calm.capacity().promised_bytes

    step = 0
    while True:
        config = config_for(tmp_path / f"crash-{step}", story)
        with Pool.open(config) as pool:
            prepare(pool)
        is_over = killed_at(config, story.act, step)
        with Pool.open(config) as pool:
            check_whole(pool)
            story.act(pool)
            check_whole(pool)
            assert story.told(pool) == expected
            assert pool.capacity().promised_bytes == promised
        if is_over:
            break
        step += 1
    assert step >= 2, "the operation has no steps to be killed at"


def test_opening_is_killed_too(tmp_path):
    story = Story("open", lambda p: p.create_volume(image("v")), lambda p: p.volumes.get(id_from("v")).size_bytes)
    for step in range(20):
        config = config_for(tmp_path / f"open-{step}", story)
        is_over = killed_at(config, story.act, step)
        with Pool.open(config) as pool:
            story.act(pool)
            assert story.told(pool) == MIB
        if is_over:
            return
    pytest.fail("never reached its end")
