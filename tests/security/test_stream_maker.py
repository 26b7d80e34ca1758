"""A backup store, or any other maker of files for `volume import`, writes the stream as it likes.

Checksums are no defence: their key is public. Each stream here has right checksums unless the test is about them.
"""

import io
import json
import os
import random
import stat
import tarfile
import tracemalloc

import pytest

from moorage.errors import MoorageError
from moorage.host.safe_remove import remove_tree
from moorage.storage import CreateVolume, Pool, PoolConfig, VolumeKind
from moorage.storage.transfer import archive
from moorage.storage.transfer.archive import TreeTooDeep, archived
from moorage.storage.transfer.export import export_to_file, subject_of
from moorage.storage.transfer.import_ import ImportRequest, import_stream
from moorage.storage.transfer.stream import (
    DATA,
    HEAD,
    MAGIC,
    TAIL,
    ZERO,
    Frame,
    FramedBytes,
    Position,
    StreamDamaged,
    StreamReader,
    checksum_of,
)
from moorage.storage.transfer.unfinished import unfinished
from moorage.storage.transfer.unpack import unpack

pytestmark = pytest.mark.root
MIB = 1 << 20
IMAGE = {"source": "1" * 32, "volume_id": "v", "volume_name": "v", "filesystem": "ext4", "size_bytes": 8 * MIB}
DIRECTORY = {**IMAGE, "filesystem": "", "format": 2, "kind": "directory"}


@pytest.fixture
def pool(tmp_path):
    with Pool.open(PoolConfig("default", tmp_path / "pool", background=False)) as opened:
        yield opened


def stream(header, frames=(), tail=None):
    """A stream with right checksums: frames are (kind, offset, payload or length of zeros)."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    position, made = Position(at=len(MAGIC)), MAGIC
    for kind, offset, payload in ((HEAD, 0, head), *frames, (TAIL, 0, None)):
        if kind == TAIL:
            payload = tail or position.trailer()
        is_zero = kind == ZERO
        frame = Frame(
            kind, offset, payload if is_zero else len(payload), bytes(16) if is_zero else checksum_of(payload)
        )
        encoded = frame.encoded()
        position.advance(frame, encoded)
        made += encoded + (b"" if is_zero else payload)
    return made


def framed(content):
    """An archive as the frames of a stream."""
    return [(DATA, at, content[at : at + MIB]) for at in range(0, len(content), MIB)]


def imported(pool, content, tmp_path, **request):
    path = tmp_path / "stream"
    path.write_bytes(content)
    with path.open("rb") as file:
        return import_stream(pool, file.fileno(), ImportRequest(**request))


def is_untouched(pool):
    return pool.volumes.page().items == () and unfinished(pool) == [] and os.listdir(pool.directory / "tmp") == []


# --- headers -----------------------------------------------------------------------------------

HEADERS = {
    "negative size": {"size_bytes": -MIB},
    "no size": {"size_bytes": 0},
    "huge size": {"size_bytes": 1 << 62},
    "size of no machine": {"size_bytes": 1 << 80},
    "fraction": {"size_bytes": 1.5},
    "unknown filesystem": {"filesystem": "vfat"},
    "filesystem that is an option": {"filesystem": "--bind"},
    "no identity": {"source": ""},
    "odd identity": {"source": "../../x"},
    "odd base": {"base": "../x", "base_snapshot_id": "../../../etc"},
    "snapshot with a long number": {"base": "2" * 32, "base_snapshot_id": "s." + "9" * 5000},
    "snapshot with NUL": {"base": "2" * 32, "base_snapshot_id": "\0"},
    "name with a control character": {"volume_name": "\x1b[2J"},
    "no name": {"volume_name": ""},
    "long name": {"volume_name": "n" * 100_000},
    "other format": {"format": 99},
    "other kind": {"kind": "socket"},
    "directory with a base": {**DIRECTORY, "base": "2" * 32},
    "directory with a filesystem": {**DIRECTORY, "filesystem": "ext4"},
    "more data than the pool": {**DIRECTORY, "data_bytes": 1 << 62},
}


@pytest.mark.parametrize("changed", HEADERS.values(), ids=HEADERS.keys())
def test_an_impossible_header_is_one_line_and_leaves_nothing(pool, tmp_path, changed):
    with pytest.raises(MoorageError) as caught:
        imported(pool, stream({**IMAGE, **changed}), tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert is_untouched(pool)


@pytest.mark.parametrize("raw", [b"[" * 900_000, b"\xff\xfe", b"{}", b"null", b'{"source":' * 100_000, b""])
def test_a_header_that_is_no_header_is_refused(pool, tmp_path, raw):
    with pytest.raises(MoorageError):
        imported(pool, stream(raw), tmp_path)
    assert is_untouched(pool)


def test_a_stream_without_identity_does_not_pass_for_the_content_of_a_volume(pool, tmp_path):
    """It would count as imported already, and grow the volume of that name."""
    there = pool.create_volume(CreateVolume("v", 8 * MIB))
    with pytest.raises(MoorageError):
        imported(pool, stream({**IMAGE, "source": "", "size_bytes": 64 * MIB}), tmp_path)
    assert pool.volumes.get(there.id).size_bytes == 8 * MIB


def test_an_archive_does_not_take_the_place_of_an_image(pool, tmp_path):
    volume = imported(pool, stream(IMAGE, [(DATA, 0, b"x" * 4096)]), tmp_path).volume
    with pytest.raises(MoorageError):
        imported(pool, stream({**DIRECTORY, "source": "3" * 32, "base": IMAGE["source"]}), tmp_path, onto=volume.id)
    assert volume.data.is_file()


# --- frames ------------------------------------------------------------------------------------

FRAMES = {
    "behind the end": [(DATA, 8 * MIB, b"x")],
    "over the end": [(DATA, 8 * MIB - 1, b"xx")],
    "far behind": [(DATA, (1 << 64) - 1, b"x")],
    "zeros over the end": [(ZERO, 0, 1 << 63)],
    "backwards": [(DATA, MIB, b"x"), (DATA, 0, b"y")],
    "twice": [(DATA, 0, b"xx"), (DATA, 1, b"y")],
    "second header": [(HEAD, 0, b"{}")],
}


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES.keys())
def test_frames_write_nothing_outside_of_the_volume(pool, tmp_path, frames):
    with pytest.raises(StreamDamaged):
        imported(pool, stream(IMAGE, frames), tmp_path)
    assert pool.volumes.page().items == ()


@pytest.mark.parametrize("tail", [b"{}", b"[" * 500_000, b'{"frames":0,"data_bytes":0,"chain":"00"}'])
def test_a_trailer_that_does_not_fit_makes_no_volume(pool, tmp_path, tail):
    with pytest.raises(StreamDamaged):
        imported(pool, stream(IMAGE, [(DATA, 0, b"x")], tail), tmp_path)
    assert pool.volumes.page().items == ()


# --- archives ----------------------------------------------------------------------------------


def member(name, content=b"", *, records=None, **fields):
    """One member as bytes; `records` go into its PAX header."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    info.pax_headers = records or {}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + content + bytes(-len(content) % 512)


def pax(raw):
    """A PAX header with any bytes in it."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(raw)
    return info.tobuf(tarfile.USTAR_FORMAT) + raw + bytes(-len(raw) % 512)


def sparse(table, data, realsize):
    table = table.encode()
    content = table + bytes(-len(table) % 512) + data
    keys = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(realsize)}
    return member("f", content, records=keys)


TOP, END = member(".", type=tarfile.DIRTYPE), bytes(1024)
FOLDER = member("d", type=tarfile.DIRTYPE)
ARCHIVES = {
    "nothing": b"",
    "no end": TOP,
    "noise": random.Random(14).randbytes(4096),
    "file as its top": member(".", b"x"),
    "no top": member("a"),
    "top twice": TOP + TOP,
    "upwards": TOP + member("../planted"),
    "upwards inside": TOP + FOLDER + member("d/../../planted"),
    "absolute": TOP + member("/tmp/planted"),
    "empty name": TOP + member(""),
    "through a link": TOP + member("way", type=tarfile.SYMTYPE, linkname="/tmp") + member("way/planted"),
    "into a directory that is left": TOP + FOLDER + member("e", type=tarfile.DIRTYPE) + member("d/late"),
    "file twice": TOP + member("a") + member("a"),
    "directory twice": TOP + FOLDER + member("e", type=tarfile.DIRTYPE) + FOLDER,
    "directory over a link": TOP + member("d", type=tarfile.SYMTYPE, linkname="/tmp") + FOLDER,
    "hard link outside": TOP + member("a", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "hard link upwards": TOP + FOLDER + member("a", type=tarfile.LNKTYPE, linkname="d/../../secret"),
    "hard link through a link": TOP
    + member("way", type=tarfile.SYMTYPE, linkname="/etc")
    + member("a", type=tarfile.LNKTYPE, linkname="way/passwd"),
    "hard link to a directory": TOP + FOLDER + member("a", type=tarfile.LNKTYPE, linkname="d"),
    "hard link to itself": TOP + member("a", type=tarfile.LNKTYPE, linkname="a"),
    "name with NUL": TOP + member("x", records={"path": "a\0b"}),
    "long name": TOP + member("x", records={"path": "n" * 5000}),
    "long attribute": TOP + member("a", records={"SCHILY.xattr.user." + "n" * 300: "x"}),
    "attribute of no kind": TOP + member("a", records={"SCHILY.xattr.nothing": "x"}),
    "owner that is none": TOP + member("a", records={"uid": "99999999999999"}),
    "owner that is no number": TOP + member("a", records={"uid": "nobody"}),
    "time that is none": TOP + member("a", records={"mtime": "1e999"}),
    "time with many digits": TOP + member("a", records={"mtime": "9" * 5000}),
    "negative size": TOP + member("a", records={"size": "-1"}),
    "size larger than the stream": TOP + member("a", records={"size": "99999"}),
    "directory with content": TOP + member("d", b"x" * 512, type=tarfile.DIRTYPE),
    "unknown type": TOP + member("a", type=b"Z"),
    "GNU long name": TOP + member("a", b"n" * 600, type=tarfile.GNUTYPE_LONGNAME),
    "header after header": TOP + pax(b"") * 2000 + member("a"),
    "records that end early": TOP + pax(b"9999 path=x\n") + member("a"),
    "record of no length": TOP + pax(b"0 path=x\n") + member("a"),
    "record without a sign": TOP + pax(b"9 pathx\n ") + member("a"),
    "records of many digits": TOP + pax(b"9" * 600_000) + member("a"),
    "records larger than is read": TOP + pax(bytes(9 << 20)) + member("a"),
    "records before the end": TOP + pax(b"10 path=x\n"),
    "sparse pieces overlap": TOP + sparse("2\n0\n4\n2\n4\n", b"abcdefgh", 100),
    "sparse pieces lie outside": TOP + sparse("1\n98\n4\n", b"abcd", 100),
    "sparse pieces backwards": TOP + sparse("2\n50\n4\n0\n4\n", b"abcdefgh", 100),
    "sparse table ends early": TOP + sparse("3\n0\n4\n", b"abcd", 100),
    "sparse table without numbers": TOP + sparse("x\n", b"", 100),
    "sparse table of many digits": TOP + sparse("9" * 5000, b"", 100),
    "sparse table that is too long": TOP + sparse("99999999\n" + "0\n" * 300_000, b"", 100),
    "sparse data missing": TOP + sparse("1\n0\n4096\n", b"abcd", 5000),
    "sparse size with many digits": TOP + sparse("0\n", b"", "9" * 30),
    "other sparse format": TOP + member("f", records={"GNU.sparse.major": "0", "GNU.sparse.minor": "1"}),
}


@pytest.mark.parametrize("content", ARCHIVES.values(), ids=ARCHIVES.keys())
def test_a_malformed_archive_is_one_line_and_leaves_nothing(pool, tmp_path, content):
    (tmp_path / "pool" / "imports").mkdir(exist_ok=True)
    (tmp_path / "secret").write_text("of the host")
    closed = content if content in (b"", TOP) else content + END
    tracemalloc.start()
    try:
        with pytest.raises(MoorageError) as caught:
            imported(pool, stream(DIRECTORY, framed(closed)), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(caught.value).splitlines()) == 1
    assert is_untouched(pool)
    assert not os.path.exists("/tmp/planted")
    assert os.stat(tmp_path / "secret").st_nlink == 1
    assert peak < 80 * MIB


def test_an_archive_holds_no_more_than_its_volume(pool, tmp_path):
    content = b"".join(member(f"f{number}", bytes(MIB)) for number in range(9))
    with pytest.raises(StreamDamaged, match="more than its volume of 8388608 bytes"):
        imported(pool, stream(DIRECTORY, framed(TOP + content + END)), tmp_path)
    assert is_untouched(pool)


def test_a_file_of_holes_takes_no_room(pool, tmp_path):
    """It says that it has 8 EiB: as in the volume itself, that is no data."""
    content = TOP + sparse("1\n1000\n3\n", b"abc", 1 << 40) + END
    volume = imported(pool, stream(DIRECTORY, framed(content)), tmp_path).volume
    found = os.stat(volume.data / "f")
    assert found.st_size == 1 << 40
    assert found.st_blocks * 512 < MIB


@pytest.mark.parametrize("kind", ["names", "depth"])
def test_no_number_of_members_takes_memory(tmp_path, kind):
    """A reader that keeps every member would take gigabytes."""

    def names(count):
        return b"".join(member(f"{number:06d}") for number in range(count))

    def depth(count):
        nested = "/".join("d" * 3 for _ in range(count // 20))
        parts = nested.split("/")
        folders = (member("/".join(parts[: at + 1]), type=tarfile.DIRTYPE) for at in range(len(parts)))
        return b"".join(folders) + b"".join(member(f"{nested}/{number:05d}") for number in range(count))

    content, target = TOP + (names(3_000) if kind == "names" else depth(1_000)) + END, tmp_path / "out"
    target.mkdir()
    source = io.BytesIO(content)
    tracemalloc.start()
    try:
        unpack(source, str(target), lambda done: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        remove_tree(target)
    assert peak < 2 * MIB


def random_archive(chance):
    """A good archive in which bytes, whole blocks or numbers were changed."""
    content = bytearray(
        TOP
        + FOLDER
        + member("d/file", chance.randbytes(700), uid=5)
        + member("d/long", records={"path": "d/" + "n" * 150, "SCHILY.xattr.user.a": "b", "mtime": "5.5"})
        + sparse("2\n0\n4\n50\n4\n", b"abcdefgh", 100)
        + member("same", type=tarfile.LNKTYPE, linkname="d/file")
        + member("link", type=tarfile.SYMTYPE, linkname="/etc")
        + END
    )
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(content))
        match chance.randrange(4):
            case 0:
                content[at] = chance.randrange(256)
            case 1:
                start, other = at // 512 * 512, chance.randrange(len(content)) // 512 * 512
                content[start : start + 512] = content[other : other + 512]
            case 2:
                content[at : at + 8] = chance.choice((b"99999999", b"-1-1-1-1", b"\xff" * 8, b"\0" * 8, b"../../.."))
            case _:
                del content[at : at + chance.choice((1, 512, 1024))]
    for at in range(0, len(content) - 511, 512):  # most headers get the checksum that they need
        if chance.random() < 0.9 and content[at + 257 : at + 262] == b"ustar":
            content[at + 148 : at + 156] = b" " * 8
            content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    return bytes(content)


def test_random_archives_end_in_files_or_in_one_error(tmp_path):
    chance = random.Random(15)
    target, good, told = tmp_path / "out", 0, []
    before = os.listdir(tmp_path)
    for _ in range(400):
        target.mkdir()
        try:
            unpack(io.BytesIO(random_archive(chance)), str(target), lambda done: None, MIB)
            good += 1
        except (MoorageError, OSError) as error:
            told.append(str(error))
        remove_tree(target)
    assert good > 20
    assert all(len(text.splitlines()) == 1 for text in told)
    assert os.listdir(tmp_path) == before


def test_random_streams_end_in_a_volume_or_in_one_error(pool, tmp_path):
    chance, told = random.Random(16), []
    good = stream(IMAGE, [(DATA, 0, b"x" * 5000), (ZERO, 8192, 4096), (DATA, MIB, b"y" * 5000)])
    for number in range(100):
        content = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        del content[chance.choice((len(content), chance.randrange(len(content)))) :]
        try:
            imported(pool, bytes(content), tmp_path, name=f"v{number}")
        except MoorageError as error:
            told.append(str(error))
        else:
            assert bytes(content) == good
    assert all(len(text.splitlines()) == 1 for text in told)


# --- the way out: what a tenant does to an export ------------------------------------------------


def test_a_tree_of_links_is_archived_with_little_memory(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    (top / "a").mkdir()
    (top / "b").mkdir()
    for number in range(300):
        (top / "a" / f"{number}").touch()
        os.link(top / "a" / f"{number}", top / "b" / f"{number}{'n' * 200}")
    links = archive._Links()
    tracemalloc.start()
    try:
        for number in range(5_000):
            found = os.stat_result((stat.S_IFREG, number, 1, 2, 0, 0, 0, 0, 0, 0))
            assert links.first(found, f"{'p' * 1000}{number}") == f"{'p' * 1000}{number}"
            assert links.first(found, "other") == f"{'p' * 1000}{number}"
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
        links.close()
    target = tmp_path / "out"
    target.mkdir()
    unpack(io.BytesIO(b"".join(archived(str(top)))), str(target), lambda done: None)
    assert sum(1 for each in (target / "b").iterdir() if each.stat().st_nlink == 2) == 300


def test_a_file_with_too_many_holes_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_PIECES", 3)
    with open(tmp_path / "f", "wb") as file:
        for number in range(5):
            file.seek(number * MIB)
            file.write(b"x")
    with pytest.raises(TreeTooDeep, match="more than 3 pieces of data"):
        b"".join(archived(str(tmp_path)))


def test_what_is_exported_from_a_directory_still_comes_back(pool, tmp_path):
    volume = pool.create_volume(CreateVolume("d", 8 * MIB, kind=VolumeKind.DIRECTORY))
    (volume.data / "e").mkdir()
    (volume.data / "e" / "f").write_text("content")
    export_to_file(subject_of(pool, volume), tmp_path / "out")
    with open(tmp_path / "out", "rb") as file:
        framed_bytes = FramedBytes(StreamReader(file.fileno()))
        (tmp_path / "there").mkdir()
        unpack(framed_bytes, str(tmp_path / "there"), lambda done: None)
    assert (tmp_path / "there" / "e" / "f").read_text() == "content"
