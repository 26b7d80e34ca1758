"""From a fork to a program: what the program gets, and what is reported if there is none."""

import contextlib
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from moorage.node.runtime import launch, namespaces, sandbox, seccomp
from moorage.node.runtime.launch import Unusable, step

NOBODY = 65534


def run(become):
    """How a process ends: its exit code and its output, or why it failed."""
    read, fail = os.pipe()
    out, out_write = os.pipe()
    pid = launch.fork(lambda report: become(report, out_write), launch.Report(fail))
    os.close(fail)
    os.close(out_write)
    with os.fdopen(read, "rb") as why, os.fdopen(out, "rb") as said:
        reported, text = why.read(), said.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if reported:
        assert code == 127
        return launch.failure_from(reported)
    return code, text


def shell(out, script, **environment):
    sandbox.take_streams((out,) * 3)
    sandbox.execute(["/bin/sh", "-c", script], environment)


def test_a_program_gets_its_arguments_environment_and_streams():
    code, said = run(lambda _, out: shell(out, 'echo "$A-$B"; exit 3', A="x y", B="ü"))
    assert (code, said) == (3, "x y-ü\n")


def test_a_program_gets_no_other_files():
    with socket.socket() as kept:
        kept.set_inheritable(True)
        _, said = run(lambda _, out: shell(out, "exec ls /proc/self/fd"))
    assert sorted(said.split()) == ["0", "1", "2", "3"]  # the last is what ls reads


def test_files_are_closed_before_the_program_but_for_those_that_are_kept():
    read, first = os.pipe()
    second = os.dup(first)

    def become(report, out):
        sandbox.take_streams((out,) * 3)
        namespaces.close_all_but(report.fd, second)
        for fd, text in ((first, b"first"), (second, b"second")):
            with contextlib.suppress(OSError):
                os.write(fd, text)
        sandbox.execute(["/missing"], {})  # which is reported through what is kept in any case

    assert run(become).text == "exec: '/missing': No such file or directory"
    for fd in (first, second):
        os.close(fd)
    with os.fdopen(read, "rb") as said:
        assert said.read() == b"second"


def test_a_thread_is_moved_where_that_can_be_and_else_the_process(tmp_path):
    for name in ("1/tasks", "1/cgroup.procs", "2/cgroup.procs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sandbox.join([str(tmp_path / "1"), str(tmp_path / "2")])
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("*/*")} == {
        "1/tasks": "0",
        "1/cgroup.procs": "",
        "2/cgroup.procs": "0",
    }


def test_the_step_that_failed_is_named(tmp_path):
    def become(report, _):
        with step("make a"):
            os.mkdir(tmp_path / "a")
        report.is_created = True
        with step("make a again"):
            os.mkdir(tmp_path / "a")

    assert run(become) == ("make a again: File exists", True)


def test_an_error_that_was_not_foreseen_is_reported_too():
    def become(_report, _out):
        raise KeyError("a bug")

    assert run(become) == ("KeyError: 'a bug'", False)


def test_a_report_that_was_cut_short_is_a_failure_all_the_same():
    assert "ended early" in launch.failure_from(b'{"text": "ha').text


SPEC = {"argv": ["true"], "env": {}, "hostname": "h", "mounts": []}


@pytest.mark.parametrize(
    "more",
    [
        {"env": {"A": "x\0y"}},
        {"env": {"A\0": "x"}},
        {"argv": ["true", "\0"]},
        {"cwd": "/a\0"},
        {"mounts": [{"source": "/", "target": "/a\0"}]},
    ],
)
def test_a_zero_byte_is_refused(more):
    with pytest.raises(Unusable, match="zero byte"):
        sandbox.check({**SPEC, **more})


LONG = "/a" * 100_000


@pytest.mark.parametrize(
    "more",
    [
        {"cwd": LONG},
        {"mounts": [{"source": "/", "target": LONG}]},
        {"mounts": [{"source": "/", "target": "/v", "sub_path": LONG}]},
        {"devices": [{"path": LONG, "number": 0}]},
    ],
)
def test_a_path_that_is_too_long_is_refused_before_a_directory_is_made(more):
    with pytest.raises(Unusable, match="longer than 4095 bytes"):
        sandbox.check({**SPEC, **more})


def test_more_than_could_be_executed_is_reported():
    assert "Argument list too long" in run(lambda _, out: shell(out, "true", A="x" * (1 << 24))).text


def program(path, text, mode):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {text}\n")
    path.chmod(mode)


def search(name, *places):
    def become(_, out):
        sandbox.take_streams((out,) * 3)
        if os.geteuid() == 0:  # who may do everything
            os.setuid(NOBODY)
        sandbox.execute([name], {"PATH": ":".join(map(str, places))})

    return run(become)


@pytest.fixture
def places(tmp_path):
    for directory in (*tmp_path.parents, tmp_path):
        if str(directory).startswith(tempfile.gettempdir() + "/"):
            directory.chmod(0o755)
    found = [tmp_path / name for name in ("none", "closed", "open")]
    program(found[1] / "tool", "closed", 0o600)
    program(found[2] / "tool", "open", 0o755)
    return found


def test_a_program_is_searched_for_as_a_shell_does(places):
    none, closed, open_ = places
    assert search("tool", none, closed, open_) == (0, "open\n")
    assert search(str(open_ / "tool"), none) == (0, "open\n")
    assert search("tool", none, closed, none).text == "exec: 'tool': Permission denied"
    assert search("tool", none).text == "exec: 'tool': No such file or directory"
    assert search("tool", none, none).text == "exec: 'tool': No such file or directory"
    assert search(str(none / "tool"), open_).text.endswith("No such file or directory")


@pytest.mark.root
@pytest.mark.parametrize(
    ("spec", "kept"),
    [({"capabilities": [10]}, 1 << 10), ({"uid": NOBODY}, 0), ({"uid": NOBODY, "capabilities": []}, 0)],
)
def test_the_last_steps_to_a_program_are_made_with_its_rights_and_out_of_sight(spec, kept):
    """Out of sight of those who have the same rights: what is open could be theirs, or the host's."""
    (read, fail), (out, out_write), (go_read, go) = os.pipe(), os.pipe(), os.pipe()

    def become(_):
        sandbox.take_identity(spec)
        os.write(out_write, b"x")
        os.read(go_read, 1)
        os._exit(0)

    pid = launch.fork(become, launch.Report(fail))
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
def test_a_kernel_without_filters_of_system_calls_starts_programs_all_the_same(monkeypatch, is_known):
    if not is_known:
        monkeypatch.setattr(seccomp, "_SET_MODE_FILTER", 999)  # which no kernel knows

    def become(_, out):
        sandbox.take_identity({})
        shell(out, "grep ^Seccomp: /proc/self/status")

    assert run(become) == (0, f"Seccomp:\t{2 if is_known else 0}\n")
