"""A process with several busy threads is killed at a random moment, again and again, on one pool."""

import os
import random
import signal
import threading

from moorage.storage import CreateSnapshot, CreateVolume, Pool, PoolConfig, Source, VolumeNotFound, id_from

MIB = 1 << 20
ROUNDS = 8
THREADS = 4


def image(name, **more):
    return CreateVolume(name, MIB, filesystem="", **more)


def busy(config, log, seed):
    """Create, copy and delete until killed; each acknowledgement is written down before the next call."""
    pool = Pool.open(config)

    def work(thread):
        chance = random.Random(f"{seed}-{thread}")
        for n in range(100_000):
            name = f"{seed}-{thread}-{n}"
            made = pool.create_volume(image(name))
            made.data.write_bytes(name.encode())
            os.write(log, f"made {name}\n".encode())
            if chance.random() < 0.5:
                pool.create_snapshot(CreateSnapshot(f"s-{name}", made.id))
                os.write(log, f"cut {name}\n".encode())
            if chance.random() < 0.3:
                pool.create_volume(image(f"c-{name}", source=Source.volume(made.id)))
                os.write(log, f"cloned {name}\n".encode())
            if chance.random() < 0.3:
                os.write(log, f"deleting {name}\n".encode())
                pool.delete_volume(made.id)
                os.write(log, f"deleted {name}\n".encode())

    for thread in range(THREADS):
        threading.Thread(target=work, args=(thread,), daemon=True).start()
    signal.pause()


def test_what_was_acknowledged_survives_every_kill(tmp_path):
    config = PoolConfig("default", tmp_path / "pool", overcommit=1e6)
    path = tmp_path / "log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance = random.Random(5)
    for seed in range(ROUNDS):
        child = os.fork()
        if child == 0:
            try:
                busy(config, log, seed)
            finally:
                os._exit(99)
        wanted = path.stat().st_size + chance.randrange(200, 3000)
        while path.stat().st_size < wanted:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the worker died by itself"
            os.sched_yield()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Pool.open(config) as pool:
            _check(pool, path)
    os.close(log)


def _check(pool, path):
    done: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        what, name = line.split()
        done.setdefault(what, set()).add(name)
    assert len(done["made"]) > 2
    for name in done["made"]:
        found = pool.volumes.find(id_from(name))
        if name in done.get("deleted", ()):
            assert found is None
        elif name not in done.get("deleting", ()):
            assert found is not None
            assert found.data.read_bytes() == name.encode()
    for name in done.get("cut", ()):
        assert pool.snapshots.get(id_from(f"s-{name}")).data.read_bytes() == name.encode()
    for name in done.get("cloned", ()):
        try:
            copied = pool.volumes.get(id_from(f"c-{name}"))
        except VolumeNotFound:
            raise AssertionError(f"the clone of {name} was acknowledged and is gone") from None
        assert copied.data.read_bytes()[: len(name)] == name.encode()
    assert pool.health.damaged() == []
    assert [name for name in os.listdir(pool.directory / "tmp") if not name.startswith("reclaim-")] == []
