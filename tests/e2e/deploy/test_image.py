"""The image: what is in it, what is not, and that the plugin inside it serves volumes with the tools it brings."""

import json
import shutil
import stat
import subprocess
import sys

import pytest
from next_version import NEXT
from tests.support.plugin_walk import MIB, Walk, walk

import moorage
from moorage.cluster.layout import DataLayout
from moorage.cluster.pool import ensure_pool, release_pool
from moorage.csi.client import CsiClient
from moorage.host import loop, mountinfo, mounts

pytestmark = pytest.mark.root


def test_the_archive_is_an_image_of_this_version_that_runs_as_nobody(oci):
    (entry,) = oci.index["manifests"]
    assert json.loads(oci.files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    assert entry["annotations"]["io.containerd.image.name"] == f"localhost/moorage:{moorage.__version__}"
    config = oci.config["config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["/usr/bin/moorage"]
    assert config["Labels"]["org.opencontainers.image.version"] == moorage.__version__


def test_it_is_small_and_has_no_compiler_installer_or_foreign_owner(oci):
    (layer,) = oci.manifest["layers"]
    assert layer["size"] < 64 * MIB
    with oci.layer() as tar:
        members = tar.getmembers()
    names = {member.name for member in members}
    programs = {name.rpartition("/")[2] for name in names if name.startswith(("usr/bin/", "usr/sbin/"))}
    assert not programs & {"gcc", "cc", "ld", "as", "make", "pip", "pip3", "apt", "apt-get", "dpkg", "perl", "curl"}
    packages = {name.split("/")[4] for name in names if name.startswith("usr/lib/python3/dist-packages/")}
    assert not packages & {"pip", "setuptools", "kubernetes", "pytest", "wheel"}
    assert {(member.uid, member.gid) for member in members} == {(0, 0)}
    assert len({member.mtime for member in members}) == 1
    powerful = [m.name for m in members if m.isfile() and m.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH)]
    assert powerful == []


def test_the_same_inputs_give_the_same_bytes_elsewhere_and_later(oci, next_oci):
    """The other image was made in another folder, later, and with another umask; only its version is another."""

    def content(image) -> dict[str, tuple]:
        with image.layer() as tar:
            return {
                m.name: (m.mode, m.type, m.linkname, m.mtime, tar.extractfile(m).read() if m.isfile() else b"")
                for m in tar
            }

    ours, theirs = content(oci), content(next_oci)
    assert list(ours) == list(theirs)
    changed = {name for name in ours if ours[name] != theirs[name]}
    sources = {f"usr/lib/python3/dist-packages/{name.removeprefix('src/')}" for name in NEXT}
    assert {name for name in changed if name.endswith(".py")} == sources
    assert {name.rpartition("/")[2].partition(".")[0] for name in changed} == {"__init__", "records"}
    assert len(changed) == 2 * len(sources), "each source and what it compiles to, and nothing else"


def test_other_readers_of_the_format_take_it(image_archive, cannot_run):
    if shutil.which("skopeo") is None:
        cannot_run("there is no skopeo")
    command = ["skopeo", "inspect", "--override-os=linux", f"oci-archive:{image_archive}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["Labels"]["org.opencontainers.image.title"] == "moorage"


@pytest.fixture
def plugin_in_image(rootfs, short_path):
    """The plugin of the image on an XFS pool, in a root and namespaces of its own; only its socket leads to it."""
    from container_entry import __file__ as entry

    layout = DataLayout(short_path)
    ensure_pool(layout, None, 3 << 30)
    kubelet = short_path / "k"
    kubelet.mkdir()
    mounts.bind(kubelet, kubelet)
    subprocess.run(["mount", "--make-shared", str(kubelet)], check=True)
    for part in ("root", "upper", "work"):
        (short_path / "c" / part).mkdir(parents=True)
    endpoint = f"unix://{kubelet}/csi.sock"
    spec = {
        **{part: str(short_path / "c" / part) for part in ("root", "upper", "work")},
        "image": str(rootfs),
        "mounts": [
            {"source": str(kubelet), "target": str(kubelet), "read_only": False, "propagation": "Bidirectional"},
            {"source": str(layout.pool), "target": "/pool", "read_only": False, "propagation": "None"},
            {"source": "/dev", "target": "/dev", "read_only": False, "propagation": "None"},
        ],
        "privileged": True,
        "capabilities": [],
        "user": 0,
        "group": 0,
        "no_new_privileges": False,
        "read_only_root": True,
        "relay_port": 0,
        "argv": ["/usr/bin/moorage", "plugin", f"--endpoint={endpoint}", "--node-id=n", "--pool=/pool"],
        "env": {"PATH": "/nowhere"},  # the plugin knows where its tools are
    }
    with (short_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, entry, json.dumps(spec)], stdout=log, stderr=log)
    yield endpoint, kubelet
    process.terminate()
    ended = process.wait(30)
    mounts.unmount_all(kubelet)
    left = loop.attached(layout.pool)
    release_pool(layout)
    assert ended == 0, (short_path / "log").read_text()
    assert left == []


async def test_the_plugin_in_the_image_carries_every_kind_of_volume_through_its_life(plugin_in_image):
    endpoint, kubelet = plugin_in_image
    async with CsiClient(endpoint, timeout_s=60) as client:
        await client.wait_ready(60)
        for kind, filesystem in (
            ("image", "ext4"),
            ("image", "xfs"),
            ("image", "btrfs"),
            ("image", "block"),
            ("directory", ""),
        ):
            steps: list[str] = []
            await walk(
                Walk(
                    client,
                    kubelet / f"{kind}-{filesystem}",
                    kind=kind,
                    filesystem=filesystem,
                    name=f"{kind}{filesystem}",
                    show=lambda name, found, seconds, steps=steps: steps.append(name),
                )
            )
            assert {"create", "restore", "delete"} <= set(steps), f"{kind} {filesystem}: {steps}"
    assert [m.target for m in mountinfo.mounts_below(kubelet) if m.target != str(kubelet)] == []
