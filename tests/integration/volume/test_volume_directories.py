"""Directory volumes in a stream: every kind of file comes back as it was, and nothing comes out of its place."""

import hashlib
import json
import os
import stat
import subprocess
import sys
import tarfile
import threading

import pytest

from moorage.host.dir_walk import opened
from moorage.host.extents import data_ranges
from moorage.storage import CreateSnapshot, CreateVolume, NameTaken, Pool, PoolConfig, VolumeKind
from moorage.storage.errors import InvalidValue
from moorage.storage.ids import id_from
from moorage.storage.transfer.export import ChangedMeanwhile, export_to_file, export_to_pipe, subject_of
from moorage.storage.transfer.import_ import ImportRequest, import_stream
from moorage.storage.transfer.stream import FramedBytes, StreamCut, StreamDamaged, StreamReader, scan
from moorage.storage.transfer.unfinished import unfinished
from moorage.storage.transfer.unpack import unpack
from moorage.storage.trees import copy_tree, make_socket

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture
def pools(tmp_path):
    with (
        Pool.open(PoolConfig("here", tmp_path / "here", background=False)) as here,
        Pool.open(PoolConfig("there", tmp_path / "there", background=False)) as there,
    ):
        yield here, there


def filled(pool, name="d"):
    """A directory volume with one of everything."""
    volume = pool.create_volume(CreateVolume(name, 64 * MIB, kind=VolumeKind.DIRECTORY))
    root = volume.data
    (root / "folder" / "deep").mkdir(parents=True)
    (root / "folder" / "plain").write_bytes(os.urandom(3 * MIB + 17))
    (root / "empty").touch()
    with open(root / "sparse", "wb") as file:
        file.seek(20 * MIB)
        file.write(os.urandom(5000))
        file.truncate(40 * MIB)
    with open(root / "hole", "wb") as file:
        file.truncate(10 * MIB)
    os.link(root / "folder" / "plain", root / "linked")
    os.symlink("folder/plain", root / "link")
    os.symlink("/etc", root / "outside")
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "disk", stat.S_IFBLK | 0o660, os.makedev(7, 99))
    with opened(root) as top:
        make_socket(top, "socket")
    os.mkdir(root / ("long" * 40))
    (root / ("long" * 40) / ("name" * 50)).write_text("long")
    (root / "žluťoučký").write_text("unicode")
    with open(os.fsencode(root) + b"/\xff\xfe", "wb") as file:
        file.write(b"no unicode")
    os.setxattr(root / "empty", "user.binary", bytes(range(256)))
    os.setxattr(root / "empty", "user.a=b%c", b"odd name")
    subprocess.run(["setfacl", "-m", "u:1234:rw", root / "folder" / "plain"], check=True)
    subprocess.run(["setfacl", "-d", "-m", "g:4321:rx", root / "folder"], check=True)
    os.chown(root / "empty", 1000, 2_000_000_000)
    os.chmod(root / "empty", 0o4755)
    os.utime(root / "empty", ns=(1, 1_600_000_000_123_456_789))
    os.chmod(root, 0o2770)
    return volume


def told(root):
    """Everything about a tree that must be kept."""
    found, links = {}, {}
    for directory, folders, names in os.walk(os.fsencode(root)):
        for path in (directory, *(os.path.join(directory, name) for name in (*folders, *names))):
            info = os.lstat(path)
            name = os.path.relpath(path, os.fsencode(root))
            kind = stat.S_IFMT(info.st_mode)
            content, places = None, None
            if kind == stat.S_IFREG:
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
                    places = [(piece.offset, piece.length) for piece in data_ranges(file.fileno())]
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)
            if info.st_nlink > 1 and kind != stat.S_IFDIR:
                links.setdefault(info.st_ino, set()).add(name)
            attributes = {
                key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
            }
            facts = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_rdev)
            found[name] = (facts, content, places, attributes, info.st_size if kind == stat.S_IFREG else 0)
    return found, sorted(map(sorted, links.values()))


def imported(pool, path, **request):
    with open(path, "rb") as file:
        return import_stream(pool, file.fileno(), ImportRequest(**request))


def test_every_kind_of_file_comes_back_as_it_was(pools, tmp_path):
    here, there = pools
    volume = filled(here)
    before = told(volume.data)
    export_to_file(subject_of(here, volume), tmp_path / "stream")
    assert (tmp_path / "stream").stat().st_size < 8 * MIB  # holes are left out
    done = imported(there, tmp_path / "stream")
    assert done.volume.kind is VolumeKind.DIRECTORY
    assert (done.volume.name, done.volume.size_bytes) == ("d", 64 * MIB)
    assert told(done.volume.data) == before
    assert there.volumes.get(done.volume.id).data.is_dir()
    assert unfinished(there) == []


def test_a_snapshot_of_a_directory_is_exported_and_the_same_twice(pools, tmp_path):
    here, there = pools
    volume = filled(here)
    cut = here.create_snapshot(CreateSnapshot("s", volume.id))
    (volume.data / "later").write_text("not in it")
    for name in ("one", "two"):
        export_to_file(subject_of(here, cut), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    done = imported(there, tmp_path / "one", name="other")
    assert told(done.volume.data) == told(cut.data)
    with pytest.raises(InvalidValue, match="no blocks to compare"):
        subject_of(here, cut, cut)


def test_gnu_tar_reads_what_is_inside(pools, tmp_path):
    here, _ = pools
    volume = filled(here)
    export_to_file(subject_of(here, volume), tmp_path / "stream")
    with open(tmp_path / "stream", "rb") as file, open(tmp_path / "archive.tar", "wb") as archive:
        framed = FramedBytes(StreamReader(file.fileno()))
        while block := framed.read():
            archive.write(block)
    (tmp_path / "out").mkdir()
    flags = ["--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "-S", "-p"]
    subprocess.run(["tar", "-x", "-C", tmp_path / "out", *flags, "-f", tmp_path / "archive.tar"], check=True)
    assert (tmp_path / "out" / "sparse").read_bytes() == (volume.data / "sparse").read_bytes()
    assert (tmp_path / "out" / "sparse").stat().st_blocks * 512 < MIB
    assert os.path.samefile(tmp_path / "out" / "linked", tmp_path / "out" / "folder" / "plain")
    assert os.getxattr(tmp_path / "out" / "empty", "user.binary") == bytes(range(256))


@pytest.mark.parametrize("cut", [100, MIB + 5000, 2 * MIB + 9000])
def test_an_export_cut_off_goes_on_to_the_same_file(pools, tmp_path, cut):
    here, _ = pools
    subject = subject_of(here, filled(here))
    export_to_file(subject, tmp_path / "whole")
    raw = (tmp_path / "whole").read_bytes()
    (tmp_path / "again.partial").write_bytes(raw[:cut])
    done = export_to_file(subject, tmp_path / "again", resume=True)
    assert (tmp_path / "again").read_bytes() == raw
    assert (done.resumed_at > 0) is (cut > MIB)


def test_a_pipe_that_broke_goes_on_where_it_was(pools, tmp_path):
    here, _ = pools
    subject = subject_of(here, filled(here))
    export_to_file(subject, tmp_path / "whole")
    reading, writing = os.pipe()
    got = []

    def receive():
        with open(reading, "rb") as file:
            got.append(file.read())

    thread = threading.Thread(target=receive)
    thread.start()
    export_to_pipe(subject, writing, skip=12345)
    os.close(writing)
    thread.join()
    assert got == [(tmp_path / "whole").read_bytes()[12345:]]


def test_a_stream_that_was_cut_or_changed_leaves_no_volume_and_can_come_again(pools, tmp_path):
    here, there = pools
    volume = filled(here)
    export_to_file(subject_of(here, volume), tmp_path / "stream")
    raw = (tmp_path / "stream").read_bytes()
    (tmp_path / "cut").write_bytes(raw[:-20])
    with pytest.raises(StreamCut):
        imported(there, tmp_path / "cut")
    (tmp_path / "changed").write_bytes(raw[: 2 * MIB] + bytes([raw[2 * MIB] ^ 1]) + raw[2 * MIB + 1 :])
    with pytest.raises(StreamDamaged):
        imported(there, tmp_path / "changed")
    assert there.volumes.page().items == ()
    assert told(imported(there, tmp_path / "stream").volume.data) == told(volume.data)
    with pytest.raises(NameTaken):
        imported(there, tmp_path / "stream")


def test_a_volume_that_changes_during_its_export_is_noticed(pools, tmp_path):
    here, _ = pools
    volume = filled(here)
    subject = subject_of(here, volume)
    (volume.data / "folder" / "deep" / "new").write_text("meanwhile")
    with pytest.raises(ChangedMeanwhile):
        export_to_file(subject, tmp_path / "stream")
    assert not (tmp_path / "stream").exists()
    with open(tmp_path / "stream.partial", "rb") as file:
        found = scan(file.fileno())
    assert found is not None
    assert not found.is_complete


def _hostile(kind, path):
    with tarfile.open(path, "w") as tar:

        def add(name, **fields):
            info = tarfile.TarInfo(name)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info)

        add(".", type=tarfile.DIRTYPE)
        if kind == "through a link":
            add("way", type=tarfile.SYMTYPE, linkname="/tmp")
            add("way/planted")
        elif kind == "upwards":
            add("../planted")
        elif kind == "absolute":
            add("/tmp/planted")
        elif kind == "twice":
            add("a")
            add("a")
        elif kind == "link outside":
            add("a", type=tarfile.LNKTYPE, linkname="/etc/passwd")


@pytest.mark.parametrize("kind", ["through a link", "upwards", "absolute", "twice", "link outside"])
def test_no_archive_leads_out_of_the_directory(tmp_path, kind):
    _hostile(kind, tmp_path / "bad.tar")
    (tmp_path / "target").mkdir()
    with open(tmp_path / "bad.tar", "rb") as source, pytest.raises(StreamDamaged):
        unpack(source, str(tmp_path / "target"), lambda done: None)
    assert not os.path.exists("/tmp/planted")
    assert not (tmp_path / "planted").exists()


def test_a_copy_of_a_tree_and_an_imported_one_are_alike(pools, tmp_path):
    here, there = pools
    volume = filled(here)
    (tmp_path / "copy").mkdir()
    copy_tree(str(volume.data), str(tmp_path / "copy"))
    export_to_file(subject_of(here, volume), tmp_path / "stream")
    assert told(imported(there, tmp_path / "stream").volume.data) == told(tmp_path / "copy")


def _moorage(pool, *arguments, **options):
    argv = [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(pool.directory), *arguments]
    return subprocess.run(argv, capture_output=True, check=False, **options)


def test_a_person_sends_a_directory_from_pool_to_pool(pools):
    here, there = pools
    volume = filled(here)
    sent = _moorage(here, "export", "d", "-")
    assert sent.returncode == 0, sent.stderr
    got = _moorage(there, "import", "-", "--name", "e", "-o", "json", input=sent.stdout)
    assert got.returncode == 0, got.stderr
    assert json.loads(got.stdout)["volume"]["kind"] == "directory"
    assert told(there.volumes.get(id_from("e")).data) == told(volume.data)

    here.create_snapshot(CreateSnapshot("monday", volume.id))
    refused = _moorage(here, "export", "monday", "-", "--since", "monday")
    assert refused.returncode == 2
    assert b"has no blocks to compare; export it whole" in refused.stderr
    onto = _moorage(there, "import", "-", "--onto", "e", input=sent.stdout)
    assert onto.returncode == 1
    assert b"full export" in onto.stderr
