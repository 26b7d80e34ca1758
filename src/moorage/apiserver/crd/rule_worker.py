"""The process that compiles and evaluates validation rules, apart from the server.

Owns: its bounds on memory and time, the schemas it has compiled, and its end of the pipe.
Start reading at: `main`.

A rule is a program that a client wrote. What it asks for in time or memory ends this process, and not the server; the
server's end of the pipe is `rule_process`.
"""

import os
import resource
import signal
import time
from collections import OrderedDict
from typing import Any

import msgspec

from moorage.apiserver.crd.cel import ABSENT
from moorage.apiserver.crd.patterns import matches
from moorage.apiserver.crd.rules import Evaluation, OutOfTime, RuleNode, compile_schema
from moorage.apiserver.crd.structural import Checker
from moorage.apiserver.errors import FieldError, invalid_value

BUDGET_S = 0.8  # of processor time, after which evaluation stops
LIMIT_S = 1.0  # of processor time, after which the kernel ends this process
LIMIT_MEMORY = 1 << 30
LIMIT_SCHEMAS = 64
OUT_OF_BUDGET = "the validation rules exceed their cost budget; no further rule was evaluated"
_compiled: "OrderedDict[bytes, RuleNode]" = OrderedDict()


def answer(question: bytes) -> bytes:
    """The field errors that a question has as its answer."""
    what, *rest = msgspec.msgpack.decode(question)
    found = _compile(rest[0]) if what == "compile" else _evaluate(*rest)
    return msgspec.msgpack.encode([(error.reason, error.field, error.message) for error in found])


def _compile(schemas: list[tuple[str, bytes]]) -> list[FieldError]:
    errors: list[FieldError] = []
    for where, schema in schemas:
        compile_schema(msgspec.json.decode(schema), where, errors)
    return errors[:50]


def _evaluate(schema: bytes, new: bytes, old: bytes) -> list[FieldError]:
    node, obj = _node_of(schema), msgspec.json.decode(new)
    checker = Checker(matches)
    checker.check_object(obj, node.schema)
    if checker.errors:
        return checker.errors[:50]
    evaluation = Evaluation(time.process_time() + BUDGET_S)
    before: Any = msgspec.json.decode(old) if old else ABSENT
    try:
        evaluation.check(node, obj, before)
    except OutOfTime:
        evaluation.errors.append(invalid_value("<nil>", {}, OUT_OF_BUDGET))
    return evaluation.errors[:50]


def _node_of(schema: bytes) -> RuleNode:
    node = _compiled.pop(schema, None)
    if node is None:
        node = compile_schema(msgspec.json.decode(schema), "", [])
    _compiled[schema] = node
    while len(_compiled) > LIMIT_SCHEMAS:
        _compiled.popitem(last=False)
    return node


def main() -> None:
    """Answer questions until the server closes the pipe. Each message is its length in four bytes, and itself."""
    questions, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between the answers
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_MEMORY, LIMIT_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while size := questions.read(4):
        question = questions.read(int.from_bytes(size, "big"))
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process, whatever runs at that moment
        said = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(said).to_bytes(4, "big") + said)
        answers.flush()


if __name__ == "__main__":
    main()
