"""Containers without an agent around them: what runs, runs once and is known; what it may do to the machine."""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import subprocess
import uuid
from pathlib import Path

import pytest

from moorage.host import loop, mountinfo
from moorage.node.pods import launch, record
from moorage.node.pods import runtime as module
from moorage.node.pods.remains import groups_of
from moorage.node.pods.runtime import Container, ContainerFailed, Runtime
from moorage.node.pods.sandbox import KEPT_CAPABILITIES
from moorage.node.removal import remove_tree

pytestmark = pytest.mark.root

ENDS_WHEN_TOLD = ["sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done"]
CHANGES_USER = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "1000"]
SYS_ADMIN = 21


def spec(*argv, **more):
    return {"argv": argv, "env": {}, "hostname": "h", "mounts": [], **more}


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Bench:
    def __init__(self, base):
        self.base = base
        self.runtimes = []
        self.pids = set()

    def runtime(self):
        self.runtimes.append(Runtime(lambda _: None))
        return self.runtimes[-1]

    def container(self, name="a", number=0):
        return Container("u1", name, number, self.base / name / str(number), self.base / "logs" / f"{name}.log")

    def pid_of(self, container):
        self.pids.add(json.loads((container.directory / "state.json").read_text())["pid"])
        return max(self.pids)

    async def ran(self, runtime, container, spec):
        await runtime.start(container, spec)
        while container.is_running:
            await asyncio.sleep(0.01)
        return [line.split(" ", 3)[3] for line in container.log.read_text().splitlines()]

    def hanging(self):
        """A control group that holds up whoever joins it, until it is read."""
        directory = self.base / uuid.uuid4().hex
        directory.mkdir()
        os.mkfifo(directory / "cgroup.procs")
        return directory

    @contextlib.contextmanager
    def answering(self, directory):
        fd = os.open(directory / "cgroup.procs", os.O_RDONLY | os.O_NONBLOCK)
        yield
        os.close(fd)


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    for runtime in made.runtimes:
        for container in list(runtime._followed.values()):
            runtime.kill(container)
    for pid in made.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    for runtime in made.runtimes:
        while runtime._followed:
            await asyncio.sleep(0.01)
        await runtime.close()


@pytest.fixture(params=["compiled", "forked"])
def either(request, monkeypatch):
    if request.param == "forked":
        monkeypatch.setattr(launch, "PROGRAM", "")


@pytest.mark.usefixtures("either")
async def test_a_start_is_heard_while_a_program_that_was_entered_goes_on(bench):
    runtime, first, second, hanging = bench.runtime(), bench.container(), bench.container("b"), bench.hanging()
    await runtime.start(first, spec("sleep", "1000"))
    starting = asyncio.create_task(runtime.start(second, spec("sleep", "1000", cgroups=[str(hanging)])))
    while not (second.directory / "state.json").exists():
        await asyncio.sleep(0.01)
    with open(os.devnull, "r+b") as null:
        session = await runtime.enter(first, {"argv": ["sleep", "1000"], "env": {}}, [null.fileno()] * 3)
    assert "pid" in await session.line()
    with bench.answering(hanging):
        async with asyncio.timeout(10):
            await starting
    assert second.is_running
    session.close()


async def test_a_fork_that_hangs_holds_up_no_other(bench, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAM", "")
    runtime, names = bench.runtime(), ("a", "b")
    hanging = [bench.hanging() for _ in names]
    containers = [bench.container(name) for name in names]
    first, second = [
        asyncio.create_task(runtime.start(one, spec("sleep", "1000", cgroups=[str(where)])))
        for one, where in zip(containers, hanging, strict=True)
    ]
    while not all((one.directory / "state.json").exists() for one in containers):
        await asyncio.sleep(0.01)
    with bench.answering(hanging[0]):
        async with asyncio.timeout(10):
            await first
    assert not second.done()
    with bench.answering(hanging[1]):
        await second


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_start_that_was_given_up_never_runs(bench, monkeypatch, is_removed):
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    runtime, container, hanging = bench.runtime(), bench.container(), bench.hanging()
    with pytest.raises(ContainerFailed, match="did not start"):
        await runtime.start(container, spec("sleep", "1000", cgroups=[str(hanging)]))
    pid = bench.pid_of(container)
    if is_removed:  # the pod was deleted
        remove_tree(container.directory)
    with bench.answering(hanging):
        while lives(pid):
            assert b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            await asyncio.sleep(0.01)


async def test_starts_that_a_supervisor_comes_to_too_late_are_not_made(bench, monkeypatch, tmp_path):
    """It hangs itself: its disk does, or the whole machine has stood still."""
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    volume = tmp_path / "v"
    volume.mkdir()
    runtime = bench.runtime()
    await runtime.open()
    supervisor = runtime._supervisor.pid
    pidfd = os.pidfd_open(supervisor)
    os.kill(supervisor, signal.SIGSTOP)
    mounts = [{"source": str(volume), "target": "/v"}]
    starts = [
        runtime.start(bench.container(f"c{number}"), spec("mkdir", f"/v/{number}", mounts=mounts))
        for number in range(10)
    ]
    failures = await asyncio.gather(*starts, return_exceptions=True)
    assert all(isinstance(one, ContainerFailed) for one in failures)
    os.kill(supervisor, signal.SIGCONT)
    await asyncio.to_thread(select.select, [pidfd], [], [], 30)  # it ends when it has nothing left to do
    os.close(pidfd)
    assert not lives(supervisor)
    assert os.listdir(volume) == []


async def test_a_process_of_another_boot_is_not_taken_for_a_container(bench):
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            container = bench.container()
            container.directory.mkdir(parents=True)
            (container.directory / "spec.json").write_text("{}")
            state = {"pid": bystander.pid, "start": record.start_ticks(bystander.pid), "boot": "another"}
            record.write(str(container.directory / "state.json"), {**state, "shim": 1, "started": 1.0})
            assert bench.runtime().find(container)
            assert container.is_ended
            assert bystander.poll() is None
        finally:
            bystander.kill()


async def test_the_end_of_an_earlier_attempt_ends_nothing_of_the_later_one(bench, monkeypatch):
    ended = []
    monkeypatch.setattr(module.remains, "end", ended.append)
    for number in (0, 1):
        container = bench.container(number=number)
        container.directory.mkdir(parents=True)
        document = {"host_pid": True, "number": number}
        (container.directory / "spec.json").write_text(json.dumps(document))
        record.write(str(container.directory / "state.json"), {"pid": 0, "shim": 1, "started": 1.0})
    for number in (0, 1):
        assert bench.runtime().find(bench.container(number=number))
    assert [one["number"] for one in ended] == [1]


async def test_the_next_agent_does_not_wait_for_a_start_that_was_given_up(bench, monkeypatch):
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    container, hanging = bench.container(), bench.hanging()
    with pytest.raises(ContainerFailed):
        await bench.runtime().start(container, spec("sleep", "1000", cgroups=[str(hanging)]))
    waited = []
    monkeypatch.setattr(module, "_wait_for_start", lambda *_: waited.append(1))
    found = bench.container()
    assert bench.runtime().find(found)
    assert not waited
    assert not found.is_running
    assert (found.state["reason"], found.exit_code) == ("StartError", 128)


async def test_a_program_that_has_changed_its_user_goes_with_its_supervisor(bench):
    """The kernel forgets then whose death it should die."""
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, spec(*CHANGES_USER))
    pid = bench.pid_of(container)
    while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        await asyncio.sleep(0.01)
    os.kill(runtime._supervisor.pid, 9)
    async with asyncio.timeout(10):
        while container.is_running:
            await asyncio.sleep(0.01)
    assert not lives(pid)
    assert (container.exit_code, container.state["reason"]) == (137, "ContainerStatusUnknown")
    assert container.state["finished"] > container.state["started"]


async def test_the_next_agent_ends_one_that_has_lost_its_supervisor(bench, monkeypatch):
    runtime, container = bench.runtime(), bench.container()
    monkeypatch.setattr(runtime, "_lost", lambda _: None)  # this agent is gone as well
    await runtime.start(container, spec(*CHANGES_USER))
    pid = bench.pid_of(container)
    while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        await asyncio.sleep(0.01)
    os.kill(runtime._supervisor.pid, 9)
    while not runtime._supervisor.is_over:
        await asyncio.sleep(0.01)
    found = bench.container()
    assert bench.runtime().find(found)
    async with asyncio.timeout(10):
        while found.is_running:  # until then nothing is started beside it
            await asyncio.sleep(0.01)
    assert not lives(pid)


@pytest.fixture(params=["cgroup", "cgroup2"])
async def group(request):
    """A control group of its own, of either version."""
    found = [mount for mount in mountinfo.mounts() if mount.fstype == request.param]
    if not found:
        pytest.skip(f"no {request.param} is mounted")
    made = Path(found[0].target) / f"moorage-test-{uuid.uuid4().hex}"
    made.mkdir()
    yield made
    for directory in reversed(groups_of(str(made))):
        async with asyncio.timeout(10):
            while Path(directory, "cgroup.procs").read_text():
                await asyncio.sleep(0.01)
        os.rmdir(directory)


@pytest.mark.parametrize("is_supervised", [True, False])
@pytest.mark.parametrize("inner", ["", "/a", "/a" * 1100])
async def test_nothing_is_left_of_one_that_sees_the_processes_of_the_host(group, bench, is_supervised, inner):
    """Nor of what it has put into control groups that it has made itself."""
    for depth in range(2, len(inner) + 1, 2):
        os.mkdir(f"{group}{inner[:depth]}")
    runtime, container = bench.runtime(), bench.container()
    script = f"sh -c 'echo 0 > /group{inner}/cgroup.procs; echo $$; exec setsid sleep 1000' & exec sleep 1000"
    mounts = [{"source": str(group), "target": "/group"}]
    document = spec("sh", "-c", script, host_pid=True, privileged=True, cgroups=[str(group)], mounts=mounts)
    await runtime.start(container, document)
    while not container.log.exists() or not container.log.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    left = int(container.log.read_text().split()[-1])
    bench.pids.add(left)
    assert str(left) in Path(f"{group}{inner}/cgroup.procs").read_text().split()
    if is_supervised:
        runtime.kill(container)
    else:
        os.kill(runtime._supervisor.pid, 9)
    while container.is_running:
        await asyncio.sleep(0.01)
    assert not lives(left)


@pytest.mark.usefixtures("either")
async def test_a_long_environment_is_no_hindrance_to_entering(bench):
    runtime, container = bench.runtime(), bench.container()
    environment = {f"V{number}": "x" * 60_000 for number in range(8)}
    await runtime.start(container, spec("sleep", "1000") | {"env": environment})
    supervisor = runtime._supervisor.pid
    read, write = os.pipe()
    request = {"argv": ["sh", "-c", "echo ${#V7}"], "env": environment}
    session = await runtime.enter(container, request, [write, write, write])
    os.close(write)
    assert "pid" in await session.line()
    assert (await session.line())["exit_code"] == 0
    assert os.read(read, 100) == b"60000\n"
    assert runtime._supervisor.pid == supervisor
    session.close()
    os.close(read)


@pytest.mark.usefixtures("either")
async def test_only_the_container_itself_is_entered_whoever_has_its_number_now(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, spec("sleep", "1000"))
    inside = [os.readlink(f"/proc/{container.state['pid']}/ns/{kind}") for kind in ("mnt", "pid", "ipc", "uts")]
    container.state["pid"] = os.getpid()
    read, write = os.pipe()
    link = "cd /proc/self/ns && readlink mnt pid ipc uts"
    session = await runtime.enter(container, {"argv": ["sh", "-c", link], "env": {}}, [write] * 3)
    assert "pid" in await session.line()
    assert await session.line() == {"exit_code": 0}
    assert os.read(read, 1000).decode().split() == inside
    session.close()

    ended = subprocess.Popen(["true"])
    running, container.pidfd = container.pidfd, os.pidfd_open(ended.pid)
    ended.wait()
    session = await runtime.enter(container, {"argv": ["echo", "out"], "env": {}}, [write] * 3)
    os.close(write)
    assert await session.line() == {"error": "the container has ended"}
    assert os.read(read, 1000) == b""
    session.close()
    os.close(container.pidfd)
    os.close(read)
    container.pidfd = running


async def test_a_volume_is_mounted_where_the_host_has_a_link(bench, tmp_path):
    volume = tmp_path / "v"
    volume.mkdir()
    (volume / "there").write_text("x")
    mounts = [{"source": str(volume), "target": "/var/run"}]
    assert os.path.islink("/var/run")
    ran = await bench.ran(bench.runtime(), bench.container(), spec("ls", "/var/run", "/run", mounts=mounts))
    assert ran.count("there") == 2


async def test_shared_memory_can_be_written_to_where_nothing_else_can(bench, tmp_path):
    script = "touch /dev/shm/x && echo shared; touch /etc/x || echo not here"
    document = spec("sh", "-c", script, read_only_root=True)
    assert {"shared", "not here"} <= set(await bench.ran(bench.runtime(), bench.container(), document))
    volume = tmp_path / "v"
    volume.mkdir()
    document["mounts"] = [{"source": str(volume), "target": "/dev/shm"}]
    await bench.ran(bench.runtime(), bench.container("b"), document)
    assert (volume / "x").exists()  # a volume there stays the volume


async def test_another_user_may_open_its_streams_once_more(bench):
    document = spec("sh", "-c", "echo one > /dev/stdout; echo two > /dev/stderr", uid=1000, gid=1000)
    assert sorted(await bench.ran(bench.runtime(), bench.container(), document)) == ["one", "two"]


async def test_root_without_privileges_reaches_no_disk_and_no_setting_of_the_machine(bench):
    number = next(line.split()[:2] for line in Path("/proc/partitions").read_text().splitlines()[2:])
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    script = f"mknod /tmp/d b {' '.join(number)} && echo made; echo x > /proc/sys/kernel/core_pattern && echo set"
    script += (
        "; test -w /proc/sysrq-trigger && : >> /proc/sysrq-trigger && echo reached; echo 0 > /proc/self/oom_score_adj"
    )
    script += "; echo $?"
    ran = await bench.ran(bench.runtime(), bench.container(), spec("sh", "-c", script))
    assert not {"made", "set", "reached"} & set(ran), ran
    assert ran[-1] == "0"  # what is of its own processes it may set
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


async def test_what_proc_has_of_the_machine_is_read_only_without_privileges(bench):
    names = ("sys", "sysrq-trigger", "irq", "bus", "fs", "scsi", "acpi", "asound", "dynamic_debug")
    there = [f"/proc/{name}" for name in names if os.path.exists(f"/proc/{name}")]
    assert "/proc/fs" in there
    script = "import os, sys; print(*(path for path in sys.argv[1:] if not os.statvfs(path).f_flag & os.ST_RDONLY))"
    runtime = bench.runtime()
    document = spec("python3", "-c", script, *there, "/proc/self")
    assert await outcome(bench, document, runtime) == "/proc/self"
    assert await outcome(bench, {**document, "privileged": True}, runtime) == " ".join([*there, "/proc/self"])


async def outcome(bench, document, runtime=None):
    """What a program said, or why there was none."""
    container = bench.container(uuid.uuid4().hex)
    try:
        return " ".join(await bench.ran(runtime or bench.runtime(), container, document))
    except ContainerFailed as error:
        return str(error)


def with_sub_path(tmp_path):
    """A volume beside a secret of the host: mounting a part of it, one looks from above."""
    (tmp_path / "v" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("of the host")
    return [{"source": str(tmp_path / "v"), "target": "/v", "sub_path": "sub"}]


@pytest.mark.usefixtures("either")
async def test_no_working_directory_leads_out_through_a_file_that_is_open(bench, tmp_path):
    mounts, runtime = with_sub_path(tmp_path), bench.runtime()
    for fd in range(3, 24):
        document = spec("sh", "-c", "cat ../secret; mkdir ../new", mounts=mounts, cwd=f"/proc/self/fd/{fd}")
        assert "of the host" not in await outcome(bench, document, runtime), fd
        await outcome(bench, spec("true", mounts=mounts, cwd=f"/proc/self/fd/{fd}/../new"), runtime)
        assert not (tmp_path / "new").exists(), fd


@pytest.mark.usefixtures("either")
async def test_a_program_is_none_of_the_files_that_are_open_before_it(bench, tmp_path):
    mounts, runtime = with_sub_path(tmp_path), bench.runtime()
    runs = [spec(f"/proc/self/fd/{fd}", mounts=mounts) for fd in range(3, 40)]
    said = [await outcome(bench, document, runtime) for document in runs]
    found = [one for one in said if "No such file or directory" not in one]
    assert len(found) == 3, found  # what has no name: the pipe that tells of failures, the supervisor, and "/" itself
    assert all("Permission denied" in one for one in found)


@pytest.mark.usefixtures("either")
async def test_no_volume_is_placed_through_a_link_of_proc(bench, tmp_path):
    (tmp_path / "v").mkdir()
    shown = {"source": "/proc", "target": "/hp", "read_only": True}  # of the host
    for target in (f"/hp/{os.getpid()}/root{tmp_path}/new", f"/hp/{os.getpid()}/root{tmp_path}/new/below"):
        mounts = [shown, {"source": str(tmp_path / "v"), "target": target}]
        assert "Too many levels of symbolic links" in await outcome(bench, spec("true", mounts=mounts))
        devices = [{"path": target, "number": os.makedev(7, 0)}]
        assert "Too many levels of symbolic links" in await outcome(
            bench, spec("true", mounts=[shown], devices=devices)
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("either")
async def test_what_a_program_reads_from_is_no_file_of_a_volume(bench, tmp_path):
    volume = tmp_path / "v"
    volume.mkdir()
    (volume / "null").symlink_to("/etc/shadow")
    mounts = [{"source": str(volume), "target": "/dev"}]
    assert await outcome(bench, spec("wc", "-c", mounts=mounts, uid=65534, gid=65534)) == "0"
    assert await outcome(bench, spec("readlink", "/proc/self/fd/0", mounts=mounts)) == "/dev/null"


async def test_the_interpreter_that_enters_a_container_cannot_be_written_to_there(bench, monkeypatch):
    """Without a compiled launcher it is what /proc/self/exe means on the way to the program."""
    monkeypatch.setattr(launch, "PROGRAM", "")
    script = "import os, sys; print(sys.version_info.major, os.access('/proc/self/exe', os.W_OK))"
    assert await outcome(bench, spec("/proc/self/exe", "-c", script)) == "3 False"


@pytest.mark.usefixtures("either")
async def test_who_sees_the_processes_of_the_host_is_not_led_out_through_them(bench, tmp_path):
    (tmp_path / "secret").write_text("of the host")
    root = f"/proc/{os.getpid()}/root"
    said = await outcome(bench, spec("cat", f".{tmp_path}/secret", host_pid=True, cwd=root))
    assert "working directory" in said or "make directory" in said
    await outcome(bench, spec("true", host_pid=True, cwd=f"{root}{tmp_path}/new"))
    assert not (tmp_path / "new").exists()
    said = await outcome(bench, spec(f"{root}/bin/echo", "executed", host_pid=True))
    assert said == f"exec: '{root}/bin/echo': Permission denied"


@pytest.mark.usefixtures("either")
async def test_who_enters_is_not_led_out_either(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, spec("sleep", "1000", host_pid=True))
    root = f"/proc/{os.getpid()}/root"
    with open(os.devnull, "r+b") as null:
        for request in (
            {"argv": ["true"], "cwd": root},
            {"argv": [f"{root}/bin/true"]},
            {"argv": ["true"], "cwd": "/no"},
        ):
            session = await runtime.enter(container, {**request, "env": {}}, [null.fileno()] * 3)
            assert "error" in await session.line()
            session.close()


@pytest.mark.usefixtures("either")
async def test_a_device_in_a_volume_is_of_use_only_where_that_is_said(bench, tmp_path):
    volume = tmp_path / "v"
    volume.mkdir()
    os.mknod(volume / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    for has_devices, said in ((False, "Permission denied"), (True, "1")):
        mounts = [{"source": str(volume), "target": "/v", "has_devices": has_devices}]
        document = spec("sh", "-c", "head -c 1 /v/zero | wc -c", mounts=mounts)
        assert said in await outcome(bench, document)
        document["mounts"][0] |= {"source": str(tmp_path), "sub_path": "v"}
        assert said in await outcome(bench, document)


@pytest.mark.usefixtures("either")
async def test_the_node_of_a_block_volume_is_never_in_another_volume(bench, tmp_path):
    volume, number = tmp_path / "v", os.makedev(7, 250)
    volume.mkdir()
    mounts = [{"source": str(volume), "target": "/v"}]
    devices = [{"path": "/v/disk", "number": number, "gid": 1000}, {"path": "/dev/new/disk", "number": number}]
    document = spec("stat", "-c", "%F %t,%T %a %g", "/v/disk", "/dev/new/disk", mounts=mounts, devices=devices)
    block = "block special file 7,fa 660"
    assert await bench.ran(bench.runtime(), bench.container(), document) == [f"{block} 1000", f"{block} 0"]
    (left,) = volume.iterdir()
    assert left.is_file()  # a place to mount on
    devices[0]["read_only"] = True
    mounts[0]["read_only"] = True
    said = await bench.ran(bench.runtime(), bench.container("again"), document)
    assert said == ["block special file 7,fa 440 1000", f"{block} 0"]


TRIES_TO_CHANGE = "echo changed > {0}/key; cat {0}/key; touch {1}/new && echo written"


def volumes(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text("as it was\n")
        yield tmp_path / name


def at(target, source, **more):
    return {"source": str(source), "target": target, **more}


@pytest.mark.usefixtures("either")
async def test_no_other_volume_turns_the_path_of_a_read_only_one_elsewhere(bench, tmp_path):
    first, second, kept, decoy = volumes(tmp_path, "first", "second", "kept", "decoy")
    (first / "link").symlink_to("/mnt")
    (second / "link").symlink_to("/opt")
    mounts = [at("/e", first), at("/opt/v", decoy), at("/e/link/v", kept, read_only_last=True), at("/e/.", second)]
    document = spec("sh", "-c", TRIES_TO_CHANGE.format("/mnt/v", "/opt/v"), mounts=mounts)
    assert (await bench.ran(bench.runtime(), bench.container(), document))[-2:] == ["as it was", "written"]
    assert (kept / "key").read_text() == "as it was\n"


@pytest.mark.usefixtures("either")
async def test_a_read_only_volume_does_not_turn_its_own_path_elsewhere(bench, tmp_path):
    first, kept, decoy = volumes(tmp_path, "first", "kept", "decoy")
    (kept / "run").symlink_to("/run")  # as /var of most hosts
    mounts = [at("/e", first), at("/run/v", decoy), at("/e/run/v/../..", kept, read_only=True)]
    document = spec("sh", "-c", TRIES_TO_CHANGE.format("/e", "/opt"), mounts=mounts)
    assert (await bench.ran(bench.runtime(), bench.container(), document))[-2:] == ["as it was", "written"]
    assert (kept / "key").read_text() == "as it was\n"


DETACHES = "import fcntl, os; fcntl.ioctl(os.open('/dev/mine', os.O_RDWR), 0x4C01, 0)"  # LOOP_CLR_FD needs no right


@pytest.mark.usefixtures("either")
async def test_nobody_detaches_the_device_of_a_block_volume(bench, tmp_path):
    """Its number would be the next volume's, and so would the node in the container."""
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    device = loop.attach(image)
    try:
        devices = [{"path": "/dev/mine", "number": os.makedev(*device.device)}]
        runtime, container = bench.runtime(), bench.container()
        for rights in ({}, {"capabilities": [*KEPT_CAPABILITIES, SYS_ADMIN]}):
            said = await outcome(bench, spec("python3", "-c", DETACHES, devices=devices, **rights), runtime)
            assert "Operation not permitted" in said
        await runtime.start(container, spec("sleep", "1000", devices=devices))
        assert "Operation not permitted" in await entered(runtime, container, "python3", "-c", DETACHES)
        assert loop.find(image) == [device]
    finally:
        for one in loop.find(image):
            loop.detach(one)


@pytest.mark.usefixtures("either")
async def test_user_namespaces_are_made_only_by_who_has_their_rights_already(bench):
    runtime = bench.runtime()
    for rights, said in (
        ({}, "Operation not permitted"),
        ({"uid": 65534, "gid": 65534}, "Operation not permitted"),
        ({"capabilities": [*KEPT_CAPABILITIES, SYS_ADMIN]}, "made"),
        ({"privileged": True}, "made"),
    ):
        assert said in await outcome(bench, spec("unshare", "--user", "echo", "made", **rights), runtime)
    threads = "import threading; t = threading.Thread(target=print, args=['made']); t.start(); t.join()"
    assert await outcome(bench, spec("python3", "-c", threads), runtime) == "made"


async def entered(runtime, container, *argv):
    """What a program said in a container that runs."""
    read, write = os.pipe()
    session = await runtime.enter(container, {"argv": argv, "env": {}}, [write] * 3)
    os.close(write)
    assert "pid" in await session.line()
    await session.line()
    session.close()
    with os.fdopen(read) as said:
        return said.read()


SESSION_KEYRING = "import ctypes; print(ctypes.CDLL(None).syscall({number}, 0, -3, 1))"  # KEYCTL_GET_KEYRING_ID


@pytest.mark.usefixtures("either")
async def test_the_keys_of_the_agents_session_are_not_in_containers(bench):
    number = {"x86_64": 250}.get(os.uname().machine, 219)
    script = SESSION_KEYRING.format(number=number)
    own = ctypes.CDLL(None).syscall(number, 0, -3, 1)  # made, if there is none yet
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, spec("sleep", "1000"))
    found = [
        await outcome(bench, spec("python3", "-c", script, **more), runtime) for more in ({}, {"privileged": True})
    ]
    found.append(await entered(runtime, container, "python3", "-c", script))
    keyrings = [int(one) for one in found]
    assert all(one > 0 for one in keyrings)
    assert len({own, *keyrings}) == 4


@contextlib.contextmanager
def descriptors(left=0):
    """Only so many more can be opened here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as lowest:
        most = lowest.fileno() + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_that_cannot_be_looked_at_is_not_taken_for_ended(bench):
    container, same, second = bench.container(), bench.container(), bench.runtime()
    await bench.runtime().start(container, spec(*ENDS_WHEN_TOLD))
    await until(lambda: container.log.exists() and b"ready" in container.log.read_bytes())  # it can be told by now
    pid = bench.pid_of(container)
    with descriptors(1):
        assert second.find(same)
        assert same.is_running
        with pytest.raises(ContainerFailed, match="cannot be looked at now"):
            await second.enter(same, {}, ())
        second.stop(same)
    assert lives(pid)
    await until(lambda: not same.is_running)
    assert same.exit_code == 3  # it was told when it could be


async def test_nothing_is_taken_up_that_cannot_even_be_read_of(bench):
    await bench.runtime().start(bench.container(), spec("sleep", "1000"))
    second = bench.runtime()
    with descriptors(), pytest.raises(OSError, match="Too many open files"):
        second.find(bench.container())


async def test_who_leaves_does_not_look_again(bench, monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    await bench.runtime().start(bench.container(), spec("sleep", "1000"))
    second, same = bench.runtime(), bench.container()
    with descriptors(1):
        second.find(same)
        assert same.is_running
        await second.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert same.pidfd < 0


async def test_one_that_is_started_while_no_descriptors_are_left_is_followed_later(bench, monkeypatch):
    runtime, container = bench.runtime(), bench.container()
    with contextlib.ExitStack() as short:
        heard = module.Reply.line

        async def line(reply):
            answer = await heard(reply)
            short.enter_context(descriptors())
            return answer

        monkeypatch.setattr(module.Reply, "line", line)
        await runtime.start(container, spec("sleep", "1000"))
        assert container.is_running
    assert lives(bench.pid_of(container))
    await until(lambda: container.pidfd >= 0)


async def test_how_one_has_ended_is_read_when_there_are_descriptors_again(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, spec(*ENDS_WHEN_TOLD))
    await until(lambda: container.log.exists() and b"ready" in container.log.read_bytes())  # it can be told by now
    ended = select.poll()
    ended.register(container.pidfd, select.POLLIN)
    with descriptors():
        runtime.stop(container)
        await asyncio.to_thread(ended.poll, 10_000)
        for _ in range(3):
            await asyncio.sleep(0)
        assert container.is_running
    await until(lambda: not container.is_running)
    assert (container.exit_code, container.state.get("reason")) == (3, None)


async def test_a_start_is_given_up_without_descriptors_too(bench, monkeypatch):
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.5)
    runtime, container, hanging = bench.runtime(), bench.container(), bench.hanging()
    starting = asyncio.create_task(runtime.start(container, spec("sleep", "1000", cgroups=[str(hanging)])))
    await until((container.directory / "state.json").exists)
    pid = bench.pid_of(container)
    with descriptors():
        await until((container.directory / record.ABANDONED).exists)
    with pytest.raises(ContainerFailed, match="did not start"):
        await starting
    with bench.answering(hanging):
        await until(lambda: not lives(pid))
    assert not container.log.exists()


async def test_messages_that_a_supervisor_never_takes_hold_up_no_later_ones(bench, monkeypatch):
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 1.0)
    runtime, first = bench.runtime(), bench.container("first")
    await runtime.start(first, spec("sleep", "1000"))
    supervisor = runtime._supervisor.pid
    os.kill(supervisor, signal.SIGSTOP)
    sessions = []
    try:
        with open(os.devnull, "r+b") as null:
            request = {"argv": ["true"], "env": {"A": "x" * 30_000}}  # more than the socket takes of them
            sessions += [asyncio.create_task(runtime.enter(first, request, [null.fileno()] * 3)) for _ in range(12)]
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                with pytest.raises(ContainerFailed, match="did not start"):
                    await runtime.start(bench.container("x"), spec("sleep", "1000"))
                await asyncio.wait(sessions)
                second = bench.container("y")
                await runtime.start(second, spec("sleep", "1000"))
        assert second.is_running
        assert runtime._supervisor.pid != supervisor
        for session in sessions:
            session.result().close()
    finally:
        os.kill(supervisor, signal.SIGCONT)


async def test_who_is_late_to_give_up_leaves_the_next_supervisor_alone(bench, monkeypatch):
    runtime, starts = bench.runtime(), []
    await runtime.open()
    supervisor = runtime._supervisor.pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        for name, patience_s in (("early", 0.3), ("late", 1.0)):
            monkeypatch.setattr(module, "_START_TIMEOUT_S", patience_s)
            starts.append(asyncio.create_task(runtime.start(bench.container(name), spec("sleep", "1000"))))
            await asyncio.sleep(0)
        early, late = starts
        with pytest.raises(ContainerFailed):
            await early
        await runtime.open()
        following = runtime._supervisor.pid
        with pytest.raises(ContainerFailed):
            await late
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert runtime._supervisor.pid == following != supervisor
