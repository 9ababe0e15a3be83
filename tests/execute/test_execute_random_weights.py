"""Models with random weights, made from config.json alone."""

import json
from pathlib import Path

import pytest
import torch
from execute_builders import (
    GREEDY,
    KINDS,
    HandScheduler,
    logits_of,
    make_model,
    make_prompt,
    reference_tokens,
    tiny_config,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from at_hand import DEVICE, on_cpu
from shoal.core import ConfigError, ModelUnavailable, ModelUnsupported, Service
from shoal.execute.model import loading, random_weights
from shoal.execute.model.loading import LoadedModel, ModelLoader
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.execute.model.random_weights import build_empty, fill


def config_folder(folder: Path, kind: str = "llama", **fields: object) -> Path:
    """A folder with nothing but the config.json of a tiny model."""
    folder.mkdir()
    config = tiny_config(kind).to_dict() | {"dtype": "float32"} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, seed: int = 0, **service: object) -> LoadedModel:
    config = Service(name="s", model="tiny", weights="random", weights_seed=seed, **service)  # type: ignore[arg-type]
    return load_models([config], {"s": folder}, device=DEVICE).services["s"].model


def own(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The module alone, as it is before anything is fused or laid out."""
    config = tiny_config(kind)
    module = build_empty(AutoModelForCausalLM._model_mapping[type(config)], config, "tiny", dtype)
    fill(module, "tiny", torch.device(DEVICE), seed)
    return module.requires_grad_(False)


def numbers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("gemma3", "bfloat16")])
def test_a_model_runs_as_if_its_weights_were_in_files(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", kind)
    model = load(folder, dtype=dtype)
    saved = own(kind, getattr(torch, dtype))
    saved.save_pretrained(tmp_path / "files")
    [other] = load_models(
        [Service(name="s", model="tiny", dtype=dtype)], {"s": tmp_path / "files"}, device=DEVICE
    ).models
    assert numbers(model.module).keys() == numbers(other.module).keys()
    for name, tensor in numbers(model.module).items():
        assert torch.equal(tensor, numbers(other.module)[name]), name
    assert (model.weight_bytes, model.kv_shape) == (other.weight_bytes, other.kv_shape)
    assert model.described.parameters == sum(parameter.numel() for parameter in saved.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_are_initialised_by_the_models_own_code(kind: str) -> None:
    expected = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.bfloat16).to(DEVICE)
    module = own(kind, torch.bfloat16)
    matrices = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    assert len(matrices) > 8
    assert numbers(module).keys() == numbers(expected).keys()
    for name, tensor in numbers(expected).items():
        found = numbers(module)[name]
        assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, tensor.device), name
        if name not in matrices:
            assert torch.equal(found, tensor), name


@pytest.mark.parametrize(("fields", "std"), [({}, 0.02), ({"initializer_range": 0.1}, 0.1)])
def test_matrices_are_normally_distributed_around_0(fields: dict[str, float], std: float) -> None:
    config = tiny_config("mixtral")
    for name, value in fields.items():
        setattr(config, name, value)
    module = build_empty(AutoModelForCausalLM._model_mapping[type(config)], config, "tiny", torch.float32)
    fill(module, "tiny", torch.device(DEVICE), 0)
    for name, parameter in module.requires_grad_(False).named_parameters():
        if parameter.ndim > 1:
            error = 5 * std / parameter.numel() ** 0.5
            assert abs(float(parameter.mean())) < error, name
            assert abs(float(parameter.std()) - std) < error, name
            assert float((parameter.abs() < std).float().mean()) == pytest.approx(0.683, abs=0.1), name


def test_large_tensors_are_drawn_in_parts_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "_MAX_DRAWN", 1000)
    table = own("llama").get_input_embeddings().weight.view(-1)
    assert len(table[:3000].unique()) == 3000


def test_numbers_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = numbers(own("gemma3", seed=5))
    torch.manual_seed(2)
    again, other = numbers(own("gemma3", seed=5)), numbers(own("gemma3", seed=6))
    short = numbers(own("gemma3", torch.bfloat16, seed=5))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor.to(short[name].dtype), short[name]), name
        assert tensor.ndim < 2 or not (tensor == other[name]).any(), name


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_embeddings_are_tied_where_the_configuration_ties_them(kind: str) -> None:
    module = own(kind)
    tied = module.get_input_embeddings().weight is module.get_output_embeddings().weight
    assert tied == tiny_config(kind).tie_word_embeddings == (kind == "gemma3")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "mixtral"])
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", kind)
    scheduler = HandScheduler({"s": folder}, weights="random", weights_seed=2)
    prompts = [make_prompt(n, seed=n) for n in (1, 9, 30)]
    own(kind, seed=2).save_pretrained(tmp_path / "files")
    outputs = scheduler.generate("s", prompts, 6, sampling=GREEDY)
    assert outputs == [reference_tokens(tmp_path / "files", prompt, 6) for prompt in prompts]
    assert len({token for output in outputs for token in output}) > 2


@on_cpu
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_int8_is_made_from_the_same_weights_and_not_cached(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    folder = config_folder(tmp_path / "m", kind)
    scheduler = HandScheduler({"s": folder}, dtype="int8", weights="random", weights_seed=4)
    assert not (tmp_path / "cache").exists()
    own(kind, torch.bfloat16, seed=4).save_pretrained(tmp_path / "files")
    other = HandScheduler({"s": tmp_path / "files"}, dtype="int8")
    assert (tmp_path / "cache" / "int8").is_dir()
    assert scheduler.models.weight_bytes == other.models.weight_bytes
    assert scheduler.models.services["s"].model.dtype == torch.int8
    prompts = [make_prompt(n, seed=n) for n in (1, 20)]
    assert logits_of(scheduler, "s", prompts, 3) == logits_of(other, "s", prompts, 3)


@on_cpu
def test_auto_is_the_dtype_of_the_configuration_even_with_a_quantised_file(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", dtype="bfloat16")
    (folder / "int8_groups.st").write_text("no weights are read, so this is no error")
    assert load(folder).dtype == torch.bfloat16


def test_weights_are_shared_where_they_are_the_same(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tiny_config("llama"))
    loader = ModelLoader(torch.device(DEVICE))
    models = ModelSet(loader, "auto")

    def add(name: str, **fields: object) -> LoadedModel:
        service = Service(name=name, model="tiny", **{"dtype": "float32", **fields})  # type: ignore[arg-type]
        models.add(service, loader.load(service, folder))
        return models.services[name].model

    files = add("files")
    random = add("random", weights="random")
    assert add("random-2", weights="random", weights_seed=0) is random
    seven = add("seven", weights="random", weights_seed=7)
    short = add("short", weights="random", dtype="bfloat16")
    assert len({id(model) for model in (files, random, seven, short)}) == 4
    assert models.services["random"].weights == models.services["random-2"].weights
    assert len({served.weights for served in models.services.values()}) == 4
    assert len({model.described.digest for model in models.models}) == 4
    assert models.weight_bytes == 3 * files.weight_bytes + short.weight_bytes
    assert files.described.format == "safetensors"
    assert (random.described.format, random.described.size_bytes) == ("random", 0)


def test_the_progress_says_that_weights_are_random(tmp_path: Path) -> None:
    folder, lines = config_folder(tmp_path / "m"), list[str]()
    service = Service(name="s", model="tiny", weights="random")
    load_models([service], {"s": folder}, device=DEVICE, progress=lines.append)
    assert lines[-1] == f"making random weights of tiny (float32) on {DEVICE}"


def test_the_size_is_known_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config_folder(tmp_path / "m", hidden_size=3 << 18, intermediate_size=1 << 24)
    with pytest.raises(ConfigError, match=r"tiny: its weights take \d{3,}\.\d\d GiB in bfloat16, but"):
        load(folder, dtype="bfloat16")
    size = own("llama").num_parameters() * 4
    folder = config_folder(tmp_path / "small")
    monkeypatch.setattr(loading, "free_bytes", lambda device: size - 1)
    with pytest.raises(ConfigError, match="weights take"):
        load(folder)
    monkeypatch.setattr(loading, "free_bytes", lambda device: size)
    load(folder)


def test_files_are_required_unless_weights_are_random(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m")
    with pytest.raises(ModelUnavailable, match=r"holds no \*\.safetensors weights"):
        load_models([Service(name="s", model="tiny")], {"s": folder})


@pytest.mark.parametrize(
    "odd", [{"num_attention_heads": 0}, {"hidden_act": "odd"}, {"initializer_range": -1.0}]
)
def test_odd_configs_are_no_tracebacks(tmp_path: Path, odd: dict[str, object]) -> None:
    with pytest.raises(ModelUnsupported, match="tiny: "):
        load(config_folder(tmp_path / "m", **odd))


def test_a_configuration_keeps_its_dtype(tmp_path: Path) -> None:
    config: PretrainedConfig = tiny_config("llama")
    before = config.to_dict()
    build_empty(AutoModelForCausalLM._model_mapping[type(config)], config, "tiny", torch.bfloat16)
    assert config.to_dict() == before
