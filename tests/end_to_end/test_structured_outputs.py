"""What the bundled models write under grammars is what independent libraries accept.

Slow. Where neither the cache nor the network has the models, they are skipped; with ``CI`` set they fail.
"""

import json
import re
from collections.abc import Iterator, Sequence

import lark
import pytest
from json_schemas import all_schemas
from jsonschema import Draft202012Validator

from at_hand import bundled_model
from shoal.core import Grammar, GrammarKind, SamplingParams, Service
from shoal.frontend.offline_api import Shoal
from shoal.frontend.offline_batch import Completion
from shoal.kvcache import KVCacheOptions
from shoal.models import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REGEXES = (
    r"[a-c]{3}-[0-9]{2}",
    r"(red|green|blue)( (red|green|blue)){0,3}",
    r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d",
    r"[A-Z][a-z]{1,9}( [A-Z][a-z]{1,9})?",
    r"(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"[^\"\\\n]{5,12}!",
    r"x?y{0,4}z{1,2}",
    r"(\+[0-9]{1,3} )?[0-9]{3} [0-9]{3}",
)
CHOICES = (("yes", "no"), ("a", "ab", "abc", "b"), ("gr\u00fcn", "\U0001f600", "two\nlines", 'say "hi"', " "))
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)~0..2
product: value (("*" | "/") value)~0..2
value: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def shoal(request: pytest.FixtureRequest) -> Iterator[Shoal]:
    bundled_model(request.param, resolve_model)
    options = KVCacheOptions(memory_bytes=256 << 20)
    with Shoal(Service(name="model", model=request.param), kv_cache=options, progress=False) as shoal:
        yield shoal


def write(shoal: Shoal, grammars: Sequence[Grammar], max_tokens: int) -> list[Completion]:
    """An output under each, at temperature 1."""
    completions = []
    for first, some in enumerate(_batched(grammars, 50)):
        params = [
            SamplingParams(max_tokens=max_tokens, seed=1000 * first + at, grammar=grammar)
            for at, grammar in enumerate(some)
        ]
        prompts = ["An example:\n"] * len(params)
        completions += [output.outputs[0] for output in shoal.generate(prompts, params, progress=False)]
    return completions


def _batched(grammars: Sequence[Grammar], size: int) -> Iterator[Sequence[Grammar]]:
    for first in range(0, len(grammars), size):
        yield grammars[first : first + size]


def test_finished_answers_validate(shoal: Shoal) -> None:
    schemas = all_schemas()
    grammars = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    finished = 0
    for schema, completion in zip(schemas, write(shoal, grammars, 80), strict=True):
        assert completion.error is None
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "stop":
            finished += 1
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
                json.loads(completion.text)
            )
    assert finished > 0.8 * len(schemas)


def test_finished_outputs_match_their_regular_expressions(shoal: Shoal) -> None:
    outputs = write(shoal, [Grammar(GrammarKind.REGEX, regex) for regex in REGEXES * 3], 40)
    for regex, completion in zip(REGEXES * 3, outputs, strict=True):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(regex, completion.text)


def test_outputs_are_one_of_the_choices(shoal: Shoal) -> None:
    grammars = [
        Grammar(GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, some))) for some in CHOICES * 4
    ]
    for some, completion in zip(CHOICES * 4, write(shoal, grammars, 20), strict=True):
        assert completion.finish_reason == "stop"
        assert completion.text in some


def test_finished_outputs_parse_with_another_parser_of_the_grammar(shoal: Shoal) -> None:
    parser = lark.Lark(ARITHMETIC)
    written = Grammar(GrammarKind.LARK, ARITHMETIC.replace("~0..2", "{0,2}"))
    finished = 0
    for completion in write(shoal, [written] * 16, 60):
        if completion.finish_reason == "stop":
            finished += 1
            parser.parse(completion.text)
    assert finished > 0
