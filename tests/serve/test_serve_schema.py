"""The OpenAPI document is true: schemathesis sends what it allows and forbids, and checks every response."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from serve_builders import FakeEngine, make_app

from hypothesis_profiles import examples
from shoal.serve.ollama.request_bodies import OllamaChatBody, OllamaGenerateBody
from shoal.serve.openai.request_bodies import ChatBody, CompletionBody
from shoal.serve.openai.token_and_embedding_bodies import EmbeddingBody
from shoal.serve.responses_api.request_body import ResponsesBody

APP = make_app(FakeEngine(context=96, max_queue=10**6))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
# Rules that a schema cannot express: combinations of fields, the vocabulary and the context.
CROSS_FIELD_RULES = (
    "stream_options",
    "top_logprobs",
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "min_tokens",
    "n",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "priority",
    "input",
    "tokens",
    "messages",
    "prompt",
    "slo.e2e_scale",
    "messages.content",
    "messages.tool_calls",
    "messages.tool_call_id",
    "messages.reasoning",
    "messages.refusal",
    "messages.reasoning_content",
    "tools",
    "tool_choice",
    "continue_final_message",
    "documents",
    "input",
    "input.content",
    "response_format",
    "structured_outputs",
    "structured_outputs.regex",
    "structured_outputs.choice",
    "structured_outputs.grammar",
    "structured_outputs.json_object",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "json_schema",
    "regex",
    "grammar",
    "ebnf",
    "output_format",
    "ignore_eos",
)
BODIES = (ChatBody, CompletionBody, EmbeddingBody, ResponsesBody, OllamaChatBody, OllamaGenerateBody)
SCHEMAS = APP.openapi()["components"]["schemas"].values()
DOCUMENTED = {name for schema in SCHEMAS for name in schema.get("properties", ())}
# Fields of other servers are left out of the schema, which allows any name.
UNDOCUMENTED = {name for body in BODIES for name in (*body.known_names(), *body.aliases)} - DOCUMENTED
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
# Explicit are bodies for each single thing that the document allows or forbids: thousands.
PHASES = (
    [Phase.generate] if settings.get_current_profile_name() == "quick" else [Phase.explicit, Phase.generate]
)


@pytest.fixture(scope="module", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Otherwise every call looks for one in the whole environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", urlsplit(SCHEMA.get_base_url()).hostname or "")
        yield


@SCHEMA.parametrize()
@settings(
    max_examples=examples(100),
    deadline=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
)
def test_every_response_is_documented(case):
    response = case.call()
    excluded = [positive_data_acceptance]
    if response.status_code == 413:
        # The body is rejected by its size before it is parsed.
        excluded.append(negative_data_rejection)
    case.validate_response(response, excluded_checks=excluded)
    if response.status_code == 400 and case.meta.generation.mode == GenerationMode.POSITIVE:
        error = response.json()["error"]
        param = re.sub(r"\.\d+\.", ".", error["param"] or "")
        allowed = {*CROSS_FIELD_RULES, *UNDOCUMENTED}
        assert param in allowed or "unknown field" in error["message"], error


def test_document_names_services_and_errors():
    document = APP.openapi()
    schemas = document["components"]["schemas"]
    assert schemas["CompletionBody"]["properties"]["model"]["enum"] == ["chat", "base"]
    assert schemas["ChatBody"]["properties"]["model"]["enum"] == ["chat"]
    assert not any("__" in name for name in schemas), "two types with one name are called by their modules"
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "404", "413", "415", "429", "500", "503"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        for status, response in responses.items():
            if status != "200":
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
