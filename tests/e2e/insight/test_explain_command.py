"""`moorage explain` and `moorage trace` as a person runs them: output, exit codes, failures."""

import asyncio
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.root

MOORAGE = [sys.executable, "-m", "moorage.cli.main"]


@pytest.fixture
def moorage(up):
    """Run the command against the stack; (exit code, standard output, standard error)."""

    def run(*words, kubeconfig=None):
        command = [*MOORAGE, *words, "--kubeconfig", str(kubeconfig or up / "kubeconfig")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


async def test_explain_tells_the_sentence_the_chain_the_evidence_and_the_step(stack, moorage):
    await stack.claim("data", "nowhere")
    await stack.pod("web", "data")
    await stack.check_cause("pod/web", "pod-claim-pending", last="claim-class-missing", evidence="ProvisioningFailed")
    code, text, _ = await asyncio.to_thread(moorage, "explain", "pod/web")
    assert code == 0
    assert text.startswith("pod/web: it waits for claim data to be bound — storage class 'nowhere' does not exist")
    assert "pod/web [Pending]" in text
    assert "pvc/data [Pending]: storage class 'nowhere' does not exist" in text
    assert "Evidence:\n  ProvisioningFailed (persistentvolume-controller" in text
    assert "Next step:\n  kubectl get storageclass\n" in text

    code, text, _ = await asyncio.to_thread(moorage, "explain", "pvc/data", "-o", "json")
    story = json.loads(text)
    assert (code, story["cause"], story["stuck"]) == (0, "claim-class-missing", True)
    assert story["chain"][0]["object"] == "pvc/data"
    assert story["next_step"] == "kubectl get storageclass"

    code, text, _ = await asyncio.to_thread(moorage, "explain")
    assert code == 0
    assert "pod/web: it waits for claim data" in text
    assert "\npvc/data" not in text  # it is told as a part of the pod's story
    code, text, _ = await asyncio.to_thread(moorage, "explain", "-o", "json")
    assert [one["object"] for one in json.loads(text)] == ["pod/web"]


async def test_watch_ends_when_it_is_resolved(stack, up):
    await stack.claim("data", None, size="64Mi")
    await stack.check_cause("pvc/data", "claim-first-consumer-no-pod")
    command = [*MOORAGE, "explain", "pvc/data", "--watch", "--kubeconfig", str(up / "kubeconfig")]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert b"waits for the first pod" in await asyncio.wait_for(process.stdout.readline(), 60)
    await stack.pod("web", "data")
    rest = (await asyncio.wait_for(process.stdout.read(), 60)).decode()
    assert await process.wait() == 0
    assert "nothing is wrong" in rest.splitlines()[-1]


async def test_nothing_is_stuck(stack, moorage):
    assert await asyncio.to_thread(moorage, "explain") == (0, "Nothing is stuck.\n", "")
    assert (await asyncio.to_thread(moorage, "explain", "-o", "json"))[1] == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "data"),
        ("explain", "ship/data"),
        ("explain", "pvc/"),
        ("explain", "pvc/data", "-o", "yaml"),
        ("explain", "--watch"),
        ("trace", "data"),
        ("trace", "pvc/data", "-o", "yaml"),
    ],
)
def test_bad_input_gets_a_sentence_and_exit_code_2(moorage, words):
    code, text, error = moorage(*words)
    assert (code, text) == (2, "")
    assert error.startswith("Error: ")
    assert "want" in error or "needs" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["explain", "trace"])
def test_an_object_that_is_not_there(moorage, command):
    code, told, error = moorage(command, "pvc/nope")
    assert (code, told) == (1, "")
    assert error.startswith("Error: there is no pvc/nope in namespace default")


@pytest.mark.parametrize("words", [("explain",), ("explain", "pvc/data"), ("trace", "pvc/data")])
def test_an_api_server_that_cannot_be_reached(moorage, tmp_path, words):
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    code, text, error = moorage(*words, kubeconfig=tmp_path / "kubeconfig")
    assert (code, text) == (1, "")
    assert error.startswith("Error: ")
    assert "127.0.0.1:9" in error
    assert len(error.splitlines()) == 1


async def test_trace_tells_who_did_what_and_where_the_time_went(stack, moorage, tmp_path):
    await stack.claim("data", None, size="64Mi")
    await stack.pod("web", "data")
    await stack.check_well("pod/web")
    file = tmp_path / "trace.json"
    code, text, error = await asyncio.to_thread(moorage, "trace", "pvc/data", "--perfetto", str(file))
    assert (code, error) == (0, "")
    order = ["created", "CreateVolume OK", "Scheduled: Success", "NodeStageVolume OK", "Started container"]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    assert "s until it could be used. Where the time went:" in text
    check_perfetto(json.loads(file.read_text()))

    code, text, _ = await asyncio.to_thread(moorage, "trace", "pod/web", "-o", "json")
    told = json.loads(text)
    assert told["is_done"]
    assert {"binder", "driver", "scheduler", "node agent", "provisioner"} <= {step["who"] for step in told["steps"]}
    calls = {step["what"]: step for step in told["steps"] if step["reason"] == "call"}
    assert calls["NodePublishVolume OK"]["took"] > 0
    assert sum(share["seconds"] for share in told["shares"]) == pytest.approx(told["seconds"])

    name = told["subjects"][2].removeprefix("pv/")
    code, text, _ = await asyncio.to_thread(moorage, "trace", f"pv/{name}", "-o", "json")
    assert code == 0
    assert "pod/web" in json.loads(text)["subjects"]


def check_perfetto(document):
    """What the Chrome trace event format asks of each event."""
    tracks = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "i")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            tracks[event["tid"]] = event["args"]["name"]
            continue
        assert event["tid"] in tracks
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] > 0
        else:
            assert event["s"] in ("t", "p", "g")
    assert {"driver", "binder", "waiting"} <= set(tracks.values())
    assert any(event["name"] == "NodeStageVolume OK" and event["ph"] == "X" for event in document["traceEvents"])


async def test_trace_of_a_snapshot_and_of_logs_that_are_not_there(stack, moorage):
    await stack.claim("data", "moorage-immediate", size="64Mi")
    await stack.check_well("pvc/data")
    await stack.snapshot("snap", cls=None)
    await stack.check_well("snapshot/snap")
    code, text, _ = await asyncio.to_thread(moorage, "trace", "snapshot/snap")
    assert code == 0
    assert text.index("CreateSnapshot OK") < text.index("SnapshotReady")
    code, _, error = await asyncio.to_thread(moorage, "trace", "pvc/data", "--logs", "/nowhere")
    assert (code, error) == (2, "Error: --logs /nowhere: there is no such directory\n")
