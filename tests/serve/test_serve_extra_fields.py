"""Echoed prompts, log-probabilities of prompts, token ids, biases and other fields of OpenAI and vLLM."""

import asyncio
from dataclasses import replace

import pytest
from pydantic import ValidationError
from serve_builders import BOS, EOS, FIRST_BYTE, FakeEngine, chat, completion, events, post

from shoal.serve.ollama.request_bodies import OllamaChatBody, Options
from shoal.serve.openai.request_bodies import ChatBody, CompletionBody
from shoal.serve.openai.token_and_embedding_bodies import EmbeddingBody
from shoal.serve.responses_api.request_body import ResponsesBody

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(path, body, engine=None, **options):
    response = asyncio.run(post(path, body, engine, **options))
    assert response.status_code == 200, response.text
    return response.json()


def ids(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


def test_echo_with_logprobs_as_lm_eval_asks_for_them():
    prompts = [[BOS, *ids("ab")], ids("xyz")]
    body = completion(prompt=prompts, max_tokens=1, logprobs=1, seed=1234, echo=True)
    first, second = ask(COMPLETIONS, body)["choices"]
    assert first["text"] == "aba"
    assert first["logprobs"] == {
        "tokens": ["", "a", "b", "a"],
        "token_logprobs": [None, -1.5, -1.5, -0.5],
        "top_logprobs": [None, {"b": -0.25, "a": -1.5}, {"c": -0.25, "b": -1.5}, {"a": -0.5}],
        "text_offset": [0, 0, 1, 2],
    }
    assert second["text"] == "xyzx"
    assert second["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -0.5]


def test_echo_without_output():
    engine = FakeEngine()
    response = ask(COMPLETIONS, completion(prompt="ab", max_tokens=0, logprobs=0, echo=True), engine)
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["", "a", "b"]
    assert choice["logprobs"]["top_logprobs"] is None
    assert response["usage"]["completion_tokens"] == 0
    assert engine.submitted[0].sampling.max_tokens == 1


def test_echo_shows_the_prompt_to_every_choice():
    body = completion(prompt=["ab", "c"], max_tokens=2, n=2, logprobs=1, echo=True, temperature=1)
    choices = ask(COMPLETIONS, body)["choices"]
    assert [choice["text"][:-2] for choice in choices] == ["ab", "ab", "c", "c"]
    assert [choice["logprobs"]["tokens"][:-2] for choice in choices] == [["", "a", "b"]] * 2 + [["", "c"]] * 2
    plain = ask(COMPLETIONS, completion(prompt="ab", max_tokens=2, echo=True))["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("abab", None)


def test_echo_in_a_stream_comes_first():
    for max_tokens, text in ((2, "abab"), (0, "ab")):
        body = completion(prompt="ab", max_tokens=max_tokens, echo=True, stream=True)
        response = asyncio.run(post(COMPLETIONS, body))
        chunks = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
        assert chunks[0]["text"] == "ab"
        assert "".join(chunk["text"] for chunk in chunks) == text
        assert chunks[-1]["finish_reason"] == "length"


def test_prompt_logprobs_have_vllms_shape():
    token = ids("a")[0]
    expected = [
        None,
        {
            str(token + 1): {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
            str(token): {"logprob": -1.5, "rank": 2, "decoded_token": "a"},
        },
    ]
    for choice in ask(COMPLETIONS, completion(prompt="a", prompt_logprobs=1, n=2))["choices"]:
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"] is None
    scores = ask(CHAT, chat(prompt_logprobs=0))["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1] == {str(ids("u")[0]): {"logprob": -1.5, "rank": 2, "decoded_token": "u"}}
    assert "prompt_logprobs" not in ask(CHAT, chat())


def test_token_ids_are_returned():
    body = {"max_tokens": 2, "return_token_ids": True}
    (choice,) = ask(COMPLETIONS, completion(prompt="abc", **body))["choices"]
    assert choice["prompt_token_ids"] == [BOS, *ids("abc")]
    assert choice["token_ids"] == ids("ab")
    response = ask(CHAT, chat(**body))
    assert response["prompt_token_ids"] == ids("<user>hi")
    assert response["choices"][0]["token_ids"] == ids("<u")


@pytest.mark.parametrize(("path", "make"), [(COMPLETIONS, completion), (CHAT, chat)])
def test_token_ids_are_streamed(path, make):
    full = ask(path, make(return_token_ids=True))
    chunks = events(asyncio.run(post(path, make(return_token_ids=True, stream=True))).text)[:-1]
    told = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert told == full["choices"][0]["token_ids"]
    assert told[-1] == EOS
    holders = [holder for chunk in chunks for holder in (chunk, chunk["choices"][0])]
    with_prompt = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    assert with_prompt == [(full | full["choices"][0])["prompt_token_ids"]]


def test_tokens_can_be_named_by_their_ids():
    named = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    (choice,) = ask(COMPLETIONS, completion(prompt="a", logprobs=1, **named))["choices"]
    name = f"token_id:{ids('a')[0]}"
    assert choice["logprobs"]["tokens"] == [name]
    assert choice["logprobs"]["top_logprobs"] == [{name: -0.5}]
    (entry,) = ask(CHAT, chat(logprobs=True, **named))["choices"][0]["logprobs"]["content"]
    assert entry["token"] == f"token_id:{ids('<')[0]}"


def test_special_tokens_and_stop_strings_can_be_included():
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert ask(COMPLETIONS, completion(prompt="ab"))["choices"][0]["text"] == "ab"
    assert ask(COMPLETIONS, completion(prompt="ab", **shown))["choices"][0]["text"] == f"ab<{EOS}>"
    assert ask(COMPLETIONS, completion(prompt="ab", skip_special_tokens=False))["choices"][0]["text"] == "ab"
    stopped = ask(COMPLETIONS, completion(prompt="abcd", stop="c", **shown))["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == ("abc", "c")
    stopped = ask(COMPLETIONS, completion(prompt="abcd", stop_token_ids=ids("c"), **shown))["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == ("abc", ids("c")[0])


def test_a_prompt_is_truncated_to_its_last_tokens():
    engine = FakeEngine(context=20)
    ask(COMPLETIONS, completion(prompt="abcdef", truncate_prompt_tokens=2), engine)
    ask(COMPLETIONS, completion(prompt="a" * 500, truncate_prompt_tokens=-1, max_tokens=5), engine)
    ask(COMPLETIONS, completion(prompt=ids("b" * 500), truncate_prompt_tokens=3), engine)
    ask(CHAT, chat(truncate_prompt_tokens=100), engine)
    assert [request.prompt for request in engine.submitted] == [
        ids("ef"),
        ids("a" * 15),
        ids("bbb"),
        ids("<user>hi"),
    ]
    echoed = ask(COMPLETIONS, completion(prompt="abcdef", truncate_prompt_tokens=2, max_tokens=0, echo=True))
    assert echoed["choices"][0]["text"] == "ef"


def test_biases_reach_the_engine():
    engine = FakeEngine()
    limits = {"logit_bias": {"5": -100, "7": 0.5}, "allowed_token_ids": [5, 9], "bad_words": ["a", " b"]}
    ask(CHAT, chat(**limits), engine)
    sampling = engine.submitted[0].sampling
    assert sampling.logit_bias == ((5, -100.0), (7, 0.5))
    assert sampling.allowed_token_ids == (5, 9)
    expected = [ids("a"), ids(" a"), ids(" b")]
    assert sampling.banned_sequences == tuple(tuple(tokens) for tokens in expected)


def test_salt_reaches_the_engine():
    engine = FakeEngine()
    ask(COMPLETIONS, completion(cache_salt="s", n=2), engine)
    ask(COMPLETIONS, completion(), engine)
    assert [request.cache_salt for request in engine.submitted] == ["s", "s", None]


def test_priority_reaches_an_engine_with_priority_order():
    engine = FakeEngine(takes_priorities=True)
    ask(COMPLETIONS, completion(priority=-2), engine)
    ask(CHAT, chat(), engine)
    assert [request.priority for request in engine.submitted] == [-2, 0]
    refused = asyncio.run(post(COMPLETIONS, completion(priority=1)))
    assert "scheduler.order is priority" in refused.json()["error"]["message"]


def submitted(path, body):
    engine = FakeEngine()
    ask(path, body, engine)
    drawn = {} if "seed" in body else {"seed": 0}
    return [(each.prompt, replace(each.sampling, **drawn), each.priority) for each in engine.submitted]


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        (COMPLETIONS, completion(prompt=[BOS, 70], max_tokens=3, n=2, seed=7, top_k=5, temperature=1)),
        (COMPLETIONS, completion(prompt=[[BOS, 70], [71]], logprobs=1, prompt_logprobs=0, min_tokens=1)),
        (COMPLETIONS, completion(stop_token_ids=[80], allowed_token_ids=[70, 80], n_probs=0, priority=0)),
        (COMPLETIONS, completion(prompt="abcdef", truncate_prompt_tokens=3)),
        (CHAT, chat(max_completion_tokens=3, logprobs=True, top_logprobs=2, best_of=1)),
        (CHAT, chat(max_new_tokens=3, repeat_penalty=2)),
        ("/v1/responses", {"model": "chat", "input": "hi", "max_output_tokens": 4, "top_k": 5, "seed": 7}),
        ("/v1/embeddings", {"model": "chat", "input": [BOS, 70], "truncate_prompt_tokens": -1}),
    ],
)
def test_integers_may_be_whole_floats(path, whole):
    def pointed(value):
        if isinstance(value, list):
            return [pointed(entry) for entry in value]
        return float(value) if type(value) is int else value

    body = {name: pointed(value) for name, value in whole.items()}
    assert body == whole
    assert str(body) != str(whole)
    assert submitted(path, body) == submitted(path, whole)
    for _, sampling, priority in submitted(path, body):
        assert {type(sampling.max_tokens), type(sampling.seed), type(priority)} <= {int, type(None)}


def test_token_ids_may_be_whole_floats():
    body = {"model": "chat", "tokens": [FIRST_BYTE + 97.0]}
    assert ask("/detokenize", body)["prompt"] == "a"


@pytest.mark.parametrize(
    "kind",
    [ChatBody, CompletionBody, ResponsesBody, EmbeddingBody, OllamaChatBody, Options],
    ids=lambda k: k.__name__,
)
def test_every_integer_of_the_schema_may_be_a_whole_float(kind):
    needed = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    needed = {name: value for name, value in needed.items() if name in required}
    found = 0
    for name, described in kind.model_json_schema()["properties"].items():
        branches = described.get("anyOf", [described])
        if "number" in [branch.get("type") for branch in branches]:
            continue
        for value in [one.get("minimum", 1) for one in branches if one.get("type") == "integer"]:
            read = [getattr(kind(**needed | {name: sent}), name) for sent in (value, float(value))]
            assert [(type(one), one) for one in read] == [(type(read[0]), read[0])] * 2, name
            found += 1
            with pytest.raises(ValidationError, match="integer"):
                kind(**needed | {name: 0.5})
    assert found
