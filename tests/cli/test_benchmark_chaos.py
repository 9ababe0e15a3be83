"""Chaos test: configurations, random requests, and comparison of answers to the last digit."""

import json

import pytest

from benchmarks.chaos.answers import answer_of, first_difference
from benchmarks.chaos.configurations import CONFIGURATIONS
from benchmarks.chaos.requests import make_requests
from shoal.config import load_config
from shoal.serve import ServerOptions


def test_every_configuration_loads(tmp_path):
    for configuration in CONFIGURATIONS:
        file = tmp_path / f"{configuration.name}.yaml"
        file.write_text(json.dumps(configuration.document(8000, "chaos")))
        loaded = load_config(ServerOptions, file=file)
        assert len(loaded.services) == 3, configuration.name


def test_requests_depend_on_the_seed_and_use_all_routes():
    requests = make_requests(3, 140)
    assert requests == make_requests(3, 140)
    assert requests != make_requests(4, 140)
    assert len({request.path for request in requests}) >= 8


def test_a_changed_digit_is_a_difference():
    right = {"choices": {"0": {"text": "a", "token_logprobs": [-1.25, -0.5]}}}
    assert first_difference(json.loads(json.dumps(right)), right) == ""
    changed = {"choices": {"0": {"text": "a", "token_logprobs": [-1.25, -0.5001]}}}
    assert "token_logprobs[1]: '-0.5001' for '-0.5'" in first_difference(changed, right)
    assert first_difference({"choices": {}}, right)
    assert first_difference(right, {"choices": {}})


@pytest.mark.parametrize(
    ("path", "chunks", "whole"),
    [
        (
            "/v1/chat/completions",
            [
                {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
                {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [1]}}]},
                {"choices": [{"index": 0, "delta": {"content": "b"}, "token_ids": [5, 6]}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            ],
            {
                "choices": [
                    {
                        "index": 0,
                        "message": {"content": "ab"},
                        "logprobs": {"content": [1]},
                        "token_ids": [5, 6],
                        "finish_reason": "stop",
                    }
                ]
            },
        ),
        (
            "/api/generate",
            [{"response": "a"}, {"response": "b", "done": True, "eval_count": 2}],
            {"response": "ab", "done": True, "eval_count": 2},
        ),
    ],
)
def test_streamed_and_whole_answers_have_one_form(path, chunks, whole):
    streamed = answer_of(path, chunks, whole=False)
    assert streamed == answer_of(path, [whole], whole=True)
    assert streamed != answer_of(path, chunks[1:-1], whole=False)
