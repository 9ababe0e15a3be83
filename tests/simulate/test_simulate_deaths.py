"""Simulated engines that die: their requests go on elsewhere, and nothing is lost."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulate_builders import TIMES, make_request, make_spec, make_workload

from hypothesis_profiles import examples
from shoal.cluster.manager.dispatch import DISPATCHES, LeastRequests
from shoal.core import ConfigError, Request
from shoal.forecast import StepRows
from shoal.measure import RequestRow
from shoal.schedule import SchedulerOptions
from shoal.simulate import Deaths, EngineSpec, OpenLoop, Simulation, Watch

SECOND = 1_000_000_000


def seconds(rows: StepRows) -> int:
    return round(TIMES.step_time(rows) * 1e9)


def run(
    engines: list[EngineSpec],
    requests: list[Request],
    *times: tuple[float, int],
    load_s: float = 2.0,
    dispatch: str = "least-requests",
    skip_ahead: bool = True,
) -> dict[str, RequestRow]:
    simulation = Simulation(
        engines,
        OpenLoop(requests),
        dispatch=DISPATCHES[dispatch],
        watch=Watch(skip_ahead=skip_ahead),
        deaths=Deaths(times=times, load_s=load_s),
    )
    rows = simulation.run().requests
    assert len(rows) == len(requests)
    return {row.request_id: row for row in rows}


@pytest.mark.parametrize("skip_ahead", [False, True])
def test_a_request_waits_for_its_engine_and_goes_on_from_its_tokens(skip_ahead: bool) -> None:
    prefill = seconds(StepRows(0, 0, ((10, 0),), 1))
    decode = seconds(StepRows(1, 11, (), 1))
    # It dies during the second decode: the token of the prefill and one more were delivered.
    death_ns = prefill + decode + decode // 2
    row = run([make_spec()], [make_request(0, 10, 5)], (death_ns / 1e9, 0), skip_ahead=skip_ahead)["r0"]
    # The manager looks at its clock four times a second; a second after the death it starts the engine again.
    back_ns = death_ns + 3 * SECOND
    again = seconds(StepRows(0, 0, ((12, 0),), 1))
    last = seconds(StepRows(1, 13, (), 1)) + seconds(StepRows(1, 14, (), 1))
    assert (row.output_tokens, row.first_token_ns, row.finish_ns) == (5, prefill, back_ns + again + last)
    assert row.largest_gap_ns == back_ns + again - (prefill + decode)
    assert row.recomputed_tokens == 11


def test_requests_go_on_at_once_on_another_engine() -> None:
    requests = [make_request(number, 10, 200) for number in range(4)]
    rows = run([make_spec(), make_spec()], requests, (0.5, 0))
    assert {row.engine for row in rows.values()} == {1}
    assert all(row.output_tokens == 200 and row.largest_gap_ns < SECOND for row in rows.values())


def test_streams_that_had_begun_go_on_before_requests_that_came_later() -> None:
    """Under the default order, though they have used up more than the mean request, and however many wait."""
    begun = [make_request(number, 10, 400) for number in range(4)]
    later = [make_request(number, 10, 100, at_s=2.1 + number / 100) for number in range(4, 80)]
    spec = make_spec(options=SchedulerOptions(max_running=4))
    rows = run([spec], begun + later, (2.0, 0))
    # Down from 2 to 5 s.
    assert all(rows[request.id].largest_gap_ns < 3.5 * SECOND for request in begun)
    assert max(row.first_token_ns for row in rows.values()) > 15 * SECOND


def test_an_engine_that_dies_while_it_loads_begins_anew() -> None:
    request = make_request(0, 10, 200)
    once = run([make_spec()], [request], (0.5, 0))["r0"]
    # Dead from 0.5 to 1.5 s, loading until 3.5 s, dead again from 2 to 4 s; the death at 3 s is none.
    twice = run([make_spec()], [request], (0.5, 0), (2.0, 0), (3.0, 0))["r0"]
    assert twice.finish_ns - once.finish_ns == 2.5 * SECOND


def test_requests_are_refused_when_their_engine_stays_away() -> None:
    requests = [make_request(0, 10, 200), make_request(1, 10, 5, at_s=55), make_request(2, 10, 5, at_s=65)]
    rows = run([make_spec()], requests, (0.5, 0), load_s=62)
    assert rows["r0"].error == "no engine of service 'a' was ready for 60 s"
    assert [rows[name].finish for name in ("r0", "r1", "r2")] == ["refused", "stop", "stop"]


def test_deaths_after_the_last_request_do_nothing() -> None:
    assert run([make_spec()], [make_request(0)], (9.0, 0))["r0"].finish_ns < SECOND


@given(
    seed=st.integers(0, 1000),
    times=st.lists(st.tuples(st.floats(0, 3, width=16), st.integers(0, 2)), max_size=6),
    dispatch=st.sampled_from(sorted(DISPATCHES)),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 1)]),
)
@example(65, [(0.375, 0)], "least-loaded", (1, 1))  # who is preempted leaves room for who was rejected
@settings(max_examples=examples(60))
def test_nothing_is_lost_and_skipping_ahead_changes_nothing(
    seed: int, times: list[tuple[float, int]], dispatch: str, shape: tuple[int, int]
) -> None:
    depth, iterations = shape
    specs = [make_spec(60, depth=depth, max_iterations=iterations) for _ in range(3)]
    requests = make_workload(40, rate=60, seed=seed)
    on, off = (
        run(specs, requests, *times, dispatch=dispatch, skip_ahead=skip, load_s=0.3) for skip in (True, False)
    )
    assert on == off
    assert {name: row.output_tokens for name, row in on.items()} == {
        request.id: request.true_output_tokens for request in requests
    }


def test_engines_of_which_none_die_are_as_before() -> None:
    requests = make_workload(60)
    plain = Simulation([make_spec(60)] * 2, OpenLoop(requests), dispatch=LeastRequests()).run()
    rows = run([make_spec(60)] * 2, requests, (3500.0, 1))
    assert list(rows.values()) == plain.requests


def test_an_engine_that_died_while_nothing_was_to_do_is_back_in_time() -> None:
    rows = run([make_spec()], [make_request(0), make_request(1, at_s=20), make_request(2, at_s=21)], (9.0, 0))
    assert all(row.finish_ns - row.arrival_ns < SECOND for row in rows.values())
    with pytest.raises(ConfigError, match="engine 2 cannot die"):
        run([make_spec()] * 2, [make_request(0)], (1.0, 2))


def test_requests_go_where_there_is_room_for_all_that_they_may_become() -> None:
    small, large = make_spec(blocks=25), make_spec(blocks=100)
    requests = [
        make_request(0, 200, 100, at_s=0.0, max_tokens=150),
        # Without a limit of its own, it may have as many tokens as the smallest engine that its prompt fits.
        make_request(1, 10, 95, at_s=0.0),
        make_request(2, 150, 300, at_s=0.0),
    ]
    rows = run([small, large], requests, (0.001, 1))
    assert {name: (row.engine, row.output_tokens, row.finish) for name, row in rows.items()} == {
        "r0": (1, 100, "stop"),
        "r1": (0, 90, "length"),
        "r2": (1, 250, "length"),
    }
