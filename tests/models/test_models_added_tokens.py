"""Tokens that are not in tokenizer.json but in other files, and end tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from models_builders import byte_level_backend, make_folder, pieces_backend

from shoal.core import ModelUnavailable
from shoal.models import Tokenizer, read_facts
from shoal.models.conversion.run_conversion import tokenizer_folder
from shoal.models.progress import silent
from shoal.models.tokenizer import added_tokens

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 8,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "eos_token_id": 261,
}


def token(text: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": text, **usual, **flags}


# As those of fine-tuned models, by where they name what tokenizer.json does not have.
FOLDERS: dict[str, dict[str, Any]] = {
    "decoder": {
        "tokenizer_config": {
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                "259": token("<|im_start|>"),
                "264": token("<|end|>"),
                "263": token("<|think|>", special=False, rstrip=True),
                "265": token("word", special=False, single_word=True),
                "266": token("Ünion", special=False, normalized=True, lstrip=True),
            },
        }
    },
    "other-description": {
        "tokenizer_config": {"added_tokens_decoder": {"262": token("🦈", special=True, rstrip=True)}}
    },
    "roles": {
        "tokenizer_config": {
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", **token("<|eot|>", special=False)},
            "pad_token": "<pad>",
            "sep_token": "<sep>",
            "image_token": "<image>",
            "additional_special_tokens": ["<|a|>", {"__type": "AddedToken", **token("<|b|>")}, "<|im_end|>"],
            "added_tokens_decoder": {},
        }
    },
    "stale-map": {
        "tokenizer_config": {
            "pad_token": "<pad>",
            "added_tokens_decoder": {"263": token("<pad>"), "264": token("<|end|>")},
        },
        "special_tokens_map": {
            "sep_token": "<sep>",
            "pad_token": "<|a|>",
            "additional_special_tokens": ["<|b|>"],
        },
        "added_tokens": {"<|x|>": 265},
    },
    "in-the-vocabulary": {"tokenizer_config": {"eos_token": "Ġthe", "pad_token": "🦈"}},
    "extra-list": {"tokenizer_config": {"extra_special_tokens": ["<|x|>", "<|y|>"], "pad_token": "<pad>"}},
    "extra-names": {"tokenizer_config": {"extra_special_tokens": {"boi_token": "<boi>", "eoi": "<eoi>"}}},
    "older-files": {
        "tokenizer_config": {"eos_token": "<old>"},
        "special_tokens_map": {
            "eos_token": token("<|new|>"),
            "extra_special_tokens": ["<|tool|>"],
            "pad_token": "🦈",
        },
        "added_tokens": {"<|tool|>": 265, "<plain>": 264, "<|new|>": 263},
    },
}
TEXTS = (
    "<|im_start|>user\nthe <|think|>  x<|end|><|eot|><s>",
    "word wordy 🦈  <pad><sep><image><|a|><|b|><|im_end|> Ünion the",
    "<|x|><|y|> <boi><eoi><old><|new|><plain><|tool|>",
)


@pytest.mark.slow
@pytest.mark.parametrize("make", [byte_level_backend, pieces_backend])
@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(empty_cache: Path, tmp_path: Path, name: str, make: Any) -> None:
    from transformers import AutoTokenizer

    files = json.loads(json.dumps(FOLDERS[name]))
    files["tokenizer_config"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    folder = make_folder(tmp_path / "model", make(), config=CONFIG, **files)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    for text, id in theirs.get_added_vocab().items():
        assert (ours.special_token(text) == id) == theirs.added_tokens_decoder[id].special


def test_tokens_of_the_configuration_are_one_token_each(empty_cache: Path, tmp_path: Path) -> None:
    files = {"added_tokens_decoder": {"263": token("<|user|>"), "264": token("<|end|>")}}
    folder = make_folder(tmp_path / "model", byte_level_backend(), tokenizer_config=files)
    before = (folder / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|user|>hi<|end|>") == [263, *tokenizer.encode("hi"), 264]
    assert tokenizer.decode([263, *tokenizer.encode("hi"), 264]) == "hi"
    # The file that grammars read has them, too, and the model's own file is left alone.
    assert "<|user|>" in (tokenizer_folder(folder, silent) / "tokenizer.json").read_text()
    assert (folder / "tokenizer.json").read_bytes() == before
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_folder(folder, silent) == folder


def test_tokens_are_added_in_another_process(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading a large tokenizer.json stops all other threads of a process for seconds.
    def read_here(file: Path) -> None:
        raise AssertionError(f"{file} is read in this process")

    monkeypatch.setattr("shoal.models.tokenizer.added_tokens.read_backend", read_here)
    own = {"eos_token": "<|end|>"}
    folder = make_folder(tmp_path / "model", byte_level_backend(), tokenizer_config=own)
    assert "<|end|>" in (tokenizer_folder(folder, silent) / "tokenizer.json").read_text()


def test_a_broken_tokenizer_that_lacks_tokens_is_named(empty_cache: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", None, tokenizer_config={"eos_token": "<|end|>"})
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailable, match=r"model/tokenizer\.json cannot be read"):
        tokenizer_folder(folder, silent)


def test_a_complete_tokenizer_is_used_in_place(empty_cache: Path, tmp_path: Path) -> None:
    backend = byte_level_backend()
    known = {str(id): token(added.content) for id, added in backend.get_added_tokens_decoder().items()}
    known["262"]["special"] = False
    files = {"added_tokens_decoder": known, "eos_token": "<|im_end|>", "add_bos_token": True}
    folder = make_folder(tmp_path / "model", backend, tokenizer_config=files)
    assert tokenizer_folder(folder, silent) == folder
    assert not empty_cache.exists()


def test_a_long_list_of_tokens_is_parsed_once(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([f"<unused{number}>" for number in range(1000)] + ["<|end|>"])
    folder = make_folder(tmp_path / "long", backend, config=CONFIG | {"vocab_size": 2000})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    parsed: list[Path] = []
    parse = added_tokens._listed
    monkeypatch.setattr(added_tokens, "_listed", lambda file: parsed.append(file) or parse(file))
    for _ in range(2):
        assert tokenizer_folder(folder, silent) == folder
        assert read_facts(folder).eos_token_ids == (261, backend.token_to_id("<|end|>"))
    assert parsed == [folder / "tokenizer.json"]
    assert (folder / "tokenizer.json").stat().st_size > added_tokens._LIST_BYTES


def test_the_template_of_a_completed_tokenizer_is_found(empty_cache: Path, tmp_path: Path) -> None:
    config = {"chat_template": "old", "added_tokens_decoder": {"263": token("<|user|>")}}
    folder = make_folder(tmp_path / "model", byte_level_backend(), tokenizer_config=config)
    (folder / "chat_template.jinja").write_text("<|user|>")
    assert Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": ""}]) == [263]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", {"added_tokens_decoder": ["<|user|>"]}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<|user|>"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"7": {"text": "<|user|>"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"7": 7}}),
        ("tokenizer_config", {"added_tokens_decoder": {"7": {"content": 7}}}),
        ("added_tokens", {"<|user|>": "7"}),
    ],
)
def test_broken_lists_of_tokens_are_named(tmp_path: Path, name: str, content: object) -> None:
    folder = make_folder(tmp_path, byte_level_backend(), **{name: content})
    with pytest.raises(ModelUnavailable, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("own", "special_map", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, {}, (261, 260)),  # that of the base model, and that of the chat format
        ({"eos_token": "<s>"}, {}, (261,)),
        ({"eos_token": token("<|im_end|>")}, {}, (261, 260)),
        ({}, {"eos_token": "<|im_end|>"}, (261, 260)),
        ({"eos_token": "<|new|>"}, {}, (261, 263)),
        ({"eos_token": None}, {}, (261,)),
        ({"eos_token": "Ġthe"}, {}, (261, 258)),
    ],
)
def test_the_tokenizers_end_token_ends_outputs(
    empty_cache: Path, tmp_path: Path, own: object, special_map: object, expected: tuple[int, ...]
) -> None:
    folder = make_folder(
        tmp_path / "model",
        byte_level_backend(),
        config=CONFIG,
        tokenizer_config=own,
        special_tokens_map=special_map,
    )
    assert Tokenizer.from_folder(folder).eos_token_ids == expected
    assert read_facts(folder).eos_token_ids == expected


def test_a_token_outside_the_embedding_is_no_end_token(empty_cache: Path, tmp_path: Path) -> None:
    config = CONFIG | {"vocab_size": 263}
    own = {"eos_token": "<|new|>"}
    folder = make_folder(tmp_path / "model", byte_level_backend(), config=config, tokenizer_config=own)
    assert read_facts(folder).eos_token_ids == (261,)
    assert Tokenizer.from_folder(folder).encode("<|new|>") == [263]


def test_facts_need_no_tokenizer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, None, config=CONFIG, tokenizer_config={"eos_token": "</s>"})
    assert read_facts(folder).eos_token_ids == (261,)
