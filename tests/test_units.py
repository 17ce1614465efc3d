"""Units: against a table of values worked out by hand, and there and back again."""

import contextlib
import math

import pytest
from hypothesis import given, strategies as st

from holmesjax import units
from holmesjax.errors import HolmesError
from tests.cases import cases

QUANTITIES = [
    ("25 Gb/s", "b/s", 3.125e9),
    ("400Gb/s", "b/s", 50e9),
    ("200 Gbps", "b/s", 25e9),
    ("1 Gib/s", "b/s", 2**30 / 8),
    ("450 GB/s", "b/s", 450e9),
    ("3.35 TB/s", "B/s", 3.35e12),
    ("5 us", "s", 5e-6),
    ("5 µs", "s", 5e-6),
    ("50us", "s", 50e-6),
    ("200 ms", "s", 0.2),
    ("2 h", "s", 7200.0),
    ("0 s", "s", 0.0),
    ("80 GiB", "B", 80 * 2**30),
    ("80 GB", "B", 80e9),
    ("8 b", "B", 1.0),
    (" 1.5  MiB ", "B", 1.5 * 2**20),
    ("989 TFLOP/s", "FLOP/s", 989e12),
    ("2.25 PFLOPS", "FLOP/s", 2.25e15),
    ("1e3 FLOP/s", "FLOP/s", 1000.0),
]


@cases("text, unit, value", QUANTITIES)
def test_parse(text, unit, value):
    assert units.parse(text, unit) == value


BAD = [
    ("25", "b/s", "has no unit", "such as 25 Gb/s"),
    (25, "b/s", "has no unit", "such as 25 Gb/s"),
    ("25 gb/s", "b/s", "'gb/s' is not a unit of bandwidth", "did you mean 25 GB/s or 25 Gb/s?"),
    ("25 Gb", "b/s", "'Gb' is not a unit of bandwidth", "such as 25 Gb/s"),
    ("5 us", "B", "'us' is not a unit of size", "such as 80 GiB"),
    ("80 GIB", "B", "'GIB' is not a unit of size", "did you mean 80 GiB or 80 Gib?"),
    ("3 MS", "s", "'MS' is not a unit of duration", "did you mean 3 ms?"),
    ("-5 us", "s", "must not be negative", "such as 5 us"),
    ("1e999 s", "s", "is too large", "such as 5 us"),
    ("nan s", "s", "must be a duration", "such as 5 us"),
    ("", "s", "must be a duration", "such as 5 us"),
    ("fast", "FLOP/s", "must be a speed", "such as 989 TFLOP/s"),
    (None, "s", "must be a duration", "such as 5 us"),
    (True, "s", "must be a duration", "such as 5 us"),
    ([1], "s", "must be a duration", "such as 5 us"),
]


@pytest.mark.parametrize(("text", "unit", "problem", "fix"), BAD)
def test_parse_refuses(text, unit, problem, fix):
    with pytest.raises(HolmesError) as error:
        units.parse(text, unit)
    assert error.value.problem == problem
    assert error.value.fix.endswith(fix)
    assert str(text) in str(error.value.found)


@pytest.mark.parametrize("unit", units.QUANTITY)
def test_the_example_of_every_refusal_works(unit):
    _, example, *_ = units.QUANTITY[unit]
    assert units.show(units.parse(example, unit), unit) == example


SHOWN = [
    (3.125e9, "b/s", "25 Gb/s"),
    (12.5e6, "b/s", "100 Mb/s"),
    (3.35e12, "B/s", "3.35 TB/s"),
    (1.5 * 2**30, "B", "1.5 GiB"),
    (17, "B", "17 B"),
    (0.012, "s", "12 ms"),
    (0.01234567, "s", "12.3 ms"),
    (0.9999, "s", "1 s"),  # rounds up into the next unit
    (75, "s", "1.25 min"),
    (1e7, "s", "2780 h"),  # no exponent above the largest unit
    (2e-12, "s", "0.002 ns"),
    (3.2e12, "FLOP/s", "3.2 TFLOP/s"),
    (0, "b/s", "0 b/s"),
    (-0.5, "s", "-500 ms"),
]


@pytest.mark.parametrize(("value", "unit", "text"), SHOWN)
def test_show(value, unit, text):
    assert units.show(value, unit) == text


@given(st.floats(min_value=0, max_value=1e290), st.sampled_from(list(units.QUANTITY)))
def test_exact_reads_back_as_the_same_number(value, unit):
    assert units.parse(units.exact(value, unit), unit) == value


@given(st.floats(min_value=1e-9, max_value=1e18), st.sampled_from(list(units.QUANTITY)))
def test_show_is_right_to_three_digits(value, unit):
    back = units.parse(units.show(value, unit), unit)
    assert math.isclose(back, value, rel_tol=0.0051)  # half of the last of three digits


@given(st.text(), st.sampled_from(list(units.QUANTITY)))
def test_any_text_is_a_quantity_or_a_mistake(text, unit):
    with contextlib.suppress(HolmesError):
        assert 0 <= units.parse(text, unit) < math.inf
