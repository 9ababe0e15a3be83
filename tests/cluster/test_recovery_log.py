"""What the log says of requests whose engine died."""

import logging

import pytest

from shoal.cluster.router.recovery_log import RecoveryLog

MS = 1_000_000


@pytest.fixture
def log_lines(caplog):
    """Levels and texts of the lines that were logged."""
    caplog.set_level(logging.INFO, "shoal.cluster.router.recovery_log")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def died(recovery_log, engine, *requests, now_ns=0):
    recovery_log.engine_ended(engine, "killed", requests, now_ns)


def test_resumed_failed_and_cancelled_requests_are_logged_separately(log_lines):
    recovery_log = RecoveryLog()
    died(recovery_log, "0", *"abcdef", now_ns=100 * MS)
    recovery_log.progressed("a", "chat", "b", 200 * MS)
    recovery_log.progressed("b", "chat", "c", 300 * MS)
    recovery_log.progressed("c", "chat", "b", 512 * MS)
    recovery_log.failed("d")
    recovery_log.cancelled("e")
    assert len(log_lines()) == 1
    recovery_log.failed("f")
    assert log_lines() == [
        ("WARNING", "engine 0 died: killed; 6 requests to be resumed"),
        (
            "WARNING",
            "engine 0: 3 requests went on within 412 ms (2 on engine b, 1 on engine c); "
            "2 requests ended with an error; 1 request cancelled meanwhile",
        ),
    ]
    assert recovery_log.resumed == {"chat": 3}


def test_failed_requests_are_not_logged_as_resumed(log_lines):
    recovery_log = RecoveryLog()
    died(recovery_log, "0", "a", "b")
    for request in "ab":
        recovery_log.failed(request)
        recovery_log.cancelled(request)
    assert log_lines()[1:] == [("WARNING", "engine 0: 2 requests ended with an error")]


def test_resumed_and_cancelled_requests_are_no_warning(log_lines):
    recovery_log = RecoveryLog()
    died(recovery_log, "0", "a", "b")
    recovery_log.cancelled("a")
    recovery_log.recovered("b", "0", 5 * MS)
    died(recovery_log, "0", "c")
    recovery_log.cancelled("c")
    assert [line for line in log_lines() if "died" not in line[1]] == [
        ("INFO", "engine 0: 1 request went on within 5 ms (1 on engine 0); 1 request cancelled meanwhile"),
        ("INFO", "engine 0: 1 request cancelled meanwhile"),
    ]


def test_a_request_that_loses_two_engines_counts_for_the_last(log_lines):
    recovery_log = RecoveryLog()
    died(recovery_log, "0", "a", "b")
    recovery_log.progressed("a", "chat", "1", 7 * MS)
    died(recovery_log, "1", "a", "b", now_ns=10 * MS)
    assert log_lines()[1][1] == "engine 1 died: killed; 2 requests to be resumed"
    assert log_lines()[2] == ("INFO", "engine 0: 1 request went on within 7 ms (1 on engine 1)")
    for request in "ab":
        recovery_log.progressed(request, "chat", "2", 13 * MS)
    assert log_lines()[3:] == [("INFO", "engine 1: 2 requests went on within 3 ms (2 on engine 2)")]
    recovery_log.failed("a")
    died(recovery_log, "2")
    assert log_lines()[4:] == [("WARNING", "engine 2 died: killed")]
