"""What a container may do to the machine and to others on it."""

import ctypes
import os
import stat
import uuid
from pathlib import Path

import pytest

from moorage.host import loop
from moorage.node.runtime import KEPT_CAPABILITIES, ContainerFailed

pytestmark = pytest.mark.root
SYS_ADMIN = 21


async def test_a_volume_is_mounted_where_the_host_has_a_link(bench, tmp_path):
    volume = tmp_path / "v"
    volume.mkdir()
    (volume / "there").write_text("x")
    mounts = [{"source": str(volume), "target": "/var/run"}]
    assert os.path.islink("/var/run")
    ran = await bench.ran(bench.runtime(), bench.container(), bench.spec("ls", "/var/run", "/run", mounts=mounts))
    assert ran.count("there") == 2


async def test_shared_memory_can_be_written_to_where_nothing_else_can(bench, tmp_path):
    script = "touch /dev/shm/x && echo shared; touch /etc/x || echo not here"
    document = bench.spec("sh", "-c", script, read_only_root=True)
    assert {"shared", "not here"} <= set(await bench.ran(bench.runtime(), bench.container(), document))
    volume = tmp_path / "v"
    volume.mkdir()
    document["mounts"] = [{"source": str(volume), "target": "/dev/shm"}]
    await bench.ran(bench.runtime(), bench.container("b"), document)
    assert (volume / "x").exists()  # a volume there stays the volume


async def test_another_user_may_open_its_streams_once_more(bench):
    document = bench.spec("sh", "-c", "echo one > /dev/stdout; echo two > /dev/stderr", uid=1000, gid=1000)
    assert sorted(await bench.ran(bench.runtime(), bench.container(), document)) == ["one", "two"]


async def test_root_without_privileges_reaches_no_disk_and_no_setting_of_the_machine(bench):
    number = next(line.split()[:2] for line in Path("/proc/partitions").read_text().splitlines()[2:])
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    script = f"mknod /tmp/d b {' '.join(number)} && echo made; echo x > /proc/sys/kernel/core_pattern && echo set"
    script += (
        "; test -w /proc/sysrq-trigger && : >> /proc/sysrq-trigger && echo reached; echo 0 > /proc/self/oom_score_adj"
    )
    script += "; echo $?"
    ran = await bench.ran(bench.runtime(), bench.container(), bench.spec("sh", "-c", script))
    assert not {"made", "set", "reached"} & set(ran), ran
    assert ran[-1] == "0"  # what is of its own processes it may set
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


async def test_what_proc_has_of_the_machine_is_read_only_without_privileges(bench):
    names = ("sys", "sysrq-trigger", "irq", "bus", "fs", "scsi", "acpi", "asound", "dynamic_debug")
    there = [f"/proc/{name}" for name in names if os.path.exists(f"/proc/{name}")]
    assert "/proc/fs" in there
    script = "import os, sys; print(*(path for path in sys.argv[1:] if not os.statvfs(path).f_flag & os.ST_RDONLY))"
    runtime = bench.runtime()
    document = bench.spec("python3", "-c", script, *there, "/proc/self")
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


async def test_no_working_directory_leads_out_through_a_file_that_is_open(bench, tmp_path):
    mounts, runtime = with_sub_path(tmp_path), bench.runtime()
    for fd in range(3, 24):
        document = bench.spec("sh", "-c", "cat ../secret; mkdir ../new", mounts=mounts, cwd=f"/proc/self/fd/{fd}")
        assert "of the host" not in await outcome(bench, document, runtime), fd
        await outcome(bench, bench.spec("true", mounts=mounts, cwd=f"/proc/self/fd/{fd}/../new"), runtime)
        assert not (tmp_path / "new").exists(), fd


async def test_a_program_is_none_of_the_files_that_are_open_before_it(bench, tmp_path):
    mounts, runtime = with_sub_path(tmp_path), bench.runtime()
    runs = [bench.spec(f"/proc/self/fd/{fd}", mounts=mounts) for fd in range(3, 40)]
    said = [await outcome(bench, document, runtime) for document in runs]
    found = [one for one in said if "No such file or directory" not in one]
    assert len(found) == 2, found  # what has no name: the pipe that reports failures, and the supervisor
    assert all("Permission denied" in one for one in found)


async def test_no_volume_is_placed_through_a_link_of_proc(bench, tmp_path):
    (tmp_path / "v").mkdir()
    shown = {"source": "/proc", "target": "/hp", "read_only": True}  # of the host
    for target in (f"/hp/{os.getpid()}/root{tmp_path}/new", f"/hp/{os.getpid()}/root{tmp_path}/new/below"):
        mounts = [shown, {"source": str(tmp_path / "v"), "target": target}]
        assert "Too many levels of symbolic links" in await outcome(bench, bench.spec("true", mounts=mounts))
        devices = [{"path": target, "number": os.makedev(7, 0)}]
        assert "Too many levels of symbolic links" in await outcome(
            bench, bench.spec("true", mounts=[shown], devices=devices)
        )
    assert not (tmp_path / "new").exists()


async def test_what_a_program_reads_from_is_no_file_of_a_volume(bench, tmp_path):
    volume = tmp_path / "v"
    volume.mkdir()
    (volume / "null").symlink_to("/etc/shadow")
    mounts = [{"source": str(volume), "target": "/dev"}]
    assert await outcome(bench, bench.spec("wc", "-c", mounts=mounts, uid=65534, gid=65534)) == "0"
    assert await outcome(bench, bench.spec("readlink", "/proc/self/fd/0", mounts=mounts)) == "/dev/null"


async def test_the_interpreter_that_enters_a_container_cannot_be_written_to_there(bench):
    """It is what /proc/self/exe means on the way to the program."""
    script = "import os, sys; print(sys.version_info.major, os.access('/proc/self/exe', os.W_OK))"
    assert await outcome(bench, bench.spec("/proc/self/exe", "-c", script)) == "3 False"


async def test_who_sees_the_processes_of_the_host_is_not_led_out_through_them(bench, tmp_path):
    (tmp_path / "secret").write_text("of the host")
    root = f"/proc/{os.getpid()}/root"
    said = await outcome(bench, bench.spec("cat", f".{tmp_path}/secret", host_pid=True, cwd=root))
    assert "working directory" in said or "make directory" in said
    await outcome(bench, bench.spec("true", host_pid=True, cwd=f"{root}{tmp_path}/new"))
    assert not (tmp_path / "new").exists()
    said = await outcome(bench, bench.spec(f"{root}/bin/echo", "executed", host_pid=True))
    assert said == f"exec: '{root}/bin/echo': Permission denied"


async def test_who_enters_is_not_led_out_either(bench):
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, bench.spec("sleep", "1000", host_pid=True))
    root = f"/proc/{os.getpid()}/root"
    with open(os.devnull, "r+b") as null:
        for request in (
            {"argv": ["true"], "cwd": root},
            {"argv": [f"{root}/bin/true"]},
            {"argv": ["true"], "cwd": "/no"},
        ):
            session = await runtime.exec(container, {**request, "env": {}}, [null.fileno()] * 3)
            assert "error" in await session.line()
            session.close()


async def test_a_device_in_a_volume_is_of_use_only_where_that_is_said(bench, tmp_path):
    volume = tmp_path / "v"
    volume.mkdir()
    os.mknod(volume / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    for has_devices, said in ((False, "Permission denied"), (True, "1")):
        mounts = [{"source": str(volume), "target": "/v", "has_devices": has_devices}]
        document = bench.spec("sh", "-c", "head -c 1 /v/zero | wc -c", mounts=mounts)
        assert said in await outcome(bench, document)
        document["mounts"][0] |= {"source": str(tmp_path), "sub_path": "v"}
        assert said in await outcome(bench, document)


async def test_the_node_of_a_block_volume_is_never_in_another_volume(bench, tmp_path):
    volume, number = tmp_path / "v", os.makedev(7, 250)
    volume.mkdir()
    mounts = [{"source": str(volume), "target": "/v"}]
    devices = [{"path": "/v/disk", "number": number, "gid": 1000}, {"path": "/dev/new/disk", "number": number}]
    document = bench.spec("stat", "-c", "%F %t,%T %a %g", "/v/disk", "/dev/new/disk", mounts=mounts, devices=devices)
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


async def test_no_other_volume_turns_the_path_of_a_read_only_one_elsewhere(bench, tmp_path):
    first, second, kept, decoy = volumes(tmp_path, "first", "second", "kept", "decoy")
    (first / "link").symlink_to("/mnt")
    (second / "link").symlink_to("/opt")
    mounts = [at("/e", first), at("/opt/v", decoy), at("/e/link/v", kept, read_only_last=True), at("/e/.", second)]
    document = bench.spec("sh", "-c", TRIES_TO_CHANGE.format("/mnt/v", "/opt/v"), mounts=mounts)
    assert (await bench.ran(bench.runtime(), bench.container(), document))[-2:] == ["as it was", "written"]
    assert (kept / "key").read_text() == "as it was\n"


async def test_a_read_only_volume_does_not_turn_its_own_path_elsewhere(bench, tmp_path):
    first, kept, decoy = volumes(tmp_path, "first", "kept", "decoy")
    (kept / "run").symlink_to("/run")  # as /var of most hosts
    mounts = [at("/e", first), at("/run/v", decoy), at("/e/run/v/../..", kept, read_only=True)]
    document = bench.spec("sh", "-c", TRIES_TO_CHANGE.format("/e", "/opt"), mounts=mounts)
    assert (await bench.ran(bench.runtime(), bench.container(), document))[-2:] == ["as it was", "written"]
    assert (kept / "key").read_text() == "as it was\n"


DETACHES = "import fcntl, os; fcntl.ioctl(os.open('/dev/mine', os.O_RDWR), 0x4C01, 0)"  # LOOP_CLR_FD needs no right


async def test_nobody_detaches_the_device_of_a_block_volume(bench, tmp_path):
    """Its number would be the next volume's, and so would the node in the container."""
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    device = loop.attach(image)
    try:
        devices = [{"path": "/dev/mine", "number": os.makedev(*device.device)}]
        runtime, container = bench.runtime(), bench.container()
        for rights in ({}, {"capabilities": [*KEPT_CAPABILITIES, SYS_ADMIN]}):
            said = await outcome(bench, bench.spec("python3", "-c", DETACHES, devices=devices, **rights), runtime)
            assert "Operation not permitted" in said
        await runtime.start(container, bench.spec("sleep", "1000", devices=devices))
        assert "Operation not permitted" in await entered(runtime, container, "python3", "-c", DETACHES)
        assert loop.find(image) == [device]
    finally:
        for one in loop.find(image):
            loop.detach(one)


async def test_user_namespaces_are_made_only_by_who_has_their_rights_already(bench):
    runtime = bench.runtime()
    for rights, said in (
        ({}, "Operation not permitted"),
        ({"uid": 65534, "gid": 65534}, "Operation not permitted"),
        ({"capabilities": [*KEPT_CAPABILITIES, SYS_ADMIN]}, "made"),
        ({"privileged": True}, "made"),
    ):
        assert said in await outcome(bench, bench.spec("unshare", "--user", "echo", "made", **rights), runtime)
    threads = "import threading; t = threading.Thread(target=print, args=['made']); t.start(); t.join()"
    assert await outcome(bench, bench.spec("python3", "-c", threads), runtime) == "made"


async def entered(runtime, container, *argv, **more):
    """What a program said in a container that runs."""
    read, write = os.pipe()
    session = await runtime.exec(container, {"argv": argv, "env": {}, **more}, [write] * 3)
    os.close(write)
    assert "pid" in await session.line()
    await session.line()
    session.close()
    with os.fdopen(read) as said:
        return said.read()


SESSION_KEYRING = "import ctypes; print(ctypes.CDLL(None).syscall({number}, 0, -3, 1))"  # KEYCTL_GET_KEYRING_ID


async def test_the_keys_of_the_agents_session_are_not_in_containers(bench):
    number = {"x86_64": 250}.get(os.uname().machine, 219)
    script = SESSION_KEYRING.format(number=number)
    own = ctypes.CDLL(None).syscall(number, 0, -3, 1)  # made, if there is none yet
    runtime, container = bench.runtime(), bench.container()
    await runtime.start(container, bench.spec("sleep", "1000", privileged=True))
    found = [await outcome(bench, bench.spec("python3", "-c", script, privileged=True), runtime)]
    found.append(await entered(runtime, container, "python3", "-c", script, privileged=True))
    keyrings = [int(one) for one in found]
    assert all(one > 0 for one in keyrings)
    assert len({own, *keyrings}) == 3
    assert await outcome(bench, bench.spec("python3", "-c", script), runtime) == "-1"  # none, without privileges
