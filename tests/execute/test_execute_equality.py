"""Greedy float32 output of the executor equals `transformers`, for every supported kind of model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import (
    BACKENDS,
    KINDS,
    HandScheduler,
    make_model,
    make_prompt,
    reference_tokens,
    tiny_config,
)
from transformers import AutoModelForCausalLM

LENGTHS = (1, 5, 16, 23, 40, 70)
OUTPUT = 14


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    return {kind: [reference_tokens(folders[kind], p, OUTPUT) for p in prompts] for kind in KINDS}


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("layout", ["merged", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_a_poisoned_pool(
    kind: str, layout: str, attention: str, folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    scheduler = HandScheduler({kind: folders[kind]}, attention=attention, layout=layout)
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    for chunk in (1000, 7):
        scheduler.poison()
        assert scheduler.generate(kind, prompts, OUTPUT, chunk=chunk) == expected[kind]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [64, 65, 200])
def test_logits_behind_longer_prompts(
    length: int, kind: str, attention: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token says less of what was computed than its logits; also those of decodes, recorded or not."""
    scheduler = HandScheduler({kind: folders[kind]}, attention=attention)
    plain, seen = scheduler.executor._forward, []

    def forward(*arguments: Any) -> torch.Tensor:
        seen.append(plain(*arguments).clone())
        return seen[-1]

    monkeypatch.setattr(scheduler.executor, "_forward", forward)
    prompt = make_prompt(length, seed=1)
    [tokens] = scheduler.generate(kind, [prompt], 4)
    reference = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, length - 1 :]
    torch.testing.assert_close(torch.cat(seen).cpu(), expected, rtol=0, atol=1e-4)


def test_two_models_with_different_shapes_share_one_pool(
    folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    scheduler = HandScheduler({"llama": folders["llama"], "gemma3": folders["gemma3"]})
    scheduler.poison()
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    for kind in ("llama", "gemma3", "llama"):
        assert scheduler.generate(kind, prompts, OUTPUT) == expected[kind]


def test_a_worker_thread_gives_the_same_tokens(
    folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    scheduler = HandScheduler({"llama": folders["llama"]}, depth=2)
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    assert scheduler.generate("llama", prompts, OUTPUT) == expected["llama"]
    scheduler.executor.close()


def test_services_of_one_model_share_its_weights(folders: dict[str, Path]) -> None:
    both = HandScheduler({"a": folders["llama"], "b": folders["llama"]}).models
    alone = HandScheduler({"a": folders["llama"]}).models
    assert both.models["a"] is both.models["b"]
    assert both.weight_bytes == alone.weight_bytes
