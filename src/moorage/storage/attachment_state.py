"""The state of a volume's attachments: numbered files that are compared and swapped without locks.

Owns: the files in `volumes/<id>/attach/`, and how the next one is made and old ones are removed.
Start reading at: `StateFiles.swap`.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable

import msgspec

from moorage.storage.errors import (
    Busy,
    DamagedRecord,
)
from moorage.storage.failpoints import reached
from moorage.storage.layout import fsync_path, read_file, write_file

_KEPT = 2
_LONGEST_LINK = 960  # XFS takes 1024 bytes, others more
_DRAFT_LIFE_S = 3600
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_SPLIT = {errno.EIO, errno.ENOTCONN}
_ATTEMPTS = 1000


class AttachedNode(msgspec.Struct, frozen=True):
    token: int
    readonly: bool
    mode: str


class AttachmentState(msgspec.Struct, frozen=True):
    """One generation. `nonce` tells a writer whether a link that seemed to fail was its own."""

    nodes: dict[str, AttachedNode] = {}
    nonce: str = ""
    sealed: bool = False


class StateFiles:
    """The numbered states of one volume."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read(self) -> tuple[int, AttachmentState]:
        """The latest number and state; 0 and empty when there was never one."""
        for _ in range(_ATTEMPTS):
            number = self._latest()
            if number == 0:
                return 0, AttachmentState()
            path = os.path.join(self._directory, str(number))
            try:
                raw = _content(path)
            except OSError as failed:
                if failed.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                continue  # two generations passed while we looked; over a network, that may be a stale handle
            try:
                return number, msgspec.json.decode(raw, type=AttachmentState)
            except (msgspec.DecodeError, UnicodeDecodeError) as failed:
                raise DamagedRecord(path, str(failed)) from failed
        raise Busy(f"{self._directory} changes too fast to be read; try again")

    def swap(self, change: Callable[[int, AttachmentState], AttachmentState | None]) -> None:
        """Apply a change to the latest state; repeat it until no other writer was in between.

        `change` gets the number that its result would have and the state before; None means that
        there is nothing to do.
        """
        for attempt in range(_ATTEMPTS):
            number, state = self.read()
            wanted = change(number + 1, state)
            if wanted is None or self._try(number + 1, wanted):
                return
            time.sleep(min(0.05, secrets.randbelow(1000) / 1e6 * (attempt + 1)))
        raise Busy(f"{self._directory}: too many others change it; try again")

    def _try(self, number: int, wanted: AttachmentState) -> bool:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
            fsync_path(os.path.dirname(self._directory))
        place = os.path.join(self._directory, str(number))
        if not self._make(place, wanted):
            return False
        reached("attach.linked")
        # A number that was cleaned up long ago can be linked again; the latest one decides.
        if self._latest() != number and not self._was_followed(number):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)
            return False
        fsync_path(self._directory)
        self._clean(number)
        return True

    def _make(self, place: str, wanted: AttachmentState) -> bool:
        """Give a state its number, as a whole. Returns False if another writer took that number."""
        content = msgspec.json.encode(wanted)
        draft = os.path.join(self._directory, f".{int(time.time())}-{wanted.nonce}")
        if len(content) > _LONGEST_LINK:
            write_file(draft, content)
        else:
            # Over a network, the answer to a success can be lost and its repetition fail; the nonce makes it ours.
            with contextlib.suppress(FileExistsError):
                os.symlink(content, os.fsencode(draft))
        reached("attach.prepared")
        try:
            self._link(draft, place, content)
        except FileExistsError:
            return self._is_ours(place, wanted)  # the answer may have been lost here too
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        return True

    def _link(self, draft: str, place: str, content: bytes) -> None:
        """Others look for `place` already: a link does not mind, but on GlusterFS a new symbolic link would."""
        try:
            os.link(draft, place, follow_symlinks=False)
        except OSError as failed:
            if failed.errno not in _NO_LINKS or len(content) > _LONGEST_LINK:
                raise
            os.symlink(content, os.fsencode(place))

    def _was_followed(self, number: int) -> bool:
        """Whether the states after ours were built on it: they are if none is missing in between."""
        numbers = self._numbers()
        return bool(numbers) and number in numbers and number >= max(numbers) - _KEPT

    def _is_ours(self, place: str, wanted: AttachmentState) -> bool:
        try:
            return msgspec.json.decode(_content(place), type=AttachmentState).nonce == wanted.nonce
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return False
        except OSError as failed:
            if failed.errno != errno.ESTALE:  # replaced meanwhile: the next look tells who has it
                raise
            return False

    def _latest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> set[int]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return set()
        except OSError as failed:
            if failed.errno == errno.ENOTDIR:
                raise DamagedRecord(self._directory, "it is not a directory") from failed
            raise
        return {int(name) for name in names if name.isascii() and name.isdigit()}

    def _clean(self, number: int) -> None:
        """Remove old generations, and drafts of the dead."""
        for name in os.listdir(self._directory):
            path = os.path.join(self._directory, name)
            with contextlib.suppress(FileNotFoundError):
                is_old = name.isdigit() and int(name) < number - _KEPT
                is_draft = name.startswith(".") and _age_s(path, name) > _DRAFT_LIFE_S
                if is_old or is_draft:
                    os.unlink(path)


def _age_s(path: str, name: str) -> float:
    """How old a draft is; its name says so, because looking it up could disturb its writer."""
    made, dash, _ = name[1:].partition("-")
    return time.time() - (int(made) if dash and made.isdigit() else os.lstat(path).st_mtime)


def _content(path: str) -> bytes:
    """The text of a state, which is never followed as a link."""
    try:
        return os.readlink(os.fsencode(path))
    except OSError as failed:
        if failed.errno != errno.EINVAL:  # it is no symbolic link
            raise
    return read_file(path)
