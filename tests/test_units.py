"""Bytes as text and text as bytes: exact, with units that are always named."""

import pytest

from logitless.errors import OptionError
from logitless.units import format_bytes, format_parameters, one_unit, parse_bytes, plural

GIB = 1 << 30


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "2 KiB"),
        (GIB - 1, "1024 MiB"),
        (5 * GIB // 4, "1.25 GiB"),
        (-3 * GIB, "-3.00 GiB"),
        (1 << 55, "33,554,432.00 GiB"),
        ((1 << 63) - 1, "8,589,934,592.00 GiB"),
        (2.5 * GIB, "2.50 GiB"),
    ],
)
def test_gib(count, text):
    assert format_bytes(count) == text


def test_gb():
    assert [format_bytes(n, "GB") for n in (999, 1500, 10**9, 39_827_013_632)] == [
        "999 B",
        "2 kB",
        "1.00 GB",
        "39.83 GB",
    ]


def test_halves_round_up_in_whole_numbers():
    assert format_bytes(2 * GIB + GIB // 8) == "2.13 GiB"
    assert format_bytes(10**18 + 5 * 10**6, "GB") == "1,000,000,000.01 GB"  # no float knows this one


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ((1147 * GIB, 15 * GIB // 2, GIB // 2), ["1,147.00 GiB", "7.50 GiB", "0.50 GiB"]),  # the last does not matter
        ((12 * GIB, GIB // 16, GIB // 64, 0, 1), ["12,288 MiB", "64 MiB", "16 MiB", "0 MiB", "<1 MiB"]),
        ((GIB, GIB // 8), ["1.00 GiB", "0.13 GiB"]),
        ((GIB - 1, GIB // 4), ["1,024 MiB", "256 MiB"]),
        ((500 << 20, -(3 << 20), 1), ["500.00 MiB", "-3.00 MiB", "<0.01 MiB"]),
        ((900, 3), ["900 B", "3 B"]),
        ((0,), ["0 B"]),
    ],
)
def test_the_smallest_row_that_matters_keeps_its_digits(sizes, shown):
    assert list(map(one_unit(sizes), sizes)) == shown


def test_gb_stay_gb():
    sizes = (302_200_000_000, 79_900_000_000)
    assert list(map(one_unit(sizes, "GB"), sizes)) == ["302.20 GB", "79.90 GB"]
    assert format_bytes(3 * 10**12, "GB") == "3,000.00 GB"


@pytest.mark.parametrize("text", ["1e999GiB", "9223372036854775808", "8388608TiB"])
def test_more_than_can_be_counted(text):
    with pytest.raises(OptionError, match=r"--reserve must be less than 2\^63 bytes"):
        parse_bytes(text, "--reserve")


def test_zero_only_where_it_has_a_meaning():
    assert parse_bytes("0", least=0) == parse_bytes("0GiB", least=0) == 0
    with pytest.raises(OptionError, match="size must be more than 0 bytes"):
        parse_bytes("0.3")


def test_counts_in_words():
    given = (0, "row"), (1, "row"), (4096, "row"), (1, "forward pass"), (2, "forward pass")
    assert [plural(*each) for each in given] == [
        "0 rows",
        "1 row",
        "4,096 rows",
        "1 forward pass",
        "2 forward passes",
    ]


def test_a_tiny_model_has_parameters():
    found = [format_parameters(count) for count in (1, 18_560, 999_999, 1_000_000, 134_515_008)]
    assert found == ["1 parameter", "18,560 parameters", "999,999 parameters", "1.0 M parameters", "134.5 M parameters"]
