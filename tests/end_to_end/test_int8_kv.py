"""Engines with int8 KV: what a request gets does not depend on how its KV came about.

Weights are int8, too, because then everything else gives the same bits in any batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_builders import OVERCOMMIT, Outcome, make_request, run_engine
from execute_builders import make_model, make_prompt, needs_native, tiny_config

from at_hand import on_cpu
from crossed import crossed

KINDS = ("llama", "qwen3", "gemma3", "gpt2")
OUTPUT = 20
SMALL = {"preset": "vllm", "memory_bytes": 30 << 10, "block_size": 4, **OVERCOMMIT}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks of 7": {"max_batched_tokens": 7},
    "depth 2": {"depth": 2},
    "recomputed": {**SMALL, "preemption_mode": "recompute"},
    "swapped": {**SMALL, "preemption_mode": "swap", "swap_bytes": 1 << 20},
    "swapped, split": {
        **SMALL,
        "preemption_mode": "swap",
        "swap_bytes": 1 << 20,
        "layout": "split",
        "memory_bytes": 72 << 10,
    },
    "recomputed, no prefix caching, chunks": {**SMALL, "prefix_caching": False, "max_batched_tokens": 28},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind), dtype=torch.bfloat16) for kind in KINDS}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "int8-kv-cache"))


def prompts() -> list[list[int]]:
    """Of several lengths; two share a beginning."""
    made = [make_prompt(length, seed=length) for length in (1, 9, 16, 33, 48)]
    return [*made, made[-1][:40] + make_prompt(8, seed=99)]


def run(folders: dict[str, Path], **settings: Any) -> Outcome:
    requests, again = (
        [
            make_request(f"{service}{suffix}-{i}", service, prompt, OUTPUT)
            for i, prompt in enumerate(prompts())
            for service in folders
        ]
        for suffix in ("", "-again")
    )
    return run_engine(folders, [requests, again], **{"kv_dtype": "int8", "dtype": "int8", **settings})


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[int]]:
    """Greedy output of each prompt by itself."""
    tokens: dict[str, list[int]] = {}
    for kind in KINDS:
        rounds = [[make_request(f"{kind}-{i}", kind, prompt, OUTPUT)] for i, prompt in enumerate(prompts())]
        settings = {"dtype": "int8", "kv_dtype": "int8", "prefix_caching": False}
        tokens |= run_engine({kind: folders[kind]}, rounds, **settings).tokens
    return tokens


@needs_native
@pytest.mark.parametrize(
    ("pair", "circumstance"), crossed([("llama", "gemma3"), ("qwen3", "gpt2")], CIRCUMSTANCES)
)
def test_greedy_output_is_the_same_in_all_circumstances(
    pair: tuple[str, str], circumstance: str, folders: dict[str, Path], alone: dict[str, list[int]]
) -> None:
    outcome = run({kind: folders[kind] for kind in pair}, **CIRCUMSTANCES[circumstance])
    for kind in pair:
        for i in range(len(prompts())):
            assert outcome.tokens[f"{kind}-{i}"] == alone[f"{kind}-{i}"]
            assert outcome.tokens[f"{kind}-again-{i}"] == alone[f"{kind}-{i}"]
    small = CIRCUMSTANCES[circumstance].get("memory_bytes") is not None
    assert (outcome.preemptions > 0) == small
    assert (outcome.swapped_tokens > 0) == ("swapped" in circumstance)
    if not small:
        assert outcome.cached_tokens > 0


@on_cpu
@pytest.mark.parametrize(("layout", "attention"), crossed(["merged", "split"], ["batched", "reference"]))
def test_torch_serves_it_without_native_kernels(
    attention: str, layout: str, folders: dict[str, Path]
) -> None:
    pair = {kind: folders[kind] for kind in ("llama", "gemma3")}
    outcome = run(pair, dtype="float32", attention=attention, layout=layout)
    assert {len(tokens) for tokens in outcome.tokens.values()} == {OUTPUT}
    assert outcome.cached_tokens > 0
