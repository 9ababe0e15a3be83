"""Models of fused layers run without the code of `transformers`, by native calls, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from execute_builders import (
    FUSED_KINDS,
    KINDS,
    HandScheduler,
    logits_of,
    make_model,
    make_prompt,
    needs_native,
    tiny_config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from shoal.core import Service
from shoal.execute.attention.native_backend import NativeAttention
from shoal.execute.model.decoder_layer import DecoderLayer
from shoal.execute.model.fused_forward import FusedForward
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import load_models
from shoal.execute.model.probe import ProbeResult
from shoal.execute.model.record_attention import RecordingStep
from shoal.execute.model.transformers_forward import TransformersForward

pytestmark = needs_native


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in int8 are kept in a cache of the test's own."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def load_at_once(folder: Path) -> LoadedModel:
    return load_models([Service(name="s", model="m")], {"s": folder}).services["s"].model


def test_layers_are_fused_at_load_and_restored_if_the_logits_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path, tiny_config("llama"))
    assert {type(layer) for layer in load_at_once(folder).module.model.layers} == {DecoderLayer}
    monkeypatch.setattr(ProbeResult, "gives_same_logits", lambda self, model: False)
    loaded = load_at_once(folder)
    assert {type(layer) for layer in loaded.module.model.layers} == {LlamaDecoderLayer}
    assert isinstance(loaded.forward, TransformersForward)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fully_fused_model_runs_without_the_code_of_transformers(kind: str, tmp_path: Path) -> None:
    loaded = load_at_once(make_model(tmp_path, tiny_config(kind)))
    fused = kind in FUSED_KINDS and kind != "gemma2"  # which caps its logits
    assert isinstance(loaded.forward, FusedForward if fused else TransformersForward)


@pytest.mark.parametrize("layout", ["merged", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", [kind for kind in FUSED_KINDS if kind != "gemma2"])
def test_a_layer_in_one_native_call_has_the_bits_of_separate_operations(
    kind: str, dtype: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run_layers = NativeAttention.run_layers

    def counted(step: NativeAttention, *arguments: Any) -> None:
        calls.append(1)
        run_layers(step, *arguments)

    monkeypatch.setattr(NativeAttention, "run_layers", counted)
    config = tiny_config(kind)
    if layout == "split":
        config.hidden_size = 96  # whole groups of inputs, which AMX reads in place
    folder = make_model(tmp_path, config, torch.bfloat16)
    scheduler = HandScheduler({kind: folder}, attention="native", layout=layout, dtype=dtype)
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23, 40)]
    forward = scheduler.models.services[kind].model.forward
    assert isinstance(forward, FusedForward)
    assert len(forward.native_layers) == scheduler.models.services[kind].model.module.config.num_hidden_layers
    scheduler.poison()
    at_once = logits_of(scheduler, kind, prompts, 4, chunk=16)
    made = len(calls)
    assert made > 4
    forward.native_layers.clear()
    scheduler.poison()
    assert logits_of(scheduler, kind, prompts, 4, chunk=16) == at_once
    assert len(calls) == made


def test_float32_layers_are_computed_by_separate_operations(tmp_path: Path) -> None:
    forward = load_at_once(make_model(tmp_path, tiny_config("llama"))).forward
    assert isinstance(forward, FusedForward)
    assert not forward.native_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_only_requested_rows_have_logits(dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, tiny_config("gemma3"))
    loaded = load_models([Service(name="s", model="m", dtype=dtype)], {"s": folder}).services["s"].model
    assert isinstance(loaded.forward, FusedForward)
    ids, positions = torch.arange(9).unsqueeze(0), torch.arange(9).unsqueeze(0)
    every, some = torch.arange(9), torch.tensor([8, 2])
    logits, kept = (loaded.forward(ids, positions, rows, RecordingStep((9,))) for rows in (every, some))
    # Native products have the same bits for any number of rows.
    tolerance = 1e-5 if dtype == "float32" else 0.0
    torch.testing.assert_close(kept, logits[some], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_model_of_one_layer(dtype: str, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    scheduler = HandScheduler(
        {"llama": make_model(tmp_path, config, torch.bfloat16)}, attention="native", dtype=dtype
    )
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23)]
    whole, chunks = (logits_of(scheduler, "llama", prompts, 3, chunk=chunk) for chunk in (64, 4))
    assert whole <= chunks  # rows that do not sample have logits, too, which are not read


def test_a_model_with_other_computations_around_its_layers_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaModel.forward

    def more(self: Any, *args: Any, **keywords: Any) -> Any:
        output = plain(self, *args, **keywords)
        output.last_hidden_state = output.last_hidden_state * 1.001
        return output

    monkeypatch.setattr(LlamaModel, "forward", more)
    loaded = load_at_once(make_model(tmp_path, tiny_config("llama")))
    assert {type(layer) for layer in loaded.module.model.layers} == {DecoderLayer}
    assert isinstance(loaded.forward, TransformersForward)
