"""The real driver of static batches over fake engines and the simulated cluster decide the same."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from padded_runs import drive_really, make_cluster, make_request

from experiments.padded.presets import STATIC_PRESETS
from hypothesis_profiles import examples
from shoal.forecast.predictors import OracleLengths


@dataclass(frozen=True)
class RecordedTime:
    """Batches take what was measured: seconds by number of assignment."""

    seconds: dict[int, float]

    def duration_s(self, assignment, iterations_run, /):
        return self.seconds[assignment.number]


class TooShort:
    """Believes in a third of the truth, then in three tokens more."""

    def predict(self, request, generated, ceiling):
        if generated:
            return min(generated + 3, ceiling)
        return max(1, min(request.true_output_tokens, ceiling) // 3)

    def record(self, request, output_tokens):
        pass


def check_same(monkeypatch, requests, seed=0, **setup):
    outcome, log, recorded = drive_really(monkeypatch, make_cluster(**setup), requests, seed)
    run = make_cluster(**setup, time=RecordedTime(recorded)).run(requests)
    simulated = {span.assignment.number: span.assignment for span in run.batches}
    assert {number: (worker, batch) for number, worker, batch in log} == {
        number: (assignment.worker, assignment.batch) for number, assignment in simulated.items()
    }
    rows = {row.request_id: row for row in run.requests}
    for asked, answer in zip(requests, outcome.completions, strict=True):
        row = rows[asked.id]
        assert (answer.record.first_token_ns, answer.record.finish_ns) == (row.first_token_ns, row.finish_ns)
        assert (answer.record.output_tokens, answer.finish_reason.value) == (row.output_tokens, row.finish)
    real, same = outcome.report.to_json(), run.report.to_json()
    # The same numbers, summed in another order.
    assert real.pop("response_mean_s") == pytest.approx(same.pop("response_mean_s"))
    assert real == same


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("preset", STATIC_PRESETS)
def test_every_preset_decides_the_same(monkeypatch, preset, workers):
    requests = [
        make_request(i, 1 + (i * 13) % 40, 1 + (i * 7) % 25, 1 + (i * 5) % 30, arrival_ms=(i * i) % 4000)
        for i in range(60)
    ]
    check_same(monkeypatch, requests, preset=preset, workers=workers)


@settings(
    max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 50), st.integers(1, 40), st.integers(0, 3000)),
        max_size=25,
    ),
    preset=st.sampled_from(sorted(STATIC_PRESETS)),
    workers=st.integers(1, 3),
    slice_tokens=st.integers(1, 12),
    predictor=st.sampled_from([None, OracleLengths(), TooShort()]),
    seed=st.integers(0, 3),
)
def test_any_workload_is_decided_the_same(
    monkeypatch, shapes, preset, workers, slice_tokens, predictor, seed
):
    requests = [make_request(i, *shape) for i, shape in enumerate(shapes)]
    check_same(
        monkeypatch,
        requests,
        seed,
        preset=preset,
        workers=workers,
        slice_tokens=slice_tokens,
        predictor=predictor,
    )
