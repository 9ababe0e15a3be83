"""What the log says of requests whose engine died."""

import logging

import pytest

from shoal.cluster.router.recovery_log import Recoveries

MS = 1_000_000


@pytest.fixture
def told(caplog):
    """Levels and texts of the lines that were logged."""
    caplog.set_level(logging.INFO, "shoal.cluster.router.recovery_log")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def died(recoveries, engine, *requests, now_ns=0):
    recoveries.engine_ended(engine, "killed", requests, now_ns)


def test_what_went_on_what_failed_and_what_was_cancelled_is_told_apart(told):
    recoveries = Recoveries()
    died(recoveries, "0", *"abcdef", now_ns=100 * MS)
    recoveries.progressed("a", "chat", "b", 200 * MS)
    recoveries.progressed("b", "chat", "c", 300 * MS)
    recoveries.progressed("c", "chat", "b", 512 * MS)
    recoveries.failed("d")
    recoveries.cancelled("e")
    assert len(told()) == 1
    recoveries.failed("f")
    assert told() == [
        ("WARNING", "engine 0 died: killed; 6 requests to be resumed"),
        (
            "WARNING",
            "engine 0: 3 requests went on within 412 ms (2 on engine b, 1 on engine c); "
            "2 requests ended with an error; 1 request cancelled meanwhile",
        ),
    ]
    assert recoveries.resumed == {"chat": 3}


def test_requests_that_only_failed_did_not_go_on(told):
    recoveries = Recoveries()
    died(recoveries, "0", "a", "b")
    for request in "ab":
        recoveries.failed(request)
        recoveries.cancelled(request)
    assert told()[1:] == [("WARNING", "engine 0: 2 requests ended with an error")]


def test_requests_that_went_on_or_were_cancelled_are_no_warning(told):
    recoveries = Recoveries()
    died(recoveries, "0", "a", "b")
    recoveries.cancelled("a")
    recoveries.went_on("b", "0", 5 * MS)
    died(recoveries, "0", "c")
    recoveries.cancelled("c")
    assert [line for line in told() if "died" not in line[1]] == [
        ("INFO", "engine 0: 1 request went on within 5 ms (1 on engine 0); 1 request cancelled meanwhile"),
        ("INFO", "engine 0: 1 request cancelled meanwhile"),
    ]


def test_a_request_that_loses_two_engines_counts_for_the_last(told):
    recoveries = Recoveries()
    died(recoveries, "0", "a", "b")
    recoveries.progressed("a", "chat", "1", 7 * MS)
    died(recoveries, "1", "a", "b", now_ns=10 * MS)
    assert told()[1][1] == "engine 1 died: killed; 2 requests to be resumed"
    assert told()[2] == ("INFO", "engine 0: 1 request went on within 7 ms (1 on engine 1)")
    for request in "ab":
        recoveries.progressed(request, "chat", "2", 13 * MS)
    assert told()[3:] == [("INFO", "engine 1: 2 requests went on within 3 ms (2 on engine 2)")]
    recoveries.failed("a")
    died(recoveries, "2")
    assert told()[4:] == [("WARNING", "engine 2 died: killed")]
