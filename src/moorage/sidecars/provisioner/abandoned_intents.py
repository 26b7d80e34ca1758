"""Intents of other instances: which of them were left behind by an instance that has ended?

A process cannot see that a process on another machine has ended. But a running instance renews its notes periodically,
so a note that has stayed the same for long enough was left behind. The time is measured on our own clock, from when the
note was first seen with its present text. The clocks of two machines are compared only if a note is so old that they
cannot differ as much.

Owns: since when each note has been the same.
Start reading at: `OtherIntents.see`, `OtherIntents.abandoned`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Clock = Callable[[], float]

_SURELY = 2.0  # times the patience: a note that was written so long ago counts as left behind when it is first seen


@dataclass(frozen=True, slots=True)
class Intent:
    """One instance's note of one attempt, as it was read; a running writer changes the text."""

    key: str
    text: str

    @property
    def uid(self) -> str:
        return self.key.partition(".")[0]


class OtherIntents:
    """The notes of all other instances, as they were last read."""

    def __init__(self, patience_s: float, *, clock: Clock = time.time, timer: Clock = time.monotonic) -> None:
        self._patience_s = patience_s  # 0: their writers have stopped
        self._clock = clock
        self._timer = timer
        self._since: dict[Intent, float] = {}

    def see(self, notes: Mapping[str, str]) -> None:
        """Take in the present notes, by key."""
        now = self._timer()
        seen = [Intent(key, text) for key, text in notes.items()]
        self._since = {note: self._since.get(note, self._first_seen(note, now)) for note in seen}

    def abandoned(self) -> list[Intent]:
        """Return the notes whose writers have ended."""
        latest = self._timer() - self._patience_s
        return [note for note, since in self._since.items() if since <= latest]

    def _first_seen(self, note: Intent, now: float) -> float:
        try:
            age_s = self._clock() - float(note.text.partition(":")[0])
        except ValueError:  # written by another version
            return now
        return now - self._patience_s if age_s >= _SURELY * self._patience_s else now
