"""Requests that are refused before they are sent, because no model computes the tokens."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from shoal.core import Grammar, InvalidRequest, SamplingParams
from shoal.core.grammar import GrammarKind
from shoal.engine.info import ServiceInfo
from shoal.frontend.validation import check_request

REAL = ServiceInfo(model="m", context_tokens=100, max_total_tokens=100, kv_tokens=100, vocab_size=50)
REFUSED: dict[str, Any] = {
    "grammar": Grammar(GrammarKind.REGEX, "a+"),
    "logprobs": 0,
    "prompt_logprobs": 2,
    "embed": True,
    "logit_bias": ((3, 1.0),),
    "allowed_token_ids": (3, 4),
    "banned_sequences": ((3,),),
}
WITHOUT_EFFECT: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "min_tokens": 2,
    "ignore_eos": True,
    "skip_special_tokens": False,
}
WORK: dict[str, Any] = {
    "max_tokens": 5,
    "stop": ("x",),
    "stop_token_ids": (3,),
    "seed": 3,
    "n": 2,
    "include_stop_str_in_output": True,
}


@dataclass(frozen=True)
class Limits:
    services: dict[str, ServiceInfo] = field(default_factory=lambda: {"a": replace(REAL, simulated=True)})
    takes_priorities: bool = False


def test_every_parameter_is_refused_or_taken():
    known = {each.name for each in fields(SamplingParams)}
    assert known == REFUSED.keys() | WITHOUT_EFFECT.keys() | WORK.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_simulated_engines_refuse_what_needs_a_model(name):
    sampling = SamplingParams(**{name: REFUSED[name]})
    with pytest.raises(
        InvalidRequest, match=f"{name} is not possible here: the engines are simulated"
    ) as error:
        check_request(Limits(), "a", [1, 2], sampling)
    assert error.value.param == name
    check_request(Limits({"a": REAL}), "a", [1, 2], sampling)


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, *WORK])
def test_simulated_engines_take_all_others(name):
    check_request(Limits(), "a", [1, 2], SamplingParams(**{name: (WITHOUT_EFFECT | WORK)[name]}))
