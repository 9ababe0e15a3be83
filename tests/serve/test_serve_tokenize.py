"""/tokenize and /detokenize."""

import asyncio

import pytest
from serve_builders import BOS, EOS, FIRST_BYTE, ByteTokenizer, FakeEngine, post, tool
from tool_templates import HERMES


def ask(path, body, status=200):
    response = asyncio.run(post(path, body))
    assert response.status_code == status, response.text
    return response.json()


def ids(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


def test_a_text():
    told = {"count": 3, "max_model_len": 200, "tokens": [BOS, *ids("ab")], "token_strs": None}
    assert ask("/tokenize", {"model": "base", "prompt": "ab"}) == told
    bare = ask(
        "/tokenize", {"model": "base", "prompt": "aé", "add_special_tokens": False, "return_token_strs": True}
    )
    assert bare["tokens"] == ids("aé")
    assert bare["token_strs"] == ["a", "\ufffd", "\ufffd"]
    assert ask("/tokenize", {"model": "base", "prompt": "", "add_special_tokens": False})["count"] == 0
    assert ask("/tokenize", {"model": "base", "prompt": "x" * 5000})["count"] == 5001


def test_a_chat_is_rendered():
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    assert ask("/tokenize", body)["tokens"] == ids("<user>hi")
    assert ask("/tokenize", body | {"add_special_tokens": True})["tokens"] == [BOS, *ids("<user>hi")]


@pytest.mark.parametrize("template", [HERMES, ByteTokenizer.template], ids=["tools", "plain"])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool("now")]},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_chat_has_the_tokens_of_the_same_chat_completion(fields, template):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    sent = {"model": "chat", "messages": messages} | fields
    engine = FakeEngine(context=4000)
    asyncio.run(post("/v1/chat/completions", sent | {"max_tokens": 1}, engine, template=template))
    response = asyncio.run(post("/tokenize", sent, template=template))
    assert response.json()["tokens"] == list(engine.submitted[0].prompt)


def test_back_to_text_with_special_tokens():
    body = {"model": "base", "tokens": [*ids("aé"), EOS]}
    assert ask("/detokenize", body) == {"prompt": f"aé<{EOS}>"}
    assert ask("/detokenize", body | {"tokens": []}) == {"prompt": ""}


def test_a_prompt_must_be_a_string():
    for prompt in (["a", "b"], [1, 2]):
        message = ask("/tokenize", {"model": "base", "prompt": prompt}, 400)["error"]["message"]
        assert message == "prompt: input should be a valid string"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"text": "a"}, "prompt"),
        ("/tokenize", {"prompts": "a"}, "prompts"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "hi"}], "continue_final_message": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_fields_are_named(path, fields, param):
    assert ask(path, {"model": "base"} | fields, 400)["error"]["param"] == param


def test_a_chat_without_a_template_and_an_unknown_model():
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    assert "chat_template" in ask("/tokenize", body, 400)["error"]["message"]
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert ask(path, {"model": "x"} | body, 404)["error"]["code"] == "model_not_found"
