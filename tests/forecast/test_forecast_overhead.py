"""Host overhead: per step, per step with prompt tokens, per layer of such a step."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layer_tables import MODEL, write_profile
from shoal.core import ConfigError
from shoal.forecast.device_specs import device_spec
from shoal.forecast.overhead import HostOverhead, OverheadTimes
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import RooflineTimes
from shoal.forecast.step_times import StepRows, StepTimes

OVERHEAD = HostOverhead(step_s=0.7e-3, prompt_s=1e-3, layer_s=60e-6)
ROOFLINE = RooflineTimes(MODEL, device_spec("h100"))


@pytest.mark.parametrize(
    ("rows", "added"),
    [
        (StepRows(4, 400, (), 4), 0.7e-3),
        (StepRows(4, 400, ((30, 0),), 4), 0.7e-3 + 1e-3 + 3 * 60e-6),
        (StepRows(0, 0, ((30, 0), (9, 8)), 2), 0.7e-3 + 1e-3 + 3 * 60e-6),
    ],
)
def test_prompts_and_their_layers_cost_more(rows: StepRows, added: float) -> None:
    slower = OverheadTimes(ROOFLINE, OVERHEAD, MODEL.layers)
    assert slower.step_time(rows) - ROOFLINE.step_time(rows) == pytest.approx(added)


@given(st.integers(1, 300), st.integers(0, 5000), st.integers(1, 40))
def test_decode_times_are_step_times_to_the_bit(sequences: int, beyond: int, steps: int) -> None:
    times = OverheadTimes(ROOFLINE, OVERHEAD, MODEL.layers)
    context = sequences + beyond
    one_by_one = [
        times.step_time(StepRows(sequences, context + sequences * step, (), sequences))
        for step in range(steps)
    ]
    assert times.decode_times(sequences, context, steps).tolist() == one_by_one


def test_it_goes_over_tables_too(tmp_path: Path) -> None:
    tables: StepTimes = ProfileTimes.load(write_profile(tmp_path), model=MODEL)
    slower = OverheadTimes(tables, HostOverhead(step_s=0.001), MODEL.layers)
    rows = StepRows(2, 64, ((20, 0),), 2)
    assert slower.step_time(rows) - tables.step_time(rows) == pytest.approx(0.001)


def test_nothing_can_be_saved() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        HostOverhead(layer_s=-1e-6)
