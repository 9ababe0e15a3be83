"""The verdict on a run, by small records whose queues are known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_builders import NS, make_row, make_run, make_totals, refused_row

from shoal.core import SLO
from shoal.measure import Sample, WeightsTotals, verdict
from shoal.measure.tables import figure
from shoal.measure.verdict import kept_share


def queue(count, *, every, takes, servers=1, first=0.5, **more):
    """Requests that come ``every`` so many seconds and are answered by ``servers``, first come, first served.

    first: share of the time that an answer takes until its first token.
    """
    free = [0.0] * servers
    rows = []
    for number in range(count):
        arrival = number * every
        server = min(range(servers), key=free.__getitem__)
        start = max(arrival, free[server])
        free[server] = start + takes
        times = {"arrival": arrival, "first": start + first * takes, "end": free[server]}
        rows.append(make_row(f"r{number}", **times, **more))
    return rows


def all_at_work(count, *, every, takes, first=0.1):
    """Requests that never wait, and take longer the more there are: ``takes(number)`` seconds."""
    arrivals = [number * every for number in range(count)]
    return [
        make_row(f"r{number}", arrival=arrival, first=arrival + first, end=arrival + takes(number))
        for number, arrival in enumerate(arrivals)
    ]


def samples(count=10, *, waiting=5, running=8, kv=0.5, engine=0):
    return [Sample(number * NS, engine, waiting, running, kv, 10.0) for number in range(count)]


def test_a_load_within_the_capacity_is_served():
    found = verdict(make_run(queue(100, every=0.5, takes=0.4)))
    assert found.kind == "served"
    assert found.text == "Served: all of 2.00 requests/s; p99 TTFT 200 ms."


def test_goals_are_told_and_missed_goals_are_late():
    fine = queue(90, every=0.5, takes=0.4, slo=SLO(ttft_s=1.0))
    assert verdict(make_run(fine)).text.endswith("p99 TTFT 200 ms, goals met by 100.0%.")
    tight = [replace(row, slo=SLO(ttft_s=0.1)) for row in fine[:9]]
    found = verdict(make_run([*tight, *fine[9:]]))
    assert found.kind == "late"
    assert found.text == "Served late: all of 2.00 requests/s; p99 TTFT 200 ms, goals met by 90.0%."


def test_the_service_with_the_lowest_share_is_named():
    good = queue(90, every=0.5, takes=0.4, slo=SLO(ttft_s=1.0))
    poor = queue(4, every=2.0, takes=0.4, service="code", slo=SLO(ttft_s=0.1))
    found = verdict(make_run([*good, *poor]))
    assert found.kind == "served"
    assert "goals met by 95.7% (of code by 0.0%)." in found.text


@pytest.mark.parametrize("overload", [1.25, 2.0, 5.0, 40.0])
def test_an_overload_is_saturated_whatever_it_is(overload):
    rows = queue(200, every=0.4 / overload, takes=0.4)
    assert kept_share(make_run(rows)) == pytest.approx(1 / overload, abs=0.13)
    found = verdict(make_run(rows))
    assert found.kind == "saturated"
    assert f" of {figure(overload * 2.5)} requests/s served; p99 TTFT" in found.text


@pytest.mark.parametrize("takes", [0.01, 1.0, 30.0, 1000.0])
def test_long_answers_that_do_not_wait_are_no_overload(takes):
    rows = all_at_work(100, every=0.5, takes=lambda number: takes)
    assert kept_share(make_run(rows)) == 1.0
    assert verdict(make_run(rows)).kind == "served"


def test_the_last_long_answers_do_not_count():
    """Ends are behind by as much as one answer takes, which says nothing about the rate."""
    rows = all_at_work(100, every=0.5, takes=lambda number: 40.0 if number % 10 == 9 else 1.0)
    assert verdict(make_run(rows)).kind == "served"


def test_answers_that_take_ever_longer_are_an_overload_though_all_begin_at_once():
    rows = all_at_work(100, every=0.5, takes=lambda number: 0.5 * number)
    found = verdict(make_run(rows))
    assert found.kind == "saturated"
    assert found.text.startswith("Saturated: 1.01 of 2.00 requests/s served; p99 TTFT 100 ms")


@given(st.integers(2, 60), st.floats(0.01, 5), st.floats(0.01, 5), st.integers(1, 3))
def test_the_share_kept_is_a_share_and_all_of_it_without_a_queue(count, every, takes, servers):
    kept = kept_share(make_run(queue(count, every=every, takes=takes, servers=servers)))
    assert 0 < kept <= 1
    if takes <= every:
        assert kept == 1


def test_requests_refused_after_they_had_waited_were_not_kept_up_with():
    rows = queue(80, every=0.5, takes=0.4)
    gone = [replace(refused_row(f"g{n}", arrival=n), finish_ns=(n + 5) * NS) for n in range(20)]
    found = verdict(make_run([*rows, *gone]))
    assert found.kind == "saturated"
    assert kept_share(make_run([*rows, *gone])) == pytest.approx(0.8)


def test_requests_refused_on_arrival_and_failures_are_not_saturation():
    rows = queue(80, every=0.5, takes=0.4)
    others = [refused_row(f"g{n}", arrival=n) for n in range(15)]
    failed = [make_row(f"f{n}", arrival=n, end=n, output=0, finish="error") for n in range(5)]
    found = verdict(make_run([*rows, *others, *failed]))
    assert found.kind == "unanswered"
    assert found.text.startswith("Not all served: 15 refused, 5 failed of 100 requests; p99 TTFT")


def test_a_few_that_were_not_answered_are_a_share_of_the_load():
    rows = queue(98, every=0.5, takes=0.4)
    found = verdict(make_run([*rows, *(refused_row(f"g{n}", arrival=n) for n in range(2))]))
    assert found.kind == "served"
    assert found.text.startswith("Served: 98.0% of 2.04 requests/s; ")


def test_cancelled_requests_do_not_count():
    rows = queue(50, every=0.5, takes=0.4)
    gone = [make_row(f"g{n}", arrival=n, end=n + 1, finish="cancelled") for n in range(20)]
    assert verdict(make_run([*rows, *gone])).kind == "served"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "Nothing served: there were no requests."),
        ([refused_row()], "Nothing served: the only request refused."),
        ([refused_row(f"{n}") for n in range(20)], "Nothing served: all 20 requests refused."),
        (
            [refused_row(), make_row(finish="error"), make_row(finish="cancelled")],
            "Nothing served: 1 refused, 1 failed, 1 cancelled of 3 requests.",
        ),
    ],
)
def test_nothing_answered(rows, text):
    found = verdict(make_run(rows))
    assert (found.kind, found.text) == ("nothing", text)


def test_one_request_and_requests_at_once_have_no_rate():
    assert verdict(make_run([make_row()])).text == "Served: the only request; TTFT 1.00 s."
    found = verdict(make_run([make_row(f"r{n}", end=3 + n) for n in range(8)]))
    assert found.text == "Served: all of 8 requests at once; p99 TTFT 1.00 s."


def test_a_closed_loop_has_the_rate_that_it_gets():
    run = make_run(queue(40, every=0.1, takes=0.4), clients=16)
    found = verdict(run)
    assert found.kind == "served"
    assert found.text.startswith("Served: 16 clients with 2.50 requests/s and 12.5 tokens/s; p99 TTFT")


def test_a_stopped_run_says_so():
    run = make_run([make_row(), make_row("r1", arrival=1, end=4)], stopped=True)
    assert verdict(run).text.endswith(" (until it was stopped).")


class TestLimits:
    """Of a queue that is twice as long as can be served."""

    rows = queue(200, every=0.2, takes=0.4)

    def limit(self, found, *, rows=None, busy=1.0, **more):
        totals = make_totals(busy_ns=round(busy * 80 * NS), **more)
        run = make_run(self.rows if rows is None else rows, samples=found, engines=[totals])
        text = verdict(run).text
        assert text.startswith("Saturated: ")
        return text.removeprefix("Saturated: limited by ").split(";")[0]

    def test_a_full_pool_while_requests_wait(self):
        assert self.limit(samples(kv=0.95)) == "KV memory"

    def test_a_full_pool_while_nothing_waits_is_no_limit(self):
        found = [*samples(4, waiting=0, kv=0.99), *samples(4, kv=0.3)]
        assert self.limit(found) == "compute"

    def test_preemptions(self):
        rows = [replace(row, preemptions=int(n % 10 == 0)) for n, row in enumerate(self.rows)]
        assert self.limit(samples(kv=0.6), rows=rows) == "KV memory"

    def test_all_slots_taken(self):
        assert self.limit(samples(running=8), max_running=8) == "compute (as many requests ran as may)"
        assert self.limit(samples(running=7), max_running=8) == "compute"

    def test_an_engine_that_stands_still_is_limited_by_the_admission(self):
        assert self.limit(samples(), busy=0.5) == "the admission of requests, not by memory or compute"

    @pytest.mark.parametrize(("share", "limit"), [(0.6, "absent weights"), (0.4, "compute")])
    def test_waits_for_weights(self, share, limit):
        waiting_s = share * sum(row.ttft_s for row in self.rows)
        weights = WeightsTotals(
            services=("chat",), num_bytes=1, fetches=9, evictions=9, fetching_s=1.0, waits=200,
            waiting_s=waiting_s, longest_wait_s=1.0,
        )  # fmt: skip
        assert self.limit(samples(), weights={"w": weights}) == limit

    def test_a_client_does_not_know(self):
        run = make_run(self.rows, engines=())
        assert verdict(run).text.startswith("Saturated: 2.50 of 5.00 requests/s served; ")
