"""Outputs follow their grammars, and are the same, whatever happens to a request on its way."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import OVERCOMMIT, make_request, run_engine
from execute_builders import make_model, make_prompt, tiny_config
from grammar_builders import EOS, Letters, write_tokenizer

from shoal.core import Carried, Grammar, GrammarKind, Request

SERVICE = "llama"
PATTERN = "[abc]{3}(0|1)+x[ab01]{10,14}"
MOST = 40
SMALL = {"preset": "vllm", "memory_bytes": 160 << 10, "block_size": 4, **OVERCOMMIT}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "preemptions": SMALL,
    "preemptions, depth 2": {**SMALL, "depth": 2},
    "swaps": {**SMALL, "preemption_mode": "swap", "swap_bytes": 4 << 20},
    "depth 2": {"depth": 2},
    "8 iterations": {"max_iterations": 8},
    "8 iterations, preemptions": {**SMALL, "max_iterations": 8},
    "chunks of 7": {"max_batched_tokens": 7},
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 11, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "logprobs": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("grammars") / "llama", tiny_config("llama"))
    write_tokenizer(folder)
    return folder


def requests() -> list[Request]:
    """Half of them follow a grammar."""
    made = []
    for i in range(10):
        grammar = Grammar(GrammarKind.REGEX, PATTERN) if i % 2 else None
        params = {"ignore_eos": grammar is None, "grammar": grammar, **SAMPLING[i // 2 % 4]}
        made.append(make_request(str(i), SERVICE, make_prompt(5 + 4 * i, seed=i), MOST, seed=i, **params))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return run_engine({SERVICE: folder}, [requests()]).tokens


def test_finished_outputs_match(folder: Path, expected: dict[str, list[int]]) -> None:
    letters = Letters(folder / "tokenizer.json")
    ended = 0
    for name, tokens in expected.items():
        if int(name) % 2 and tokens[-1] == EOS:
            assert re.fullmatch(PATTERN, letters.text(tokens[:-1]))
            ended += 1
    assert ended > 1


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_outputs_are_the_same_in_all_circumstances(
    circumstance: str, folder: Path, expected: dict[str, list[int]]
) -> None:
    outcome = run_engine({SERVICE: folder}, [requests()], **CIRCUMSTANCES[circumstance])
    assert outcome.tokens == expected
    assert not outcome.errors
    assert (outcome.preemptions > 0) == ("preset" in CIRCUMSTANCES[circumstance])
    assert (outcome.swapped_tokens > 0) == (circumstance == "swaps")


@pytest.mark.parametrize("cut", [1, 7, 15])
def test_a_resumed_output_goes_on_as_it_would_have(
    cut: int, folder: Path, expected: dict[str, list[int]]
) -> None:
    resumed = [
        replace(one, output_tokens=tuple(expected[one.id][:cut]), carried=Carried(max_new_tokens=MOST))
        for one in requests()
    ]
    outcome = run_engine({SERVICE: folder}, [resumed])
    assert outcome.tokens == {name: tokens[cut:] for name, tokens in expected.items()}


def test_a_grammar_that_is_refused_ends_its_request_with_the_reason(folder: Path) -> None:
    good, bad = requests()[:2]
    bad = replace(bad, sampling=replace(bad.sampling, grammar=Grammar(GrammarKind.REGEX, "((")))
    outcome = run_engine({SERVICE: folder}, [[good, bad]])
    assert len(outcome.tokens[good.id]) == MOST
    assert outcome.tokens[bad.id] == []
    assert "unclosed group" in outcome.errors[bad.id]


def test_an_end_that_a_grammar_asks_for_comes_before_min_tokens(folder: Path) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]{4}")
    params = {"ignore_eos": False, "grammar": grammar, "min_tokens": 30}
    asked = [make_request(str(i), SERVICE, make_prompt(9, seed=i), MOST, **params) for i in range(3)]
    for iterations in (1, 8):
        outcome = run_engine({SERVICE: folder}, [asked], max_iterations=iterations)
        for tokens in outcome.tokens.values():
            assert tokens.index(EOS) == len(tokens) - 1 <= 4
