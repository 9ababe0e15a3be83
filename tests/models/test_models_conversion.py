"""The conversion itself, which needs torch and transformers and takes its time."""

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from at_hand import bundled_model
from gguf_files import write_tiny_llama
from shoal.core import ModelUnavailable, ModelUnsupported
from shoal.models import Tokenizer, is_quantised, list_models, read_facts, resolve_model
from shoal.models.conversion import run_conversion
from shoal.models.download.catalog import BUNDLED
from shoal.models.download.pull import bundled_folder
from shoal.models.folder.weights import GROUPS_FILE
from shoal.models.progress import silent

HIDDEN, HEADS = 16, 4


@pytest.mark.slow
def test_a_users_gguf_file_becomes_a_folder_once(empty_cache: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = tmp_path / "tiny.gguf"
    weights = write_tiny_llama(file)
    reports: list[tuple[str, int, int | None]] = []

    folder = resolve_model(str(file), lambda *report: reports.append(report))

    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]  # for other programs
    stored = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.bfloat16"}
    embedding = stored["model.embed_tokens.weight"].float().numpy()
    np.testing.assert_allclose(embedding, weights["token_embd.weight"], rtol=2**-8)
    down = stored["model.layers.1.mlp.down_proj.weight"].float().numpy()
    np.testing.assert_allclose(down, weights["blk.1.ffn_down.weight"], rtol=2**-8)
    # llama's GGUF files interleave the halves of each head's query and key rows
    rows = weights["blk.0.attn_q.weight"].reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    query = stored["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    np.testing.assert_allclose(query, rows.swapaxes(1, 2).reshape(HIDDEN, HIDDEN), rtol=2**-8)
    assert read_facts(folder).eos_token_ids == (258,)
    assert read_facts(folder).context_tokens == 128
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.has_chat_template
    # digits are cut off first, so both blanks stay together before one
    assert tokenizer.encode("  1 a") == [257, *tokenizer.encode("1"), 256]
    assert not is_quantised(folder)
    assert reports[0][1:] == (0, 4)
    assert reports[-1][1:] == (4, 4)
    assert list_models()[-1].name == str(file)

    reports.clear()
    assert resolve_model(str(file), lambda *report: reports.append(report)) == folder
    assert reports == []
    os.utime(file, (1, 1))
    assert resolve_model(str(file)) != folder


@pytest.mark.slow
def test_a_quantised_gguf_file_keeps_its_integers(empty_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_llama(file, hidden=64, inner=96, kind=GGMLQuantizationType.Q8_0)
    folder = resolve_model(str(file))
    assert is_quantised(folder)
    (folder / GROUPS_FILE).write_bytes(b"broken")
    with pytest.raises(ModelUnavailable, match=r"damaged .* remove the folder"):
        is_quantised(folder)


def test_conversions_of_an_earlier_revision_are_repeated(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(run_conversion, "convert_gguf", lambda file, folder, progress: made.append(file))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"")
    with monkeypatch.context() as earlier:
        earlier.setattr(run_conversion, "REVISION", run_conversion.REVISION - 1)
        before = run_conversion.converted_gguf(file, silent)
    after = run_conversion.converted_gguf(file, silent)
    assert before != after == run_conversion.converted_gguf(file, silent)
    assert made == [file, file]
    assert bundled_folder(BUNDLED["smollm2"]).name.endswith(f"-r{run_conversion.REVISION}")


def test_a_file_that_is_no_gguf_is_explained(empty_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelUnsupported, match=r"could not convert the gguf of .*bad\.gguf"):
        resolve_model(str(tmp_path / "bad.gguf"))


@pytest.mark.slow
def test_a_gguf_file_that_lacks_weights_is_refused(empty_cache: Path, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "lacks.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelUnsupported, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        resolve_model(str(tmp_path / "lacks.gguf"))
    write_tiny_llama(tmp_path / "many.gguf", layers=10**9)
    with pytest.raises(
        ModelUnsupported, match=r"llama\.block_count is 1000000000, but the file has 20 tensors"
    ):
        resolve_model(str(tmp_path / "many.gguf"))


@pytest.mark.slow
def test_smollm2_generates_text_and_its_files_agree() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = bundled_model("smollm2")
    assert is_quantised(folder)
    facts = read_facts(folder)
    assert len(facts.layers) == 30
    assert (facts.layers[0].kv_heads, facts.layers[0].key_dim) == (3, 64)
    assert facts.context_tokens == 8192
    tokenizer, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.token_text(*tokenizer.eos_token_ids) == "<|im_end|>"
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    prompt = tokenizer.apply_chat_template(conversation)
    assert prompt == expected
    for text in ("naïve  café 2018,   x = 1;\n\n\tdef f(): 日本 🦈", "", "  <|im_start|> "):
        assert tokenizer.encode(text) == theirs(text).input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    output = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(output.tolist()) == "The capital of France is Paris."
    assert output[-1] == tokenizer.eos_token_ids[0]
