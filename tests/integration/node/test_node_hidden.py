"""What of the host a container does not see."""

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from moorage.node.runtime import RunningContainer
from moorage.node.runtime.process_runtime import ProcessRuntime

pytestmark = pytest.mark.root


@pytest.fixture
def outside():
    """A directory that is seen in containers: those of pytest lie below one that every container has of its own."""
    base = Path(tempfile.mkdtemp(prefix="moorage-test-", dir="/var/lib"))
    base.chmod(0o711)
    yield base
    shutil.rmtree(base)


async def said(base, hide, *words, **spec):
    """What a program prints in a container from which these directories are hidden."""
    ended = asyncio.Event()
    runtime = ProcessRuntime(lambda _container: ended.set(), hide=[str(one) for one in hide])
    container = RunningContainer("u", "main", 0, base / "attempt", base / "0.log")
    try:
        await runtime.start(container, {"argv": list(words), "env": {}, "hostname": "h", "mounts": [], **spec})
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        await runtime.close()
    assert container.exit_code == 0, json.dumps(container.state)
    return [line.split(" ", 3)[3] for line in container.log.read_text().splitlines()]


async def test_of_two_hidden_directories_one_may_hold_the_other(tmp_path, outside):
    """As the root of a node lies in the directory of `moorage up`."""
    inner = outside / "up" / "nodes" / "n1"
    inner.mkdir(parents=True)
    (outside / "up" / "secret").touch()
    (outside / "seen").touch()
    names = await said(tmp_path, [inner, outside / "up"], "find", str(outside), "-mindepth", "1", "-printf", "%P\n")
    assert sorted(names) == ["seen", "up"]


async def test_what_is_made_later_or_reached_by_a_link_is_hidden_too(tmp_path, outside):
    (outside / "real").mkdir()
    (outside / "real" / "secret").touch()
    (outside / "link").symlink_to(outside / "real")
    later = outside / "a" / "later"
    script = f"mkdir -p {outside}/mine; find {outside} -mindepth 1 -printf '%P %m\\n'"
    found = await said(tmp_path, [outside / "link", later], "sh", "-c", script)
    assert sorted(line.split()[0] for line in found) == ["a", "a/later", "link", "mine", "real"]
    assert not (outside / "mine").exists()  # what a container writes stays in it
    assert not later.exists()


async def test_directories_on_the_way_keep_their_owner_and_mode(tmp_path, outside):
    os.chown(outside, 1234, 4321)
    (outside / "deep").mkdir()
    (found,) = await said(tmp_path, [outside / "deep"], "stat", "-c", "%a %u %g", str(outside))
    assert found == "711 1234 4321"


async def test_what_one_container_does_to_its_devices_is_not_seen_in_another(tmp_path):
    """They come from a layer that all containers of an agent have in common."""
    runtime = ProcessRuntime(lambda _container: None)
    seen = []
    try:
        for number, script in enumerate(("chmod 600 /dev/null; rm /dev/zero; stat -c %a /dev/*", "stat -c %a /dev/*")):
            log = tmp_path / f"{number}.log"
            container = RunningContainer("u", "main", number, tmp_path / str(number), log)
            spec = {"argv": ["sh", "-c", f"{script}; echo end"], "env": {}, "hostname": "h", "mounts": []}
            await runtime.start(container, spec)
            async with asyncio.timeout(30):
                while not log.exists() or not log.read_text().endswith("end\n"):
                    await asyncio.sleep(0.02)
            seen.append([line.split(" ", 3)[3] for line in log.read_text().splitlines()])
    finally:
        await runtime.close()
    first, second = seen
    assert first.count("600") == 1
    assert second.count("600") == 0
    assert len(second) == len(first) + 1
    assert stat.S_IMODE(Path("/dev/null").stat().st_mode) == 0o666


async def test_device_nodes_in_the_root_of_the_host_are_of_no_use(tmp_path, outside):
    os.mknod(outside / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    (outside / "zero").chmod(0o666)
    script = f"head -c 1 {outside}/zero | wc -c"
    assert (await said(tmp_path, [], "sh", "-c", script))[-1] == "0"
    assert (await said(tmp_path / "p", [], "sh", "-c", script, privileged=True))[-1] == "1"


@pytest.fixture
def below_dev():
    """A file that the host's root has in /dev, where another filesystem lies over it."""
    name = f"moorage-test-{os.getpid()}"

    def below(command):
        script = f"mount --bind / /mnt && {command} /mnt/dev/{name}"
        subprocess.run(["unshare", "--mount", "sh", "-c", script], check=True)

    below("touch")
    yield name
    below("rm")


async def test_what_lies_below_the_devices_of_the_host_is_not_seen(tmp_path, below_dev):
    assert not os.path.exists(f"/dev/{below_dev}")
    names = await said(tmp_path, [], "ls", "/dev")
    assert {"null", "zero", "pts", "shm"} < set(names)
    assert below_dev not in names


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_container_has_devices_of_its_own_wherever_it_may_write(tmp_path, read_only):
    script = """
        echo x > /dev/null && head -c 1 /dev/zero /dev/random /dev/urandom > /dev/null && echo usable
        echo x > /dev/full || echo full
        python3 -c 'import os; os.openpty(); open("/dev/ptmx").close()' && echo terminals
        touch /dev/shm/x && echo shared
        touch /dev/x && echo written
        true
    """
    found = await said(tmp_path, [], "sh", "-c", script, read_only_root=read_only)
    words = [line for line in found if " " not in line]
    assert words == ["usable", "full", "terminals", "shared", *([] if read_only else ["written"])]


async def test_signals_that_the_agent_ignores_or_blocks_reach_a_program(tmp_path):
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        found = await said(tmp_path, [], "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    finally:
        signal.signal(signal.SIGUSR2, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert [line.split()[1] for line in found] == ["0" * 16] * 2
