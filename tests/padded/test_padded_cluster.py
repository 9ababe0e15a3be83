"""Static batches on a virtual clock: every request answered once, exact accounting, reproducible."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_runs import CONTEXT, TIME, make_cluster, make_request

from experiments.padded.batch_time import UncertainTime
from experiments.padded.cluster import StaticRun
from experiments.padded.presets import STATIC_PRESETS
from hypothesis_profiles import examples
from shoal.batches import MemoryByBytes
from shoal.core import SLO, ConfigError
from shoal.forecast.predictors import OracleLengths

SHAPES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 50), st.integers(1, 40), st.integers(0, 3000)), max_size=25
)


def as_bytes(run: StaticRun) -> bytes:
    return (
        json.dumps([asdict(row) for row in run.requests] + [run.report.to_json()]).encode()
        + repr(run.batches).encode()
    )


def check(run: StaticRun, requests, options) -> None:
    """What holds of every run, recounted from its batches."""
    assert sorted(row.request_id for row in run.requests) == sorted(request.id for request in requests)
    asked = {request.id: request for request in requests}
    made = dict.fromkeys(asked, 0)
    batches = dict.fromkeys(asked, 0)
    pads = invalid = 0
    for span in run.batches:
        batch = span.assignment.batch
        assert span.iterations_run <= batch.iterations
        assert span.iterations_run == max(span.outputs)
        assert options.slice_tokens is None or batch.iterations <= options.slice_tokens
        longest = max(len(asked[request.id].prompt) + made[request.id] for request in batch.requests)
        assert longest == batch.input_tokens
        for request, output in zip(batch.requests, span.outputs, strict=True):
            pads += longest - request.tokens
            invalid += span.iterations_run - output
            assert request.tokens == len(asked[request.id].prompt) + made[request.id]
            assert span.start_ns >= asked[request.id].arrival_ns
            made[request.id] += output
            batches[request.id] += 1
    for row in run.requests:
        request = asked[row.request_id]
        length = min(request.true_output_tokens, request.sampling.max_tokens)
        assert row.output_tokens == made[row.request_id] == length
        assert row.finish == ("stop" if request.true_output_tokens == length else "length")
        assert row.arrival_ns < row.first_token_ns <= row.finish_ns
        assert (row.first_token_ns == row.finish_ns) == (batches[row.request_id] == 1)
    assert (run.report.tokens.pad_tokens, run.report.tokens.invalid_tokens) == (pads, invalid)
    assert run.report.tokens.useful_tokens == sum(made.values())
    assert [row.finish_ns for row in run.requests] == sorted(row.finish_ns for row in run.requests)


def check_workers(run: StaticRun, workers: int) -> None:
    """Each serves its batches one after the other, in the order in which it was given them."""
    for worker in range(workers):
        own = [span for span in run.batches if span.assignment.worker == worker]
        assert [span.assignment.number for span in own] == sorted(span.assignment.number for span in own)
        for before, after in pairwise(own):
            assert before.end_ns <= after.start_ns
        last = own[-1].end_ns / 1e9 if own else 0
        assert run.report.worker_completion_s[worker] == last


@settings(max_examples=examples(80))
@given(
    shapes=SHAPES,
    preset=st.sampled_from(sorted(STATIC_PRESETS)),
    workers=st.integers(1, 3),
    slice_tokens=st.integers(1, 12),
    predictor=st.sampled_from([None, OracleLengths()]),
    spread=st.sampled_from([0.0, 0.3]),
)
def test_any_workload(shapes, preset, workers, slice_tokens, predictor, spread) -> None:
    requests = [make_request(i, *shape) for i, shape in enumerate(shapes)]
    cluster = make_cluster(
        preset, workers, slice_tokens, predictor=predictor, time=UncertainTime(TIME, spread)
    )
    run = cluster.run(requests)
    check(run, requests, cluster.options)
    check_workers(run, workers)
    assert as_bytes(run) == as_bytes(cluster.run(requests))


def test_by_hand() -> None:
    # One worker, fixed batches of up to 4, slices of 4: prompts 2, 5, 5; lengths 3, 6, 9.
    shapes = [(2, 3, 20), (5, 6, 20), (5, 9, 20)]
    run = make_cluster("so", workers=1).run([make_request(i, *shape) for i, shape in enumerate(shapes)])
    # {2, 5, 5} x 4, then {9, 9} x 4 of which 2 and 4 are wanted, then {13} x 1.
    assert [(span.iterations_run, span.outputs) for span in run.batches] == [
        (4, (3, 4, 4)),
        (4, (2, 4)),
        (1, (1,)),
    ]
    times = [TIME.serve(3, 5, 4), TIME.serve(2, 9, 4), TIME.serve(1, 13, 1)]
    ends = [round(sum(times[: n + 1]), 9) for n in range(3)]
    assert [row.finish_ns / 1e9 for row in run.requests] == pytest.approx(ends)
    report = run.report
    assert (report.batches, report.mean_batch_size, report.slices) == (3, 2, {1: 1, 2: 1, 3: 1})
    assert (report.tokens.pad_tokens, report.tokens.invalid_tokens) == (3, 1 + 2)
    assert (report.tokens.prefilled_tokens, report.tokens.recomputed_tokens) == (12 + 18 + 13, 18 + 13)
    # The last batch may run for 4 iterations and needs one.
    assert report.early_return_ratio == pytest.approx(1 / 3)
    last = run.requests[-1]
    assert (last.request_id, last.recomputed_tokens) == ("r2", 9 + 13)
    assert last.largest_gap_ns == run.batches[1].end_ns - run.batches[1].start_ns


def test_a_batch_ends_when_all_have_ended() -> None:
    requests = [make_request(0, output=3), make_request(1, output=7)]
    run = make_cluster("sls", workers=1).run(requests)
    [span] = run.batches
    assert (span.iterations_run, run.report.early_return_ratio) == (7, 1.0)
    assert {row.finish_ns for row in run.requests} == {span.end_ns}


def test_workers_share_what_comes_at_once() -> None:
    memory = MemoryByBytes(token_bytes=1, available_bytes=60, zeta=1.0)
    requests = [make_request(i, prompt=1 + 30 * (i % 2)) for i in range(8)]
    run = make_cluster("lb", workers=2, memory=memory).run(requests)
    starts = {span.assignment.worker: span.start_ns for span in reversed(run.batches)}
    assert starts == {0: 0, 1: 0}


@pytest.mark.parametrize("preset", STATIC_PRESETS)
def test_no_requests_is_a_run(preset) -> None:
    run = make_cluster(preset).run([])
    assert (run.requests, run.batches, run.report.duration_s) == ((), (), 0)


@pytest.mark.parametrize("preset", STATIC_PRESETS)
def test_single_tokens_at_time_zero_and_late_arrivals(preset) -> None:
    requests = [make_request(0, output=1, limit=1), make_request(1, output=1, arrival_ms=60_000)]
    cluster = make_cluster(preset)
    run = cluster.run(requests)
    check(run, requests, cluster.options)
    assert [row.output_tokens for row in run.requests] == [1, 1]
    assert run.requests[1].e2e_s == pytest.approx(TIME.serve(1, 5, 1))


def test_arrivals_may_be_out_of_order() -> None:
    requests = [make_request(i, arrival_ms=1000 * (5 - i)) for i in range(5)]
    run = make_cluster("so", workers=1).run(requests)
    assert [row.request_id for row in run.requests] == ["r4", "r3", "r2", "r1", "r0"]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (make_request(0, prompt=CONTEXT, limit=1), "do not fit in a context of 120; ask for at most 0"),
        (make_request(0, prompt=110, limit=11), "ask for at most 10"),
        (make_request(0, prompt=90, limit=20), "do not fit in the memory of a worker"),
        (replace(make_request(0), true_output_tokens=None), "must know its output length"),
        (replace(make_request(0), slo=SLO(e2e_scale=2.0)), "execution"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_rest_is_not(request_, why) -> None:
    memory = MemoryByBytes(token_bytes=1, available_bytes=100, zeta=1.0)
    run = make_cluster("scls", memory=memory).run([request_, make_request(1)])
    refused, served = run.requests
    assert (refused.finish, refused.engine, refused.output_tokens) == ("refused", -1, 0)
    assert why in refused.error
    assert served.finish == "stop"
    assert (run.report.finished, run.report.failed, sum(run.report.slices.values())) == (1, 1, 2)


def test_without_a_limit_a_request_may_fill_the_context() -> None:
    request = make_request(0, prompt=100, output=50)
    request = replace(request, sampling=replace(request.sampling, max_tokens=None))
    [row] = make_cluster("so").run([request]).requests
    assert (row.output_tokens, row.finish) == (CONTEXT - 100, "length")


def test_ids_must_differ() -> None:
    with pytest.raises(ValueError, match="different ids"):
        make_cluster().run([make_request(1), make_request(1)])


def test_progress_is_called_for_every_end() -> None:
    told = []
    make_cluster().run([make_request(i) for i in range(3)], lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_uncertain_times_have_the_given_spread() -> None:
    requests = [make_request(i, arrival_ms=1000 * i) for i in range(400)]
    run = make_cluster("so", workers=1, time=UncertainTime(TIME, 0.1, seed=1)).run(requests)
    exact = TIME.serve(1, 5, 4)
    errors = [(span.end_ns - span.start_ns) / 1e9 / exact - 1 for span in run.batches]
    assert sum(errors) / len(errors) == pytest.approx(0, abs=0.02)
    assert (sum(error**2 for error in errors) / len(errors)) ** 0.5 == pytest.approx(0.1, abs=0.015)
    with pytest.raises(ConfigError, match="spread"):
        UncertainTime(TIME, 0.4)
