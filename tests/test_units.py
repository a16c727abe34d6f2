"""Bytes as text and text as bytes: exact, with units that are always named."""

import pytest

from logitless.errors import OptionError
from logitless.units import format_bytes, parse_bytes, plural

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
        (1 << 55, "32,768.00 TiB"),
        ((1 << 63) - 1, "8,388,608.00 TiB"),
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
    assert format_bytes(10**18 + 5 * 10**9, "GB") == "1,000,000.01 TB"  # no float knows this one


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
