import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from models_builders import CHATML, byte_level_backend, make_folder, pieces_backend
from tokenizers import models, normalizers

from shoal.core import ConfigError, InvalidRequest, ModelUnavailable
from shoal.models import Tokenizer
from shoal.models.chat_template.template import ChatTemplate

BYTE_LEVEL = byte_level_backend()
PIECES = pieces_backend()
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}


def byte_level(folder: Path, template: str | None = CHATML) -> Tokenizer:
    own = {**SPECIAL, "chat_template": template} if template else SPECIAL
    return Tokenizer.from_folder(make_folder(folder, BYTE_LEVEL, tokenizer_config=own))


def joined(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokens)


@given(st.text())
def test_byte_level_token_bytes_join_to_the_text(text: str) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL, special_tokens={}, eos_token_ids=())
    tokens = tokenizer.encode(text)
    assert joined(tokenizer, tokens) == text.encode()
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


@given(st.text().filter(lambda text: "▁" not in text))
def test_pieces_token_bytes_join_to_the_text(text: str) -> None:
    tokenizer = Tokenizer(PIECES, special_tokens={}, eos_token_ids=())
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert joined(tokenizer, tokens) == text.encode()


def test_special_and_added_tokens_are_their_own_text(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    text = "<|im_start|> the 🦈<|im_end|>"
    tokens = tokenizer.encode(text)
    assert len(tokens) == 5
    assert [tokenizer.token_text(token) for token in tokens] == [
        "<|im_start|>",
        " the",
        " ",
        "🦈",
        "<|im_end|>",
    ]
    assert tokenizer.decode(tokens) == " the 🦈"


def test_an_incomplete_character_decodes_as_a_replacement(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    first, second = tokenizer.encode("é")
    assert tokenizer.token_bytes(first) == b"\xc3"
    assert tokenizer.token_text(second) == "\ufffd"


@pytest.mark.parametrize("text", ["ab\udcff", "\ud800", "\ude00\ud83d"])
def test_a_text_that_has_no_utf8_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"not UTF-8 text: character \d is the lone surrogate"):
        byte_level(tmp_path).encode(text)


def test_ids_outside_the_vocabulary_are_empty(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.vocab_size == 256 + 3 + 4
    for token in (tokenizer.vocab_size, 10**12, -1):
        assert tokenizer.token_bytes(token) == b""


def test_bos_is_written_once(tmp_path: Path) -> None:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "own", PIECES, tokenizer_config=config))
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.bos_token_id == 1

    # A fine-tuned model's configuration may name another than its tokenizer writes.
    other = Tokenizer.from_folder(
        make_folder(tmp_path / "other", PIECES, tokenizer_config=config | {"bos_token": "<unk>"})
    )
    assert other.encode("a") == tokenizer.encode("a")

    config = {**SPECIAL, "add_bos_token": True}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "config", BYTE_LEVEL, tokenizer_config=config))
    assert tokenizer.encode("a") == [tokenizer.bos_token_id, *tokenizer.encode("a", add_special_tokens=False)]


def test_a_template_that_writes_bos_does_not_double_it(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, PIECES, tokenizer_config=config))
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert tokens.count(1) == 1
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<bos>a"


def test_saved_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, backend))
    assert len(tokenizer.encode("x")) == 1
    assert len(tokenizer.encode("xxxxxxxxx")) == 9


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, (7, 9, 260)),  # and <|im_end|> of tokenizer_config
        ({"eos_token_id": 7}, {}, (7, 260)),
        ({}, {"eos_token_id": 3}, (3, 260)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [4]}}, (4, 260)),
        ({"eos_token_id": [260, 7]}, {}, (260, 7)),
        ({}, {}, (260,)),
    ],
)
def test_eos_comes_from_the_first_file_that_names_it_and_from_the_tokenizer(
    tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    folder = make_folder(
        tmp_path, BYTE_LEVEL, generation_config=generation, config=config, tokenizer_config=SPECIAL
    )
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


def test_the_chat_template_renders_the_conversation(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    tokens = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "be <kind>"},
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        ]
    )
    assert tokenizer.decode(tokens, skip_special_tokens=False) == (
        "<|im_start|>system\nbe <kind><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def templates_of(folder: Path, given: str | None = None) -> tuple[str, str]:
    """What is written without tools, and with them."""
    template = Tokenizer.from_folder(folder, given).chat_template
    messages = [{"role": "user", "content": "x"}]
    without, having = (template.chosen(with_tools).render(messages) for with_tools in (False, True))
    return without, having


def test_templates_of_a_folder_are_found(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "yes"}]
    folder = make_folder(tmp_path, BYTE_LEVEL, chat_template={"chat_template": "processor"})
    assert templates_of(folder) == ("processor", "processor")
    make_folder(folder, None, tokenizer_config={"chat_template": several})
    assert templates_of(folder) == ("yes", "tools")
    (folder / "chat_template.jinja").write_text("file")
    assert templates_of(folder) == ("file", "tools")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools file")
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag file")
    assert templates_of(folder) == ("file", "tools file")
    assert templates_of(folder, "given") == ("given", "given")


def test_a_template_for_tools_alone_is_for_everything(tmp_path: Path) -> None:
    own = {"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}]}
    assert templates_of(make_folder(tmp_path, BYTE_LEVEL, tokenizer_config=own)) == ("tools", "tools")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{% for m in messages %}{% break %}no{% endfor %}yes", "yes"),
        ("{{ messages[0].content | tojson }}", '"<ü>"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}no{% endif %}{{ eos_token }}", "<|im_end|>"),
    ],
)
def test_templates_may_use_hugging_face_helpers(tmp_path: Path, template: str, expected: str) -> None:
    tokenizer = byte_level(tmp_path, template)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "<ü>"}])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected


def test_keys_without_a_value_do_not_reach_a_template() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": None}, "x": None}}
    messages = [
        {"role": "user", "content": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "assistant", "content": "x", "tool_calls": [], "audio": None},
    ]
    function = {"name": "f", "arguments": {"a": None}}
    assert json.loads(ChatTemplate("{{ messages | tojson }}", {}).render(messages)) == [
        {"role": "user", "content": ""},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "assistant", "content": "x"},
    ]


def test_odd_templates_of_a_folder_are_no_tracebacks(tmp_path: Path) -> None:
    odd = ["odd", {"name": ["default"]}, {"name": "default", "template": 7}]
    folder = make_folder(tmp_path, BYTE_LEVEL, tokenizer_config={"chat_template": odd})
    assert not Tokenizer.from_folder(folder).has_chat_template
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelUnavailable, match=r"chat_template\.jinja is no text in UTF-8"):
        Tokenizer.from_folder(folder)


def test_a_missing_template_is_refused_with_param_chat_template(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="chat_template") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"content": "no role"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)
def test_malformed_messages_are_refused(tmp_path: Path, messages: list[dict[str, object]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        byte_level(tmp_path).apply_chat_template(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "cannot lay out"),
        ("{{ 'x' + 5 }}", "cannot lay out"),
        ("{{ 1 // 0 }}", "cannot lay out"),
        ("{{ messages.append(1) }}", "cannot lay out"),
        ("{{ ''.__class__.__mro__ }}", "cannot lay out"),
        ("{% for %}", "line 1"),
    ],
)
def test_failing_templates_are_refusals(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        byte_level(tmp_path, template).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_template_from_the_configuration_is_checked_at_start(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, BYTE_LEVEL)
    with pytest.raises(ConfigError, match="line 2"):
        Tokenizer.from_folder(folder, chat_template="fine\n{% if %}")


def test_models_with_the_same_tokenizer_share_it(tmp_path: Path) -> None:
    folders = [
        make_folder(tmp_path / name, BYTE_LEVEL, config={"eos_token_id": i}) for i, name in enumerate("ab")
    ]
    other = make_folder(tmp_path / "other", PIECES)
    loaded: dict[str, tokenizers.Tokenizer] = {}
    first, second, third = (Tokenizer.from_folder(folder, None, loaded) for folder in (*folders, other))
    assert len(loaded) == 2
    assert (first.eos_token_ids, second.eos_token_ids) == ((0,), (1,))
    assert first.encode("a") == second.encode("a") != third.encode("a")


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_that_fails_with_every_text_is_refused_at_the_start(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        Tokenizer.from_folder(make_folder(tmp_path, backend))


@pytest.mark.parametrize("steps", [[("Replace", "ab" * 9)] * 3, [("Prepend", "x" * 1000)]])
def test_a_normalizer_that_makes_short_texts_enormous_is_refused(tmp_path: Path, steps: list[Any]) -> None:
    kinds = {"Replace": lambda text: normalizers.Replace("a", text), "Prepend": normalizers.Prepend}
    backend = byte_level_backend()
    backend.normalizer = normalizers.Sequence([kinds[kind](text) for kind, text in steps])
    with pytest.raises(ModelUnavailable, match="enormous"):
        Tokenizer.from_folder(make_folder(tmp_path, backend))
