"""Greedy float32 output of the executor equals `transformers`, for every supported kind of model."""

from collections.abc import Sequence
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
    tiny_config,
)
from references import assert_greedy, reference_model

from crossed import crossed

LENGTHS = (1, 5, 16, 23, 40, 70)
OUTPUT = 14


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


PROMPTS = [make_prompt(length, seed=length) for length in LENGTHS]


def assert_all_greedy(folder: Path, outputs: Sequence[Sequence[int]]) -> None:
    """They go on from all prompts as `transformers` does."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(folder, prompt, output, OUTPUT)


@pytest.mark.parametrize(("kind", "layout", "attention"), crossed(KINDS, ["merged", "split"], BACKENDS))
def test_every_kind_in_a_poisoned_pool(
    kind: str, layout: str, attention: str, folders: dict[str, Path]
) -> None:
    scheduler = HandScheduler({kind: folders[kind]}, attention=attention, layout=layout)
    for chunk in (1000, 7):
        scheduler.poison()
        assert_all_greedy(folders[kind], scheduler.generate(kind, PROMPTS, OUTPUT, chunk=chunk))


@pytest.mark.parametrize(
    ("length", "kind", "attention"),
    crossed([64, 65, 200], ["llama", "mistral", "gemma2", "gemma3"], BACKENDS, of_each=2),
)
def test_logits_after_longer_prompts(
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
    reference = reference_model(folders[kind])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, length - 1 :]
    torch.testing.assert_close(torch.cat(seen).cpu(), expected, rtol=0, atol=1e-4)


def test_two_models_with_different_shapes_share_one_pool(folders: dict[str, Path]) -> None:
    scheduler = HandScheduler({"llama": folders["llama"], "gemma3": folders["gemma3"]})
    scheduler.poison()
    for kind in ("llama", "gemma3", "llama"):
        assert_all_greedy(folders[kind], scheduler.generate(kind, PROMPTS, OUTPUT))


def test_a_worker_thread_gives_the_same_tokens(folders: dict[str, Path]) -> None:
    scheduler = HandScheduler({"llama": folders["llama"]}, depth=2)
    assert_all_greedy(folders["llama"], scheduler.generate("llama", PROMPTS, OUTPUT))
    scheduler.executor.close()


def test_services_of_one_model_share_its_weights(folders: dict[str, Path]) -> None:
    both = HandScheduler({"a": folders["llama"], "b": folders["llama"]}).models
    alone = HandScheduler({"a": folders["llama"]}).models
    assert both.services["a"].model is both.services["b"].model
    assert both.weight_bytes == alone.weight_bytes
