"""Length distributions against their definitions, and presets against their sources."""

import numpy as np
import pytest
import workload_builders as build

from shoal.core import ConfigError
from shoal.workload import (
    LENGTHS,
    Concatenation,
    Empirical,
    FixedLength,
    GammaLength,
    Independent,
    LengthDistribution,
    LogNormalLength,
    Mixture,
    MixtureLength,
    SideDistribution,
    UniformLength,
)
from shoal.workload.presets import figures

ONES = Independent(FixedLength(1), FixedLength(1))
TWOS = Independent(FixedLength(2), FixedLength(2))
SIDES = [
    FixedLength(7),
    UniformLength(3, 9),
    LogNormalLength(5.0, 1.0),
    GammaLength(200.0, 0.5),
    MixtureLength(((3, FixedLength(1)), (1, UniformLength(5, 6)))),
]


@pytest.mark.parametrize("side", SIDES)
def test_draws_depend_only_on_the_seed(side: SideDistribution) -> None:
    drawn = side.draw(500, 3)
    assert drawn.dtype == np.int64
    assert len(drawn) == 500
    assert (side.draw(500, 3) == drawn).all()
    assert (side.draw(200, 3) == drawn[:200]).all()
    assert len(side.draw(0, 3)) == 0


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_presets_give_lengths_of_at_least_one_token(name: str) -> None:
    prompts, outputs = LENGTHS[name].sample(2000, 5)
    assert (len(prompts), len(outputs)) == (2000, 2000)
    assert min(prompts.min(), outputs.min()) >= 1
    again = LENGTHS[name].sample(2000, 5)
    assert (again[0] == prompts).all()
    assert (again[1] == outputs).all()
    assert (LENGTHS[name].sample(2000, 6)[0] != prompts).any()


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("distribution-1", (32, 4096), (2048, 4096)),
        ("distribution-2", (3000, 5000), (3000, 5000)),
        ("distribution-3", (2048, 4096), (32, 4096)),
    ],
)
def test_distributions_of_past_future(name: str, prompt: tuple[int, int], output: tuple[int, int]) -> None:
    for drawn, (low, high) in zip(LENGTHS[name].sample(60_000, 0), (prompt, output), strict=True):
        assert (drawn.min(), drawn.max()) == (low, high)
        assert drawn.mean() == pytest.approx((low + high) / 2, rel=0.01)


def test_prompts_and_outputs_are_not_the_same_draws() -> None:
    prompts, outputs = LENGTHS["distribution-2"].sample(2000, 0)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.1


def test_uniform_reaches_both_ends_equally() -> None:
    counts = np.bincount(UniformLength(2, 4).draw(30_000, 1))
    assert list(counts[:2]) == [0, 0]
    assert counts[2:] == pytest.approx(10_000, rel=0.05)


def test_lognormal_has_its_median_and_bounds() -> None:
    drawn = LogNormalLength(np.log(200), 1.0, 50, 1000).draw(50_000, 2)
    assert np.median(drawn) == pytest.approx(200, rel=0.03)
    assert (drawn.min(), drawn.max()) == (50, 1000)
    assert np.log(LogNormalLength(8.0, 0.5).draw(50_000, 2)).std() == pytest.approx(0.5, rel=0.02)


def test_gamma_has_its_mean_and_variation() -> None:
    drawn = GammaLength(400.0, 0.7).draw(50_000, 2)
    assert drawn.mean() == pytest.approx(400, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(0.7, rel=0.02)


def test_mixtures_choose_by_weight() -> None:
    one_side = MixtureLength(((3, FixedLength(1)), (1, FixedLength(2)))).draw(20_000, 3)
    assert (one_side == 1).mean() == pytest.approx(0.75, abs=0.02)
    prompts, outputs = Mixture(((3, ONES), (1, TWOS))).sample(20_000, 3)
    assert (prompts == 1).mean() == pytest.approx(0.75, abs=0.02)
    assert (prompts == outputs).all(), "a request comes from one part"


def test_concatenation_is_one_part_after_the_other() -> None:
    prompts, outputs = Concatenation(((1, ONES), (2, TWOS))).sample(10, 0)
    assert prompts.tolist() == outputs.tolist() == [1] * 3 + [2] * 7
    assert Concatenation(((1, ONES), (2, TWOS))).sample(0, 0)[0].tolist() == []


def test_varying_load_is_o1_then_the_three_distributions() -> None:
    prompts, outputs = LENGTHS["varying"].sample(4000, 1)
    assert np.median(prompts[:1000]) < 400
    assert outputs[1000:2000].min() >= 2048
    assert min(prompts[2000:3000].min(), outputs[2000:3000].min()) >= 3000
    assert prompts[3000:].min() >= 2048


def test_empirical_draws_whole_rows() -> None:
    table = Empirical.of([build.row(prompt=1, output=10), build.row(prompt=2, output=20)])
    prompts, outputs = table.sample(10_000, 0)
    assert (outputs == prompts * 10).all()
    assert (prompts == 1).mean() == pytest.approx(0.5, abs=0.03)


def test_codefuse_is_as_short_as_the_paper_says() -> None:
    prompts, outputs = LENGTHS["codefuse"].sample(50_000, 0)
    assert max(prompts.max(), outputs.max()) == 1024
    assert (outputs < 512).mean() == pytest.approx(0.92, abs=0.01)
    assert (outputs <= 3 * 128).mean() == pytest.approx(0.87, abs=0.01)


def test_quoted_figures_are_what_the_presets_give() -> None:
    quoted = {
        "sharegpt": ((305, 134, 807), (199, 129, 489)),
        "azure-conversation": ((1167, 1009, 2858), (211, 130, 424)),
        "azure-code": ((1995, 1450, 4696), (27, 13, 55)),
        "reasoning": ((1265, 197, 2369), (1508, 818, 3373)),
        "sharegpt-o1": ((381, 204, 871), (2164, 1933, 3859)),
        "codefuse": ((243, 149, 609), (203, 134, 453)),
    }
    for name, sides in quoted.items():
        found = figures(LENGTHS[name])
        for side, expected in zip(("prompt", "output"), sides, strict=True):
            assert [found[side][key] for key in ("mean", "p50", "p90")] == pytest.approx(expected, abs=0.5), (
                name
            )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FixedLength(0),
        lambda: UniformLength(5, 4),
        lambda: UniformLength(0, 4),
        lambda: LogNormalLength(float("nan"), 1.0),
        lambda: LogNormalLength(1.0, -1.0),
        lambda: GammaLength(0.0, 1.0),
        lambda: GammaLength(5.0, float("nan")),
        lambda: MixtureLength(()),
        lambda: Mixture(((0.0, ONES),)),
        lambda: Concatenation(((-1.0, ONES),)),
        lambda: Empirical(()),
        lambda: Empirical(((5, 0),)),
    ],
)
def test_senseless_parameters_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]


def test_nested_mixtures_are_distributions_too() -> None:
    nested: LengthDistribution = Mixture(
        ((1, Concatenation(((1, ONES), (1, TWOS)))), (1, LENGTHS["sharegpt"]))
    )
    assert nested.sample(10, 0)[0].shape == (10,)
