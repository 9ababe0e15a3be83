"""What `transformers` says of a model in a folder, in float32."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@cache
def reference_model(folder: Path) -> torch.nn.Module:
    """The model, read once, with textbook attention: before version 5.20 that of torch left out softcaps."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@cache
@torch.inference_mode()
def reference_pass(folder: Path, prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """What it says of ``prompt`` alone: log-probabilities [length, vocab] of the tokens that follow, and
    hidden states [length, size] after the last norm."""
    model = reference_model(folder)
    ids = torch.tensor([prompt])
    hidden = model.base_model(ids).last_hidden_state[0]
    return model(ids).logits[0].float().log_softmax(-1), hidden


@cache
@torch.inference_mode()
def _likeliest(folder: Path, tokens: tuple[int, ...]) -> list[int]:
    """Behind each token the likeliest next one."""
    return reference_model(folder)(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


def assert_greedy(
    folder: Path, prompt: Sequence[int], output: Sequence[int], count: int, end: int | None = None
) -> None:
    """``output`` is how `transformers` goes on from ``prompt`` alone, greedily, by ``count`` tokens.

    One pass over both tells: each token must be the likeliest behind those before it.
    end: the token with which an output is over, even before ``count``.
    """
    assert len(output) == count or (0 < len(output) < count and output[-1] == end)
    assert end not in output[:-1]
    tokens = (*prompt, *output)
    assert list(output) == _likeliest(folder, tokens[:-1])[len(prompt) - 1 :]
