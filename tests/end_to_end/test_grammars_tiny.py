"""Outputs follow their grammars, and are the same, whatever happens to a request on its way."""

import os
import random
import re
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import OVERCOMMIT, make_request, run_engine
from execute_builders import make_model, make_prompt, tiny_config
from grammar_builders import EOS, Letters, write_tokenizer

from crossed import crossed, each_nth
from shoal.core import Grammar, GrammarKind, Request, ResumeState
from shoal.execute.grammar import watchdog
from shoal.execute.grammar.masks import RowMasks

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


def postpone(executor: Any) -> None:
    """From now on many masks come late, by chance."""
    draws, masks = random.Random(7), executor._masks
    finish, ready = masks.finish, masks.ready

    def some() -> RowMasks | None:
        made = finish()
        if made is None:
            return None
        kept = [at for at in range(len(made.rows)) if draws.random() < 0.7]
        late = {row for at, row in enumerate(made.rows) if at not in kept}
        return RowMasks([made.rows[at] for at in kept], made.bits[kept], made.failures, made.postponed | late)

    masks.finish = some
    masks.ready = lambda numbers: [number for number in ready(numbers) if draws.random() < 0.5]


@pytest.mark.parametrize(("circumstance", "late"), crossed(each_nth(CIRCUMSTANCES, 2), [False, True]))
def test_outputs_are_the_same_in_all_circumstances(
    circumstance: str, late: bool, folder: Path, expected: dict[str, list[int]]
) -> None:
    prepare = postpone if late else lambda executor: None
    outcome = run_engine({SERVICE: folder}, [requests()], prepare=prepare, **CIRCUMSTANCES[circumstance])
    assert outcome.tokens == expected
    assert not outcome.errors
    assert (outcome.preemptions > 0) == ("preset" in CIRCUMSTANCES[circumstance])
    assert (outcome.swapped_tokens > 0) == (circumstance == "swaps")


def test_with_int8_kv_a_token_that_is_computed_again_is_what_it_was(folder: Path) -> None:
    plain, late = [
        run_engine({SERVICE: folder}, [requests()], kv_dtype="int8", prepare=prepare).tokens
        for prepare in (lambda executor: None, postpone)
    ]
    assert late == plain


def test_services_that_decode_together_are_postponed_apart(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    asked = [replace(one, service="ab"[int(one.id) // 2 % 2]) for one in requests()]
    outcome = run_engine({"a": folder, "b": folder}, [asked], prepare=postpone)
    assert outcome.tokens == expected


@pytest.mark.parametrize(("sign", "depth"), crossed([signal.SIGKILL, signal.SIGSTOP], [1, 2]))
def test_processes_that_are_killed_or_stopped_change_no_output(
    sign: signal.Signals,
    depth: int,
    folder: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "STALLED_S", 0.3)
    steps = count(1)

    def sabotage(executor: Any) -> None:
        finish = executor._masks.finish

        def hitting() -> RowMasks | None:
            if next(steps) % 12 == 0:
                for worker in list(executor.grammars._workers.values()):
                    if worker.pid is not None:
                        os.kill(worker.pid, sign)
            made: RowMasks | None = finish()
            return made

        executor._masks.finish = hitting

    outcome = run_engine({SERVICE: folder}, [requests()], prepare=sabotage, depth=depth)
    assert next(steps) > 36
    assert not outcome.errors
    assert outcome.tokens == expected


def test_a_stream_steps_on_while_another_waits_for_its_process(folder: Path) -> None:
    """The process answers once the plain stream has all of its tokens, and not before."""
    plain, bound = requests()[:2]
    late: list[str] = []

    def hold(executor: Any) -> None:
        finish, ready = executor._masks.finish, executor._masks.ready

        def held() -> RowMasks | None:
            made = finish()
            if made is None or late:
                return made
            rows = frozenset([*made.rows, *made.postponed])
            return RowMasks([], made.bits[:0], {}, rows)

        executor._masks.finish = held
        executor._masks.ready = lambda numbers: ready(numbers) if late else []

    def done(request_id: str) -> None:
        late.append(request_id)

    outcome = run_engine({SERVICE: folder}, [[bound, plain]], prepare=hold, on_end=done)
    assert late == [plain.id, bound.id]
    assert len(outcome.tokens[plain.id]) == MOST


@pytest.mark.parametrize("cut", [1, 7, 15])
def test_a_resumed_output_goes_on_as_it_would_have(
    cut: int, folder: Path, expected: dict[str, list[int]]
) -> None:
    resumed = [
        replace(
            one, output_tokens=tuple(expected[one.id][:cut]), resume_state=ResumeState(max_new_tokens=MOST)
        )
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
