"""Sampling against the distribution it must follow, and against itself in other company."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from hypothesis_profiles import examples
from shoal.core import NO_TOKEN, SamplingParams, TokenLogprobs, uniform
from shoal.execute.sampling.adjust_logits import adjust_logits
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sampling.sampler import sample as sample_rows
from shoal.execute.sequences import RunningSequence
from shoal.native import native_variants

pytestmark = pytest.mark.without_native

VOCAB = 1000

Sample = Callable[..., tuple[list[int], list[TokenLogprobs | None] | None]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="torch"),
        *(pytest.param(one, id=one.variant) for one in native_variants()),
    ],
)
def sample(request: pytest.FixtureRequest) -> Sample:
    """By torch's operations, and by the kernels of each instruction set."""
    native = None if request.param is None else NativeSampler(request.param)
    return partial(sample_tokens, native=native)


def sample_tokens(*arguments: Any, **options: Any) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    return sample_rows(*arguments, **options)[:2]


def make_row(seed: int = 0, prompt: tuple[int, ...] = (5, 6), output: tuple[int, ...] = (), **params: object):
    sampling = SamplingParams(**params)
    return RunningSequence([*prompt, *output], len(prompt), 0, sampling, seed)


def make_logits(seed: int = 0, rows: int = 1, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def allowed(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by definition: sort everything, cut, normalise."""
    p = torch.softmax(logits.double() / params.temperature, -1).numpy()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), dtype=bool)
    if params.top_k > 0:
        keep[order[params.top_k :]] = False
    head = np.where(keep, p, 0)[order]
    before = np.cumsum(head) - head
    keep[order[before >= params.top_p * head.sum()]] = False
    keep &= p >= params.min_p * p.max()
    kept = np.where(keep, p, 0)
    return kept / kept.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 2.5, "top_p": 0.98},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 300, "top_p": 0.9, "min_p": 0.001},
    ],
)
def test_draws_follow_the_truncated_distribution(sample: Sample, params: dict[str, float]) -> None:
    logits = make_logits()
    expected = allowed(logits[0], SamplingParams(**params))
    draws = 4000
    rows = [make_row(seed, **params) for seed in range(draws)]
    tokens, _ = sample(logits.expand(draws, -1).clone(), rows, [])
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    often = expected * draws >= 5
    seen = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * draws
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-4


def test_a_flat_nucleus_wider_than_the_first_candidates_is_widened(sample: Sample) -> None:
    rows = [make_row(seed, temperature=1.0, top_p=0.9) for seed in range(600)]
    tokens, _ = sample(torch.zeros(600, 5000), rows, [])
    assert len(set(tokens)) > 400


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_rows_token_does_not_depend_on_other_rows(sample: Sample, seed: int, others: list[int]) -> None:
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 3},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 3.0, "top_k": 700, "repetition_penalty": 1.3},
    ]
    for kind in kinds:
        mine = make_logits(seed % 1000)
        alone, _ = sample(mine.clone(), [make_row(seed, output=(7, 8), **kind)], [])
        company = [make_row(i, **kinds[other]) for i, other in enumerate(others)]
        logits = torch.cat([make_logits(9, len(others)), mine])
        together, _ = sample(logits, [*company, make_row(seed, output=(7, 8), **kind)], [])
        assert together[-1] == alone[0]


def test_penalties_follow_their_definitions(sample: Sample) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3], logits[0, 4], logits[0, 6] = 2.0, 1.9, -1.0
    greedy = {"temperature": 0.0, "logprobs": 10}
    row = make_row(prompt=(3, 6), output=(4, 4), **greedy, repetition_penalty=2.0)
    assert sample(logits.clone(), [row], [])[0] == [3]  # 2.0/2 = 1.0 against 1.9/2 = 0.95
    row = make_row(prompt=(3,), output=(4, 4), **greedy, frequency_penalty=0.5)
    assert sample(logits.clone(), [row], [])[0] == [3]
    ahead = logits.clone()
    ahead[0, 4] = 2.4
    row = make_row(prompt=(3,), output=(4, 4), **greedy, presence_penalty=0.3)
    assert sample(ahead.clone(), [row], [])[0] == [4]  # 2.4 - 0.3, once and not for each occurrence
    row = make_row(prompt=(3,), output=(4, 4), **greedy, frequency_penalty=0.3)
    assert sample(ahead.clone(), [row], [])[0] == [3]


def test_tokens_that_end_are_banned_until_min_tokens(sample: Sample) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 2], logits[0, 7], logits[0, 5] = 9.0, 8.0, 7.0
    early = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (7,)}
    assert sample(logits.clone(), [make_row(output=(1,), **early)], [2])[0] == [5]
    assert sample(logits.clone(), [make_row(output=(1, 1), **early)], [2])[0] == [2]
    assert sample(logits.clone(), [make_row(output=(1,), ignore_eos=True, **early)], [2])[0] == [2]


def test_logprobs_are_computed_before_temperature_and_truncation(sample: Sample) -> None:
    logits = make_logits(3)
    row = make_row(temperature=0.5, top_k=2, logprobs=4, repetition_penalty=1.5)
    tokens, logprobs = sample(logits.clone(), [row, make_row(1)][:1], [])
    expected = torch.log_softmax(logits[0].double(), -1)
    assert logprobs is not None
    entry = logprobs[0]
    assert entry is not None
    assert entry.token == tokens[0]
    assert entry.logprob == pytest.approx(float(expected[tokens[0]]), abs=1e-4)
    top = torch.topk(expected, 4)
    assert [t for t, _ in entry.top] == top.indices.tolist()
    assert [lp for _, lp in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_rows_without_logprobs_get_none(sample: Sample) -> None:
    _, logprobs = sample(make_logits(0, 2), [make_row(0, logprobs=0), make_row(1)], [])
    assert logprobs is not None
    assert logprobs[0] is not None
    assert logprobs[0].top == ()
    assert logprobs[1] is None
    assert sample(make_logits(0, 2), [make_row(0), make_row(1)], [])[1] is None


def test_a_row_without_finite_logits_gets_no_token_and_affects_no_other(sample: Sample) -> None:
    logits = make_logits(0, 4)
    logits[1, 7], logits[2] = float("nan"), float("-inf")
    kinds = [{"top_p": 0.9}, {"top_p": 0.9, "logprobs": 2}, {"temperature": 0.0}, {}]
    rows = [make_row(i, **kind) for i, kind in enumerate(kinds)]
    tokens, _ = sample(logits.clone(), rows, [])
    assert tokens[1] == tokens[2] == NO_TOKEN
    for i in (0, 3):
        assert sample(logits[i : i + 1].clone(), [rows[i]], [])[0] == [tokens[i]]


@pytest.mark.parametrize("temperature", [1.0001e-5, 1e-3, 100.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}])
def test_extreme_temperatures_and_penalties_stay_finite(
    sample: Sample, temperature: float, cut: dict[str, float]
) -> None:
    logits = make_logits(2, spread=3000.0)
    row = make_row(3, output=(1, 2, 3), temperature=temperature, repetition_penalty=0.01, **cut)
    (token,), _ = sample(logits, [row], [])
    assert 0 <= token < VOCAB


def test_ties_do_not_depend_on_another_rows_top_k(sample: Sample) -> None:
    alone, _ = sample(torch.zeros(1, 50_000), [make_row(5, top_p=0.5)], [])
    both, _ = sample(torch.zeros(2, 50_000), [make_row(1, top_k=5000), make_row(5, top_p=0.5)], [])
    assert both[1] == alone[0]


def choose_by_definition(
    logits: np.ndarray, params: SamplingParams, draw: float, top_p: float, min_p: float
) -> set[int]:
    """Rank, cut and look up in double precision; neighbours, too, where the draw is next to a border."""
    ranking = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = ranking[: params.top_k] if params.top_k > 0 else ranking
    mass = np.cumsum(weights[kept])
    if params.top_p < 1:
        kept = kept[mass - weights[kept] < top_p * mass[-1]]
    ids = np.sort(kept[weights[kept] >= min_p])
    ends = np.cumsum(weights[ids]) / weights[ids].sum()
    return {int(ids[min(ends.searchsorted(draw + d, side="right"), len(ids) - 1)]) for d in (-1e-5, 0, 1e-5)}


def within_rounding(value: float) -> set[float]:
    return {value * (1 - 1e-6), value, value * (1 + 1e-6)}


def hostile_logits(seed: int, vocab: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, vocab)
    if kind == "ties":
        logits = rng.integers(-3, 3, vocab).astype(float)
    elif kind == "flat":
        logits = np.full(vocab, 1.5)
    elif kind == "nearly flat":
        logits = 1 + rng.integers(0, 3, vocab) * 2.0**-23
    elif kind == "masked":
        logits[rng.random(vocab) < 0.9] = -np.inf
        logits[int(rng.integers(vocab))] = 2.0
    elif kind == "far":
        logits[rng.random(vocab) < 0.5] -= 3e38
        logits[int(rng.integers(vocab))] += 40
    return logits.astype(np.float32)


@settings(deadline=None, max_examples=examples(150))
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([1, 7, 255, 256, 257, 1000, 3001, 70_000]),
    kind=st.sampled_from(["normal", "ties", "flat", "nearly flat", "masked", "far"]),
    bf16=st.booleans(),
    temperature=st.sampled_from([2e-5, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 2, 40, 300, 2000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
)
# top-p is of all that top-k leaves, also beyond the first candidates; and of what min-p takes away.
@example(seed=9547, vocab=1000, kind="ties", bf16=False, temperature=100.0, top_k=300, top_p=0.5, min_p=0.0)
@example(seed=5826, vocab=257, kind="normal", bf16=False, temperature=1.7, top_k=0, top_p=0.9, min_p=0.05)
# Three tokens lie within rounding below min-p.
@example(seed=1, vocab=70_000, kind="normal", bf16=False, temperature=100.0, top_k=0, top_p=1.0, min_p=0.9)
def test_tokens_are_those_of_the_definition(
    sample: Sample, seed: int, vocab: int, kind: str, bf16: bool, **params: float
) -> None:
    logits = torch.from_numpy(hostile_logits(seed, vocab, kind))
    if bf16:
        logits = logits.bfloat16()
    rows = [make_row(number, **params) for number in range(seed, seed + 3)]
    tokens, _ = sample(logits.expand(len(rows), -1).contiguous(), rows, [])
    for row, token in zip(rows, tokens, strict=True):
        expected: set[int] = set()
        for top_p, min_p in itertools.product(
            within_rounding(row.sampling.top_p), within_rounding(row.sampling.min_p)
        ):
            expected |= choose_by_definition(
                logits.double().numpy(), row.sampling, uniform(row.seed, 0), top_p, min_p
            )
        assert token in expected


def test_kernels_sample_the_tokens_that_torch_samples(sample: Sample) -> None:
    kinds: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 0.0}]
    rows = [make_row(seed, **kinds[seed % len(kinds)]) for seed in range(40)]
    logits = make_logits(4, len(rows), 49_152).bfloat16()
    assert sample(logits, rows, [])[0] == sample_rows(logits, rows, [])[0]


def test_top_logprobs_are_in_order_and_ties_are_reported_once(sample: Sample) -> None:
    logits = torch.zeros(2, 600)
    logits[0, 100:130] = 3.0
    logits[1] = make_logits(1, vocab=600)[0]
    _, logprobs = sample(logits, [make_row(0, logprobs=20), make_row(1, logprobs=3)], [])
    assert logprobs is not None
    first, second = logprobs
    assert first is not None
    assert second is not None
    assert len({token for token, _ in first.top}) == 20
    assert all(100 <= token < 130 for token, _ in first.top)
    expected = logits[1].double().log_softmax(-1).topk(3)
    assert [token for token, _ in second.top] == expected.indices.tolist()
    assert [value for _, value in second.top] == pytest.approx(expected.values.tolist(), abs=1e-5)


@settings(deadline=None, max_examples=examples(40))
@given(
    seed=st.integers(0, 1000),
    strengths=st.lists(
        st.tuples(
            st.sampled_from([1.0, 1.3, 0.5]), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, -0.4])
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_penalties_of_many_rows_are_those_of_each_token(
    seed: int, strengths: list[tuple[float, float, float]]
) -> None:
    rng = np.random.default_rng(seed)
    logits = make_logits(seed, len(strengths), 20)
    expected = logits.clone()
    rows = []
    for number, (repetition, frequency, presence) in enumerate(strengths):
        prompt, output = rng.integers(0, 20, 8).tolist(), rng.integers(0, 20, 6).tolist()
        penalties = {
            "repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence
        }  # fmt: skip
        rows.append(make_row(prompt=prompt, output=output[:4], min_tokens=5, ignore_eos=True, **penalties))
        adjust_logits(logits[:1].clone(), rows[-1:], [])
        for token in output[4:]:
            rows[-1].tokens.append(token)
            if rows[-1].penalty is not None:
                rows[-1].penalty.add(token)
        for token in {*prompt, *output}:
            old = expected[number, token]
            new = old / repetition if old > 0 else old * repetition
            times = output.count(token)
            expected[number, token] = new - frequency * times - presence * (times > 0)
    adjust_logits(logits, rows, [])
    torch.testing.assert_close(logits, expected)


def biased(sampling: SamplingParams, logits: torch.Tensor, output: tuple[int, ...]) -> torch.Tensor:
    """By definition: add biases, then take away what is not allowed and what would complete a ban."""
    adjusted = logits.clone()
    for token in range(len(adjusted)):
        adjusted[token] += dict(sampling.logit_bias).get(token, 0.0)
        full = (*output, token)
        banned = any(full[-len(one) :] == one for one in sampling.banned_sequences)
        if banned or (sampling.allowed_token_ids and token not in sampling.allowed_token_ids):
            adjusted[token] = float("-inf")
    return adjusted


TOKENS = st.integers(0, 19)


@settings(deadline=None, max_examples=examples(60))
@given(
    biases=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=5),
    allowed_ids=st.lists(TOKENS, min_size=4, max_size=8, unique=True) | st.just([]),
    banned=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3),
    output=st.lists(TOKENS, max_size=5).map(tuple),
    seed=st.integers(0, 100),
)
def test_biases_follow_their_definitions(
    sample: Sample, biases, allowed_ids, banned, output, seed: int
) -> None:
    limits = {
        "logit_bias": tuple(biases.items()),
        "allowed_token_ids": tuple(allowed_ids),
        "banned_sequences": tuple(banned),
    }
    logits = make_logits(seed, vocab=20)
    rows = [
        make_row(output=output, temperature=0.0, logprobs=3, **limits),
        make_row(seed, output=output, temperature=1.0, **limits),
        make_row(output=output, temperature=0.0),
    ]
    expected = biased(rows[0].sampling, logits[0], output)
    for _ in range(2):  # the second time with what is remembered of the row
        tokens, logprobs = sample(logits.expand(3, -1).clone(), rows, [])
        assert tokens[0] == int(expected.argmax())
        assert expected[tokens[1]] > float("-inf")
        assert tokens[2] == int(logits[0].argmax())
        raw = logits[0].log_softmax(-1)
        assert logprobs is not None
        assert logprobs[0].logprob == pytest.approx(raw[tokens[0]].item(), abs=1e-5)


def test_a_row_with_all_tokens_excluded_gets_no_token(sample: Sample) -> None:
    row = make_row(allowed_token_ids=(3, 4), banned_sequences=((3,), (4,)))
    assert sample(make_logits(), [row], [])[0] == [NO_TOKEN]
