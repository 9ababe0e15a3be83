"""Ranks that divide the experts of every layer: the slowest rank, then the experts of all tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layer_tables import MODEL, write_profile
from shoal.core import ConfigError
from shoal.forecast.data_parallel import RankTimes
from shoal.forecast.overhead import HostOverhead, OverheadTimes
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import expected_active_experts
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows

EXPERTS = replace(MODEL, experts=8, experts_per_token=2)
LINK = Link(1e9, 5e-6)


def experts_us(tokens: float, touched: float) -> float:
    """Linear in both, so that interpolation is exact."""
    return 10.0 + 0.5 * tokens + 3.0 * touched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_profile(tmp_path_factory.mktemp("experts"))
    rows = [f"{t},{n},{experts_us(t, n)}" for t in (1, 16, 256) for n in (2, 8)]
    (path / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
    return path


def shared_us(tokens: int, imbalance: float = 1.0) -> float:
    """All layers' experts for the tokens of two ranks, and gathering and scattering them."""
    touched = expected_active_experts(8, 2, tokens) / 2
    moved = 2 * tokens * (64 + 8) + 2 * tokens * 64
    return 3 * (experts_us(tokens / 2 * imbalance, touched) + 2 * 5 + moved / 2 / 1e9 * 1e6)


def own_us(folder: Path, rows: StepRows, tokens: int | None = None) -> float:
    """What a rank takes without experts, if need be as if it computed more tokens."""
    dense = write_profile(folder.parent / "dense")
    times = ProfileTimes.load(dense, model=MODEL)
    return 1e6 * (times.step_time(rows) + times.padding_time(rows.new_tokens, tokens or rows.new_tokens))


DECODES = [StepRows(12, 900, (), 12), StepRows(30, 1200, (), 30)]
PROMPT = StepRows(4, 300, ((40, 10),), 5)


@pytest.mark.parametrize("order", [1, -1])
def test_decodes_are_padded_to_the_longest_rank(folder: Path, order: int) -> None:
    times = RankTimes.load(folder, 2, model=EXPERTS, link=LINK)
    first, second = DECODES[::order]
    found = times.step_time(replace(first, others=(second,)))
    own = max(own_us(folder, rows, 30) for rows in DECODES)
    assert found * 1e6 == pytest.approx(own + shared_us(60))


@pytest.mark.parametrize("order", [1, -1])
def test_with_a_prompt_ranks_are_not_padded(folder: Path, order: int) -> None:
    times = RankTimes.load(folder, 2, model=EXPERTS, link=LINK)
    first, second = [PROMPT, DECODES[0]][::order]
    found = times.step_time(replace(first, others=(second,)))
    own = max(own_us(folder, rows) for rows in (PROMPT, DECODES[0]))
    assert found * 1e6 == pytest.approx(own + shared_us(44 + 12))


def test_a_rank_with_nothing_to_do_runs_along(folder: Path) -> None:
    times = RankTimes.load(folder, 2, model=EXPERTS, link=LINK)
    assert times.step_time(DECODES[1]) * 1e6 == pytest.approx(own_us(folder, DECODES[1]) + shared_us(60))
    assert times.step_time(PROMPT) * 1e6 == pytest.approx(own_us(folder, PROMPT) + shared_us(44))


def test_an_uneven_choice_of_experts_costs_what_the_busiest_rank_takes(folder: Path) -> None:
    even, uneven = (
        RankTimes.load(folder, 2, model=EXPERTS, link=LINK, imbalance=factor) for factor in (1.0, 1.5)
    )
    difference = uneven.step_time(DECODES[1]) - even.step_time(DECODES[1])
    assert difference * 1e6 == pytest.approx(shared_us(60, 1.5) - shared_us(60))


@given(st.integers(1, 60), st.integers(0, 500), st.integers(1, 30))
def test_decode_times_are_step_times_to_the_bit(
    folder: Path, sequences: int, beyond: int, steps: int
) -> None:
    times = RankTimes.load(folder, 2, model=EXPERTS, link=LINK)
    context = sequences + beyond
    one_by_one = [
        times.step_time(StepRows(sequences, context + sequences * step, (), sequences))
        for step in range(steps)
    ]
    assert times.decode_times(sequences, context, steps).tolist() == one_by_one


def test_a_prompt_on_any_rank_costs_all_of_them_the_host_s_overhead(folder: Path) -> None:
    times = RankTimes.load(folder, 2, model=EXPERTS, link=LINK)
    busy = OverheadTimes(times, HostOverhead(step_s=1e-3, layer_s=1e-4), EXPERTS.layers)
    for rows, added in ((DECODES[0], 1e-3), (replace(DECODES[0], others=(PROMPT,)), 1e-3 + 3e-4)):
        assert busy.step_time(rows) - times.step_time(rows) == pytest.approx(added)


def test_tables_without_experts_cannot_be_divided(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 0 experts, which 2 ranks cannot divide"):
        RankTimes.load(folder, 2, model=MODEL, link=LINK)
    with pytest.raises(ConfigError, match="has 8 experts, which 3 ranks cannot divide"):
        RankTimes.load(folder, 3, model=EXPERTS, link=LINK)
    with pytest.raises(ConfigError, match=r"has no moe\.csv"):
        RankTimes.load(write_profile(tmp_path), 2, model=EXPERTS, link=LINK)
    with pytest.raises(ConfigError, match="is not a device on record"):
        RankTimes.load(folder, 2, model=EXPERTS)
