"""Sampling parameters refuse what has no meaning and name the parameter."""

import math

import pytest

from shoal.core import InvalidRequest, SamplingDefaults, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", tuple((token, 1.0) for token in range(1025))),
        ("allowed_token_ids", (-1,)),
        ("banned_sequences", ((),)),
        ("banned_sequences", ((1,),) * 257),
        ("seed", 2**63),
        ("n", 0),
        ("n", 10**9),
    ],
)
def test_an_invalid_value_is_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert param in str(caught.value)


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidRequest, match="max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_greedy_and_has_penalties() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-39).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams().has_penalties
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{penalty: 0.5}).has_penalties


def test_a_request_overrides_its_service_and_a_service_its_model() -> None:
    service = SamplingDefaults(temperature=0.7, top_k=20)
    effective = service.with_fallback({"temperature": 0.2, "top_p": 0.9})
    assert effective == SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20, min_p=0, repetition_penalty=1)
    asked = {"top_k": 0, "max_tokens": 5}
    assert effective.params(asked) == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5)
    assert SamplingDefaults().params({}) == SamplingParams()


def test_defaults_and_parameters_by_name_are_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="top_p must be"):
        SamplingDefaults(top_p=2)
    with pytest.raises(InvalidRequest, match="maxtokens: unknown key, did you mean 'max_tokens'"):
        SamplingDefaults().params({"maxtokens": 3})
    with pytest.raises(InvalidRequest, match="max_tokens: '5' has the wrong type") as caught:
        SamplingDefaults().params({"min_tokens": 9, "max_tokens": "5"})
    assert caught.value.param == "max_tokens"
