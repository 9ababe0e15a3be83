"""Responses of /v1/completions and /v1/chat/completions, without a network."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from serve_builders import (
    FIRST_BYTE,
    SERVICES,
    ByteTokenizer,
    FakeEngine,
    InlineWorkers,
    chat,
    completion,
    events,
    make_app,
    make_client,
    make_tokenizers,
    post,
)

from shoal.core import SLO, SamplingDefaults, TokenLogprobs
from shoal.serve import create_app
from shoal.serve.openai.logprobs import LogprobFormatter


def ask(path, body, engine=None, **options):
    return asyncio.run(post(path, body, engine, **options))


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_completion_has_openais_shape():
    response = ask(COMPLETIONS, completion(prompt="abc", max_tokens=2)).json()
    assert response.pop("id").startswith("cmpl-")
    assert isinstance(response.pop("created"), int)
    assert response == {
        "object": "text_completion",
        "model": "base",
        "choices": [
            {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_chat_has_openais_shape():
    response = ask(CHAT, chat()).json()
    assert response["id"].startswith("chatcmpl-")
    assert response["object"] == "chat.completion"
    assert response["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<user>hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_completion_has_16_tokens_by_default():
    response = ask(COMPLETIONS, completion(prompt="x" * 50)).json()
    assert response["usage"]["completion_tokens"] == 16


def test_default_length_shrinks_at_the_end_of_the_context():
    response = ask(COMPLETIONS, completion(prompt="x" * 189)).json()  # 190 tokens with the first
    assert response["usage"]["completion_tokens"] == 10


def test_default_length_grows_with_min_tokens():
    engine = FakeEngine()
    assert ask(COMPLETIONS, completion(min_tokens=30), engine).status_code == 200
    assert engine.submitted[0].sampling.max_tokens == 30


def test_chat_fills_the_context_by_default():
    engine = FakeEngine()
    assert ask(CHAT, chat(ignore_eos=True), engine).json()["usage"]["total_tokens"] == engine.context
    assert engine.submitted[0].sampling.max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([99, 100], ["ab"]),
        ([[99, 100], [101]], ["ab", "c"]),
    ],
)
def test_prompts_in_every_form(prompt, expected):
    choices = ask(COMPLETIONS, completion(prompt=prompt)).json()["choices"]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(len(expected)))


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt():
    choices = ask(COMPLETIONS, completion(prompt=["ab", "cd"], n=2)).json()["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]


def test_usage_counts_each_prompt_once():
    usage = ask(COMPLETIONS, completion(prompt=["abc", "de"], n=3, max_tokens=1)).json()["usage"]
    assert usage["prompt_tokens"] == 4 + 3
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


def test_special_tokens_can_be_omitted():
    engine = FakeEngine()
    ask(COMPLETIONS, completion(prompt="a", add_special_tokens=False), engine)
    assert list(engine.submitted[0].prompt) == [99]


def test_every_sampling_parameter_reaches_the_engine():
    engine = FakeEngine()
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2,
        "ignore_eos": True,
        "seed": 5,
        "logprobs": 3,
        "stop_token_ids": [4],
    }
    assert ask(COMPLETIONS, completion(**fields, stop=["!!"]), engine).status_code == 200
    sampling = engine.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields | {"stop_token_ids": (4,)}


def test_null_is_a_missing_field():
    fields = ("max_tokens", "temperature", "n", "stream", "stop", "seed", "logprobs", "logit_bias", "top_k")
    response = ask(COMPLETIONS, completion(**dict.fromkeys(fields)))
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 16


def test_stop_string_ends_the_output_and_is_reported():
    choice = ask(COMPLETIONS, completion(stop="o w")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", "o w")


def test_stop_token_ends_the_output_and_is_reported():
    choice = ask(COMPLETIONS, completion(prompt="abc", stop_token_ids=[100])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 100)


def test_max_completion_tokens_is_max_tokens():
    for fields in (
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ):
        assert ask(CHAT, chat(**fields)).json()["usage"]["completion_tokens"] == 3


def test_seed_repeats_and_choices_differ():
    body = chat(temperature=1, seed=7, n=3, max_tokens=12)
    first, second = ([c["message"]["content"] for c in ask(CHAT, body).json()["choices"]] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_messages_reach_the_template():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
            "provider_specific_fields": {"a": 1},
        },
        {"role": "user", "content": "", "name": "joe"},
    ]
    content = ask(CHAT, chat(messages=messages)).json()["choices"][0]["message"]["content"]
    assert content == "<system>be brief<user>a\nb<assistant>c<user>"


def test_fields_that_change_nothing_are_ignored():
    ignored = {
        "user": "me",
        "metadata": {"a": [1, None]},
        "store": True,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "logit_bias": {},
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    assert ask(CHAT, chat(**ignored)).status_code == 200


# vLLM's defaults, and fields without effect.
NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 0.5,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "echo": False,
    "priority": 0,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "bad_words": [],
    "logits_processors": [],
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "guided_json": None,
    "cache_salt": None,
    "vllm_xargs": {},
    "include_reasoning": True,
    "best_of": 1,
    "response_format": {"type": "text"},
}
NEUTRAL_IN_CHATS = NEUTRAL | {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "documents": [],
}


def test_inert_fields_of_vllm_are_accepted():
    for path, body, neutral in (
        (COMPLETIONS, completion(), NEUTRAL),
        (CHAT, chat(), NEUTRAL_IN_CHATS),
    ):
        plain, response = ask(path, body).json(), ask(path, body | neutral).json()
        assert response["choices"] == plain["choices"]


def test_returned_message_fields_may_be_sent_back():
    said = {"role": "assistant", "content": "Hi", "reasoning_content": None, "reasoning": "", "refusal": None}
    assert ask(CHAT, chat(messages=[said, {"role": "user", "content": "And?"}])).status_code == 200


def test_completion_logprobs():
    logprobs = ask(COMPLETIONS, completion(prompt="aé", logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", ""]  # the last ends the text
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -2.0}
    assert logprobs["text_offset"][0] == 0
    entry = TokenLogprobs(FIRST_BYTE + ord("z"), -3.0, ((FIRST_BYTE + ord("a"), -0.1),))
    unlikely = LogprobFormatter(ByteTokenizer(), num_top=1).completion(0, [entry])
    assert unlikely.top_logprobs == [{"a": -0.1, "z": -3.0}]
    assert ask(COMPLETIONS, completion(logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"] is None


def test_chat_logprobs():
    content = ask(CHAT, chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "<",
        "logprob": -0.5,
        "bytes": [60],
        "top_logprobs": [
            {"token": "<", "logprob": -0.5, "bytes": [60]},
            {"token": "b", "logprob": -2.0, "bytes": [98]},
        ],
    }
    plain = ask(CHAT, chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert plain[0]["top_logprobs"] == []


def test_chat_stream_is_role_text_reason_done():
    response = ask(CHAT, chat(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": letter} for letter in "<user>hi"]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


def test_completion_stream_with_usage():
    body = completion(prompt="abc", stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(ask(COMPLETIONS, body).text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 4 + 4


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, completion(prompt=["ab", "abcd"], n=2)), (CHAT, chat(n=2))]
)
def test_stream_with_continuous_usage(path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(ask(path, body | {"stream": True, "stream_options": options}).text)
    counts = {}
    for chunk in chunks:
        counts.setdefault(chunk["choices"][0]["index"], []).append(chunk["usage"])
    for usages in counts.values():
        completed = [usage["completion_tokens"] for usage in usages]
        assert completed == sorted(completed)
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
    sent = {index: usages[-1] for index, usages in counts.items()}
    assert sum(usage["completion_tokens"] for usage in sent.values()) == last["usage"]["completion_tokens"]
    prompts = {index // 2: usage["prompt_tokens"] for index, usage in sent.items()}
    assert sum(prompts.values()) == last["usage"]["prompt_tokens"]
    # Alone it has no effect, as in vLLM.
    options = {"continuous_usage_stats": True}
    assert '"usage"' not in ask(path, body | {"stream": True, "stream_options": options}).text


def test_streamed_pieces_add_up_to_the_full_response():
    body = completion(prompt=["héllo", "日本"], n=2, stop="lo", logprobs=1)
    whole = ask(COMPLETIONS, body).json()["choices"]
    texts, tokens, offsets = {}, {}, {}
    for chunk in events(ask(COMPLETIONS, body | {"stream": True}).text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["logprobs"]:
                tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
                offsets.setdefault(choice["index"], []).extend(choice["logprobs"]["text_offset"])
    assert texts == {choice["index"]: choice["text"] for choice in whole}
    assert tokens == {choice["index"]: choice["logprobs"]["tokens"] for choice in whole}
    assert offsets == {choice["index"]: choice["logprobs"]["text_offset"] for choice in whole}


def test_models_are_listed_and_found():
    async def main():
        async with make_client(make_app()) as client:
            listed = (await client.get("/v1/models")).json()
            assert [model["id"] for model in listed["data"]] == ["chat", "base"]
            assert (await client.get("/v1/models/base")).json() == listed["data"][1]
            assert listed["data"][0]["max_model_len"] == 200
            version = (await client.get("/version")).json()["version"]
            assert version.count(".") == 2

    asyncio.run(main())


def test_missing_fields_get_the_services_defaults():
    sampling = SamplingDefaults(temperature=0.5, top_k=40)
    services = [replace(service, sampling=sampling) for service in SERVICES]
    engine = FakeEngine()
    app = create_app(engine, make_tokenizers(), services, workers=InlineWorkers())

    async def main():
        async with make_client(app) as client:
            shown = (await client.get("/v1/models")).json()["data"][0]["sampling_defaults"]
            assert shown == {
                "temperature": 0.5,
                "top_p": 1.0,
                "top_k": 40,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
                for own in ({"temperature": None}, {"temperature": 0, "top_k": 3}):
                    assert (await client.post(path, json=body | own)).status_code == 200

    asyncio.run(main())
    taken = [(request.sampling.temperature, request.sampling.top_k) for request in engine.submitted]
    assert taken == [(0.5, 40), (0, 3)] * 2


def test_importing_the_server_loads_no_torch():
    code = "import sys, json, shoal.serve; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, chat(), SLO()),
        (CHAT, chat(slo=None), SLO()),
        (CHAT, chat(slo={"e2e_scale": 2, "ttft": None}), SLO(e2e_scale=2)),
        (
            COMPLETIONS,
            completion(prompt=["a", "b"], slo={"ttft": 1, "tpot": 0.05, "mtpot": 0.5, "e2e": 2.5}),
            SLO(ttft_s=1, tpot_s=0.05, mtpot_s=0.5, e2e_s=2.5),
        ),
    ],
)
def test_goals_reach_the_engine(path, body, expected):
    engine = FakeEngine()
    assert ask(path, body, engine).status_code == 200
    assert {request.slo for request in engine.submitted} == {expected}


def test_goals_are_in_the_document():
    schemas = make_app().openapi()["components"]["schemas"]
    assert set(schemas["Goals"]["properties"]) == {"ttft", "tpot", "mtpot", "e2e", "e2e_scale"}
    assert schemas["Goals"]["additionalProperties"] is False
    for body in ("ChatBody", "CompletionBody"):
        assert {"$ref": "#/components/schemas/Goals"} in schemas[body]["properties"]["slo"]["anyOf"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion()), (CHAT, chat())])
def test_arrival_is_before_the_body(path, body):
    engine, begun_ns = FakeEngine(), []

    async def slowly():
        begun_ns.append(time.monotonic_ns())
        yield json.dumps(body).encode()

    async def main():
        async with make_client(make_app(engine)) as client:
            headers = {"Content-Type": "application/json"}
            assert (await client.post(path, content=slowly(), headers=headers)).status_code == 200

    before_ns = time.monotonic_ns()
    asyncio.run(main())
    assert before_ns <= engine.submitted[0].arrival_ns <= begun_ns[0]
