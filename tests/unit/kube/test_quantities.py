"""Quantities: a table made with Kubernetes' own parser, and the algebra that must hold for all of them."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.kube.quantity import BadQuantity, Quantity, bytes_of, bytes_text

TABLE = [json.loads(line) for line in (Path(__file__).parent / "quantities.jsonl").read_text().splitlines()]
SCALE = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
SCALE |= {suffix: Fraction(1000**n) for n, suffix in enumerate("kMGTPE", 1)}
SCALE |= {f"{suffix}i": Fraction(1024**n) for n, suffix in enumerate("KMGTPE", 1)}
SCALE |= {f"e{n}": Fraction(10) ** n for n in range(-12, 13)}


def test_it_reads_and_writes_as_kubernetes_does():
    """Each row: text, what Kubernetes writes (None: refused), value, milli value, format."""
    wrong = []
    for text, written, *rest in TABLE:
        try:
            found = Quantity.parse(text)
        except BadQuantity:
            found = None
        mine = [str(found), found.value, found.milli_value, found.style] if found else [None]
        if mine != [written, *rest]:
            wrong.append((text, [written, *rest], mine))
    assert not wrong
    assert len(TABLE) > 800


@pytest.mark.parametrize("text", ["1" * 300, "1e999999999999", "1e-400", "0." + "1" * 300])
def test_hostile_numbers_are_refused_quickly(text):
    with pytest.raises(BadQuantity):
        Quantity.parse(text)


@pytest.mark.parametrize("text", ["Gi5", "1 Gi", "1gi", "1GB", "٣Gi", "1__0", "infinity", "0x10", "1e1.5", "--5"])
def test_what_is_no_quantity_is_refused_with_its_text(text):
    with pytest.raises(BadQuantity, match="not a quantity"):
        Quantity.parse(text)


numbers = st.builds(
    lambda sign, whole, fraction, suffix: (sign, whole, fraction, suffix),
    st.sampled_from(["", "-", "+"]),
    st.integers(0, 10**12),
    st.text("0123456789", max_size=6),
    st.sampled_from(sorted(SCALE)),
)


def _text(number):
    sign, whole, fraction, suffix = number
    return f"{sign}{whole}{'.' + fraction if fraction else ''}{suffix}"


def _exact(number):
    """The amount by naive arithmetic, rounded away from zero to nano and capped as binary amounts are."""
    sign, whole, fraction, suffix = number
    amount = Fraction(int(f"{whole}{fraction}"), 10 ** len(fraction)) * SCALE[suffix]
    nanos = -(-amount * 10**9 // 1)
    if suffix.endswith("i"):
        nanos = min(nanos, (2**63 - 1) * 10**9)
    return Fraction(int(nanos) * (-1 if sign == "-" else 1), 10**9)


@given(numbers)
def test_the_amount_is_exact(number):
    assert Fraction(Quantity.parse(_text(number)).amount) == _exact(number)


@given(numbers, numbers)
def test_comparison_is_that_of_the_amounts(one, other):
    a, b = Quantity.parse(_text(one)), Quantity.parse(_text(other))
    assert (a < b) == (_exact(one) < _exact(other))
    assert (a == b) == (_exact(one) == _exact(other))
    if a == b:
        assert hash(a) == hash(b)


@given(numbers)
def test_the_value_rounds_away_from_zero(number):
    exact, found = _exact(number), Quantity.parse(_text(number))
    up = -(-abs(exact) // 1)
    assert found.value == (up if exact >= 0 else -up)
    assert found.milli_value == (1 if exact >= 0 else -1) * -(-abs(exact) * 1000 // 1)


@given(numbers)
def test_what_is_written_reads_as_the_same_amount_and_is_written_the_same_again(number):
    first = Quantity.parse(_text(number))
    again = Quantity.parse(first.canonical())
    assert again == first
    assert again.canonical() == first.canonical()


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_bytes_survive_their_text(size):
    text = bytes_text(size)
    assert bytes_of(text) == size
    if abs(size) >= 1024 and text[-1] == "i":
        assert int(text[:-2]) % 1024 or text.endswith("Ei")


def test_nothing_is_zero_bytes():
    assert (bytes_of(None), bytes_of(""), bytes_of("0"), bytes_of(5), bytes_of("1.5Gi")) == (0, 0, 0, 5, 3 << 29)


def test_a_size_in_bytes_fits_into_a_message_of_csi():
    assert bytes_of("100E") == 2**63 - 1 == bytes_of("9e200")
    assert bytes_of("-100E") == -(2**63) + 1
