"""Sampling against the distribution it must follow, and against itself in other company."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hypothesis_profiles import examples
from shoal.core import NO_TOKEN, SamplingParams
from shoal.execute.group import RunningSequence
from shoal.execute.sampler import sample

VOCAB = 1000


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
def test_draws_follow_the_cut_distribution(params: dict[str, float]) -> None:
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


def test_a_flat_nucleus_wider_than_the_first_candidates_is_widened() -> None:
    rows = [make_row(seed, temperature=1.0, top_p=0.9) for seed in range(600)]
    tokens, _ = sample(torch.zeros(600, 5000), rows, [])
    assert len(set(tokens)) > 400


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_row_gets_the_same_token_in_any_company(seed: int, others: list[int]) -> None:
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


def test_penalties_follow_their_definitions() -> None:
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


def test_tokens_that_end_are_banned_until_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 2], logits[0, 7], logits[0, 5] = 9.0, 8.0, 7.0
    early = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (7,)}
    assert sample(logits.clone(), [make_row(output=(1,), **early)], [2])[0] == [5]
    assert sample(logits.clone(), [make_row(output=(1, 1), **early)], [2])[0] == [2]
    assert sample(logits.clone(), [make_row(output=(1,), ignore_eos=True, **early)], [2])[0] == [2]


def test_logprobs_are_of_the_distribution_before_temperature_and_cuts() -> None:
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


def test_rows_without_logprobs_get_none() -> None:
    _, logprobs = sample(make_logits(0, 2), [make_row(0, logprobs=0), make_row(1)], [])
    assert logprobs is not None
    assert logprobs[0] is not None
    assert logprobs[0].top == ()
    assert logprobs[1] is None
    assert sample(make_logits(0, 2), [make_row(0), make_row(1)], [])[1] is None


def test_a_row_without_finite_logits_gets_no_token_and_harms_no_other() -> None:
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
def test_extreme_temperatures_and_penalties_stay_finite(temperature: float, cut: dict[str, float]) -> None:
    logits = make_logits(2, spread=3000.0)
    row = make_row(3, output=(1, 2, 3), temperature=temperature, repetition_penalty=0.01, **cut)
    (token,), _ = sample(logits, [row], [])
    assert 0 <= token < VOCAB


def test_equally_likely_tokens_do_not_depend_on_a_neighbours_top_k() -> None:
    alone, _ = sample(torch.zeros(1, 50_000), [make_row(5, top_p=0.5)], [])
    both, _ = sample(torch.zeros(2, 50_000), [make_row(1, top_k=5000), make_row(5, top_p=0.5)], [])
    assert both[1] == alone[0]
