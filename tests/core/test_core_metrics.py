"""Latency formulas on a worked example."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import RequestRecord, percentile


def make_record(**changes: int) -> RequestRecord:
    times = {"arrival_ns": 1_000_000_000, "first_token_ns": 1_500_000_000, "finish_ns": 3_500_000_000}
    counts = {"prompt_tokens": 7, "output_tokens": 5}
    return RequestRecord(request_id="r", service="s", **{**times, **counts, **changes})


def test_ttft_tpot_and_e2e() -> None:
    record = make_record()
    assert record.ttft_s == 0.5
    assert record.e2e_s == 2.5
    assert record.tpot_s == 0.5


def test_a_single_token_has_no_time_per_output_token() -> None:
    assert make_record(output_tokens=1).tpot_s == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_numpys_linear_one(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(percentile([], 50))
