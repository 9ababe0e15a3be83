"""Step times of mixtures of experts from tables: the time of the experts, and how often it counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layer_tables import MODEL, write_profile
from shoal.core import ConfigError
from shoal.forecast.profile_files.reading import Curve
from shoal.forecast.profile_files.tables import ProfileTimes, interpolate_experts
from shoal.forecast.step_times import StepRows

EXPERTS = replace(MODEL, experts=8, experts_per_token=2)


def block(tokens: float, experts: float) -> float:
    """A time that is linear along each axis, so that interpolation is exact."""
    return 30.0 + 0.5 * tokens + 6.0 * experts


def moe_rows(devices: int = 1) -> list[tuple[int, int, int, float]]:
    """The points that one device of so many can be measured at."""
    return [
        (devices, tokens, experts, devices * block(tokens, experts))
        for tokens in (1, 2, 4, 8, 64, 256)
        for experts in (1, 2, 4, 8)
        if 2 // devices <= experts <= min(8 // devices, tokens * 2 // devices)
    ]


def write_experts(folder: Path, rows: list[tuple[int, int, int, float]], degrees: bool = True) -> Path:
    lines = ["ep,tokens,activated_experts,time_us", *(",".join(map(str, row)) for row in rows)]
    (folder / "moe.csv").write_text("\n".join(line if degrees else line.partition(",")[2] for line in lines))
    return folder


def block_us(folder: Path, rows: StepRows, tp: int = 1) -> float:
    """Microseconds that the experts of one layer add to a step."""
    found = ProfileTimes.load(folder, tp, model=EXPERTS).step_time(rows)
    path = folder / "tp1" / "moe.csv" if tp > 1 else folder / "moe.csv"
    saved = path.read_text()
    path.unlink()
    without = ProfileTimes.load(folder, tp, model=MODEL).step_time(rows)
    path.write_text(saved)
    return (found - without) * 1e6 / MODEL.layers


@pytest.mark.parametrize("degrees", [True, False], ids=["with ep", "without ep"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 30, 64, 400])
def test_each_layer_adds_its_experts_once(tmp_path: Path, tokens: int, degrees: bool) -> None:
    folder = write_experts(write_profile(tmp_path), moe_rows(), degrees)
    # Of 8 experts that each token chooses 2 of, a token misses one with 3 in 4.
    touched = 8 * (1 - 0.75**tokens)
    rows = StepRows(tokens, 64 * tokens, (), tokens)
    assert block_us(folder, rows) == pytest.approx(block(tokens, touched), rel=1e-9)


def test_tokens_of_prompts_and_decodes_go_through_experts_together(tmp_path: Path) -> None:
    folder = write_experts(write_profile(tmp_path), moe_rows())
    rows = StepRows(3, 200, ((40, 16), (21, 0)), 4)
    assert block_us(folder, rows) == pytest.approx(block(64, 8 * (1 - 0.75**64)), rel=1e-9)


def test_devices_share_the_experts_and_compute_all_tokens(tmp_path: Path) -> None:
    for degree in (1, 2):
        write_profile(tmp_path / f"tp{degree}")
    write_experts(tmp_path / "tp1", [*moe_rows(1), *moe_rows(2)])
    (tmp_path / "meta.yaml").write_text("model: tiny\nhardware: RTX4090\n")
    rows = StepRows(8, 64 * 8, (), 8)
    expected = 2 * block(8, 4 * (1 - 0.75**8))
    assert block_us(tmp_path, rows, tp=2) == pytest.approx(expected, rel=1e-9)


def test_decode_runs_know_the_experts_too(tmp_path: Path) -> None:
    times = ProfileTimes.load(write_experts(write_profile(tmp_path), moe_rows()), model=EXPERTS)
    one_by_one = [times.step_time(StepRows(5, 300 + 5 * step, (), 5)) for step in range(6)]
    assert times.decode_times(5, 300, 6).tolist() == one_by_one


@given(
    st.lists(st.floats(0, 40), min_size=1, max_size=12),
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 32]), min_size=1, max_size=5, unique=True),
    st.randoms(),
)
def test_between_measured_experts_times_are_linear(
    touched: list[float], measured: list[int], random: np.random.Generator
) -> None:
    curves = {
        experts: Curve(np.array([1.0, 4.0]), np.array([random.uniform(1, 9), random.uniform(1, 99)]))
        for experts in measured
    }
    found = interpolate_experts(curves, np.array([0.0, *touched]))
    assert found[0] == 0.0
    axis = sorted(measured)
    for tokens, x in enumerate(touched, start=1):
        values = [curves[experts].at_integers(tokens)[tokens] for experts in axis]
        if x <= axis[-1] or len(axis) == 1:
            expected = np.interp(x, axis, values)
        else:
            slope = (values[-1] - values[-2]) / (axis[-1] - axis[-2])
            expected = values[-1] + slope * (x - axis[-1])
        assert found[tokens] == pytest.approx(expected)


def test_points_that_no_step_can_reach_need_not_be_measured() -> None:
    """One token cannot touch 4 experts: that curve stands at its first point."""
    curves = {
        2: Curve(np.array([1.0, 2.0]), np.array([10.0, 12.0])),
        4: Curve(np.array([2.0]), np.array([20.0])),
    }
    assert interpolate_experts(curves, np.array([0.0, 2.0, 3.0])).tolist() == [0.0, 10.0, 16.0]


def test_tables_and_model_must_fit(tmp_path: Path) -> None:
    folder = write_profile(tmp_path)
    with pytest.raises(ConfigError, match=r"has no moe\.csv, but the layers of tiny have 8 experts"):
        ProfileTimes.load(folder, model=EXPERTS)
    write_experts(folder, moe_rows())
    with pytest.raises(ConfigError, match=r"moe\.csv times layers with experts, but tiny has none"):
        ProfileTimes.load(folder, model=MODEL)
    with pytest.raises(ConfigError, match=r"8 activated experts on each of 1 devices, but tiny has 4 in all"):
        ProfileTimes.load(folder, model=replace(EXPERTS, experts=4))
    dense = folder / "dense.csv"
    dense.write_text(dense.read_text() + "\nact_fn,1,3\n")
    with pytest.raises(ConfigError, match=r"dense\.csv has act_fn beside moe\.csv"):
        ProfileTimes.load(folder, model=EXPERTS)


def test_degrees_that_were_not_measured_are_refused(tmp_path: Path) -> None:
    for degree in (1, 2):
        write_profile(tmp_path / f"tp{degree}")
    write_experts(tmp_path / "tp1", [*moe_rows(1), (4, 1, 1, 5.0)])
    with pytest.raises(ConfigError, match=r"no rows for experts shared by 2 devices; it has ep=1, 4"):
        ProfileTimes.load(tmp_path, 2, model=EXPERTS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tokens,time_us\n1,2\n", r"moe\.csv:1: column activated_experts is missing"),
        (
            "ep,tokens,activated_experts,time_us\n1,1,two,9\n",
            r"moe\.csv:2: activated_experts must be a whole",
        ),
        ("ep,tokens,activated_experts,time_us\n", r"moe\.csv:2: no rows"),
    ],
)
def test_wrong_files_are_named_with_their_line(tmp_path: Path, text: str, problem: str) -> None:
    (write_profile(tmp_path) / "moe.csv").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        ProfileTimes.load(tmp_path, model=EXPERTS)
