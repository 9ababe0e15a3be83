"""Outputs of a static batch are those of its prompts alone, with any padding and slices."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from execute_builders import make_model, make_prompt, tiny_config
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from experiments.padded import torch_executor
from experiments.padded.torch_executor import StaticBatchExecutor, StaticModel, load_static_model
from shoal.core import ConfigError, ModelUnsupported, Service
from shoal.execute.model.model_set import load_models
from shoal.models import is_quantised
from shoal.models.folder.weights import COMPLETE, GROUPS_FILE

KINDS = ("llama", "mistral", "gemma3", "gpt2", "opt")
LENGTHS = (1, 5, 16, 23, 40)
OUTPUT = 14
PROMPTS = [make_prompt(n, seed=n) for n in LENGTHS]
ENDLESS: list[tuple[int, ...]] = [()] * len(PROMPTS)


def load(folder: Path, dtype: str = "float32") -> StaticModel:
    return load_static_model(Service(name="tiny", model=str(folder), dtype=dtype), folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("static")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> StaticModel:
    return load(folders["llama"])


def alone(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by forward passes over the whole sequence: no cache, no padding, no `generate`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_token(kind: str, folders: dict[str, Path]) -> None:
    executor = StaticBatchExecutor(load(folders[kind]))
    result = executor.run(PROMPTS, OUTPUT, [OUTPUT] * len(PROMPTS), ENDLESS)
    assert result.outputs == [alone(folders[kind], prompt, OUTPUT) for prompt in PROMPTS]
    assert result.iterations_run == OUTPUT
    assert result.duration_ns > 0
    assert not any(result.ended)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_add_up_to_the_whole(kind: str, folders: dict[str, Path]) -> None:
    executor = StaticBatchExecutor(load(folders[kind]))
    [whole] = executor.run([PROMPTS[3]], OUTPUT, [OUTPUT], [()]).outputs
    tokens: list[int] = []
    for other in PROMPTS[:3]:
        batch = [PROMPTS[3] + tokens, other]
        output, _ = executor.run(batch, 5, [OUTPUT - len(tokens), 9], [(), ()]).outputs
        tokens += output
    assert tokens == whole


def test_each_request_ends_at_its_own_end(folders: dict[str, Path], llama: StaticModel) -> None:
    expected = [alone(folders["llama"], prompt, OUTPUT) for prompt in PROMPTS]
    ends = [{expected[0][2], 5}, {expected[1][3]}, (), {expected[3][6]}, {expected[4][0]}]
    result = StaticBatchExecutor(llama).run(PROMPTS, OUTPUT, [OUTPUT] * len(PROMPTS), ends)
    shortened = [
        min((until(tokens, token) for token in end), key=len, default=tokens)
        for tokens, end in zip(expected, ends, strict=True)
    ]
    assert result.outputs == shortened
    assert result.ended == [True, True, False, True, True]
    assert result.iterations_run == OUTPUT


def test_the_model_s_own_ends_count_where_no_others_are_named(
    folders: dict[str, Path], llama: StaticModel
) -> None:
    expected = [alone(folders["llama"], prompt, OUTPUT) for prompt in PROMPTS]
    model = replace(llama, eos_token_ids=(expected[1][3], expected[3][6]))
    result = StaticBatchExecutor(model).run(PROMPTS, OUTPUT, [OUTPUT] * len(PROMPTS))
    shortened = [min((until(tokens, end) for end in model.eos_token_ids), key=len) for tokens in expected]
    assert result.outputs == shortened
    assert any(result.ended)


def test_a_batch_returns_early_when_all_requests_have_ended(
    folders: dict[str, Path], llama: StaticModel
) -> None:
    expected = alone(folders["llama"], PROMPTS[2], OUTPUT)
    end = expected[4]
    result = StaticBatchExecutor(llama).run([PROMPTS[2]] * 2, OUTPUT, [OUTPUT, 2], [{end}] * 2)
    assert result.outputs == [until(expected, end), until(expected, end)[:2]]
    assert result.iterations_run == len(until(expected, end))


def test_limits_of_the_requests_cut_the_batch(folders: dict[str, Path], llama: StaticModel) -> None:
    executor = StaticBatchExecutor(llama)
    result = executor.run(PROMPTS, 8, [1, 3, 5, 2, 100], ENDLESS)
    whole = [alone(folders["llama"], prompt, 8) for prompt in PROMPTS]
    assert result.outputs == [tokens[:limit] for tokens, limit in zip(whole, [1, 3, 5, 2, 8], strict=True)]
    assert executor.run(PROMPTS[:4], 8, [1, 3, 5, 2], ENDLESS[:4]).iterations_run == 5


def test_an_interrupted_executor_returns_after_one_iteration(llama: StaticModel) -> None:
    executor = StaticBatchExecutor(llama)
    executor.interrupt()
    result = executor.run(PROMPTS, 8, [8] * len(PROMPTS), ENDLESS)
    assert result.iterations_run == 1
    assert [len(output) for output in result.outputs] == [1] * len(PROMPTS)


def test_the_folder_s_own_generation_settings_do_not_count(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "odd", tiny_config("llama"))
    expected = alone(folder, PROMPTS[1], OUTPUT)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 5.0, "repetition_penalty": 9.0, "max_length": 3}'
    )
    result = StaticBatchExecutor(load(folder)).run([PROMPTS[1]], OUTPUT, [OUTPUT], [()])
    assert result.outputs == [expected]


def test_what_a_loaded_model_says_of_itself(folders: dict[str, Path]) -> None:
    model = load(folders["llama"])
    assert (model.context_tokens, model.vocab_size, model.eos_token_ids) == (256, 199, (2,))
    assert model.kv_token_bytes == 3 * 2 * (8 + 8) * 4
    assert load(folders["llama"], "bfloat16").kv_token_bytes == 3 * 2 * (8 + 8) * 2


def test_a_model_that_padding_disturbs_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = torch_executor._pad_left

    def without_mask(prompts, device):  # type: ignore[no-untyped-def]
        ids, mask = honest(prompts, device)
        return ids, torch.ones_like(mask)

    monkeypatch.setattr(torch_executor, "_pad_left", without_mask)
    with pytest.raises(ModelUnsupported, match="padding a prompt changes the logits of LlamaForCausalLM"):
        load(folders["llama"])


def test_random_weights_are_those_of_continuous_batches(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "m")
    service = Service(name="tiny", model="m", dtype="float32", weights="random", weights_seed=3)
    model = load_static_model(service, tmp_path / "m")
    (other,) = load_models([service], {"tiny": tmp_path / "m"}).models
    assert torch.equal(model.module.lm_head.weight, other.module.lm_head.weight)
    model.module.save_pretrained(tmp_path / "files")
    result = StaticBatchExecutor(model).run(PROMPTS, 4, [4] * len(PROMPTS), ENDLESS)
    assert result.outputs == [alone(tmp_path / "files", prompt, 4) for prompt in PROMPTS]


def test_auto_is_never_int8(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "m"))
    save_file({"any": torch.zeros(1)}, folder / GROUPS_FILE, metadata={COMPLETE: "True"})
    assert is_quantised(folder)
    assert load(folder, "auto").module.dtype == torch.float32


def test_what_is_not_possible_is_said(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="possible are auto, float32"):
        load(folders["llama"], "int3")
    with pytest.raises(ConfigError, match="float32, bfloat16 or float16, not in int8"):
        load(folders["llama"], dtype="int8")
    with pytest.raises(ConfigError, match="possible are cpu and cuda"):
        load_static_model(Service(name="t", model="t"), folders["llama"], device="meta")
