"""Plans of system calls: both who make them do exactly what is written down, and say what failed."""

import errno
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.host.libc import AT_FDCWD
from moorage.node.runtime import rootfs, sandbox, seccomp
from moorage.node.runtime.launch import ANY, PROGRAM, Calls, Launcher, Unusable, errors

NOBODY = 65534
WRITE_NEW = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC


@pytest.fixture(scope="module", params=["compiled", "forked"])
def launcher(request):
    return forked() if request.param == "forked" else compiled()


@cache
def forked():
    return Launcher("")


@cache
def compiled():
    made = Launcher()
    if not made.is_compiled and shutil.which("cc") is None:
        pytest.skip("this machine has no C compiler, and so no launcher")
    assert made.is_compiled, f"{PROGRAM} was not made when the package was installed"
    return made


def run(launcher, write, **fds):
    """How a process ends that makes this plan: its exit code and what it said before, or why it failed."""
    read, fail = os.pipe()
    out, out_write = os.pipe()
    plan = launcher.plan(fail, out=out_write, **fds)
    write(plan)
    pid = launcher.launch(plan)
    os.close(fail)
    os.close(out_write)
    with os.fdopen(read, "rb") as why, os.fdopen(out, "rb") as said:
        told, text = why.read(), said.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if told:
        assert code == 127
        return plan.failure(told)
    return code, text


def shell(plan, script, **environment):
    sandbox.take_streams(plan, (plan.at["out"],) * 3)
    sandbox.execute(plan, ["/bin/sh", "-c", script], environment)


def test_a_program_gets_its_arguments_environment_and_streams(launcher):
    code, said = run(launcher, lambda plan: shell(plan, 'echo "$A-$B"; exit 3', A="x y", B="ü"))
    assert (code, said) == (3, "x y-ü\n")


def test_a_program_gets_no_other_files(launcher):
    with socket.socket() as kept:
        kept.set_inheritable(True)
        fd = kept.fileno()
        _, said = run(launcher, lambda plan: shell(plan, "exec ls /proc/self/fd"), more=fd)
    assert sorted(said.split()) == ["0", "1", "2", "3"]  # the last is what ls reads


def test_files_are_closed_before_the_program_but_for_those_that_are_kept(launcher):
    def write(plan):
        sandbox.take_streams(plan, (plan.at["out"],) * 3)
        plan.keep_only("second")
        for name in ("first", "second"):
            plan.do("write", plan.at[name], plan.data(name.encode()), 6, accept=errors(errno.EBADF), text="write")
        sandbox.execute(plan, ["/missing"], {})  # which is told through what is kept in any case

    read, first, second = *os.pipe(), os.open(os.devnull, os.O_RDONLY)
    os.dup2(first, second)
    assert run(launcher, write, first=first, second=second).text == "exec: '/missing': No such file or directory"
    for fd in (first, second):
        os.close(fd)
    with os.fdopen(read, "rb") as said:
        assert said.read() == b"second"


def test_results_are_arguments_of_later_calls(launcher, tmp_path):
    def write(plan):
        fds = [plan.get("openat", AT_FDCWD, str(tmp_path / name), WRITE_NEW, 0o600, text="open") for name in "ab"]
        for fd, text in zip(fds, (b"first", b"second"), strict=True):
            plan.do("write", fd, plan.data(text), len(text), text="write")
        plan.do("exit_group", 0, text="end")

    assert run(launcher, write)[0] == 0
    assert [(tmp_path / name).read_text() for name in "ab"] == ["first", "second"]


def test_descriptors_arrive_whatever_their_numbers_are(launcher, tmp_path):
    paths = [tmp_path / str(number) for number in range(5)]
    fds = {f"f{number}": os.open(path, WRITE_NEW) for number, path in enumerate(paths)}
    fds = dict(reversed(fds.items()))

    def write(plan):
        for name in fds:
            plan.do("write", plan.at[name], plan.data(name.encode()), 2, text="write")
        plan.do("exit_group", 0, text="end")

    assert run(launcher, write, **fds)[0] == 0
    assert [path.read_text() for path in paths] == ["f0", "f1", "f2", "f3", "f4"]
    for fd in fds.values():
        os.close(fd)


def test_a_thread_is_moved_where_that_can_be_and_else_the_process(launcher, tmp_path):
    for name in ("1/tasks", "1/cgroup.procs", "2/cgroup.procs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def write(plan):
        sandbox.join(plan, [str(tmp_path / "1"), str(tmp_path / "2")])
        plan.do("exit_group", 0, text="end")

    assert run(launcher, write)[0] == 0
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("*/*")} == {
        "1/tasks": "0",
        "1/cgroup.procs": "",
        "2/cgroup.procs": "0",
    }


def test_the_first_failure_ends_it_and_is_told_in_words(launcher, tmp_path):
    def write(plan):
        plan.do("mkdirat", AT_FDCWD, str(tmp_path / "a"), 0o700, text="make a")
        plan.do("mkdirat", AT_FDCWD, str(tmp_path / "a"), 0o700, text="make a again")
        plan.do("mkdirat", AT_FDCWD, str(tmp_path / "b"), 0o700, text="make b")

    step, text = run(launcher, write)
    assert text == "make a again: File exists"
    assert step == 2  # the first step of every plan is its own
    assert os.listdir(tmp_path) == ["a"]


def test_words_may_be_better_than_those_of_the_kernel(launcher, tmp_path):
    def write(plan):
        plan.words[errno.ENOENT] = "nobody has made it"
        plan.do("chdir", str(tmp_path / "missing"), text="enter it")

    assert run(launcher, write).text == "enter it: nobody has made it"


def test_what_is_accepted_goes_on_and_may_leave_steps_out(launcher, tmp_path):
    names = iter("abcd")

    def make(plan):
        plan.do("mkdirat", AT_FDCWD, str(tmp_path / next(names)), 0o700, text="make")

    def write(plan):
        make(plan)
        plan.do("chdir", str(tmp_path / "missing"), accept=errors(errno.ENOENT), skip=2, text="enter")
        make(plan)
        make(plan)
        make(plan)
        plan.do("chdir", str(tmp_path), accept=errors(errno.ENOENT), skip=1, text="enter")  # no error, nothing left out
        plan.do("mkdirat", AT_FDCWD, "e", 0o700, text="make")
        plan.do("chdir", str(tmp_path / "missing"), accept=errors(errno.EPERM), text="enter at last")

    assert run(launcher, write).text == "enter at last: No such file or directory"
    assert sorted(os.listdir(tmp_path)) == ["a", "d", "e"]


def test_an_unexpected_result_is_a_failure_without_an_error(launcher):
    read, write_end = os.pipe()
    os.close(write_end)
    failure = run(launcher, lambda plan: plan.do("read", plan.at["go"], plan.data(bytes(8)), 1, expect=1, text="left"),
                  go=read)  # fmt: skip
    os.close(read)
    assert failure.text == "left"


def test_an_error_beyond_those_that_can_be_accepted_is_one(launcher):
    def write(plan):
        plan.do("write", plan.at["to"], plan.data(b"x"), 1, accept=ANY, text="send")

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nowhere:
        assert run(launcher, write, to=nowhere.fileno()).text == "send: Destination address required"


def test_the_same_calls_many_times_are_written_once(launcher, tmp_path):
    umasks = Calls.of("umask", [(number,) for number in (0o77, 0o27)], text="umask")

    def write(plan):
        plan.do_all(umasks)
        plan.do("mkdirat", AT_FDCWD, str(tmp_path / "a"), 0o777, text="make")
        plan.do("exit_group", 0, text="end")

    assert run(launcher, write)[0] == 0
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750


def test_a_zero_byte_is_refused(launcher):
    with pytest.raises(Unusable, match="zero byte"):
        run(launcher, lambda plan: shell(plan, "true", A="x\0y"))


def test_more_than_could_be_executed_is_refused(launcher):
    with pytest.raises(Unusable, match="bytes"):
        run(launcher, lambda plan: shell(plan, "true", A="x" * (1 << 24)))


LONG = "/a" * 100_000


@pytest.mark.parametrize(
    "more",
    [
        {"cwd": LONG},
        {"mounts": [{"source": "/", "target": LONG}]},
        {"mounts": [{"source": "/", "target": "/v", "sub_path": LONG}]},
        {"devices": [{"path": LONG, "number": 0}]},
        {"env": {"PATH": ":".join("/a" for _ in range(100_000))}},
    ],
)
def test_what_is_too_long_is_refused_before_it_takes_the_memory(more):
    spec = {"argv": ["true"], "env": {}, "hostname": "h", "mounts": [], **more}
    origin = sandbox.SupervisorOrigin(0, 0, (1, 1), b"0", ())
    plan = forked().plan(2, go=0, template=0, origin=0, out=1, err=2)
    tracemalloc.start()
    try:
        with pytest.raises(Unusable, match="more than the 16777216 bytes"):
            sandbox.write(plan, spec, rootfs.Template(0, []), origin)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_what_is_said_of_a_long_path_does_not_take_the_square_of_its_length():
    spec = {"argv": ["true"], "env": {}, "hostname": "h", "mounts": [], "cwd": "/a" * 20_000}
    plan = forked().plan(2)
    tracemalloc.start()
    try:
        rootfs.finish(plan, spec)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20  # 400 MB of texts
    finally:
        tracemalloc.stop()


NOT_RUNNING = [(b"\x7fELF of another machine", 0o755), (b"", 0o755), (b"#!/bin/false\n", 0o755), (b"x", 0o644)]


@pytest.mark.parametrize(("content", "mode"), NOT_RUNNING)
def test_a_program_that_does_not_run_here_is_not_used(tmp_path, content, mode):
    program = tmp_path / "launcher"
    program.write_bytes(content)
    program.chmod(mode)
    made = Launcher(str(program))
    assert not made.is_compiled
    assert run(made, lambda plan: shell(plan, "echo still here")) == (0, "still here\n")


def test_what_is_executed_can_be_written_to_by_nobody():
    """A container can make whoever enters it execute this program once more, and open it."""
    made, executed = compiled(), []

    def write(plan):
        shell(plan, "exit 0")
        executed.append(made._program)

    assert run(made, write) == (0, "")
    assert not os.path.samefile(executed[0], PROGRAM)
    assert int(executed[0].rpartition("/")[2]) >= 16  # where no descriptor of a plan is put
    before = Path(executed[0]).read_bytes()
    with pytest.raises(PermissionError), open(executed[0], "r+b", buffering=0) as file:
        file.write(b"x")
    assert Path(executed[0]).read_bytes() == before == Path(PROGRAM).read_bytes()


def program(path, text, mode):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {text}\n")
    path.chmod(mode)


def search(launcher, name, *places):
    def write(plan):
        sandbox.take_streams(plan, (plan.at["out"],) * 3)
        if os.geteuid() == 0:  # who may do everything
            plan.do("setuid", NOBODY, text="become nobody")
        sandbox.execute(plan, [name], {"PATH": ":".join(map(str, places))})

    return run(launcher, write)


@pytest.fixture
def places(tmp_path):
    for directory in (*tmp_path.parents, tmp_path):
        if str(directory).startswith(tempfile.gettempdir() + "/"):
            directory.chmod(0o755)
    found = [tmp_path / name for name in ("none", "closed", "open")]
    program(found[1] / "tool", "closed", 0o600)
    program(found[2] / "tool", "open", 0o755)
    return found


def test_a_program_is_searched_for_as_a_shell_does(launcher, places):
    none, closed, open_ = places
    assert search(launcher, "tool", none, closed, open_) == (0, "open\n")
    assert search(launcher, str(open_ / "tool"), none) == (0, "open\n")
    assert search(launcher, "tool", none, closed, none).text == "exec: 'tool': Permission denied"
    assert search(launcher, "tool", none).text == "exec: 'tool': No such file or directory"
    assert search(launcher, "tool", none, none).text == "exec: 'tool': No such file or directory"
    assert search(launcher, str(none / "tool"), open_).text.endswith("No such file or directory")


@pytest.mark.root
@pytest.mark.parametrize(
    ("spec", "kept"),
    [({"capabilities": [10]}, 1 << 10), ({"uid": NOBODY}, 0), ({"uid": NOBODY, "capabilities": []}, 0)],
)
def test_the_last_steps_to_a_program_are_made_with_its_rights_and_out_of_sight(launcher, spec, kept):
    """Out of sight of those who have the same rights: what is open could be theirs, or the host's."""
    (read, fail), (out, out_write), (go_read, go) = os.pipe(), os.pipe(), os.pipe()
    plan = launcher.plan(fail, out=out_write, go=go_read)
    sandbox.take_identity(plan, spec)
    plan.do("write", plan.at["out"], plan.data(b"x"), 1, text="say that it is there")
    plan.do("read", plan.at["go"], plan.data(bytes(1)), 1, text="wait")
    plan.do("exit_group", 0, text="end")
    pid = launcher.launch(plan)
    assert os.read(out, 1) == b"x"
    sets = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Cap" in line)
    look = ["setpriv", f"--reuid={spec.get('uid', 0)}", "--clear-groups", "--bounding-set=-all,+net_bind_service"]
    looked = subprocess.run([*look, "ls", f"/proc/{pid}/root/"], capture_output=True, text=True, check=False)
    os.write(go, b"g")
    os.waitpid(pid, 0)
    for fd in (read, fail, out, out_write, go_read, go):
        os.close(fd)
    assert {name: int(value, 16) for name, value in sets.items() if name != "CapBnd"} == {
        "CapInh": 0, "CapPrm": kept, "CapEff": kept, "CapAmb": 0,
    }  # fmt: skip
    assert "Permission denied" in looked.stderr


@pytest.mark.root
@pytest.mark.parametrize("is_known", [True, False])
def test_a_kernel_without_filters_of_system_calls_starts_programs_all_the_same(launcher, monkeypatch, is_known):
    if not is_known:
        monkeypatch.setattr(seccomp, "_SET_MODE_FILTER", 999)  # which no kernel knows

    def write(plan):
        sandbox.take_identity(plan, {})
        shell(plan, "grep ^Seccomp: /proc/self/status")

    assert run(launcher, write) == (0, f"Seccomp:\t{2 if is_known else 0}\n")


NAMES = st.sampled_from(["a", "b", "a/c", "b/c"])
STEPS = st.tuples(
    st.sampled_from(["mkdir", "file", "unlink", "rmdir", "enter"]),
    NAMES,
    st.sets(st.sampled_from([errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY, errno.EISDIR])),
    st.integers(0, 2),
    st.sampled_from([-1, -1, 0, 7]),
)


def write_steps(plan, steps):
    for kind, name, accepted, skip, expected in steps:
        call, *arguments = {
            "mkdir": ("mkdirat", AT_FDCWD, name, 0o755),
            "file": ("mknodat", AT_FDCWD, name, 0o100644, 0),
            "unlink": ("unlinkat", AT_FDCWD, name, 0),
            "rmdir": ("unlinkat", AT_FDCWD, name, 0x200),
            "enter": ("chdir", name),
        }[kind]
        plan.do(call, *arguments, accept=errors(*accepted), skip=skip, expect=expected, text=f"{kind} {name}")
    plan.do("exit_group", 0, text="end")


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEPS, max_size=12))
def test_both_make_the_same_of_any_plan(steps):
    seen = []
    for launcher in (compiled(), forked()):
        with tempfile.TemporaryDirectory() as root:

            def write(plan, root=root):
                plan.do("chdir", root, text="begin")
                write_steps(plan, steps)

            outcome = run(launcher, write)
            tree = sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))
            seen.append((outcome, tree))
    assert seen[0] == seen[1]


def test_what_cannot_be_read_is_told():
    plan = forked().plan(2)
    assert "could not" in plan.failure(struct.pack("=ii", -1, 0)).text
