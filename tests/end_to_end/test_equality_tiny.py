"""Output does not depend on batch, preemptions, chunks, prefix hits, layout or pipelining.

Greedy float32 output equals `transformers`, token for token, for tiny random models; sampled output
with a seed equals itself in other circumstances.
"""

from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import OVERCOMMIT, make_request, run_engine
from execute_builders import make_model, make_prompt, tiny_config
from references import assert_greedy

from crossed import crossed
from shoal.core import derive_seed
from shoal.schedule import FcfsStrict

KINDS = ("llama", "qwen3", "opt", "gpt2", "gemma3", "gemma2")
PARTNER = {
    "llama": "gemma3",
    "qwen3": "llama",
    "opt": "qwen3",
    "gpt2": "llama",
    "gemma3": "gpt2",
    "gemma2": "opt",
}
LENGTHS = (1, 9, 16, 33, 48)
OUTPUT = 20

SMALL = {"preset": "vllm", "memory_bytes": 160 << 10, "block_size": 4, **OVERCOMMIT}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "no prefix caching": {"prefix_caching": False},
    "chunks of 7": {"max_batched_tokens": 7},
    "preemptions": SMALL,
    "preemptions, no prefix caching": {**SMALL, "prefix_caching": False},
    "preemptions, chunks of 7": {**SMALL, "max_batched_tokens": 7},
    "preemptions, depth 2, large-young": {**SMALL, "depth": 2, "victim": "large-young"},
    "preemptions, split, strict": {**SMALL, "layout": "split", "order": FcfsStrict()},
    "depth 2": {"depth": 2},
    "reference attention": {"attention": "reference"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


def prompts() -> list[list[int]]:
    """Of several lengths; two share a beginning."""
    made = [make_prompt(length, seed=length) for length in LENGTHS]
    return [*made, made[-1][:40] + make_prompt(8, seed=99)]


@pytest.mark.parametrize(("kind", "circumstance"), crossed(KINDS, CIRCUMSTANCES))
def test_greedy_output_equals_transformers(kind: str, circumstance: str, folders: dict[str, Path]) -> None:
    pair = (kind, PARTNER[kind])
    requests = [
        make_request(f"{service}-{i}", service, prompt, OUTPUT)
        for i, prompt in enumerate(prompts())
        for service in pair
    ]
    again = [
        make_request(f"{service}-again-{i}", service, prompt, OUTPUT)
        for i, prompt in enumerate(prompts())
        for service in pair
    ]
    settings = CIRCUMSTANCES[circumstance]
    outcome = run_engine({name: folders[name] for name in pair}, [requests, again], **settings)
    for service in pair:
        for i, prompt in enumerate(prompts()):
            for name in (f"{service}-{i}", f"{service}-again-{i}"):
                assert_greedy(folders[service], prompt, outcome.tokens[name], OUTPUT)
    assert (outcome.preemptions > 0) == ("preemptions" in circumstance)
    if "preemptions" not in circumstance:
        assert (outcome.cached_tokens > 0) == settings.get("prefix_caching", True)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_alone(kind: str, folders: dict[str, Path]) -> None:
    rounds = [[make_request(str(i), kind, prompt, OUTPUT)] for i, prompt in enumerate(prompts())]
    outcome = run_engine({kind: folders[kind]}, rounds, prefix_caching=False)
    for i, prompt in enumerate(prompts()):
        assert_greedy(folders[kind], prompt, outcome.tokens[str(i)], OUTPUT)


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 11, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5},
]


@pytest.mark.slow
def test_sampled_output_with_a_seed_is_the_same_in_all_circumstances(folders: dict[str, Path]) -> None:
    def requests(suffix: str) -> list[Any]:
        return [
            make_request(
                f"{i}-{choice}{suffix}", "llama", prompt, OUTPUT, derive_seed(i, choice), **SAMPLING[i % 4]
            )
            for i, prompt in enumerate(prompts())
            for choice in range(2)
        ]

    one_by_one = [[request] for request in requests("")]
    alone = run_engine({"llama": folders["llama"]}, one_by_one, prefix_caching=False).tokens
    assert all(alone[f"{i}-0"] != alone[f"{i}-1"] for i in range(len(prompts())))
    for settings in CIRCUMSTANCES.values():
        if settings.get("attention") == "reference":
            continue
        others = [make_request(f"g{i}", "gemma3", prompt, OUTPUT) for i, prompt in enumerate(prompts())]
        both = {name: folders[name] for name in ("llama", "gemma3")}
        outcome = run_engine(both, [requests("") + others, requests("-again")], **settings)
        for name, tokens in alone.items():
            assert outcome.tokens[name] == tokens
            assert outcome.tokens[f"{name}-again"] == tokens
