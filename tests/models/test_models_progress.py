"""Progress as text, which shows whether slow work hangs."""

import pytest

from shoal.models import in_words


def lines(reports, again_s):
    lines = []
    report = in_words(lines.append, again_s)
    for each in reports:
        report(*each)
    return lines


@pytest.mark.parametrize("again_s", [0.0, 1e9])
def test_each_line_is_sent_once(again_s):
    reports = [("downloading", done, 1000) for done in (0, 10, 10, 10, 500)]
    assert lines([*reports, ("converting", 1, 2)], again_s) == [
        "downloading: 0%",
        "downloading: 1%",
        "downloading: 50%",
        "converting: 50%",
    ]


def test_slow_work_is_reported_again_and_stalled_work_is_not():
    reports = [("downloading", done, 10**9) for done in (1, 2, 2, 2, 3, 3)]
    assert lines(reports, 0.0) == ["downloading: 0%"] * 3
    assert lines(reports, 1e9) == ["downloading: 0%"]


def test_work_of_unknown_length_is_reported_again():
    reports = [("waiting for another process", 0, None)] * 3
    assert lines(reports, 0.0) == ["waiting for another process"] * 3
    assert lines(reports, 1e9) == ["waiting for another process"]
