"""Log-probabilities of prompts and embeddings equal those of `transformers`, whatever else happens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_builders import (
    OVERCOMMIT,
    Outcome,
    greedy_reference,
    make_request,
    reference_pass,
    run_engine,
)
from execute_builders import KINDS, make_model, make_prompt, tiny_config

from at_hand import bundled_model
from shoal.core import Request, TokenLogprobs
from shoal.models import Tokenizer

LENGTHS = (1, 9, 23, 40)
OUTPUT = 16
TOP = 3

SMALL = {"preset": "vllm", "memory_bytes": 120 << 10, "block_size": 4, **OVERCOMMIT}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "evictions, chunks of 13": {**SMALL, "max_batched_tokens": 13},
    "evictions, no prefix caching": {**SMALL, "prefix_caching": False},
    "evictions, depth 2, split, chunks of 13": {
        **SMALL, "depth": 2, "layout": "split", "max_batched_tokens": 13
    },
    "evictions, swap, chunks of 11": {
        **SMALL, "preemption_mode": "swap", "swap_bytes": 1 << 20, "max_batched_tokens": 11
    },
    "several iterations": {"max_iterations": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


def prompts() -> list[list[int]]:
    """Of several lengths; two share a beginning, and two are equal."""
    made = [make_prompt(length, seed=length) for length in LENGTHS]
    return [*made, made[-1][:32] + make_prompt(8, seed=99), made[-1]]


def requests(service: str, suffix: str = "") -> list[Request]:
    """All want log-probabilities but each third one, which wants an embedding instead."""
    return [
        make_request(
            f"{service}-{i}{suffix}",
            service,
            prompt,
            OUTPUT,
            **({"embed": True} if i % 3 == 2 else {"prompt_logprobs": i % (TOP + 1)}),
        )
        for i, prompt in enumerate(prompts())
    ]


def assert_scores(entries: Sequence[TokenLogprobs], folder: Path, prompt: Sequence[int], top: int) -> None:
    """They are of every token but the first, each once, with the likeliest tokens."""
    expected, _ = reference_pass(folder, tuple(prompt))
    assert [entry.token for entry in entries] == list(prompt[1:])
    for entry, logprobs in zip(entries, expected, strict=False):
        assert entry.logprob == pytest.approx(logprobs[entry.token].item(), abs=1e-3)
        assert entry.rank == 1 + int((logprobs > logprobs[entry.token]).sum())
        values, ids = logprobs.topk(top)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


def assert_embedding(vector: bytes, folder: Path, prompt: Sequence[int]) -> None:
    """It is the last token's hidden state, of length 1."""
    _, hidden = reference_pass(folder, tuple(prompt))
    ours = torch.frombuffer(bytearray(vector), dtype=torch.float32)
    torch.testing.assert_close(ours, hidden[-1] / hidden[-1].norm(), atol=1e-4, rtol=1e-3)


def assert_equal_to_reference(outcome: Outcome, service: str, folder: Path, suffix: str = "") -> None:
    for i, prompt in enumerate(prompts()):
        name = f"{service}-{i}{suffix}"
        assert outcome.tokens[name] == greedy_reference(folder, prompt, OUTPUT)
        if i % 3 == 2:
            (vector,) = outcome.embeddings[name]
            assert_embedding(vector, folder, prompt)
            assert name not in outcome.prompt_logprobs
        else:
            assert_scores(outcome.prompt_logprobs.get(name, ()), folder, prompt, i % (TOP + 1))
            assert name not in outcome.embeddings


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, folders: dict[str, Path]) -> None:
    outcome = run_engine({kind: folders[kind]}, [requests(kind)], block_size=4, max_batched_tokens=29)
    assert_equal_to_reference(outcome, kind, folders[kind])


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_all_circumstances(circumstance: str, folders: dict[str, Path]) -> None:
    both = {name: folders[name] for name in ("llama", "gemma2")}
    rounds = [[one for pair in zip(*map(requests, both), strict=True) for one in pair]]
    rounds.append([request for name in both for request in requests(name, "-again")])
    settings = CIRCUMSTANCES[circumstance]
    outcome = run_engine(both, rounds, **settings)
    for name, folder in both.items():
        for suffix in ("", "-again"):
            assert_equal_to_reference(outcome, name, folder, suffix)
    assert (outcome.evictions > 0) == ("evictions" in circumstance)
    assert (outcome.swapped_tokens > 0) == ("swap" in circumstance)
    # By those that want an embedding.
    assert (outcome.cached_tokens > 0) == settings.get("prefix_caching", True)


def test_services_that_decode_together(folders: dict[str, Path]) -> None:
    both = {"one": folders["llama"], "other": folders["llama"]}
    rounds = [[request for name in both for request in requests(name)]]
    outcome = run_engine(both, rounds, max_batched_tokens=30)
    for name, folder in both.items():
        assert_equal_to_reference(outcome, name, folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_model() -> None:
    folder = bundled_model("smollm2")
    text = "In the year 1969, the first people landed on the moon. Their names were"
    prompt = Tokenizer.from_folder(folder).encode(text)
    scored = make_request("scored", "smollm2", prompt, 2, prompt_logprobs=TOP)
    embedded = make_request("embedded", "smollm2", prompt, 1, embed=True)
    outcome = run_engine({"smollm2": folder}, [[scored, embedded]], memory_bytes=64 << 20)
    assert_scores(outcome.prompt_logprobs["scored"], folder, prompt, TOP)
    assert_embedding(outcome.embeddings["embedded"][0], folder, prompt)
