import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ConfigError
from shoal.forecast import ServiceMonitor, Spread

S = 1_000_000_000
# (nanoseconds since the last event, arrival or not, prompt, output, execution, queued, decoding, met)
events = st.lists(
    st.tuples(
        st.integers(0, 20 * S),
        st.booleans(),
        st.integers(1, 5_000),
        st.integers(1, 5_000),
        st.integers(0, 10**12),
        st.integers(0, 10**11),
        st.integers(0, 10**11),
        st.sampled_from([None, True, False]),
    ),
    max_size=40,
)


def finish(monitor, now_ns, *, prompt=1, output=1, execution_ns=S, latency_ns=S, ttft_ns=S, met=None):
    arrival_ns = now_ns - latency_ns
    monitor.finished(now_ns, prompt, output, execution_ns, arrival_ns, arrival_ns + ttft_ns, met)


def spread(values):
    return Spread(statistics.fmean(values), statistics.pstdev(values)) if values else None


def assert_close(actual, expected):
    if expected is None:
        assert actual is None
    elif isinstance(expected, Spread):
        assert_close(actual.mean, expected.mean)
        assert_close(actual.deviation, expected.deviation)
    else:
        assert math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-9)


@given(events, st.integers(1, 12), st.integers(1, 90), st.integers(0, 200 * S))
def test_windows_hold_what_a_recomputation_from_the_whole_past_says(happened, size, window_s, later_ns):
    monitor = ServiceMonitor(2.5, window_requests=size, window_s=window_s)
    now_ns, arrivals, finished = 1_000 * S, [], []
    for passed_ns, is_arrival, prompt, output, execution_ns, queued_ns, decoding_ns, met in happened:
        now_ns += passed_ns
        if is_arrival:
            monitor.arrived(now_ns)
            arrivals.append(now_ns)
            continue
        arrival_ns = now_ns - queued_ns - decoding_ns
        monitor.finished(now_ns, prompt, output, execution_ns, arrival_ns, arrival_ns + queued_ns, met)
        finished.append(
            (now_ns, prompt, output, execution_ns / S, (queued_ns + decoding_ns) / S, queued_ns / S, met)
        )
    now_ns += later_ns
    kept = finished[-size:]
    recent = [request for request in kept if request[0] > now_ns - window_s * S]
    judged = [met for *_, met in recent if met is not None]
    traffic = monitor.snapshot(now_ns)
    execution = spread([request[3] for request in kept]) or Spread(2.5, 0.0)
    assert traffic.finished == len(kept)
    assert_close(traffic.prompt_tokens, spread([request[1] for request in kept]))
    assert_close(traffic.output_tokens, spread([request[2] for request in kept]))
    assert_close(traffic.execution_s, execution)
    assert_close(Spread(*monitor.execution), execution)
    assert_close(traffic.latency_s, statistics.fmean(request[4] for request in recent) if recent else None)
    assert_close(traffic.ttft_s, statistics.fmean(request[5] for request in recent) if recent else None)
    assert_close(traffic.attainment, sum(judged) / len(judged) if judged else None)
    inside = sum(arrival > now_ns - window_s * S for arrival in arrivals)
    observed_s = min(window_s, max(1.0, (now_ns - arrivals[0]) / S)) if arrivals else window_s
    assert_close(traffic.arrivals_per_s, inside / observed_s)


def test_before_data_the_execution_time_is_the_prior():
    assert ServiceMonitor().execution == (1.0, 0.0)
    assert ServiceMonitor(prior_execution_s=7.5).execution == (7.5, 0.0)


def test_one_finished_request_replaces_the_prior():
    monitor = ServiceMonitor(prior_execution_s=7.5)
    finish(monitor, 9 * S, execution_ns=3 * S)
    assert monitor.execution == (3.0, 0.0)
    finish(monitor, 9 * S, execution_ns=5 * S)
    assert monitor.execution == (4.0, 1.0)


def test_a_giant_that_has_left_the_window_leaves_no_trace():
    monitor = ServiceMonitor(window_requests=2)
    finish(monitor, S, execution_ns=10**18)
    finish(monitor, S, execution_ns=1)
    finish(monitor, S, execution_ns=3)
    assert monitor.execution == (2e-9, 1e-9)


def test_execution_times_do_not_age_but_latencies_do():
    monitor = ServiceMonitor(window_s=10)
    finish(monitor, 5 * S, execution_ns=2 * S, latency_ns=4 * S, met=True)
    at_edge, beyond = monitor.snapshot(15 * S - 1), monitor.snapshot(15 * S)
    assert (at_edge.latency_s, at_edge.attainment) == (4.0, 1.0)
    assert (beyond.latency_s, beyond.ttft_s, beyond.attainment) == (None, None, None)
    assert beyond.execution_s == Spread(2.0, 0.0)


def test_attainment_is_none_without_goals():
    monitor = ServiceMonitor()
    finish(monitor, S, met=None)
    assert monitor.snapshot(S).attainment is None
    finish(monitor, S, met=False)
    finish(monitor, S, met=True)
    finish(monitor, S, met=None)
    assert monitor.snapshot(S).attainment == 0.5


def test_a_young_service_has_the_rate_of_its_life_so_far():
    monitor = ServiceMonitor(window_s=600)
    for second in range(20):
        monitor.arrived(100 * S + second * S)
    assert monitor.snapshot(120 * S).arrivals_per_s == 1.0
    assert monitor.snapshot(1_000 * S).arrivals_per_s == 0.0


def test_nothing_seen_is_said_so():
    traffic = ServiceMonitor(3.0).snapshot(0)
    assert (traffic.finished, traffic.arrivals_per_s, traffic.execution_s) == (0, 0.0, Spread(3.0, 0.0))
    assert (traffic.prompt_tokens, traffic.output_tokens, traffic.latency_s) == (None, None, None)


@pytest.mark.parametrize("windows", [{"window_requests": 0}, {"window_s": 0}, {"window_s": float("nan")}])
def test_windows_without_extent_are_refused(windows):
    with pytest.raises(ConfigError, match="must be"):
        ServiceMonitor(**windows)
