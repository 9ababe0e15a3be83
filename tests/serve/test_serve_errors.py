"""Invalid input gets a clear 4xx in OpenAI's shape, and the server continues."""

import asyncio
import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_builders import FakeEngine, chat, completion, events, make_app, make_client, post, tool

from hypothesis_profiles import examples
from shoal.core import FinishReason, ServiceUnavailable
from shoal.serve.openai.request_bodies import ChatBody, CompletionBody

REFUSED = {"type": "refusal", "refusal": "No."}
THOUGHT = {"type": "thinking", "thinking": "Hm."}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(path, body, engine=None, **options):
    return asyncio.run(post(path, body, engine, **options))


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"stop_token_ids": [1, 1.5]}, "stop_token_ids.1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"model": 1}, "model"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"priority": False}, "priority"),
        ({"priority": 1}, "priority"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": "a"}, "bad_words"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"slo": 2}, "slo"),
        ({"slo": {"ttft": 0}}, "slo.ttft"),
        ({"slo": {"tpot": -0.1}}, "slo.tpot"),
        ({"slo": {"e2e": "2s"}}, "slo.e2e"),
        ({"slo": {"e2e": True}}, "slo.e2e"),
        ({"slo": {"e2e": 1e300}}, "slo.e2e"),
        ({"slo": {"ttft_s": 1}}, "slo.ttft_s"),
        ({"slo": {"e2e_scale": 5}}, "slo.e2e_scale"),
    ],
)
def test_wrong_completion_fields_are_named(fields, param):
    error = error_of(ask(COMPLETIONS, completion(**fields)), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "function", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "hi", "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thought"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [REFUSED]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [THOUGHT]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages.0.function_call"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [tool("no name")]}, "tools.0.function.name"),
        ({"tools": [tool("a" * 65)]}, "tools.0.function.name"),
        ({"tools": [tool("a", parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool("a", parameters={"type": "array"})]}, "tools"),
        ({"tools": [tool(f"a{i}") for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": "some"}, "tool_choice"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
        ),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "highest"}, "reasoning_effort"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [{"role": "assistant", "content": "a", "tool_calls": [CALL]}],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"slo": [1]}, "slo"),
        ({"slo": {"e2e_scale": 0}}, "slo.e2e_scale"),
        ({"slo": {"e2e_scale": 1e7}}, "slo.e2e_scale"),
        ({"slo": {"deadline": 1}}, "slo.deadline"),
    ],
)
def test_wrong_chat_fields_are_named(fields, param):
    error = error_of(ask(CHAT, chat(**fields)), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"suffix": "end"}, "into the prompt"),
        ({"best_of": 3}, "ask for n outputs with logprobs"),
        ({"use_beam_search": True}, "ask for n outputs with logprobs"),
        ({"kv_transfer_params": {}}, "leave it out"),
    ],
)
def test_refused_fields_name_an_alternative(fields, instead):
    message = error_of(ask(COMPLETIONS, completion(**fields)), 400)["message"]
    assert "is not supported by this server; " in message
    assert instead in message


def test_error_texts_of_a_field_apply_only_where_it_exists():
    assert "unknown field" in error_of(ask(CHAT, chat(prompt="x")), 400)["message"]


def test_unknown_field_gets_a_hint():
    error = error_of(ask(COMPLETIONS, completion(max_token=5)), 400)
    assert error["param"] == "max_token"
    assert "'max_tokens'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"slo": {"ttft_s": 1}}, "unknown field 'slo.ttft_s'; did you mean 'ttft'?"),
        (
            {"slo": {"deadline": 1}},
            "unknown field 'slo.deadline'; possible here: ttft, tpot, mtpot, e2e, e2e_scale",
        ),
        ({"slo": {"ttft": 0}}, "slo.ttft: input should be greater than 0"),
        ({"slo": {"e2e_scale": 5}}, "slo.e2e_scale is a multiple of the service's execution time, which"),
    ],
)
def test_wrong_goals_are_explained(fields, expected):
    assert error_of(ask(COMPLETIONS, completion(**fields)), 400)["message"].startswith(expected)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_goals_are_finite(value):
    raw = b'{"model": "base", "prompt": "a", "slo": {"e2e": ' + value + b"}}"
    error_of(ask(COMPLETIONS, raw), 400)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"text"',
        b'{"model": "base", "prompt": "\xff\xfe"}',
        b'{"model": "base", "prompt": "\\ud800"}',
        b'{"model": "base", "prompt": "\\udc00\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "base", "prompt": "a", "\\ud800": 1}',
        b'{"model": "base", "prompt": "a", "temperature": NaN}',
        b'{"model": "base", "prompt": "a", "temperature": Infinity}',
        b'{"model": "base", "prompt": "a", "temperature": 1e999}',
        b'{"model": "base", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "base", "prompt": ' + b"[" * 100_000 + b"}",
        b'{"model": "base", "prompt": "a"} trailing',
        "{'model': 'base'}".encode("utf-16"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_invalid_json_gets_a_400(path, raw):
    error_of(ask(path, raw), 400)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
def test_wrong_content_type_gets_a_415(kind):
    async def main():
        async with make_client(make_app()) as client:
            content = json.dumps(completion()).encode()
            headers = {} if kind is None else {"Content-Type": kind}
            response = await client.post(COMPLETIONS, content=content, headers=headers)
            assert "application/json" in error_of(response, 415)["message"]
            for fine in ('Application/JSON; charset="UTF-8"', "application/vnd.api+json"):
                response = await client.post(COMPLETIONS, content=content, headers={"Content-Type": fine})
                assert response.status_code == 200

    asyncio.run(main())


def post_routes():
    routes = [route for route in make_app().routes if "POST" in getattr(route, "methods", ())]
    return sorted(route.path_format.replace("{", "").replace("}", "") for route in routes)


@pytest.mark.parametrize("path", [*post_routes(), "/nothing"])
def test_an_encoded_body_gets_a_415_on_every_route(path):
    async def main():
        async with make_client(make_app(admin_key="operator")) as client:
            for coding in ("gzip", "br", "identity, zstd", "x" * 5000):
                headers = {"Content-Encoding": coding, "Authorization": "Bearer operator"}
                response = await client.post(path, content=gzip.compress(b"{}"), headers=headers)
                assert response.status_code == 415
                assert response.headers["accept-encoding"] == "identity"
                assert "Content-Encoding: " in response.text
                assert len(response.text) < 400
                if not path.startswith(("/api/", "/v1/messages")):
                    assert error_of(response, 415)["code"] == "unsupported_media_type"

    asyncio.run(main())


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
def test_an_identity_content_encoding_is_accepted(coding):
    async def main():
        async with make_client(make_app()) as client:
            headers = {"Content-Encoding": coding}
            assert (await client.post(COMPLETIONS, json=completion(), headers=headers)).status_code == 200
            # There is nothing to decode.
            assert (await client.get("/health", headers={"Content-Encoding": "gzip"})).status_code == 200

    asyncio.run(main())


def test_large_bodies_get_a_413_and_those_at_the_limit_do_not():
    body = json.dumps(completion(user="")).encode()
    fits = body.replace(b'"user": ""', b'"user": "%s"' % (b"x" * (2000 - len(body))))
    assert len(fits) == 2000
    assert ask(COMPLETIONS, fits, max_body_bytes=2000).status_code == 200
    error = error_of(ask(COMPLETIONS, fits + b" ", max_body_bytes=2000), 413)
    assert "2000 bytes" in error["message"]
    error_of(ask(COMPLETIONS, b"x" * 100_000, max_body_bytes=2000), 413)


def test_unknown_model_lists_those_served():
    for path, body in ((COMPLETIONS, completion(model="gpt")), (CHAT, chat(model="gpt"))):
        error = error_of(ask(path, body), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "chat, base" in error["message"]


def test_unknown_routes_and_methods():
    async def main():
        async with make_client(make_app()) as client:
            assert error_of(await client.get("/v1/nothing"), 404)["code"] == "unknown_url"
            assert error_of(await client.post("/v1/completions/", json={}), 404)
            assert error_of(await client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
            response = await client.get(COMPLETIONS)
            assert error_of(response, 405)["code"] == "method_not_allowed"
            assert response.headers["allow"] == "POST, OPTIONS"

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{"prompt": "x" * 200}, {"prompt": "x" * 150, "max_tokens": 100}])
def test_a_prompt_beyond_the_context_is_a_400(fields):
    assert error_of(ask(COMPLETIONS, completion(**fields)), 400)["code"] == "context_length_exceeded"


def test_chat_without_a_template_names_it():
    assert "chat_template" in error_of(ask(CHAT, chat(model="base")), 400)["message"]


def test_full_queue_is_a_429_with_retry_after():
    async def main():
        engine = FakeEngine(max_queue=2, hold=asyncio.Event())
        async with make_client(make_app(engine)) as client:
            waiting = asyncio.create_task(client.post(COMPLETIONS, json=completion(n=2)))
            while engine.waiting < 2:
                await asyncio.sleep(0)
            for stream in (False, True):
                response = await client.post(COMPLETIONS, json=completion(stream=stream))
                assert error_of(response, 429)["type"] == "rate_limit_error"
                assert response.headers["retry-after"] == "3"
            engine.hold.set()
            assert (await waiting).status_code == 200

    asyncio.run(main())


def test_a_request_that_fits_the_queue_only_in_part_leaves_nothing_behind():
    async def main():
        engine = FakeEngine(max_queue=3, hold=asyncio.Event())
        async with make_client(make_app(engine)) as client:
            response = await client.post(COMPLETIONS, json=completion(prompt=["a", "b"], n=2))
            error_of(response, 429)
            assert len(engine.cancelled) == 2
            await asyncio.sleep(0)
            assert engine.waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", [{"alive": False}, {"fail_after": 0}])
def test_a_service_without_an_engine_is_a_503_with_retry_after(when, stream):
    engine = FakeEngine(**when, failure=ServiceUnavailable("no engine of 'base' runs", retry_after_s=4.2))
    response = ask(COMPLETIONS, completion(stream=stream), engine)
    error = error_of(response, 503)
    assert (error["type"], error["code"], error["param"]) == ("server_error", "service_unavailable", None)
    assert error["message"] == "no engine of 'base' runs"
    assert response.headers["retry-after"] == "5"


def test_a_stream_without_an_engine_for_too_long_ends_with_an_error_event():
    engine = FakeEngine(fail_after=3, failure=ServiceUnavailable("no engine of 'base' runs", retry_after_s=5))
    *chunks, last = events(ask(COMPLETIONS, completion(stream=True), engine).text)
    assert len(chunks) == 3
    assert last["error"]["code"] == "service_unavailable"


def test_a_request_that_crashes_engines_is_a_500_without_retry():
    for stream in (False, True):
        response = ask(COMPLETIONS, completion(stream=stream), FakeEngine(fail_after=0))
        assert error_of(response, 500)["code"] == "engine_died"
        assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("prompt", ["hello", ["hello", "there"]])
def test_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(prompt):
    response = ask(COMPLETIONS, completion(prompt=prompt, stream=True), FakeEngine(fail_after=2))
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert last["error"]["code"] == "engine_died"
    assert any(chunk["choices"][0]["text"] == "e" for chunk in chunks)


def test_a_request_that_the_engine_fails_is_a_500_with_the_reason():
    error = error_of(ask(COMPLETIONS, completion(), FakeEngine(error_after=1)), 500)
    assert "NaN in the logits" in error["message"]
    stream = events(ask(COMPLETIONS, completion(stream=True), FakeEngine(error_after=1)).text)
    assert "NaN in the logits" in stream[-1]["error"]["message"]


def test_a_request_that_excludes_every_token_is_a_400():
    def failing():
        return FakeEngine(error_after=1, error_finish=FinishReason.INVALID)

    for error in (
        error_of(ask(COMPLETIONS, completion(), failing()), 400),
        events(ask(COMPLETIONS, completion(stream=True), failing()).text)[-1]["error"],
    ):
        assert (error["type"], error["message"]) == ("invalid_request_error", "NaN in the logits")


def test_unexpected_errors_reveal_no_internals():
    class Broken(FakeEngine):
        async def submit(self, *arguments):
            raise ZeroDivisionError("secret")

    for stream in (False, True):
        error = error_of(ask(COMPLETIONS, completion(stream=stream), Broken()), 500)
        assert "secret" not in json.dumps(error)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = sorted(CompletionBody.model_fields | ChatBody.model_fields)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from([COMPLETIONS, CHAT]), st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=3))
def test_no_json_ever_breaks_the_server(path, fields):
    base = completion(max_tokens=4) if path == COMPLETIONS else chat(max_tokens=4)
    response = ask(path, json.dumps(base | fields).encode())
    if response.status_code != 200:
        error_of(response, response.status_code)
        assert response.status_code in (400, 404)
