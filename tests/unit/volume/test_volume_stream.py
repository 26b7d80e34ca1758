"""The export stream: what is written is what is read, and nothing can be changed, lost or cut off unnoticed."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.host.extents import Range
from moorage.storage import CreateSnapshot, CreateVolume, NameTaken, Pool, PoolConfig
from moorage.storage.errors import ImageMissing, InvalidValue, StorageError
from moorage.storage.transfer.export import export_to_file, export_to_pipe, subject_of
from moorage.storage.transfer.import_ import ImportRequest, WrongBase, import_stream, state_of
from moorage.storage.transfer.stream import CHUNK_BYTES, NotAStream, StreamCut, StreamDamaged, StreamReader, scan
from moorage.storage.transfer.unfinished import discard_unfinished, unfinished

MIB = 1 << 20


@pytest.fixture
def pools(tmp_path):
    with (
        Pool.open(PoolConfig("here", tmp_path / "here", background=False)) as here,
        Pool.open(PoolConfig("there", tmp_path / "there", background=False)) as there,
    ):
        yield here, there


def raw_volume(pool, name="v", size=8 * MIB):
    return pool.create_volume(CreateVolume(name, size, filesystem=""))


def write(volume, offset, content):
    with open(volume.data, "r+b") as file:
        file.seek(offset)
        file.write(content)


def exported(pool, volume, name, path, since=None):
    cut = pool.create_snapshot(CreateSnapshot(name, volume.id))
    export_to_file(subject_of(pool, cut, since), path)
    return cut


def imported(pool, path, **request):
    with open(path, "rb") as file:
        return import_stream(pool, file.fileno(), ImportRequest(**request))


def chain(pools, tmp_path):
    """A full export and a delta after it, of a volume that grew in between."""
    here, _ = pools
    volume = raw_volume(here)
    write(volume, MIB, os.urandom(2 * MIB))
    first = exported(here, volume, "s1", tmp_path / "full")
    write(volume, MIB, bytes(MIB))
    write(volume, 5 * MIB + 100, b"new")
    here.expand_volume(volume.id, 12 * MIB)
    second = exported(here, volume, "s2", tmp_path / "delta", first)
    return first, second


def test_a_volume_comes_out_of_a_stream_as_it_went_in_and_stays_sparse(pools, tmp_path):
    here, there = pools
    volume = raw_volume(here, size=64 * MIB)
    write(volume, 3 * MIB - 10, os.urandom(100))
    write(volume, 40 * MIB, os.urandom(MIB))
    cut = exported(here, volume, "s", tmp_path / "stream")
    assert (tmp_path / "stream").stat().st_size < 4 * MIB

    done = imported(there, tmp_path / "stream")
    assert done.volume.data.read_bytes() == cut.data.read_bytes()
    assert done.volume.data.stat().st_blocks * 512 < 4 * MIB
    assert (done.volume.name, done.volume.size_bytes) == ("v", 64 * MIB)


def test_a_delta_brings_an_import_to_the_next_state_with_its_zeros_and_its_size(pools, tmp_path):
    _, there = pools
    first, second = chain(pools, tmp_path)
    assert (tmp_path / "delta").stat().st_size < MIB

    done = imported(there, tmp_path / "full")
    assert done.volume.data.read_bytes() == first.data.read_bytes()
    done = imported(there, tmp_path / "delta", onto=done.volume.id)
    assert done.volume.data.read_bytes() == second.data.read_bytes()
    assert done.volume.size_bytes == 12 * MIB
    assert imported(there, tmp_path / "delta", onto=done.volume.id).was_complete
    assert unfinished(there) == []


def test_a_delta_makes_a_new_volume_where_its_base_snapshot_is(pools, tmp_path):
    here, there = pools
    _, second = chain(pools, tmp_path)
    assert imported(here, tmp_path / "delta", name="n").volume.data.read_bytes() == second.data.read_bytes()
    with pytest.raises(WrongBase, match="import that first"):
        imported(there, tmp_path / "delta", name="n")


def test_a_delta_is_refused_on_any_state_but_its_base(pools, tmp_path):
    _, there = pools
    chain(pools, tmp_path)
    stranger = raw_volume(there, "stranger")
    with pytest.raises(WrongBase, match="was not imported"):
        imported(there, tmp_path / "delta", onto=stranger.id)

    volume = imported(there, tmp_path / "full").volume
    write(volume, 0, b"written since")
    assert state_of(volume) == ""
    before = volume.data.read_bytes()
    with pytest.raises(WrongBase, match="changed since"):
        imported(there, tmp_path / "delta", onto=volume.id)
    assert volume.data.read_bytes() == before


def test_a_full_stream_is_not_applied_onto_a_volume(pools, tmp_path):
    here, there = pools
    chain(pools, tmp_path)
    other = raw_volume(there, "other")
    with pytest.raises(WrongBase, match="full export"):
        imported(there, tmp_path / "full", onto=other.id)
    with pytest.raises(NameTaken):
        imported(here, tmp_path / "full")


@pytest.mark.parametrize("position", [0, 20, 60, 300, 600, 2000, 10_000, -1, -100])
def test_a_changed_byte_is_noticed_and_nothing_is_imported(pools, tmp_path, position):
    _, there = pools
    chain(pools, tmp_path)
    raw = bytearray((tmp_path / "full").read_bytes())
    raw[position] ^= 1
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises((StreamDamaged, NotAStream)):
        imported(there, tmp_path / "bad")
    assert there.volumes.page().items == ()


def test_a_frame_that_was_taken_out_is_noticed(pools, tmp_path):
    chain(pools, tmp_path)
    raw = (tmp_path / "full").read_bytes()
    with open(tmp_path / "full", "rb") as file:
        reader = StreamReader(file.fileno())
        start = reader.position.at
        _, _, after = next(reader.frames())
    (tmp_path / "bad").write_bytes(raw[:start] + raw[after.at :])
    with pytest.raises(StreamDamaged, match="trailer"):
        imported(pools[1], tmp_path / "bad")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.floats(0, 1))
def test_an_export_cut_off_anywhere_goes_on_to_the_same_file(pools, tmp_path, cut):
    here, _ = pools
    if not (tmp_path / "full").exists():
        chain(pools, tmp_path)
    whole = (tmp_path / "full").read_bytes()
    (tmp_path / "again.partial").write_bytes(whole[: int(len(whole) * cut)])
    export_to_file(subject_of(here, here.snapshots.page().items[0]), tmp_path / "again", resume=True)
    assert (tmp_path / "again").read_bytes() == whole


def test_an_import_cut_off_goes_on_from_its_checkpoint(pools, tmp_path):
    _, there = pools
    first, _ = chain(pools, tmp_path)
    whole = (tmp_path / "full").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) - MIB // 2])
    with pytest.raises(StreamCut):
        imported(there, tmp_path / "cut", checkpoint_bytes=1)
    assert there.volumes.page().items == ()
    assert [ident for ident, _, _ in unfinished(there)] == [first.volume_id]

    done = imported(there, tmp_path / "full")
    assert done.resumed_at > MIB
    assert done.volume.data.read_bytes() == first.data.read_bytes()


def test_a_pipe_that_broke_is_sent_again_and_only_the_rest_is_written(pools, tmp_path):
    here, there = pools
    first, _ = chain(pools, tmp_path)
    whole = (tmp_path / "full").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) - MIB // 2])
    with pytest.raises(StreamCut):
        imported(there, tmp_path / "cut", checkpoint_bytes=1)
    done = _through_a_pipe(there, whole)
    assert done.resumed_at > 0
    assert done.volume.data.read_bytes() == first.data.read_bytes()

    with open(tmp_path / "rest", "wb") as rest:
        export_to_pipe(subject_of(here, first), rest.fileno(), skip=1000)
    assert whole[:1000] + (tmp_path / "rest").read_bytes() == whole


def _through_a_pipe(pool, raw):
    read_end, write_end = os.pipe()

    def send():
        with open(write_end, "wb") as out:
            out.write(raw)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return import_stream(pool, read_end, ImportRequest())
    finally:
        os.close(read_end)
        sender.join()


def test_an_unfinished_import_of_another_stream_is_not_mixed_up(pools, tmp_path):
    here, there = pools
    chain(pools, tmp_path)
    whole = (tmp_path / "full").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StreamCut):
        imported(there, tmp_path / "cut", name="x")
    other = raw_volume(here, "other")
    write(other, 0, b"other")
    cut = exported(here, other, "o", tmp_path / "other")
    with pytest.raises(Exception, match="another stream"):
        imported(there, tmp_path / "other", name="x")
    assert imported(there, tmp_path / "other", name="x", restart=True).volume.data.read_bytes() == cut.data.read_bytes()


def test_an_import_that_is_never_finished_can_be_discarded(pools, tmp_path):
    _, there = pools
    first, _ = chain(pools, tmp_path)
    (tmp_path / "cut").write_bytes((tmp_path / "full").read_bytes()[:-10])
    with pytest.raises(StreamCut):
        imported(there, tmp_path / "cut")
    assert discard_unfinished(there, first.volume_id)
    assert unfinished(there) == []


def test_a_directory_has_no_blocks_to_compare(pools):
    from moorage.storage import VolumeKind

    here, _ = pools
    volume = here.create_volume(CreateVolume("d", MIB, kind=VolumeKind.DIRECTORY))
    cut = here.create_snapshot(CreateSnapshot("s", volume.id))
    with pytest.raises(InvalidValue, match="export it whole"):
        subject_of(here, cut, cut)


def test_only_what_has_a_header_is_scanned_as_a_stream(tmp_path):
    (tmp_path / "text").write_text("something else")
    with open(tmp_path / "text", "rb") as file:
        assert scan(file.fileno()) is None
        file.seek(0)
        with pytest.raises(NotAStream):
            StreamReader(file.fileno())


@pytest.mark.parametrize("length", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_pieces_end_at_chunks_wherever_the_data_begins(pools, tmp_path, length):
    here, there = pools
    volume = raw_volume(here, f"v{length}")
    write(volume, 4096 * 3, os.urandom(length))
    cut = exported(here, volume, "s", tmp_path / "stream")
    assert imported(there, Path(tmp_path / "stream")).volume.data.read_bytes() == cut.data.read_bytes()


def _is_reading():
    return any(thread.name == "export-reader" for thread in threading.enumerate())


def test_the_reader_ends_when_the_other_side_of_a_pipe_goes_away(pools):
    here, _ = pools
    volume = raw_volume(here, size=32 * MIB)
    write(volume, 0, os.urandom(24 * MIB))
    cut = here.create_snapshot(CreateSnapshot("s", volume.id))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(StorageError, match="gone away"):
            export_to_pipe(subject_of(here, cut), writing)
    finally:
        os.close(writing)
    assert not _is_reading()


def test_data_that_ends_early_is_an_error_and_leaves_no_file_that_looks_whole(pools, tmp_path):
    here, _ = pools
    volume = raw_volume(here)
    write(volume, 0, os.urandom(4 * MIB))
    cut = here.create_snapshot(CreateSnapshot("s", volume.id))
    subject = replace(subject_of(here, cut), ranges=lambda start: iter([Range(0, 8 * MIB)]))
    os.chmod(cut.data, 0o600)
    os.truncate(cut.data, 3 * MIB)
    with pytest.raises(ImageMissing, match="ends at"):
        export_to_file(subject, tmp_path / "stream")
    assert not (tmp_path / "stream").exists()
    assert not _is_reading()
