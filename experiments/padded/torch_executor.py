"""Executor of static batches with `transformers` `generate`: left padding, a limit of iterations.

SCLS (sections 2.4 and 4.1) schedules for engines with only these abilities. Decoding is greedy, so a request
has the same output in slices as in one batch.
"""

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from experiments.padded.executor import StaticResult
from shoal.core import ConfigError, ModelUnsupported, Service
from shoal.execute.free_memory import free_memory_bytes
from shoal.execute.kv_pool_size import CUDA_MEMORY_SHARE
from shoal.execute.malloc import keep_freed_memory
from shoal.execute.model.checkpoint import load_module, read_model_config, unsupported_on_error
from shoal.execute.model.choose_dtype import resolve_dtype
from shoal.execute.model.model_set import DEFAULT_CPU_KV_BYTES, resolve_device
from shoal.execute.model.probe import TOLERANCE
from shoal.execute.model.random_weights import build_empty, fill
from shoal.models import read_facts

PAD = 0
"""Token id of padding; it is masked, so any token of the vocabulary would do."""

PROBE_LENGTHS = (7, 3)
_NO_END = -1


@dataclass(frozen=True, slots=True)
class StaticModel:
    """A model of `transformers`, shared by any number of executors."""

    module: Any
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_token_bytes: int
    """KV of one token in all layers."""
    weight_bytes: int

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    def default_kv_bytes(self) -> int:
        """Default memory for the KV of all executors.

        On a CPU 2 GiB, but at most 40% of the available memory; on CUDA 90% of the device less the weights.
        """
        if self.device.type != "cuda":
            return min(DEFAULT_CPU_KV_BYTES, int(free_memory_bytes() * 0.4))
        free, total = torch.cuda.mem_get_info(self.device)
        return max(1, free - int(total * (1 - CUDA_MEMORY_SHARE)))


def load_static_model(service: Service, folder: Path, *, device: str = "cpu") -> StaticModel:
    """Load the model of ``service`` from ``folder`` for static batches.

    Raises:
        ModelUnsupported: transformers cannot read it, it is not a decoder-only language model, or padding
            changes its output.
        ConfigError: the device or the dtype is not available.
    """
    target = resolve_device(device)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    name = service.model
    config = read_model_config(name, folder)
    if type(config) not in AutoModelForCausalLM._model_mapping or getattr(
        config, "is_encoder_decoder", False
    ):
        raise ModelUnsupported(
            f"{name}: {type(config).__name__} is no decoder-only language model of transformers"
        )
    dtype = resolve_dtype(service, folder)
    if not dtype.is_floating_point:
        raise ConfigError(
            f"service {service.name!r}: static batches are computed in float32, bfloat16 or float16, "
            f"not in {service.dtype}"
        )
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if service.random_seed is None:
        module = load_module(model_class, folder, config, name, dtype)
    else:
        module = build_empty(model_class, config, name, dtype)
        fill(module, name, target, service.random_seed)
    module.eval().requires_grad_(False).to(target)
    # Without the folder's defaults (temperature, penalties, lengths).
    module.generation_config = GenerationConfig()
    with unsupported_on_error("run", name):
        _check_padding_has_no_effect(module, name)
    if target.type == "cpu":
        keep_freed_memory()
    facts = read_facts(folder)
    return StaticModel(
        module=module,
        context_tokens=min(facts.context_tokens, service.max_model_len or facts.context_tokens),
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        kv_token_bytes=sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in facts.layers)
        * dtype.itemsize,
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
    )


class StaticBatchExecutor:
    """Runs static batches of one model; the ``StaticExecutor`` of real engines.

    Several executors may share a model and run in different threads. threads: torch's CPU threads in the
    thread that calls ``run``; None: unchanged.
    """

    def __init__(self, model: StaticModel, *, threads: int | None = None) -> None:
        self.model = model
        self._threads = threads
        self._interrupted = threading.Event()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        iterations: int,
        limits: Sequence[int],
        ends: Sequence[Collection[int]] | None = None,
    ) -> StaticResult:
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # a setting of the calling thread
        started = time.monotonic_ns()
        ends = [self.model.eos_token_ids] * len(prompts) if ends is None else ends
        row_limits = [min(limit, iterations) for limit in limits]
        ids, mask = _pad_left(prompts, self.model.device)
        padded = ids.shape[1]
        done = _RowsDone(padded, row_limits, ends, self.model.device, self._interrupted)
        generated = self.model.module.generate(
            ids,
            attention_mask=mask,
            generation_config=_greedy(max(row_limits)),
            stopping_criteria=StoppingCriteriaList([done]),
        )
        rows = generated[:, padded:].tolist()
        outputs = [_until_end(row[:n], end) for row, n, end in zip(rows, row_limits, ends, strict=True)]
        return StaticResult(
            outputs=outputs,
            ended=[output[-1] in end for output, end in zip(outputs, ends, strict=True)],
            iterations_run=generated.shape[1] - padded,
            duration_ns=time.monotonic_ns() - started,
        )

    def interrupt(self) -> None:
        self._interrupted.set()


class _RowsDone(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at its own limit or end tokens, and all rows on an interrupt."""

    def __init__(
        self,
        padded: int,
        limits: Sequence[int],
        ends: Sequence[Collection[int]],
        device: torch.device,
        interrupted: threading.Event,
    ) -> None:
        self._lengths = torch.tensor(limits, device=device) + padded
        self._interrupted = interrupted
        most = max(len(tokens) for tokens in ends)
        filled = [[*tokens, *[_NO_END] * (most - len(tokens))] for tokens in ends]
        self._ends = torch.tensor(filled, dtype=torch.int64, device=device)  # [batch, most]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # Returns bool [batch]: which rows are done.
        if self._interrupted.is_set():
            return torch.ones_like(self._lengths, dtype=torch.bool)
        ended = (input_ids[:, -1:] == self._ends).any(dim=1)
        return ended | (input_ids.shape[1] >= self._lengths)


def _until_end(row: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens of a row up to and including the first one that ends it."""
    end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
    return list(row[: end + 1])


def _greedy(iterations: int, **more: bool) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=iterations, do_sample=False, num_beams=1, use_cache=True, pad_token_id=PAD, **more
    )


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [batch, longest prompt] int64.

    ``generate`` counts positions along the mask, so the first token of each request has position 0.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@torch.inference_mode()
def _check_padding_has_no_effect(module: Any, name: str) -> None:
    """Raise ModelUnsupported if a prompt has other logits with padding than without."""
    generator = torch.Generator().manual_seed(0)
    vocab = int(module.config.get_text_config().vocab_size)
    prompts = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in PROBE_LENGTHS]
    alone_logits, padded_logits = (_first_logits(module, rows) for rows in (prompts[-1:], prompts))
    # With a near tie the first tokens may differ; then the second ones cannot be compared.
    compared = 2 if alone_logits[0].argmax() == padded_logits[0].argmax() else 1
    alone_logits, padded_logits = alone_logits[:compared], padded_logits[:compared]
    difference = float((alone_logits - padded_logits).norm() / alone_logits.norm())
    if not difference <= TOLERANCE[module.dtype]:
        raise ModelUnsupported(
            f"{name}: padding a prompt changes the logits of {type(module).__name__} by {difference:.1%}, "
            "so it cannot be served in static batches; `shoal generate` and `shoal serve` pad nothing"
        )


def _first_logits(module: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of the last row's first two tokens, [2, vocab] float32: one of prefill, one of decode."""
    ids, mask = _pad_left(rows, module.device)
    config = _greedy(2, output_logits=True, return_dict_in_generate=True)
    answer = module.generate(ids, attention_mask=mask, generation_config=config)
    return torch.stack([step[-1].float() for step in answer.logits])
