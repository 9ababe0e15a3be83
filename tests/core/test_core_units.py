import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.config import format_duration, format_size, parse_duration, parse_number, parse_size
from shoal.core.units import format_byte_rate, parse_byte_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("2GiB", 2 * 2**30),
        ("1.5 KiB", 1536),
        (".5kb", 500),
        ("3TiB", 3 * 2**40),
        (" 7 b ", 7),
        ("2G", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("2Gi", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("2 GiB", 2 * 2**30),
        ("512M", 512 * 10**6),
        ("512mi", 512 * 2**20),
        ("1.5Ki", 1536),
        ("1t", 10**12),
        ("1 Ti", 2**40),
        ("100 bytes", 100),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 gigs", "-1GiB", "1e9", "2GiB extra", "nan", "٣GiB x"])
def test_an_invalid_size_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"2GiB.*got") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@given(st.integers(0, 2**60))
@example(0)
@example(2**40)
def test_a_size_round_trips(size):
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_a_whole_number_of_units_is_exact(count, unit):
    power = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]
    assert parse_size(f"{count}{unit}") == count << power


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("25GB", 25e9), ("1.25 GB/s", 1.25e9), ("16e9", 16e9), ("63GiB", 63 * 2**30), ("0.5", 0.5), ("0", 0)],
)
def test_bytes_per_second(text, bytes_per_s):
    assert parse_byte_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "fast", "5%", "nan", "inf", "2GB/min", "/s"])
def test_an_invalid_byte_rate_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"25GB or 16e9, got") as error:
        parse_byte_rate(text)
    assert repr(text) in str(error.value)


@given(st.integers(0, 2**50))
@example(25 * 10**9)
@example(1_234_567_000)
def test_a_byte_rate_round_trips(bytes_per_s):
    assert round(parse_byte_rate(format_byte_rate(bytes_per_s))) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200ms", 0.2),
        ("2s", 2),
        ("1.5m", 90),
        ("1.5min", 90),
        ("2", 2),
        ("1h", 3600),
        ("7us", 7e-6),
        ("0", 0),
        ("5 minutes", 300),
        ("5min", 300),
        ("1 minute", 60),
        ("10 mins", 600),
        ("1 Hour", 3600),
        ("2 hrs", 7200),
        ("3 days", 3 * 86_400),
        ("1.5 seconds", 1.5),
        ("20 sec", 20),
        ("250 milliseconds", 0.25),
        ("7 microseconds", 7e-6),
        ("1h30m", 5400),
        ("1h 30min", 5400),
        ("1 hour 30 minutes 5 s", 5405),
        ("5m0s", 300),
        ("1m0.5s", 60.5),
        ("2s500ms", 2.5),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "", "s", "two seconds", "-1s", "1 fortnight", "inf", "99999999999999h", "30m1h", "1h2h", "1h30",
        "30 1h", "1m1minute", "1h, 30m", "5 minutess", "1e3s",
    ],
)  # fmt: skip
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(ValueError, match="expected a time"):
        parse_duration(text)


@given(st.integers(0, 10**8))
def test_a_duration_in_milliseconds_round_trips(milliseconds):
    seconds = milliseconds / 1e3
    assert math.isclose(parse_duration(format_duration(seconds)), seconds, rel_tol=1e-5)


@given(st.floats(0, 1e6, allow_nan=False))
def test_a_number_round_trips(value):
    assert parse_number(repr(value)) == value


@given(st.integers(0, 10_000))
def test_percent_is_a_hundredth(percent):
    assert parse_number(f"{percent}%") == pytest.approx(percent / 100)


@pytest.mark.parametrize("text", ["", "%", "five", "5%%", "nan", "inf", "1,5"])
def test_an_invalid_number_is_refused(text):
    with pytest.raises(ValueError, match="5%"):
        parse_number(text)
