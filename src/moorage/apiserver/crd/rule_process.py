"""Questions about validation rules and patterns, answered by a process of their own.

Owns: the questions, starting and ending the process, and the time that an answer may take.
Start reading at: `RuleProcess.answer`, `compile_question`.
"""

import asyncio
import importlib.util
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from functools import cache
from typing import Any

import msgspec

from moorage.apiserver.errors import FieldError, StatusError, invalid_value, too_many
from moorage.log import get_logger

log = get_logger(__name__)

_ALTERNATIVES = ("allOf", "anyOf", "oneOf", "enum", "required")
PROGRAMS = ("x-kubernetes-validations", "pattern")
ANSWER_S = 10.0  # the process has less processor time; this is for a machine that has none to give
START_S = 15.0
IDLE_S = 60.0
LIMIT_WAITING = 100
NEEDS_EXTRA = 'validation rules and patterns need packages that are not installed: run pip install "moorage[apiserver]"'
OUT_OF_BUDGET = "the validation rules exceed their cost budget of time or memory"


class RulesPending(Exception):
    """A write cannot be decided before this question has its answer."""

    def __init__(self, question: bytes) -> None:
        super().__init__("validation rules were not evaluated yet")
        self.question = question


@cache
def is_installed() -> bool:
    """Whether the libraries that rules and patterns need are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("cel_expr_python", "re2"))


def has_programs(schema: Any) -> bool:
    """Whether a schema has rules or patterns: what a client wrote, and the server would have to run."""
    if isinstance(schema, dict):
        return any(name in schema and schema[name] for name in PROGRAMS) or any(map(has_programs, schema.values()))
    return isinstance(schema, list) and any(map(has_programs, schema))


def alternatives(schema: Any) -> int:
    """How many schemas and values one value may have to be compared with: the factor of the cost of validation."""
    if isinstance(schema, dict):
        here = sum(len(schema[word]) for word in _ALTERNATIVES if isinstance(schema.get(word), list))
        return 1 + here + sum(alternatives(item) - 1 for item in schema.values())
    return 1 + sum(alternatives(item) - 1 for item in schema) if isinstance(schema, list) else 1


def without_programs(schema: Any) -> Any:
    """The schema without its rules and patterns."""
    if isinstance(schema, dict):
        return {name: without_programs(item) for name, item in schema.items() if name not in PROGRAMS}
    return [without_programs(item) for item in schema] if isinstance(schema, list) else schema


def compile_question(schemas: list[tuple[str, Any]]) -> bytes:
    """Which rules and patterns of these schemas do not compile; each schema comes with its path in the definition."""
    return msgspec.msgpack.encode(("compile", [(where, msgspec.json.encode(schema)) for where, schema in schemas]))


def evaluate_question(schema: bytes, new: Any, old: Any) -> bytes:
    """What of a schema an object breaks; `old` is None for a new object."""
    before = b"" if old is None else msgspec.json.encode(old)
    return msgspec.msgpack.encode(("evaluate", schema, msgspec.json.encode(new), before))


class RuleProcess:
    """At most one process, started for the first question and ended when there were none for a while."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._idle: asyncio.TimerHandle | None = None

    async def answer(self, question: bytes) -> list[FieldError]:
        """The field errors that answer a question; running out of time or memory is one too."""
        if not is_installed():
            return [FieldError("FieldValueForbidden", "<nil>", f"Forbidden: {NEEDS_EXTRA}")]
        if self._waiting >= LIMIT_WAITING:
            raise too_many("too many objects wait for their validation rules, please try again later", 1)
        self._waiting += 1
        try:
            async with self._turn:
                return await self._ask(question)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        async with self._turn:
            await self._end()

    async def _ask(self, question: bytes) -> list[FieldError]:
        if self._idle is not None:
            self._idle.cancel()
        process = self._process or await self._start()
        try:
            async with asyncio.timeout(ANSWER_S):
                said = await _exchange(process, question)
        except (TimeoutError, EOFError, ConnectionError):
            log.warning("validation rules exceeded their budget", question_bytes=len(question))
            await self._end()
            return [invalid_value("<nil>", {}, OUT_OF_BUDGET)]
        except BaseException:  # cancelled between a question and its answer
            await self._end()
            raise
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._on_idle)
        return [FieldError(*error) for error in msgspec.msgpack.decode(said)]

    async def _start(self) -> Process:
        command = (sys.executable, "-m", "moorage.apiserver.crd.rule_worker")
        # A variable more: the allocator returns what a large object took, and keeps one arena.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, start_new_session=True
        )
        try:
            async with asyncio.timeout(START_S):
                await _exchange(self._process, compile_question([]))
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError | EOFError | ConnectionError):
                raise StatusError(
                    503, "ServiceUnavailable", "the process for validation rules did not start"
                ) from error
            raise
        return self._process

    def _on_idle(self) -> None:
        if self._process is not None and self._process.stdin is not None and not self._turn.locked():
            self._process.stdin.close()  # it ends at the end of its input
            self._process = None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _exchange(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(question).to_bytes(4, "big") + question)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "big")
    return await process.stdout.readexactly(size)
