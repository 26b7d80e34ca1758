"""The command `moorage check`: what it prints and writes, and what it leaves when it ends early."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.mutants.catalogue import MUTANTS
from tests.support.mutants.running import Mutant, no_bug, running

from moorage.conformance.process import CannotRestart, listener_of
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.endpoint import is_live
from moorage.host import mountinfo
from moorage.testing import until

pytestmark = pytest.mark.root

FOLDERS = Path(__file__).parents[3] / "examples" / "drivers" / "folders.py"
COMMAND = (sys.executable, "-m", "moorage.cli.main", "check")


def start(endpoint: str, *words: str) -> "subprocess.Popen[str]":
    command = [*COMMAND, "--endpoint", endpoint, "--size", "16Mi", "--block", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def checked(mutant: Mutant, *words: str) -> tuple[int, str, str]:
    process = start(f"unix://{mutant.path}", *words)
    out, err = await asyncio.to_thread(process.communicate, timeout=120)
    assert "Traceback" not in out + err
    return process.returncode, out, err


def test_a_missing_or_dead_socket_is_an_error_at_once(tmp_path):
    process = start(f"unix://{tmp_path}/none.sock")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("Error: there is no socket at")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(tmp_path / "left.sock"))
    process = start(f"unix://{tmp_path}/left.sock")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "no process listens on" in err


async def test_a_failure_shows_its_calls_and_is_in_every_report(tmp_path):
    async with running(MUTANTS["create-wrong-code"]) as mutant:
        files = ["--html", str(tmp_path / "report.html"), "--junit", str(tmp_path / "report.xml")]
        code, out, _ = await checked(mutant, "--only", "CreateVolume.needs-*", *files)
        as_json = await checked(mutant, "--only", "CreateVolume.needs-*", "-o", "json")
    assert code == 1
    assert "FAIL CreateVolume.needs-name (wrong answer)" in out
    assert "expected: INVALID_ARGUMENT" in out
    assert "came back INTERNAL planted" in out
    assert "moorage csi CreateVolume capacity_range.required_bytes" in out
    assert "1 passed, 1 failed" in out
    suite = ElementTree.fromstring((tmp_path / "report.xml").read_text())
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    page = (tmp_path / "report.html").read_text()
    assert "CreateVolume.needs-name (wrong answer)" in page
    assert "moorage csi CreateVolume" in page
    [failed] = [result for result in json.loads(as_json[1]) if result["result"] == "failed"]
    assert (failed["id"], failed["kind"], failed["expected"]) == (
        "CreateVolume.needs-name",
        "wrong answer",
        "INVALID_ARGUMENT",
    )
    assert failed["calls"][0]["code"] == "INTERNAL"


async def test_a_crash_that_nothing_repairs_ends_the_run_and_names_the_call():
    async with running(MUTANTS["delete-unknown-crashes"]) as mutant:
        code, out, _ = await checked(mutant, "--only", "DeleteVolume.*", "--seed", "1")
    assert code == 1
    assert "FAIL DeleteVolume.unknown-volume (crash)" in out
    assert "the driver crashed during DeleteVolume" in out
    assert out.count("FAIL") == 1
    assert "not run because DeleteVolume.unknown-volume failed" in out


async def test_ctrl_c_removes_what_the_checks_had_made():
    seen = asyncio.Event()

    async def slow(call):
        answer = await call.forward()
        seen.set()
        await asyncio.sleep(0.5)
        return answer

    planted = replace(no_bug(), mutation=slow, on=frozenset({"NodePublishVolume"}), block=False)
    async with running(planted) as mutant:
        work = mutant.directory / "work"
        process = start(f"unix://{mutant.path}", "--only", "Data.*", "--workdir", str(work))
        await asyncio.wait_for(seen.wait(), 60)
        assert mountinfo.mounts_below(work)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 130
        assert "interrupted" in out
        assert "Traceback" not in out + err
        assert mountinfo.mounts_below(work) == []
        assert list(work.iterdir()) == []
        async with CsiClient(f"unix://{mutant.path}") as client:

            async def is_empty() -> bool:
                return not (await client.ListVolumes(pb.ListVolumesRequest())).entries

            await until(is_empty)


async def test_a_volume_that_was_there_before_is_never_deleted():
    """The driver answers a volume of its owner for every name."""

    async def mine(call):
        answer = await call.forward()
        if "id" in call.state:
            answer.volume.volume_id = call.state["id"]
        call.state["id"] = answer.volume.volume_id
        return answer

    async with running(replace(no_bug(), mutation=mine, on=frozenset({"CreateVolume"}))) as mutant:
        async with CsiClient(f"unix://{mutant.path}") as client:
            mode = pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
            capability = pb.VolumeCapability(block=pb.VolumeCapability.BlockVolume(), access_mode=mode)
            request = pb.CreateVolumeRequest(name="precious", volume_capabilities=[capability])
            precious = (await client.CreateVolume(request)).volume.volume_id
        code, out, _ = await checked(mutant, "--only", "CreateVolume.*", "--only", "DeleteVolume.*")
        assert code == 1
        assert "which was there before the run" in out
        async with CsiClient(f"unix://{mutant.path}") as client:
            left = [entry.volume.volume_id for entry in (await client.ListVolumes(pb.ListVolumesRequest())).entries]
        assert precious in left


async def test_a_driver_is_killed_and_started_again_with_its_command(tmp_path):
    endpoint = f"unix://{tmp_path}/csi.sock"
    words = [sys.executable, str(FOLDERS), "--endpoint", endpoint, "--state-dir", str(tmp_path / "state")]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    await until(lambda: is_live(tmp_path / "csi.sock"))
    only = ["--only", "Restart.keeps-volumes", "--restart-command", shlex.join(words)]
    command = [*COMMAND, "--endpoint", endpoint, *only]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
    last = listener_of(tmp_path / "csi.sock")
    os.kill(last, signal.SIGTERM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert first.wait(30) == -signal.SIGKILL
    assert last != first.pid


def test_this_process_is_never_taken_for_the_driver(tmp_path):
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(os.fspath(tmp_path / "csi.sock"))
        ours.listen()
        with pytest.raises(CannotRestart, match="not visible from here"):
            listener_of(tmp_path / "csi.sock")


def test_the_list_names_every_check_without_a_driver():
    done = subprocess.run([*COMMAND, "--list"], capture_output=True, text=True, timeout=60, check=True)
    assert "NodePublishVolume.read-only" in done.stdout
    assert len(done.stdout.splitlines()) > 200
