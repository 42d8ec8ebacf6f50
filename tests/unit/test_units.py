"""Human forms of numbers, and back."""

import pytest

from meshwright.units import (
    parse_bytes,
    parse_count,
    parse_number,
    parse_seconds,
    show_bytes,
    show_count,
    show_range,
    show_seconds,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_count, "4M", 4_000_000),
        (parse_count, "1.5k", 1500),
        (parse_count, "300B", 300_000_000_000),
        (parse_count, "128Ki", 131_072),
        (parse_count, "4Mi", 4_194_304),
        (parse_count, "1e6", 1_000_000),
        (parse_count, "1_000", 1000),
        (parse_count, 1e3, 1000),
        (parse_count, 7, 7),
        (parse_bytes, "80GiB", 80 * 2**30),
        (parse_bytes, "80GB", 80 * 10**9),
        (parse_bytes, "512", 512),
        (parse_seconds, "30d", 2_592_000.0),
        (parse_seconds, "90min", 5400.0),
        (parse_seconds, 5, 5),
        (parse_number, "3e-4", 3e-4),
        (parse_number, 0.5, 0.5),
    ],
)
def test_human_forms_are_read(parse, text: object, value: float):
    assert parse(text) == value


@pytest.mark.parametrize("parse", [parse_count, parse_bytes, parse_seconds, parse_number])
@pytest.mark.parametrize("text", ["fast", "4kg", "", "1e999x", "--1", True, False])
def test_what_is_no_number_is_refused(parse, text: object):
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize("text", ["1.5", "0.1k1", "1e-3"])
def test_a_count_is_whole(text: str):
    with pytest.raises(ValueError):
        parse_count(text)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_count(8_030_261_248), "8.03B"),
        (show_count(4_000_000), "4M"),
        (show_count(999_999), "1M"),
        (show_count(12), "12"),
        (show_count(787.407), "787"),
        (show_bytes(80 * 2**30), "80.0 GiB"),
        (show_bytes(512), "512 B"),
        (show_seconds(0.0123), "12.3 ms"),
        (show_seconds(90), "1.50 min"),
        (show_seconds(1230), "20.5 min"),
        (show_seconds(5400), "1.5 h"),
        (show_seconds(2_592_000), "30.0 days"),
        (show_seconds(10 * 31557600.0), "10.0 years"),
    ],
)
def test_numbers_are_shown_for_people(shown: str, text: str):
    assert shown == text


def test_a_range_has_one_unit() -> None:
    assert show_range(48.81, 60.6) == "48.8 s to 60.6 s"
    assert show_range(0.95, 1.234) == "950 ms to 1230 ms"
