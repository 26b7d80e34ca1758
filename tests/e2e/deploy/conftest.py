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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE / "stage"))

INPUTS = ("src/moorage", "deploy/image", "requirements.txt")


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
def image_archive(cannot_run) -> Path:
    """What `make image` makes; built when its inputs have changed. MOORAGE_IMAGE names another to be tested."""
    with _one_at_a_time("image"):
        return _image_archive(cannot_run)


def _image_archive(cannot_run: Callable[[str], NoReturn]) -> Path:
    if given := os.environ.get("MOORAGE_IMAGE"):
        return Path(given)
    if os.geteuid() != 0:
        pytest.skip("needs root, to unpack packages")
    if shutil.which("mmdebstrap") is None:
        cannot_run("there is no mmdebstrap: the image cannot be made here; scripts/prepare dev installs it")
    return _built(ROOT, f"{_digest_of_inputs()}.oci.tar")


def _built(tree: Path, name: str, umask: int = 0o022, **environment: str) -> Path:
    """The image of a tree, from the last run if that made it."""
    cache = Path(tempfile.gettempdir()) / "moorage-image-cache"
    cache.mkdir(exist_ok=True, mode=0o700)
    archive = cache / name
    if not archive.exists():
        for old in cache.glob("*.oci.tar"):
            if old.name[:16] != name[:16]:
                old.unlink()
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


@pytest.fixture(scope="session")
def next_oci(oci, tmp_path_factory) -> "Oci":
    """An image of another version, made from a copy of this tree elsewhere, later, and with another umask."""
    tree = tmp_path_factory.mktemp("next version")
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
    with oci.layer() as layer:
        epoch = str(next(iter(layer)).mtime)
    surroundings = {"SOURCE_DATE_EPOCH": epoch, "TZ": "Asia/Tokyo", "TMPDIR": str(tree)}
    with _one_at_a_time("image"):
        archive = _built(tree, f"{_digest_of_inputs()}-next.oci.tar", 0o077, **surroundings)
    return Oci(archive)


@pytest.fixture(scope="session")
def next_rootfs(next_oci):
    """The root filesystem of the other version."""
    yield from _unpacked(next_oci)


def _unpacked(image: "Oci") -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="moo-rootfs-"))
    with image.layer() as layer:
        layer.extractall(directory, filter="tar")
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
