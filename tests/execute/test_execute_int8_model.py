"""Services with ``dtype: int8``: which layers, what they generate, and the cached weights."""

import os
from pathlib import Path

import pytest
import torch
from execute_builders import KINDS, HandScheduler, logits_of, make_model, make_prompt, tiny_config
from linear_builders import quantised_linear
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from at_hand import on_cpu
from shoal.core import ConfigError, ModelUnavailable, ModelUnsupported, Service
from shoal.execute.linear.packed_linear import PackedLinear
from shoal.execute.model import int8_model
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import load_models
from shoal.native import load_native

LENGTHS = (1, 5, 23)
OUTPUT = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "int8"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_model(root / kind, tiny_config(kind), dtype=torch.bfloat16) for kind in KINDS}


def load(folder: Path, dtype: str = "int8") -> LoadedModel:
    return load_models([Service(name="s", model="m", dtype=dtype)], {"s": folder}).services["s"].model


def dense(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in ("Linear", "Conv1D")]


def bytes_in_int8(folder: Path) -> int:
    """Of linear layers padded int8, with a float32 scale and bias for each output; the rest in bfloat16."""
    model = dense(folder)
    total = 0
    for layer in linears(model):
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.T.shape
        padded = -(-outputs // 32) * 32
        total += padded * (-(-inputs // 32) * 32 + 4 + 4 * (layer.bias is not None))
    gone = {id(p) for layer in linears(model) for p in layer.parameters()}
    gone -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return total + sum(p.nbytes for p in model.parameters() if id(p) not in gone)


def folders_in(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


@on_cpu
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_same_bits_in_any_batch_and_chunks_and_with_any_threads(
    kind: str, dtype: str, folders: dict[str, Path]
) -> None:
    native = load_native() is not None
    if dtype == "bfloat16" and not native and torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN computes bfloat16 with AMX, in an order that depends on the batch")
    # Without our own attention, only the reference computes every row by itself.
    scheduler = HandScheduler({kind: folders[kind]}, attention="auto" if native else "reference", dtype=dtype)
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    together = logits_of(scheduler, kind, prompts, OUTPUT)
    assert len(together) == len(LENGTHS) * OUTPUT
    assert set().union(*(logits_of(scheduler, kind, [prompt], OUTPUT) for prompt in prompts)) == together
    if native:
        assert logits_of(scheduler, kind, prompts[::-1], OUTPUT, chunk=7) >= together
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert logits_of(scheduler, kind, prompts, OUTPUT) == together
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_is_int8_and_the_rest_bfloat16(kind: str, folders: dict[str, Path]) -> None:
    loaded = load(folders[kind])
    assert not linears(loaded.module)
    assert isinstance(loaded.module.lm_head, PackedLinear)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert (loaded.dtype, loaded.kv_shape.dtype) == (torch.int8, "bfloat16")
    assert loaded.weight_bytes == bytes_in_int8(folders[kind])


def test_a_reloaded_model_uses_cached_weights(
    folders: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folders["gpt2"])
    [kept] = folders_in(cache)
    monkeypatch.setattr(int8_model, "quantise_channels", None)  # quantising again would fail
    second = load(folders["gpt2"])
    assert folders_in(cache) == [kept]
    for one, other in zip(first.module.modules(), second.module.modules(), strict=True):
        if isinstance(one, PackedLinear):
            x = torch.randn(3, one.in_features)
            assert torch.equal(one(x), other(x))


def test_weights_that_changed_are_quantised_again(tmp_path: Path, cache: Path) -> None:
    folder = make_model(tmp_path / "m", tiny_config("llama"), dtype=torch.bfloat16)
    load(folder)
    before = (folder / "model.safetensors").stat()
    make_model(folder, tiny_config("llama"), dtype=torch.bfloat16, seed=1)
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = load(folder).module.lm_head.weights.packed
    assert len(folders_in(cache)) == 2
    assert torch.equal(changed, quantised_linear(dense(folder).lm_head.weight).weights.packed)


def test_a_cache_that_cannot_be_written_only_warns(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    assert isinstance(load(folders["llama"]).module.lm_head, PackedLinear)
    assert "cannot be kept in the cache" in caplog.text


def test_a_damaged_cache_is_named(folders: dict[str, Path], cache: Path) -> None:
    load(folders["llama"])
    [kept] = folders_in(cache)
    (kept / "int8.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelUnavailable, match=r"remove the folder .*built again"):
        load(folders["llama"])


def test_without_the_native_library_tokens_are_the_same_with_a_warning(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if load_native() is None:
        pytest.skip("the native library is not built")
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    expected = HandScheduler({"qwen3": folders["qwen3"]}, dtype="int8").generate("qwen3", prompts, OUTPUT)
    monkeypatch.setattr(int8_model, "load_native", lambda: None)
    slow = HandScheduler({"qwen3": folders["qwen3"]}, dtype="int8")
    assert "many times slower" in caplog.text
    assert slow.generate("qwen3", prompts, OUTPUT) == expected


def test_a_model_that_reads_its_layers_weights_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x.to(self.gate_proj.weight.dtype)))
    load(folders["llama"], "bfloat16")
    with pytest.raises(ModelUnsupported, match="with int8 weights it cannot run"):
        load(folders["llama"])


def test_devices_other_than_cpus_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.execute.model.model_set.resolve_device", lambda device: torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="int8 is computed on CPUs only"):
        load_models([Service(name="s", model="m", dtype="int8")], {"s": folders["llama"]}, device="cuda:0")


def test_services_in_int8_and_bfloat16_have_separate_weights(folders: dict[str, Path]) -> None:
    services = [Service(name=dtype, model="m", dtype=dtype) for dtype in ("int8", "bfloat16")]
    models = load_models(services, dict.fromkeys(("int8", "bfloat16"), folders["llama"]))
    assert models.services["int8"].model is not models.services["bfloat16"].model
    assert models.weight_bytes == sum(served.model.weight_bytes for served in models.services.values())
