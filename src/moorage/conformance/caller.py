"""The calls of one check: recorded, bounded by a deadline, and judged when they fail.

Owns: telling a hang, a crash and an answer apart, and the rules that hold for every answer.
Start reading at: `Caller`.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from moorage.conformance.model import DriverCrashed, DriverHung, Exchange, NotMet
from moorage.conformance.reproduce import command_for
from moorage.csi import limits
from moorage.csi.errors import CsiError
from moorage.csi.generated.csi_calls import CsiCalls
from moorage.csi.redact import one_line
from moorage.errors import InvalidRequest
from moorage.printable import shortened

if TYPE_CHECKING:
    from moorage.conformance.session import Session

_Response = TypeVar("_Response", bound=Message)

_LONGEST_TEXT = 1500
_MOST_RECORDED = 200
_MOST_MESSAGES = 10_000  # of one stream
_TRANSPORT_CODES = frozenset({"UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"})  # a lost connection looks like these


class Caller(CsiCalls):
    """Every CSI method, for one check. A failed call raises CsiError, DriverHung or DriverCrashed."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._number = 0
        self.exchanges: dict[int, Exchange] = {}
        self.is_cleanup = False

    async def _unary(
        self, path: str, request: Message, response: type[_Response], timeout_s: float | None
    ) -> _Response:
        method = path.rpartition("/")[2]
        self._refuse_what_hangs(method)
        self._session.refuse_others(method, request)
        number, started = self._begin(method, request)
        limit = timeout_s or self._session.config.timeout_s
        losses = self._session.losses
        try:
            answer = await self._session.client.call(path, request, limit)
        except CsiError as error:
            await self._judge(number, method, error, started, limit, losses)
            raise
        except asyncio.CancelledError:
            self._end(number, "given up by the check", "", started)
            raise
        self._end(number, "OK", one_line(answer), started)
        self._look_at(number, method, answer)
        return answer  # type: ignore[return-value]  # `call` takes the type from the same descriptor

    async def _stream(
        self, path: str, request: Message, response: type[_Response], timeout_s: float | None
    ) -> AsyncIterator[_Response]:
        method = path.rpartition("/")[2]
        self._refuse_what_hangs(method)
        self._session.refuse_others(method, request)
        number, started = self._begin(method, request)
        limit = timeout_s or self._session.config.timeout_s
        losses, count, last = self._session.losses, 0, ""
        try:
            async for message in getattr(self._session.client, method)(request, limit):
                count, last = count + 1, one_line(message)
                if count > _MOST_MESSAGES:
                    raise CsiError(method, "RESOURCE_EXHAUSTED", f"the stream has more than {_MOST_MESSAGES} messages")
                yield message
        except CsiError as error:
            await self._judge(number, method, error, started, limit, losses)
            raise
        self._end(number, "OK", f"{count} messages, the last {last}", started)

    def _refuse_what_hangs(self, method: str) -> None:
        if owner := self._session.always_hangs(method):
            raise NotMet(owner, DriverHung(method, self._session.config.timeout_s))

    def _begin(self, method: str, request: Message) -> tuple[int, float]:
        self._number += 1
        if len(self.exchanges) >= _MOST_RECORDED:
            del self.exchanges[next(iter(self.exchanges))]
        shown = shortened(one_line(request), _LONGEST_TEXT)
        again = command_for(method, request, self._session.config.endpoint)
        self.exchanges[self._number] = Exchange(method, shown, again, "no answer yet", is_cleanup=self.is_cleanup)
        return self._number, time.monotonic()

    def _end(self, number: int, code: str, answer: str, started: float) -> None:
        if (known := self.exchanges.get(number)) is not None:
            shown = shortened(self._session.without_secrets(answer), _LONGEST_TEXT)
            taken = time.monotonic() - started
            self.exchanges[number] = replace(known, code=code, answer=shown, seconds=taken)

    async def _judge(
        self, number: int, method: str, error: CsiError, started: float, limit: float, losses: int
    ) -> None:
        """Raise what the error really is, if it is no answer of the driver."""
        if error.code == "DEADLINE_EXCEEDED" and time.monotonic() - started >= limit * 0.95:
            self._end(number, "no answer", f"within {limit:g} s", started)
            raise DriverHung(method, limit) from None
        if error.code in _TRANSPORT_CODES and await self._session.has_crashed_since(losses):
            self._end(number, "no answer", "the connection was lost", started)
            raise DriverCrashed(method) from None
        self._end(number, error.code, error.message, started)
        if not error.message.strip():
            self._session.violate("Answers.messages", f"{method} answered {error.code} without a message")
        self._look_for_secrets(method, error.message)

    def _look_at(self, number: int, method: str, answer: Message) -> None:
        try:
            limits.check(answer)
        except InvalidRequest as error:
            self._session.violate("Answers.sizes", f"the answer of {method}: {error}")
        if negative := next(_negative_numbers(answer), ""):
            self._session.violate("Answers.numbers", f"the answer of {method}: {negative} is negative")
        self._look_for_secrets(method, str(answer))

    def _look_for_secrets(self, method: str, text: str) -> None:
        if name := self._session.secret_in(text):
            self._session.violate("Secrets.not-echoed", f"the answer of {method} has the value of secret {name!r}")


def _negative_numbers(message: Message) -> Any:
    for field, value in message.ListFields():
        for item in value if field.is_repeated and not hasattr(value, "items") else [value]:
            if isinstance(item, Message):
                if item.DESCRIPTOR.full_name != "google.protobuf.Timestamp":
                    yield from _negative_numbers(item)
            elif isinstance(item, int) and item < 0:
                yield field.name
