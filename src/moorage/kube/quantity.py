"""Quantities exactly as Kubernetes has them: `1.5Gi`, `1e3`, `100m`.

Owns: parsing, comparing, rounding and the canonical text of quantities.
May not touch: anything else; these are pure values.
Start reading at: `Quantity.parse`, `Quantity.canonical`.
"""

import re
from decimal import ROUND_CEILING, Decimal, localcontext
from functools import lru_cache, total_ordering
from typing import Literal

from moorage.errors import InvalidRequest

Format = Literal["DecimalSI", "BinarySI", "DecimalExponent"]

_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SYNTAX = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_NANO = Decimal("1e-9")
_MAX = Decimal(2**63 - 1)


class BadQuantity(InvalidRequest):
    """The text is no quantity."""


@total_ordering
class Quantity:
    """An exact amount and the style that it was written in."""

    __slots__ = ("amount", "style")

    def __init__(self, amount: Decimal | int, style: Format = "BinarySI") -> None:
        self.amount = Decimal(amount)
        self.style: Format = style

    @classmethod
    def parse(cls, text: str | int | float) -> "Quantity":
        """The quantity written as `text`; finer than nano is rounded away from zero, as Kubernetes does."""
        return _parse(str(text))

    @property
    def value(self) -> int:
        """Whole units, rounded up: what a size in bytes becomes."""
        with localcontext() as context:
            context.prec = 60
            return int(self.amount.to_integral_value(rounding=ROUND_CEILING))

    @property
    def milli_value(self) -> int:
        with localcontext() as context:
            context.prec = 60
            return int((self.amount * 1000).to_integral_value(rounding=ROUND_CEILING))

    def canonical(self) -> str:
        """The text Kubernetes would write: the largest suffix that leaves no fraction."""
        if self.amount == 0:
            return "0"
        if self.style == "BinarySI" and abs(self.amount) >= 1024 and self.amount == self.amount.to_integral_value():
            return _with_binary_suffix(int(self.amount))
        style: Format = "DecimalSI" if self.style == "BinarySI" else self.style
        return _with_decimal_suffix(self.amount, style)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantity) and self.amount == other.amount

    def __lt__(self, other: "Quantity") -> bool:
        return self.amount < other.amount

    def __hash__(self) -> int:
        return hash(self.amount)

    def __repr__(self) -> str:
        return f"Quantity({self.canonical()!r})"

    def __str__(self) -> str:
        return self.canonical()


def bytes_of(text: str | int | float | None) -> int:
    """The size in bytes that a quantity stands for, rounded up; nothing is 0."""
    return Quantity.parse(text).value if text is not None and text != "" else 0


def bytes_text(size_bytes: int) -> str:
    """The canonical binary quantity for a size in bytes, as the sidecars write it (`1Gi`)."""
    return Quantity(size_bytes, "BinarySI").canonical()


@lru_cache(maxsize=4096)
def _parse(text: str) -> Quantity:
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise BadQuantity(
            f"{text[:64]!r} is not a quantity: want a number with an optional suffix, such as 10Gi, 1e9 or 500m"
        )
    number, suffix = match[1], match[2] or ""
    with localcontext() as context:
        context.prec = 60
        amount = Decimal(number)
        if suffix in _BINARY:
            style: Format = "BinarySI"
            amount = amount * (1 << _BINARY[suffix])
        elif suffix in _DECIMAL:
            style = "DecimalSI"
            amount = amount.scaleb(_DECIMAL[suffix])
        else:
            style = "DecimalExponent"
            amount = amount.scaleb(max(-60, min(60, int(suffix[1:]))))
        amount = _bounded(amount)
    return Quantity(amount, style)


def _bounded(amount: Decimal) -> Decimal:
    if abs(amount) > _MAX:
        return _MAX.copy_sign(amount)
    rounded = abs(amount).quantize(_NANO, rounding=ROUND_CEILING)
    return rounded.copy_sign(amount)


def _with_binary_suffix(amount: int) -> str:
    for suffix, shift in reversed(_BINARY.items()):
        if amount % (1 << shift) == 0:
            return f"{amount >> shift}{suffix}"
    return str(amount)


def _with_decimal_suffix(amount: Decimal, style: Format) -> str:
    with localcontext() as context:
        context.prec = 60
        for suffix, exponent in reversed(_DECIMAL.items()):
            scaled = amount.scaleb(-exponent)
            if scaled == scaled.to_integral_value():
                if style == "DecimalSI":
                    return f"{int(scaled)}{suffix}"
                return f"{int(scaled)}e{exponent}" if exponent else str(int(scaled))
    return str(amount)
