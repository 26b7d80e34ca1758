"""The pages that a newcomer follows, run as they are printed, at 80 and at 120 columns: they show what happens."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.walks import ROOT, Printed, Terminal, commands_of, differs

from moorage.host.safe_remove import remove_tree

pytestmark = pytest.mark.root

READING = ("kubectl get", "moorage explain", "moorage trace", "moorage volume", "ls ", "cat ", "findmnt ")
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}


def claim(name: str, storage_class: str) -> dict[str, object]:
    spec = {**CLAIM, "storageClassName": storage_class}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def pod(name: str, of_claim: str) -> dict[str, object]:
    mounts = [{"name": "v", "mountPath": "/data"}]
    container = {"name": "c", "image": "host", "command": ["sleep", "600"], "volumeMounts": mounts}
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": of_claim}}
    spec = {"terminationGracePeriodSeconds": 1, "containers": [container], "volumes": [volume]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Walk:
    """A cluster started as a page says, and two terminals beside it."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._cluster = Terminal(80, home)
        self._terminals = [Terminal(columns, home) for columns in (80, 120)]

    def up(self, printed: Printed) -> None:
        self._cluster.start(printed.command.replace(".venv/bin/moorage", "moorage"))
        said = self._cluster.until("the data stays\\.\n")
        assert differs(printed.shown + "\n…", said[said.index("Moorage is up") :]) == ""
        for terminal in self._terminals:
            terminal.run("export KUBECONFIG=/tmp/moor/kubeconfig")

    def have(self, *objects: dict[str, object]) -> None:
        environment = {**os.environ, "KUBECONFIG": str(self._home / "kubeconfig")}
        for each in objects:
            subprocess.run(
                ["kubectl", "create", "-f", "-"], input=json.dumps(each).encode(), env=environment, check=True
            )

    def follow(self, printed: Printed) -> None:
        """Run a command. One that only reads is repeated, at both widths, until it shows what the page shows."""
        reads = printed.command.startswith(READING)
        for terminal in self._terminals if reads else self._terminals[:1]:
            ends_at = time.monotonic() + 30
            while wrong := differs(printed.shown, text := terminal.run(printed.command)):
                assert reads, f"{printed.command}: {wrong}"
                assert time.monotonic() < ends_at, f"{printed.command}, {terminal.columns} columns: {wrong}"
                time.sleep(0.2)
            if printed.command.startswith("moorage"):
                prose = [line for line in text.splitlines() if "kubectl" not in line]
                assert [line for line in prose if len(line) > terminal.columns] == [], printed.command

    def close(self) -> None:
        try:
            self._cluster.interrupt()
            self._cluster.until("Stopped\\. Everything is kept in /tmp/moor|Interrupted", 90)
        finally:
            for terminal in (self._cluster, *self._terminals):
                terminal.close()


@pytest.fixture
def walk() -> Iterator[Walk]:
    home = Path(tempfile.mkdtemp(prefix="mo", dir="/tmp"))
    walking = Walk(home)
    yield walking
    walking.close()
    remove_tree(home)  # never through a mount that is left


def up_and_rest(page: str) -> tuple[Printed, list[Printed]]:
    """The command of a page that starts the cluster, and those after it."""
    found = commands_of(page)
    start = next(at for at, each in enumerate(found) if "moorage up" in each.command)
    return found[start], found[start + 1 :]


def test_the_tutorial_shows_what_happens(walk):
    start, rest = up_and_rest("docs/tutorial/first-volume.md")
    walk.up(start)
    assert len(rest) > 15
    for printed in rest:
        walk.follow(printed)


def test_the_readme_shows_what_happens(walk):
    start, rest = up_and_rest("README.md")
    walk.up(start)
    for line in start.shown.split("Try it:\n")[1].splitlines():
        command = line.strip().replace("kubectl get pods -w", "kubectl get pods")
        if command:
            walk.follow(Printed(command, "…"))
    walk.have(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "fast"},
            "provisioner": "csi.example.com",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        claim("a", "fast"),
        pod("p", "a"),
    )
    for printed in (each for each in rest if each.command.startswith("moorage")):
        walk.follow(printed)


def test_the_page_about_stuck_volumes_shows_what_happens(walk):
    walk.up(up_and_rest("README.md")[0])
    walk.have(claim("archive", "moorage-fast"), pod("backup", "archive"), claim("data", "moorage"), pod("web", "data"))
    printed = commands_of("docs/how-to/explain-a-stuck-volume.md")
    assert [each.command.split()[1] for each in printed] == ["explain", "trace"]
    for each in printed:
        walk.follow(each)


def test_the_demo_of_the_readme_shows_what_happens(tmp_path):
    (printed,) = [each for each in commands_of("README.md") if each.command == "make demo"]
    terminal = Terminal(80, tmp_path)
    try:
        text = terminal.run("moorage demo", 120)
    finally:
        terminal.close()
    titles = [line for line in printed.shown.splitlines() if line and not line.startswith(" ")]
    assert differs(" … ".join(titles), text) == ""


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/first-volume.md", "docs/how-to/clean-up.md"])
def test_pages_never_end_processes_by_a_broad_name(page):
    assert "pkill" not in (ROOT / page).read_text()


def test_a_page_that_shows_something_else_is_noticed():
    same: Callable[[str, str], bool] = lambda shown, printed: differs(shown, printed) == ""  # noqa: E731
    assert same("pvc-…  Bound  3s\n", "pvc-6f7ad0b4  Bound   12s")
    assert same("one\n…\nlast 1", "one\ntwo\nthree\nlast 7")
    assert not same("Bound", "Pending")
    assert not same("one\nlast", "one\ntwo\nlast")
    assert same("", "anything")
