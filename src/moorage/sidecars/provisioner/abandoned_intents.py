"""Other instances' notes: which of them were left by an instance that is gone?

Nobody sees that a process on another machine has ended. But a living one writes its notes anew again and again, so one
that has stayed the same for long enough was left behind. How long that is, is measured from when we first saw it as it
is, by our own clock: the clocks of two machines are compared only for a note so old that they cannot differ as much.

Owns: since when each note has been the same.
May not touch: the Lease; what an attempt means.
Start reading at: `Others.see`, `Others.abandoned`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Clock = Callable[[], float]

_SURELY = 2.0  # times the patience: a note that was written so long ago counts as left behind when it is first seen


@dataclass(frozen=True, slots=True)
class Intent:
    """One instance's note of one attempt, as it was seen; a living writer changes the text."""

    key: str
    text: str

    @property
    def uid(self) -> str:
        return self.key.partition(".")[0]


class Others:
    """The notes of all other instances, as they were last seen."""

    def __init__(self, patience_s: float, *, clock: Clock = time.time, timer: Clock = time.monotonic) -> None:
        self._patience_s = patience_s  # 0: whoever wrote them has stopped
        self._clock = clock
        self._timer = timer
        self._since: dict[Intent, float] = {}

    def see(self, notes: Mapping[str, str]) -> None:
        """Take in all notes that there are now, by key."""
        now = self._timer()
        seen = [Intent(key, text) for key, text in notes.items()]
        self._since = {note: self._since.get(note, self._first_seen(note, now)) for note in seen}

    def abandoned(self) -> list[Intent]:
        """The notes that nobody works on any more."""
        latest = self._timer() - self._patience_s
        return [note for note, since in self._since.items() if since <= latest]

    def _first_seen(self, note: Intent, now: float) -> float:
        try:
            age_s = self._clock() - float(note.text.partition(":")[0])
        except ValueError:  # written by another version
            return now
        return now - self._patience_s if age_s >= _SURELY * self._patience_s else now
