"""Validation rules of CustomResourceDefinitions: the part of CEL that such rules are made of.

Owns: parsing and evaluating expressions: has(), size(), comparisons, logic, `in`, string methods, all() and exists().
May not touch: anything; a rule is a function of self and oldSelf.
Start reading at: `Rule`.

An expression outside this part is not guessed at: parsing it fails, and its rule is left out (and said so in the log).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage.errors import InvalidRequest

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.\d+|\d+)|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<op>&&|\|\||==|!=|<=|>=|[-+*/%!<>?:.,()\[\]]))"
)
_MISSING = object()


class BadExpression(InvalidRequest):
    """The text is no expression of the supported part of CEL."""


class NoValue(Exception):
    """A field that is not there was used."""


Scope = dict[str, Any]
Node = Callable[[Scope], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A compiled rule; one that mentions oldSelf holds only for changes."""

    text: str
    message: str
    node: Node
    is_transition: bool

    @classmethod
    def compile(cls, text: str, message: str) -> "Rule":
        parser = _Parser(text)
        node = parser.expression()
        parser.expect_end()
        return cls(text, message or f"failed rule: {text}", node, "oldSelf" in parser.names)

    def holds(self, value: Any, old: Any = _MISSING) -> bool:
        """Whether the rule is kept; a rule that cannot be computed is broken."""
        scope: Scope = {"self": value}
        if self.is_transition:
            if old is _MISSING:
                return True
            scope["oldSelf"] = old
        try:
            return bool(self.node(scope))
        except (NoValue, TypeError, ZeroDivisionError, re.error):
            return False


ABSENT = _MISSING
_BINARY = [("||",), ("&&",), ("==", "!=", "<=", ">=", "<", ">", "in"), ("+", "-"), ("*", "/", "%")]


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.names: set[str] = set()
        self.bound = ["self", "oldSelf"]
        at = 0
        text = text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.end() == at:
                raise BadExpression(f"cannot read {text[at : at + 20]!r}")
            self.tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
            at = match.end()
            while at < len(text) and text[at].isspace():
                at += 1
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> tuple[str, str]:
        if self.at >= len(self.tokens) or (wanted and self.tokens[self.at][1] != wanted):
            raise BadExpression(f"expected {wanted or 'more'}, found {self.peek()!r}")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect_end(self) -> None:
        if self.at != len(self.tokens):
            raise BadExpression(f"unexpected {self.peek()!r}")

    def expression(self) -> Node:
        test = self.binary(0)
        if self.peek() != "?":
            return test
        self.take("?")
        yes = self.expression()
        self.take(":")
        no = self.expression()
        return lambda scope: yes(scope) if test(scope) else no(scope)

    def binary(self, level: int) -> Node:
        if level == len(_BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _BINARY[level]:
            operator = self.take()[1]
            left = _combine(operator, left, self.binary(level + 1))
        return left

    def unary(self) -> Node:
        if self.peek() == "!":
            self.take()
            inner = self.unary()
            return lambda scope: not inner(scope)
        if self.peek() == "-":
            self.take()
            inner = self.unary()
            return lambda scope: -inner(scope)
        return self.postfix(self.primary())

    def postfix(self, node: Node) -> Node:
        while self.peek() in (".", "["):
            if self.take()[1] == "[":
                index = self.expression()
                self.take("]")
                node = _indexed(node, index)
                continue
            kind, name = self.take()
            if kind != "name":
                raise BadExpression(f"unexpected {name!r} after a dot")
            node = self.method(node, name) if self.peek() == "(" else _member(node, name)
        return node

    def method(self, target: Node, name: str) -> Node:
        self.take("(")
        if name in ("all", "exists", "exists_one", "filter", "map"):
            variable = self.take()[1]
            self.take(",")
            self.bound.append(variable)
            body = self.expression()
            self.bound.pop()
            self.take(")")
            return _macro(name, target, variable, body)
        arguments = self.arguments()
        if name not in _METHODS:
            raise BadExpression(f"unknown method {name}")
        function = _METHODS[name]
        return lambda scope: function(target(scope), *[argument(scope) for argument in arguments])

    def arguments(self) -> list[Node]:
        found: list[Node] = []
        while self.peek() != ")":
            found.append(self.expression())
            if self.peek() == ",":
                self.take()
        self.take(")")
        return found

    def primary(self) -> Node:
        kind, text = self.take()
        if kind == "number":
            number = float(text) if "." in text else int(text)
            return lambda _scope: number
        if kind == "string":
            string = re.sub(r"\\(.)", r"\1", text[1:-1])
            return lambda _scope: string
        if text == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if text == "[":
            items: list[Node] = []
            while self.peek() != "]":
                items.append(self.expression())
                if self.peek() == ",":
                    self.take()
            self.take("]")
            return lambda scope: [item(scope) for item in items]
        if kind != "name":
            raise BadExpression(f"unexpected {text!r}")
        return self.named(text)

    def named(self, name: str) -> Node:
        if name in ("true", "false", "null"):
            value = {"true": True, "false": False, "null": None}[name]
            return lambda _scope: value
        if self.peek() == "(":
            self.take("(")
            arguments = self.arguments()
            if name == "has" and len(arguments) == 1:
                return _has(arguments[0])
            if name in _FUNCTIONS and len(arguments) == 1:
                function = _FUNCTIONS[name]
                return lambda scope: function(arguments[0](scope))
            raise BadExpression(f"unknown function {name}")
        if name not in self.bound:
            raise BadExpression(f"unknown name {name}")
        self.names.add(name)

        def variable(scope: Scope) -> Any:
            if name not in scope:
                raise NoValue(name)
            return scope[name]

        return variable


def _combine(operator: str, left: Node, right: Node) -> Node:
    match operator:
        case "&&":
            return lambda scope: bool(left(scope)) and bool(right(scope))
        case "||":
            return lambda scope: bool(left(scope)) or bool(right(scope))
        case "==":
            return lambda scope: left(scope) == right(scope)
        case "!=":
            return lambda scope: left(scope) != right(scope)
        case "in":
            return lambda scope: left(scope) in right(scope)
    function = _ARITHMETIC[operator]
    return lambda scope: function(left(scope), right(scope))


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) else a / b,
    "%": lambda a, b: a % b,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "size": len,
    "string": str,
    "int": int,
    "double": float,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "size": len,
    "startsWith": lambda text, part: text.startswith(part),
    "endsWith": lambda text, part: text.endswith(part),
    "contains": lambda text, part: part in text,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
    "lowerAscii": lambda text: text.lower(),
    "split": lambda text, part: text.split(part),
}


def _name(text: str) -> str:
    """A field's name; names that are words of CEL are written as `__namespace__`."""
    return text[2:-2] if text.startswith("__") and text.endswith("__") and len(text) > 4 else text


def _member(target: Node, name: str) -> Node:
    key = _name(name)

    def get(scope: Scope) -> Any:
        value = target(scope)
        if not isinstance(value, dict) or key not in value:
            raise NoValue(key)
        return value[key]

    return get


def _indexed(target: Node, index: Node) -> Node:
    def get(scope: Scope) -> Any:
        value, at = target(scope), index(scope)
        try:
            return value[at]
        except (KeyError, IndexError) as error:
            raise NoValue(str(at)) from error

    return get


def _has(argument: Node) -> Node:
    def test(scope: Scope) -> bool:
        try:
            return argument(scope) is not None
        except NoValue:
            return False

    return test


def _macro(name: str, target: Node, variable: str, body: Node) -> Node:
    def run(scope: Scope) -> Any:
        value = target(scope)
        found = [body({**scope, variable: item}) for item in value]
        match name:
            case "all":
                return all(found)
            case "exists":
                return any(found)
            case "exists_one":
                return sum(map(bool, found)) == 1
            case "filter":
                return [item for item, keep in zip(value, found, strict=True) if keep]
        return found

    return run
