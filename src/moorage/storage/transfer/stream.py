"""The export stream: a volume's blocks as frames that check themselves, in a file or a pipe.

Owns: the format (docs/reference/stream-format.md) and the errors of a stream that is not whole.
May not touch: pools and volumes; it is given bytes and gives frames.
Start reading at: `Frame`, `StreamReader`, `scan`.

A stream is a magic word and frames of a 48-byte head and a payload: one HEAD (JSON), any number of DATA and ZERO in
order of offset, one TAIL (JSON). Every head has a checksum of itself and of its payload, and all heads form a chain of
SHA-256, whose last link the TAIL carries: nothing can be changed, lost or moved without notice, and where a
stream was cut off, what came before is good.
"""

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from moorage.errors import InvalidRequest
from moorage.host.errors import host_error
from moorage.storage.errors import StorageError

MAGIC = b"MOORAGE1"
CHUNK_BYTES = 1024 * 1024
"""DATA frames end where an offset is a multiple of this: the same source gives the same stream, from any start."""

HEAD, DATA, ZERO, TAIL = b"HEAD", b"DATA", b"ZERO", b"TAIL"
_FIELDS = struct.Struct("<4sIQQ16sI")  # kind, padding, offset, length, checksum of the payload, reserved
_FRAME = struct.Struct("<44sI")  # the fields, checksum of them
_KEY, _NONCE = b"moorage volume export, format 01", bytes(12)
_ALIGN = 4096
_ALIGNED_FROM = 256 * 1024
_ZEROS = bytes(_ALIGN)
FRAME_BYTES = _FRAME.size
_LARGEST_JSON = 1 << 20
_LARGEST_DATA = 64 << 20
FORMAT, DIRECTORY_FORMAT = 1, 2
"""Streams of images are of the first format, those of directories of the second: older versions refuse only these."""


class NotAStream(InvalidRequest):
    """The input is something else, or of a newer format."""


class StreamDamaged(StorageError):
    """A checksum does not fit, or frames are out of order; nothing after this point can be trusted."""

    code = "DATA_LOSS"
    retryable = False


class StreamCut(StorageError):
    """The stream ends before its TAIL; what came before is good, and the rest can follow later."""

    code = "DATA_LOSS"


@dataclass(frozen=True, slots=True)
class Frame:
    """The head of a frame. `length` is that of the payload; a ZERO has none, and stands for so many zeros."""

    kind: bytes
    offset: int
    length: int
    checksum: bytes = bytes(16)
    padding: int = 0

    @property
    def payload_bytes(self) -> int:
        return 0 if self.kind == ZERO else self.length

    def padded_at(self, at: int) -> "Frame":
        """The same frame for this place in the stream: large payloads begin at whole pages, which files take faster."""
        if self.payload_bytes < _ALIGNED_FROM:
            return self
        return replace(self, padding=-(at + FRAME_BYTES) % _ALIGN)

    def encoded(self) -> bytes:
        fields = _FIELDS.pack(self.kind, self.padding, self.offset, self.length, self.checksum, 0)
        return _FRAME.pack(fields, zlib.crc32(fields))

    @staticmethod
    def decoded(raw: bytes, at: int) -> "Frame":
        fields, checksum = _FRAME.unpack(raw)
        if zlib.crc32(fields) != checksum:
            raise StreamDamaged(f"the stream is damaged at byte {at}: the checksum of a frame's head is wrong")
        kind, padding, offset, length, payload, _ = _FIELDS.unpack(fields)
        if kind not in (HEAD, DATA, ZERO, TAIL):
            raise StreamDamaged(f"the stream is damaged at byte {at}: {kind!r} is no kind of frame")
        if length > {DATA: _LARGEST_DATA, ZERO: 1 << 63}.get(kind, _LARGEST_JSON):
            raise StreamDamaged(f"the stream is damaged at byte {at}: a frame of {length} bytes is too long")
        if padding >= _ALIGN:
            raise StreamDamaged(f"the stream is damaged at byte {at}: {padding} bytes of padding are too many")
        return Frame(kind, offset, length, payload, padding)


def checksum_of(payload: bytes | memoryview) -> bytes:
    """AES-256-GMAC under a key that everybody knows: against accidents, not against forgers.

    128 bits at tens of GiB/s with the processor's own instructions; CRC-32 and SHA-256 of the standard library take
    longer than all the reading and writing.
    """
    return _gmac()(_NONCE, b"", payload) if len(payload) else bytes(16)


@cache
def _gmac() -> Callable[[bytes, bytes, bytes | memoryview], bytes]:
    """Imported at the first use: pools are read also where the package is not installed."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_KEY).encrypt


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is in the stream. `source` and `base` are identities of contents, not names; no base: everything is here."""

    source: str
    volume_id: str
    volume_name: str
    filesystem: str
    size_bytes: int
    snapshot_id: str = ""
    base: str = ""
    base_snapshot_id: str = ""
    data_bytes: int = 0
    created_ns: int = 0
    format: int = FORMAT
    kind: str = "image"

    @property
    def is_directory(self) -> bool:
        """Whether the frames hold an archive of files, whose offsets are its own, instead of blocks."""
        return self.kind == "directory"


class Trailer(msgspec.Struct, frozen=True):
    """How much came before, and the last link of the chain."""

    frames: int
    data_bytes: int
    chain: str


@dataclass(slots=True)
class Position:
    """How far a stream has been written or read; enough to go on from there."""

    at: int = 0
    frames: int = 0
    data_bytes: int = 0
    offset: int = 0
    chain: bytes = bytes(32)

    def advance(self, frame: Frame, encoded: bytes) -> None:
        self.chain = hashlib.sha256(self.chain + encoded).digest()
        self.at += FRAME_BYTES + frame.padding + frame.payload_bytes
        if frame.kind in (DATA, ZERO):
            self.frames += 1
            self.offset = frame.offset + frame.length
        if frame.kind == DATA:
            self.data_bytes += frame.length

    def trailer(self) -> bytes:
        return msgspec.json.encode(Trailer(self.frames, self.data_bytes, self.chain.hex()))

    def copied(self) -> "Position":
        return Position(self.at, self.frames, self.data_bytes, self.offset, self.chain)


class StreamReader:
    """Frames from a file or pipe, each checked before it is given out."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.position = Position()
        self._buffer = memoryview(
            bytearray(CHUNK_BYTES)
        )  # fresh memory for each frame would cost as much as reading it
        self.header = self._read_header()

    def frames(self) -> Iterator[tuple[Frame, memoryview, Position]]:
        """DATA and ZERO frames with the position after each, up to a TAIL that fits; StreamCut without one.

        The bytes of a frame are good until the next.
        """
        while True:
            before = self.position.copied()
            frame, payload = self._next()
            if frame.kind == TAIL:
                _check_tail(payload, before)
                return
            if frame.kind == HEAD or frame.offset < before.offset:
                raise StreamDamaged(f"the stream is damaged at byte {before.at}: a frame is out of order")
            if not self.header.is_directory and frame.offset + frame.length > self.header.size_bytes:
                raise StreamDamaged(f"the stream is damaged at byte {before.at}: a frame lies outside of the volume")
            yield frame, payload, self.position.copied()

    def skip_to(self, position: Position) -> bool:
        """Go on from a position of an earlier reading; False where the input cannot seek."""
        try:
            os.lseek(self._fd, position.at, os.SEEK_SET)
        except OSError:
            return False
        self.position = position.copied()
        return True

    def _read_header(self) -> Header:
        magic = self._exactly(len(MAGIC), may_end=True)
        if magic != MAGIC:
            raise NotAStream("the input is no export of a volume: it does not begin with MOORAGE1")
        self.position.at = len(MAGIC)
        frame, payload = self._next()
        if frame.kind != HEAD:
            raise StreamDamaged("the stream does not begin with its header")
        try:
            found = msgspec.json.decode(payload, type=Header)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failed:
            raise NotAStream(f"the stream's header cannot be read: {failed}") from failed
        if found.format > DIRECTORY_FORMAT or found.kind not in ("image", "directory"):
            raise NotAStream(
                f"the stream has format {found.format} ({found.kind}), this version reads up to {DIRECTORY_FORMAT}"
            )
        return found

    def _next(self) -> tuple[Frame, memoryview]:
        raw = bytes(self._exactly(FRAME_BYTES))
        frame = Frame.decoded(raw, self.position.at)
        if bytes(self._exactly(frame.padding)) != _ZEROS[: frame.padding]:  # views compare byte by byte, slowly
            raise StreamDamaged(
                f"the stream is damaged at byte {self.position.at}: the padding of a frame is not empty"
            )
        payload = self._exactly(frame.payload_bytes)
        if checksum_of(payload) != frame.checksum:
            raise StreamDamaged(
                f"the stream is damaged at byte {self.position.at}: the checksum of {frame.length} bytes "
                f"for offset {frame.offset} is wrong"
            )
        self.position.advance(frame, raw)
        return frame, payload

    def _exactly(self, length: int, may_end: bool = False) -> memoryview:
        view = self._buffer[:length] if length <= CHUNK_BYTES else memoryview(bytearray(length))
        filled = 0
        while filled < length:
            try:
                count = os.readv(self._fd, [view[filled:]])
            except OSError as failed:
                raise host_error("read the stream from", f"descriptor {self._fd}", failed) from failed
            if count == 0:
                if may_end:
                    return view[:0]
                raise StreamCut(f"the stream ends early, at byte {self.position.at}: it is not complete")
            filled += count
        return view


class FramedBytes(io.RawIOBase):
    """The payloads of a stream one after the other, as a file that is read once; each is checked before."""

    def __init__(self, reader: StreamReader) -> None:
        self._frames = reader.frames()
        self._rest = memoryview(b"")
        self._offset = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; none at the end, which has been verified then."""
        if not self._rest:
            found = next(self._frames, None)
            if found is None:
                return b""
            frame, payload, _ = found
            if frame.kind != DATA or frame.offset != self._offset:
                raise StreamDamaged(f"the stream is damaged: what lies at {self._offset} of its archive is missing")
            self._rest, self._offset = payload, frame.offset + frame.length
        size = len(self._rest) if size < 0 else size
        taken, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return taken

    def drain(self) -> None:
        """Read to the end, so that the trailer is verified."""
        while self.read():
            pass


def _check_tail(payload: memoryview, before: Position) -> None:
    try:
        found = msgspec.json.decode(payload, type=Trailer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failed:
        raise StreamDamaged(f"the stream's trailer cannot be read: {failed}") from failed
    if found != Trailer(before.frames, before.data_bytes, before.chain.hex()):
        raise StreamDamaged("the stream's trailer does not fit to what came before it: frames were lost or changed")


@dataclass(frozen=True, slots=True)
class Scanned:
    """A stream in a file: its header, the end of the last good frame, and whether the TAIL is there."""

    header: Header
    position: Position
    is_complete: bool


def scan(fd: int) -> Scanned | None:
    """What a file holds of a stream; None if not even the header. Every checksum is verified."""
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        reader = StreamReader(fd)
    except (StreamCut, StreamDamaged, NotAStream):
        return None
    last = reader.position.copied()
    try:
        for _, _, after in reader.frames():
            last = after
    except (StreamCut, StreamDamaged):
        return Scanned(reader.header, last, False)
    return Scanned(reader.header, last, True)
