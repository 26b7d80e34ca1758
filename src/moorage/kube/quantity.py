"""Quantities exactly as Kubernetes has them: `1.5Gi`, `1e3`, `100m`.

Owns: parsing, comparing, rounding and the canonical text of quantities.
May not touch: anything else; these are pure values.
Start reading at: `Quantity.parse`, `Quantity.canonical`.
"""

import re
from decimal import ROUND_UP, Context, Decimal, localcontext
from functools import lru_cache, total_ordering
from typing import Literal

from moorage.errors import InvalidRequest

Format = Literal["DecimalSI", "BinarySI", "DecimalExponent"]

_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
# Kubernetes lets the digits be missing ("." and "Ki" are zero); validation refuses such sizes, not the parser.
_SYNTAX = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_NANO = Decimal("1e-9")
_MOST_BYTES = 2**63 - 1
_MAX = Decimal(_MOST_BYTES)
_MAX_DIGITS = 256  # a bound that no real amount reaches: the work for hostile text stays small
_MAX_EXPONENT = 256
_EXACT = Context(prec=1024)
_FAST_DIGITS = 18  # Kubernetes keeps the text of such short numbers as it was written, where it is canonical enough


class BadQuantity(InvalidRequest):
    """The text is no quantity."""


@total_ordering
class Quantity:
    """An exact amount and the style that it was written in."""

    __slots__ = ("_text", "amount", "style")

    def __init__(self, amount: Decimal | int, style: Format = "BinarySI", text: str = "") -> None:
        self.amount = Decimal(amount)
        self.style: Format = style
        self._text = text

    @classmethod
    def parse(cls, text: str | int | float) -> "Quantity":
        """The quantity written as `text`; finer than nano is rounded away from zero, as Kubernetes does."""
        return _parse(str(text).strip())

    @property
    def value(self) -> int:
        """Whole units, rounded up (away from zero): what a size in bytes becomes."""
        with localcontext(_EXACT):
            return int(self.amount.to_integral_value(rounding=ROUND_UP))

    @property
    def milli_value(self) -> int:
        """Thousandths, rounded up (away from zero)."""
        with localcontext(_EXACT):
            return int((self.amount * 1000).to_integral_value(rounding=ROUND_UP))

    def canonical(self) -> str:
        """The text Kubernetes would write: the largest suffix that leaves no fraction, or the text that was read where
        Kubernetes keeps it."""
        if self._text:
            return self._text
        if self.amount == 0:
            return "0"
        with localcontext(_EXACT):
            whole = self.amount == self.amount.to_integral_value()
            if self.style == "BinarySI" and abs(self.amount) >= 1024 and whole:
                return _with_binary_suffix(int(self.amount))
            return _with_decimal_suffix(self.amount, self.style)

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


@lru_cache(maxsize=4096)
def canonical_text(text: str, is_amount: bool = False) -> str:
    """What Kubernetes stores for a quantity that was written as `text`.

    An amount of a resource (`is_amount`) is rounded up to thousandths, which other quantities are not.
    """
    quantity = Quantity.parse(text)
    if is_amount and (milli := quantity.milli_value) != quantity.amount.scaleb(3, _EXACT):
        return Quantity(Decimal(milli).scaleb(-3, _EXACT), quantity.style).canonical()
    return quantity.canonical()


def bytes_of(text: str | int | float | None) -> int:
    """Return the size in bytes that a quantity stands for, rounded up; nothing is 0, and CSI counts up to 63 bits."""
    found = Quantity.parse(text).value if text is not None and text != "" else 0
    return max(-_MOST_BYTES, min(found, _MOST_BYTES))


def bytes_text(size_bytes: int) -> str:
    """The canonical binary quantity for a size in bytes, as the sidecars write it (`1Gi`)."""
    return Quantity(size_bytes, "BinarySI").canonical()


@lru_cache(maxsize=4096)
def _parse(text: str) -> Quantity:
    match = _SYNTAX.fullmatch(text)
    if match is None or not text:
        raise BadQuantity(
            f"{text[:64]!r} is not a quantity: want a number with an optional suffix, such as 10Gi, 1e9 or 500m"
        )
    sign, whole, fraction, suffix = match[1], match[2].lstrip("0") or "0", match[3] or "", match[4] or ""
    if len(whole) + len(fraction) > _MAX_DIGITS:
        raise BadQuantity(f"{text[:64]!r}… is not a quantity: too many digits")
    with localcontext(_EXACT):
        digits = Decimal(f"{whole}.{fraction or 0}")
        if suffix in _BINARY:
            amount, style = _binary(digits * (1 << _BINARY[suffix]))
        else:
            exponent = _exponent_of(suffix, text)
            amount = digits.scaleb(exponent).quantize(_NANO, rounding=ROUND_UP)
            style = "DecimalSI" if suffix in _DECIMAL else "DecimalExponent"
        kept = text if _is_kept(whole, fraction, suffix, amount) else ""
        return Quantity((-amount if sign == "-" else amount).normalize(), style, kept)


def _binary(amount: Decimal) -> tuple[Decimal, Format]:
    """Binary amounts are capped at what 64 bits hold; below one they are shown with decimal suffixes."""
    amount = min(amount.quantize(_NANO, rounding=ROUND_UP), _MAX)
    return amount, "DecimalSI" if 0 < amount < 1 else "BinarySI"


def _exponent_of(suffix: str, text: str) -> int:
    if suffix in _DECIMAL:
        return _DECIMAL[suffix]
    exponent = int(suffix[1:]) if len(suffix) < 9 else _MAX_EXPONENT + 1
    if abs(exponent) > _MAX_EXPONENT:
        raise BadQuantity(f"{text[:64]!r} is not a quantity: the exponent is out of range")
    return exponent


def _is_kept(whole: str, fraction: str, suffix: str, amount: Decimal) -> bool:
    """Whether Kubernetes would write this number as it was read instead of in canonical form.

    It does so for short numbers whose exponent is a multiple of three and that do not end in three zeros, which
    lets spellings such as `1.500` and `+1` pass.
    """
    if suffix in _BINARY:
        spare = 15 - len(whole) - int(_BINARY[suffix] * 3 / 10) - 1
        return not fraction and spare >= 0 and amount <= _MAX and int(whole) & 7 != 0
    digits = whole + fraction
    scale = (_DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:])) - len(fraction)
    fits = len(digits) <= _FAST_DIGITS and scale >= -9
    return fits and scale % 3 == 0 and not digits.endswith("000") and digits[0] != "0"


def _with_binary_suffix(amount: int) -> str:
    for suffix, shift in reversed(_BINARY.items()):
        if amount % (1 << shift) == 0:
            return f"{amount >> shift}{suffix}"
    return str(amount)


def _with_decimal_suffix(amount: Decimal, style: Format) -> str:
    """The mantissa without trailing zeros beyond what an exponent divisible by three needs."""
    sign, digits, exponent = amount.normalize().as_tuple()
    assert isinstance(exponent, int)  # never NaN or infinite
    ceiling = exponent if style == "DecimalExponent" else min(exponent, 18)
    exponent3 = ceiling - ceiling % 3
    mantissa = int("".join(map(str, digits))) * 10 ** (exponent - exponent3)
    text = f"{'-' if sign else ''}{mantissa}"
    if style == "DecimalExponent":
        return f"{text}e{exponent3}" if exponent3 else text
    return text + next(suffix for suffix, e in _DECIMAL.items() if e == exponent3)
