"""The image's root filesystem, made once for all tests and kept for the next run, and a stage for the manifests."""

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE / "stage"))

INPUTS = ("src/moorage", "deploy/image", "requirements.txt")
CACHE = Path(tempfile.gettempdir()) / "moorage-image-cache"


def _digest_of_inputs() -> str:
    digest = hashlib.sha256()
    for name in INPUTS:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """Held against other processes of this test run, and other runs on this machine."""
    with open(Path(tempfile.gettempdir()) / f"moorage-deploy-{what}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def images(request, cannot_run, tmp_path_factory) -> dict[str, Path]:
    """Archives that are built, side by side, when their inputs have changed: `this` is what `make image` makes, `next`
    is there when a test of this run wants it. MOORAGE_IMAGE names another to be tested."""
    digest = _digest_of_inputs()
    if given := os.environ.get("MOORAGE_IMAGE"):
        made = {"this": lambda: Path(given)}
    elif os.geteuid() != 0:
        pytest.skip("needs root, to unpack packages")
    elif shutil.which("mmdebstrap") is None:
        cannot_run("there is no mmdebstrap: the image cannot be made here; scripts/prepare dev installs it")
    else:
        made = {"this": lambda: _built(ROOT, f"{digest}.oci.tar")}
    if any("next_oci" in item.fixturenames for item in request.session.items):
        tree = tmp_path_factory.mktemp("next version")
        known = Path(given) if given else CACHE / f"{digest}.oci.tar"
        epoch = _epoch_of(Oci(known)) if known.exists() else _epoch_of_inputs()
        made["next"] = lambda: _built_next(tree, f"{digest}-next.oci.tar", epoch)
    with _one_at_a_time("image"), ThreadPoolExecutor() as threads:
        running = {name: threads.submit(make) for name, make in made.items()}
        return {name: future.result() for name, future in running.items()}


@pytest.fixture(scope="session")
def image_archive(images) -> Path:
    return images["this"]


def _built(tree: Path, name: str, umask: int = 0o022, **environment: str) -> Path:
    """The image of a tree, from the last run if that made it."""
    CACHE.mkdir(exist_ok=True, mode=0o700)
    archive = CACHE / name
    if not archive.exists():
        for old in CACHE.glob("*.oci.tar"):
            if old.name[:16] != name[:16]:
                old.unlink(missing_ok=True)
        building = archive.with_suffix(".part")
        done = subprocess.run(
            [tree / "deploy/image/build", building], capture_output=True, text=True, check=False, timeout=280,
            env={**os.environ, "VENV": sys.prefix, **environment}, umask=umask,
        )  # fmt: skip
        if "apt-get update" in done.stderr:
            pytest.skip(f"Debian's packages cannot be reached: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
        building.rename(archive)
    return archive


def _epoch_of_inputs() -> str:
    """The time that an image's files have unless told otherwise: that of the last commit that touched its inputs."""
    command = ["git", "log", "-1", "--format=%ct", "--", "src", "deploy/image", "requirements.txt"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "0"


def _epoch_of(image: "Oci") -> str:
    with image.layer() as layer:
        return str(next(iter(layer)).mtime)


def _built_next(tree: Path, name: str, epoch: str) -> Path:
    """An image of another version, made from a copy of this tree elsewhere, later, and with another umask."""
    if not (CACHE / name).exists():
        _write_next(tree)
        time.sleep(2)  # a time that got into its files would be another than in those of its neighbour
    surroundings = {"SOURCE_DATE_EPOCH": epoch, "TZ": "Asia/Tokyo", "TMPDIR": str(tree)}
    return _built(tree, name, 0o077, **surroundings)


def _write_next(tree: Path) -> None:
    for name in (*INPUTS, "pyproject.toml"):
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
        else:
            shutil.copy(source, target)
    from next_version import NEXT

    for name, (old, new) in NEXT.items():
        text = (tree / name).read_text()
        assert text.count(old) == 1, name
        (tree / name).write_text(text.replace(old, new))


@pytest.fixture(scope="session")
def next_oci(images) -> "Oci":
    return Oci(images["next"])


@pytest.fixture(scope="session")
def next_rootfs(next_oci):
    """The root filesystem of the other version."""
    yield from _unpacked(next_oci)


def _unpacked(image: "Oci") -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="moo-rootfs-"))
    with image.layer() as layer:
        layer.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python before 3.11.4 has none
        layer.extractall(directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def image_manifest(image_archive) -> dict:
    return Oci(image_archive).manifest


@pytest.fixture(scope="session")
def oci(image_archive) -> "Oci":
    return Oci(image_archive)


class Oci:
    """An OCI archive, read as a runtime reads it: by the digests in its index."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        self.index = json.loads(self.files["index.json"])
        self.manifest = json.loads(self.blob(self.index["manifests"][0]))
        self.config = json.loads(self.blob(self.manifest["config"]))

    def blob(self, descriptor: dict) -> bytes:
        algorithm, _, digest = descriptor["digest"].partition(":")
        data = self.files[f"blobs/{algorithm}/{digest}"]
        assert hashlib.sha256(data).hexdigest() == digest
        assert len(data) == descriptor["size"]
        return data

    def layer(self) -> tarfile.TarFile:
        (descriptor,) = self.manifest["layers"]
        return tarfile.open(fileobj=io.BytesIO(self.blob(descriptor)))


@pytest.fixture(scope="session")
def rootfs(oci):
    """The root filesystem of the image."""
    yield from _unpacked(oci)


@pytest.fixture
def short_path():
    """A short path: sockets end at 107 characters."""
    directory = Path(tempfile.mkdtemp(prefix="moo-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def stage(short_path, rootfs, cannot_run):
    if shutil.which("kubectl") is None:
        cannot_run("there is no kubectl on the PATH")
    from real_stage import Stage

    with Stage(short_path, rootfs) as running:
        yield running
