"""Container logs as `kubectl logs` reads them: options, long lines, files put aside while they are read."""

import asyncio
import os
import threading

import pytest

from moorage.errors import InvalidRequest
from moorage.node.runtime.log_writer import ContainerLog
from moorage.node.serve import logs
from moorage.node.serve.logs import LogOptions, log_options_from, stream

EARLY, LATE = b"2026-01-01T00:00:00.000000000Z", b"2026-01-01T00:00:09.000000000Z"


async def read(path, running=lambda: False, **options):
    return b"".join([piece async for piece in stream(path, LogOptions(**options), running)])


async def test_the_time_stands_only_at_the_beginning_of_a_line(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(
        EARLY + b" stdout P lo\n" + EARLY + b" stdout P ng\n" + LATE + b" stdout F er\n" + LATE + b" stdout F x\n"
    )
    assert await read(path, timestamps=True) == EARLY + b" longer\n" + LATE + b" x\n"
    assert await read(path, timestamps=True, tail=2) == LATE + b" er\n" + LATE + b" x\n"
    assert await read(path) == b"longer\nx\n"


async def test_a_very_long_line_is_one_line_again(tmp_path):
    path = tmp_path / "0.log"
    written = ContainerLog(str(path))
    text = b"0123456789" * 10_000
    for start in range(0, len(text), 4096):
        written.add("stdout", text[start : start + 4096])
    written.add("stdout", b"\nlast without an end")
    written.close()
    assert path.read_bytes().count(b" stdout P ") > 1
    assert await read(path) == text + b"\nlast without an end"


class Writer:
    """A container that writes numbered lines and puts its log aside as its supervisor does."""

    def __init__(self, path):
        self.path, self.count = path, 0

    def write(self, lines):
        with self.path.open("ab") as file:
            for _ in range(lines):
                file.write(EARLY + b" stdout F line %d\n" % self.count)
                self.count += 1

    def put_aside(self):
        os.replace(self.path, f"{self.path}.1")

    @property
    def all(self):
        return b"".join(b"line %d\n" % number for number in range(self.count))


async def test_the_file_put_aside_is_read_first(tmp_path):
    writer = Writer(tmp_path / "0.log")
    writer.write(3)
    writer.put_aside()
    assert await read(writer.path) == writer.all  # the next one is not begun yet
    writer.write(2)
    assert await read(writer.path) == writer.all
    assert await read(writer.path, tail=3) == b"line 2\nline 3\nline 4\n"


async def test_nothing_is_lost_when_the_log_is_put_aside_while_it_is_followed(tmp_path):
    writer = Writer(tmp_path / "0.log")
    writer.write(2)
    seen = b""
    steps = iter(
        [
            lambda: writer.write(1),
            lambda: (writer.write(1), writer.put_aside()),  # lines that nobody has read yet, and no new file
            lambda: writer.write(5),  # and the new one is longer than the old one was
            lambda: (writer.put_aside(), writer.write(1), writer.put_aside(), writer.write(9)),  # twice at once
            lambda: writer.write(1),
        ]
    )
    is_running = [True]
    async with asyncio.timeout(60):
        async for piece in stream(writer.path, LogOptions(follow=True), lambda: is_running[0]):
            seen += piece
            while seen == writer.all and is_running[0]:
                step = next(steps, None)
                if step is None:
                    is_running[0] = False
                else:
                    step()
    assert seen == writer.all


async def test_what_is_written_just_before_the_log_is_put_aside_is_read(tmp_path, monkeypatch):
    writer, successor = Writer(tmp_path / "0.log"), logs._Log._successor
    writer.write(1)
    steps = [lambda: (writer.write(2), writer.put_aside(), writer.write(1))]

    def between(log):
        """The reader has come to the end of the file, and looks now whether there is another."""
        if log._file is not None and steps:
            steps.pop()()
        return successor(log)

    monkeypatch.setattr(logs._Log, "_successor", between)
    assert await read(writer.path) == writer.all


async def test_a_file_is_closed_only_after_the_thread_that_reads_it(tmp_path, monkeypatch):
    begun, may_end, order = threading.Event(), threading.Event(), []

    def slow(_log, _printer, _tail):
        begun.set()
        may_end.wait(60)
        order.append("read")
        return []

    monkeypatch.setattr(logs._Log, "stored", slow)
    monkeypatch.setattr(logs._Log, "close", lambda _log: order.append("closed"))
    reading = asyncio.create_task(read(tmp_path / "0.log"))
    await asyncio.to_thread(begun.wait, 60)
    reading.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert order == ["read", "closed"]


async def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path):
    writer = Writer(tmp_path / "0.log")
    asked = []

    def running():
        asked.append(1)
        if len(asked) == 1:
            writer.write(2)
        return len(asked) < 4

    assert await read(writer.path, running, follow=True) == writer.all


async def test_whoever_stops_reading_leaves_nothing_open(tmp_path):
    writer = Writer(tmp_path / "0.log")
    writer.write(2)
    before = sorted(os.listdir("/proc/self/fd"))
    following = stream(writer.path, LogOptions(follow=True), lambda: True)
    assert await anext(following) == writer.all
    await following.aclose()
    assert await read(writer.path, follow=True, limit_bytes=3, running=lambda: True) == b"lin"
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"tailLines": "-1"}, "tailLines: Invalid value: -1: must be greater than or equal to 0"),
        ({"limitBytes": "0"}, "limitBytes: Invalid value: 0: must be greater than 0"),
        ({"sinceSeconds": "0"}, "sinceSeconds: Invalid value: 0: must be greater than 0"),
        ({"sinceSeconds": "many"}, "must be a number"),
        ({"sinceTime": "yesterday"}, "sinceTime"),
        ({"sinceTime": "2026-01-01T00:00:00Z", "sinceSeconds": "5"}, "at most one"),
        ({"stream": "stdout"}, "must be one of All, Stdout, Stderr"),
        ({"stream": "Stdout", "tailLines": "3"}, "mutually exclusive"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(query, words):
    with pytest.raises(InvalidRequest, match=words):
        log_options_from(query, 100.0)


def test_options_are_read_as_kubectl_and_the_official_client_write_them():
    found = log_options_from({"follow": "true", "timestamps": "True", "tailLines": "0", "limitBytes": "9"}, 100.0)
    assert found == LogOptions(follow=True, timestamps=True, tail=0, limit_bytes=9)
    assert log_options_from({"sinceSeconds": "40", "stream": "Stderr"}, 100.0) == LogOptions(
        since=60.0, stream="Stderr"
    )
    assert log_options_from({"sinceTime": "1970-01-01T00:01:00Z"}, 100.0) == LogOptions(since=60.0)
    assert log_options_from({"stream": "", "tailLines": ""}, 100.0) == LogOptions()


def test_all_lines_of_a_moment_have_its_time(tmp_path):
    log = ContainerLog(str(tmp_path / "0.log"))
    log.add("stderr", b"a\n\nb\nc")
    log.add("stderr", b"")
    lines = (tmp_path / "0.log").read_bytes().splitlines()
    assert [line.split(b" ", 1)[1] for line in lines] == [b"stderr F a", b"stderr F ", b"stderr F b", b"stderr P c"]
    assert len({line.split(b" ")[0] for line in lines[:3]}) == 1
