"""Masks of grammars: against sets of texts that can be written down, and in an executor."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from execute_builders import VOCAB, HandScheduler, make_model, make_prompt, tiny_config, with_forward
from grammar_builders import EOS, Letters, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.core import (
    NO_TOKEN,
    Failure,
    FinishReason,
    Grammar,
    GrammarKind,
    InvalidRequest,
    QueueFull,
    SamplingParams,
)
from shoal.execute.grammar import masks as grammar_masks
from shoal.execute.grammar import pool as grammar_pool
from shoal.execute.grammar import watchdog
from shoal.execute.grammar import worker as grammar_worker
from shoal.execute.grammar.fork_server import ForkServers, GrammarModel
from shoal.execute.grammar.masks import GrammarMasks, RowMasks
from shoal.execute.grammar.messages import SequenceTokens, Step
from shoal.execute.grammar.pool import GrammarLease, GrammarPool
from shoal.execute.grammar.process import Masks, compile_grammar, read_tokenizer
from shoal.execute.grammar.worker import GrammarWorker
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sampling.sampler import sample as sample_rows
from shoal.execute.sequences import RunningSequence
from shoal.native import load_native

without_native = pytest.mark.without_native

SERVICE = "tiny"
DEEP = "start: r0\n" + "".join(f'r{i}: r{i + 1} | "x{i}"\n' for i in range(5_000)) + 'r5000: "a"\n'
SLOWER_AND_SLOWER = "start: " + "a " * 17 + '\na: b*\nb: c*\nc: "x"?\n'
ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}),
)
MANY_PROPERTIES = {"type": "object", "properties": {f"p{number}": {} for number in range(600)}}


def one_of(*texts: str) -> Grammar:
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, texts)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("grammars") / "llama", tiny_config("llama"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def letters(folder: Path) -> Letters:
    return Letters(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(folder / "tokenizer.json"), n_vocab=VOCAB, eos_token=[EOS])


@pytest.fixture
def pool(folder: Path) -> Iterator[GrammarPool]:
    pool = GrammarPool({SERVICE: GrammarModel(folder, VOCAB, (EOS,))})
    yield pool
    pool.close()


def step(*rows: SequenceTokens, left: Sequence[int] = ()) -> Step:
    return Step(list(rows), list(left), 1.0)


def bits(masks: np.ndarray) -> list[list[int]]:
    """Ids that each mask allows."""
    return [np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() for mask in masks]


def row(*output: int, **params: Any) -> RunningSequence:
    return RunningSequence([5, 6, *output], 2, 0, SamplingParams(**params), seed=7)


@without_native
@given(
    texts=st.lists(st.text('ab01"', min_size=1, max_size=6), min_size=1, max_size=6, unique=True),
    draws=st.lists(st.integers(0, 999), min_size=8, max_size=8),
)
@settings(max_examples=examples(100))
def test_a_mask_allows_the_tokens_that_continue_an_accepted_text(
    texts: Sequence[str], draws: Sequence[int], tokenizer: llguidance.LLTokenizer, letters: Letters
) -> None:
    masks = Masks(compile_grammar(tokenizer, one_of(*texts)), [EOS], VOCAB)
    output: list[int] = []
    sent = 0
    for draw in draws:
        answer, made = masks.answer(step(SequenceTokens(1, output[sent:])))
        sent = len(output)
        assert not answer.failures
        (mask,) = bits(made)
        text = letters.text(output)
        possible = [
            token
            for token in range(letters.size)
            if letters.piece(token) and any(t.startswith(text + letters.piece(token)) for t in texts)
        ]
        if text not in texts and len({t[len(text)] for t in texts if t.startswith(text)}) == 1:
            # What must come may have to come in the tokens that the tokenizer would make of it.
            assert mask
            assert set(mask) <= set(possible)
        else:
            assert mask == sorted([*possible, *([EOS] if text in texts else [])])
        output.append(mask[draw % len(mask)])
        if output[-1] == EOS:
            break
    else:
        return
    assert letters.text(output) in texts
    _, made = masks.answer(step(SequenceTokens(1, [EOS])))
    assert bits(made) == [[EOS]]


@without_native
@given(draws=st.lists(st.integers(0, 999), min_size=1, max_size=12), cut=st.integers(0, 12))
@settings(max_examples=examples(50))
def test_a_sequence_that_returns_gets_the_same_masks(
    draws: Sequence[int], cut: int, tokenizer: llguidance.LLTokenizer
) -> None:
    schema = Grammar(
        GrammarKind.JSON_SCHEMA, '{"type": "object", "additionalProperties": {"type": "integer"}}'
    )
    start = compile_grammar(tokenizer, schema)
    masks = Masks(start, [EOS], VOCAB)
    output: list[int] = []
    new: list[int] = []
    for draw in draws:
        _, made = masks.answer(step(SequenceTokens(1, new)))
        mask = bits(made)[0]
        new = [mask[draw % len(mask)]]
        output += new
        if len(output) == cut:
            masks.answer(step(left=[1]))
            new = list(output)
    _, made = masks.answer(step(SequenceTokens(1, new)))
    _, fresh = Masks(start, [EOS], VOCAB).answer(step(SequenceTokens(2, output)))
    assert bits(made) == bits(fresh)


@without_native
def test_a_tokenizer_may_have_more_tokens_than_the_model(folder: Path, letters: Letters) -> None:
    file, grammar = str(folder / "tokenizer.json"), one_of("ab", "1")
    longer, shorter = (read_tokenizer(file, size, [EOS]) for size in (letters.size - 40, letters.size + 40))
    answers = []
    for tokenizer in (longer, shorter):
        masks = Masks(compile_grammar(tokenizer, grammar), [EOS], tokenizer.vocab_size)
        answers.append(bits(masks.answer(Step([SequenceTokens(1, [])], [], 1.0))[1]))
    assert answers[0] == answers[1]
    assert {letters.piece(token) for token in answers[0][0]} == {"a", "ab", "1"}


Sample = Callable[..., Any]


@pytest.fixture(scope="module", params=["torch", "native"])
def sample(request: pytest.FixtureRequest) -> Sample:
    library = load_native()
    if request.param == "native" and library is None:
        pytest.skip("the native library was not built, or is off")
    return partial(sample_rows, native=None if request.param == "torch" else NativeSampler(library))


def masked(rows: Sequence[int], allowed: Sequence[Sequence[int]], failures: Any = None) -> RowMasks:
    words = np.zeros((len(rows), -(-VOCAB // 32)), dtype=np.uint32)
    for mask, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return RowMasks(list(rows), words, failures or {})


ANY = one_of("a")
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_masked_row_is_sampled_as_if_the_other_tokens_were_impossible(
    params: dict[str, Any], dtype: torch.dtype, sample: Sample
) -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(3)).to(dtype)
    may = [3, 77, 78, 150, VOCAB - 1]
    forbidden = torch.ones(VOCAB, dtype=torch.bool)
    forbidden[may] = False
    rows = [row(9, 77), row(9, 77, grammar=ANY, **params), row(9)]
    expected, *_ = sample(
        torch.stack([logits[0], logits[1].masked_fill(forbidden, -torch.inf), logits[2]]),
        [rows[0], row(9, 77, **params), rows[2]],
        [EOS],
    )
    raw = logits[1].float().log_softmax(-1)
    tokens, *_ = sample(logits.clone(), rows, [EOS], masks=masked([1], [may]))
    assert tokens == expected
    assert tokens[1] in may
    reported = [row(9, 77, grammar=ANY, logprobs=2, **params)]
    _, [logprobs], *_ = sample(logits[1:2].clone(), reported, [EOS], masks=masked([0], [may]))
    assert logprobs.logprob == pytest.approx(float(raw[logprobs.token]), abs=1e-5)
    assert [token for token, _ in logprobs.top] == raw.topk(2).indices.tolist()


def test_ends_are_banned_early_unless_nothing_else_is_allowed(sample: Sample) -> None:
    logits = torch.zeros((4, VOCAB))
    logits[:, EOS] = logits[:, 40] = 9.0
    params = {"min_tokens": 3, "stop_token_ids": (40,), "temperature": 0.0, "grammar": ANY}
    rows = [row(**params) for _ in range(3)] + [row(1, 1, 1, **params)]
    masks = masked([0, 1, 2, 3], [[EOS, 40, 50], [EOS, 40], [40], [EOS, 50]])
    assert sample(logits, rows, [EOS], masks=masks)[0] == [50, EOS, 40, EOS]


def test_a_row_without_a_mask_gets_no_token(sample: Sample) -> None:
    logits = torch.zeros((3, VOCAB))
    logits[:, 5] = 1.0
    rows = [row(grammar=ANY, temperature=0.0), row(temperature=0.0), row(grammar=ANY, temperature=0.0)]
    why = Failure("why")
    tokens, _, failures, _ = sample(logits, rows, [EOS], masks=masked([2], [[8, 9]], {0: why}))
    assert tokens == [NO_TOKEN, 5, 8]
    assert failures == {0: why}


def test_a_row_with_all_tokens_excluded_differs_from_one_with_logits_that_are_not_finite(
    sample: Sample,
) -> None:
    logits = torch.zeros((5, VOCAB))
    logits[2, 3] = torch.nan
    excluding: list[dict[str, Any]] = [
        {"grammar": ANY, "allowed_token_ids": (9,)},
        {"allowed_token_ids": (9,), "banned_sequences": ((9,),)},
        {"allowed_token_ids": (9,)},
        {"allowed_token_ids": (EOS,), "min_tokens": 2},
        {"allowed_token_ids": (9,)},
    ]
    rows = [row(**params) for params in excluding]
    tokens, _, failures, _ = sample(logits, rows, [EOS], masks=masked([0], [[8]]))
    assert tokens == [NO_TOKEN] * 4 + [9]
    assert {at: failure.finish for at, failure in failures.items()} == dict.fromkeys(
        (0, 1, 3), FinishReason.INVALID
    )
    assert "own limits" in failures[0].why


def test_a_masked_row_of_a_model_that_overflows_gets_no_token(sample: Sample) -> None:
    logits = torch.zeros((2, VOCAB))
    logits[0, 8] = torch.nan
    rows = [row(grammar=ANY), row()]
    assert sample(logits, rows, [EOS], masks=masked([0], [[8, 9]]))[0][0] == NO_TOKEN


class Steps:
    """Masks of one step after another, and the leases of all that they follow."""

    def __init__(self, pool: GrammarPool) -> None:
        self.pool = pool
        self.masks = GrammarMasks(pool)
        self.leases: dict[Grammar, GrammarLease] = {}

    def lease(self, grammar: Grammar) -> GrammarLease:
        lease = self.leases[grammar] = self.pool.lease(SERVICE, grammar)
        return lease

    def follow(self, *rows: tuple[int, RunningSequence]) -> RowMasks:
        """The masks of a step, requested again until none is postponed."""
        for _, one in rows:
            grammar = one.sampling.grammar
            if grammar is not None and grammar not in self.leases:
                with suppress(InvalidRequest):
                    self.lease(grammar).ready.result()
        for _ in range(1000):
            made = self.step(*rows)
            if not made.postponed:
                return made
            with self.pool.answered:
                self.pool.answered.wait(0.05)
        raise AssertionError("masks do not come")

    def step(self, *rows: tuple[int, RunningSequence]) -> RowMasks:
        self.masks.begin(SERVICE, rows)
        made = self.masks.finish()
        assert made is not None
        return made

    def process(self, grammar: Grammar) -> int:
        """Number of its process."""
        worker = self.pool.find(SERVICE, grammar)
        assert worker is not None
        assert worker.pid is not None
        return worker.pid


@pytest.fixture
def steps(pool: GrammarPool) -> Steps:
    return Steps(pool)


def allowed_by_row(masks: RowMasks) -> dict[int, list[int]]:
    return dict(zip(masks.rows, bits(masks.bits), strict=True))


@without_native
def test_rows_get_the_masks_of_their_own_grammars(steps: Steps, letters: Letters) -> None:
    one, other = one_of("abc", "0"), Grammar(GrammarKind.REGEX, "[xyz]+")
    made = steps.follow((1, row(grammar=one)), (2, row()), (3, row(grammar=other)), (4, row(grammar=one)))
    texts = {place: {letters.piece(t) for t in mask} for place, mask in allowed_by_row(made).items()}
    assert texts == {0: {"a", "ab", "abc", "0"}, 2: {"x", "y", "z"}, 3: {"a", "ab", "abc", "0"}}
    steps.masks.begin(SERVICE, [(2, row())])
    assert steps.masks.finish() is None


@without_native
@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.REGEX, "(("), "unclosed group"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"if": {}}'), "if"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "EOF"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"a":' * 10_000 + "1" + "}" * 10_000), "recursion"),
        (Grammar(GrammarKind.JSON_SCHEMA, "true"), "object"),
        (Grammar(GrammarKind.LARK, "start: other"), "other"),
        (Grammar(GrammarKind.LARK, "root ::= ("), "Unexpected|Expected|expected"),
        (Grammar(GrammarKind.REGEX, "(" * 10_000 + "a" + ")" * 10_000), "regex"),
        (Grammar(GrammarKind.LARK, DEEP), "stack"),
        pytest.param(ENDLESS, "CPU", marks=pytest.mark.slow),
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(MANY_PROPERTIES)), "items"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_grammar_that_cannot_be_used_is_refused(pool: GrammarPool, grammar: Grammar, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        pool.lease(SERVICE, grammar).ready.result()
    assert raised.value.param == "grammar"


@without_native
def test_a_row_whose_grammar_cannot_be_used_gets_no_mask(steps: Steps) -> None:
    bad = row(grammar=Grammar(GrammarKind.REGEX, "(("))
    made = steps.follow((1, bad), (2, row(grammar=one_of("b"))))
    assert made.rows == [1]
    assert set(made.failures) == {0}


@without_native
def test_a_slow_mask_fails_only_its_own_request(
    steps: Steps, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_worker, "MASK_CPU_S", 0.05)
    monkeypatch.setattr(grammar_worker, "TOKEN_CPU_S", 0.0)
    slow = Grammar(GrammarKind.LARK, SLOWER_AND_SLOWER)
    good = row(grammar=one_of("ab", "0"))
    assert not steps.follow((1, row(grammar=slow)), (2, good)).failures
    process = steps.process(good.sampling.grammar)
    (x,) = [token for token in range(letters.size) if letters.piece(token) == "x"]
    made = steps.follow((1, row(*[x] * 2_000, grammar=slow)), (2, good))
    assert set(made.failures) == {0}
    assert "too long" in made.failures[0].why
    assert set(allowed_by_row(made)) == {1}
    assert steps.process(good.sampling.grammar) == process
    assert not steps.follow((3, row(grammar=slow))).failures


@without_native
def test_a_step_does_not_wait_for_a_process(steps: Steps) -> None:
    slow, good = row(grammar=one_of("ab", "0")), row(grammar=one_of("b"))
    steps.follow((1, slow), (2, good))
    os.kill(steps.process(slow.sampling.grammar), signal.SIGSTOP)
    (a,) = [token for token in allowed_by_row(steps.follow((1, slow)))[0] if token][:1]
    later = row(a, grammar=slow.sampling.grammar)
    made = steps.step((1, later), (2, good))
    assert made.postponed == {0}
    assert (made.rows, made.failures) == ([1], {})
    assert steps.masks.ready([1, 2, 3]) == [2, 3]
    os.kill(steps.process(slow.sampling.grammar), signal.SIGCONT)
    assert steps.follow((1, later), (2, good)).rows == [0, 1]
    assert steps.masks.ready([1, 2]) == [1, 2]


@without_native
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stalled_process_is_replaced(
    sign: signal.Signals, steps: Steps, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "STALLED_S", 0.2)
    grammar = Grammar(GrammarKind.REGEX, "(ab){3}c")
    output: list[int] = []
    for _ in range(4):
        made = steps.follow((1, row(*output, grammar=grammar)))
        assert not made.failures
        output.append(allowed_by_row(made)[0][0])
        os.kill(steps.process(grammar), sign)
    assert "abababc".startswith(letters.text(output))


@without_native
def test_a_grammar_whose_processes_always_end_fails(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = one_of("ab", "0")
    steps.follow((1, row(grammar=grammar)))
    query = GrammarWorker._query

    def killing(self: GrammarWorker, requests: Any) -> Any:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        return query(self, requests)

    monkeypatch.setattr(GrammarWorker, "_query", killing)
    made = steps.follow((2, row(grammar=grammar)))
    assert "3 times" in made.failures[0].why
    monkeypatch.undo()
    assert not steps.follow((3, row(grammar=grammar))).failures


@without_native
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stalled_fork_server_is_replaced(
    sign: signal.Signals, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.lease(one_of("a")).ready.result()
    monkeypatch.setattr(watchdog, "STALLED_S", 0.5)
    [server] = steps.pool._fork_servers._servers.values()
    os.kill(server.pid, sign)
    steps.lease(one_of("b")).ready.result()


@without_native
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_fork_servers_do_not_count_against_the_tokenizer(
    sign: signal.Signals, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or stopped twice while one request waits: it still follows its grammar, and is no 400."""
    monkeypatch.setattr(watchdog, "STALLED_S", 0.5)
    running, ended = ForkServers._running, []

    def ending(self: ForkServers, model: GrammarModel) -> Any:
        server = running(self, model)
        if len(ended) < ends:
            ended.append(server.pid)
            os.kill(server.pid, sign)
        return server

    monkeypatch.setattr(ForkServers, "_running", ending)
    ends = 3
    steps.lease(one_of("a")).ready.result()
    assert len(set(ended)) == 3
    ends = 100
    with pytest.raises(QueueFull, match="try again"):
        steps.lease(one_of("b")).ready.result()


@without_native
def test_a_failed_step_leaves_no_masks(steps: Steps, letters: Letters) -> None:
    start = row(grammar=one_of("ab", "0"))
    steps.lease(start.sampling.grammar).ready.result()
    steps.masks.begin(SERVICE, [(1, start)])  # and then the forward pass fails
    (zero,) = [token for token in range(letters.size) if letters.piece(token) == "0"]
    later = row(zero, grammar=start.sampling.grammar)
    assert allowed_by_row(steps.follow((1, later))) == {0: [EOS]}


@without_native
def test_the_number_of_grammars_in_use_is_limited(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "MAX_PROCESSES", 2)
    for text in "abcde":  # unused grammars are evicted
        lease = pool.lease(SERVICE, one_of(text))
        lease.ready.result()
        lease.release()
    first, second = pool.lease(SERVICE, one_of("0")), pool.lease(SERVICE, one_of("1"))
    with pytest.raises(QueueFull, match="2 different grammars"):  # whether they run or not
        pool.lease(SERVICE, one_of("2"))
    again = pool.lease(SERVICE, one_of("1"))
    second.release()
    with pytest.raises(QueueFull):
        pool.lease(SERVICE, one_of("2"))
    again.release()
    pool.lease(SERVICE, one_of("2")).ready.result()
    first.ready.result()


@without_native
def test_a_request_accepted_elsewhere_is_queued_and_has_priority(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_pool, "MAX_PROCESSES", 1)
    held = pool.lease(SERVICE, one_of("0"))
    coming = [pool.lease(SERVICE, one_of(text), accepted=True) for text in "12"]
    gone = pool.lease(SERVICE, one_of("3"), accepted=True)
    held.ready.result()
    assert not any(lease.ready.done() for lease in coming)
    gone.release()
    held.release()
    coming[0].ready.result()
    assert not coming[1].ready.done()
    with pytest.raises(QueueFull):
        pool.lease(SERVICE, one_of("4"))
    coming[0].release()
    coming[1].ready.result()


@without_native
def test_a_model_without_usable_tokenizer_or_end_token_supports_no_grammar(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    for model in (GrammarModel(tmp_path, VOCAB, (EOS,)), GrammarModel(folder, VOCAB, ())):
        pool = GrammarPool({SERVICE: model})
        with pytest.raises(InvalidRequest, match=r"tokenizer|ends an output"):
            pool.lease(SERVICE, one_of("a")).ready.result()
        pool.close()


def test_rows_without_a_grammar_are_not_affected(
    folder: Path, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 60.0)  # plans made by hand do not handle postponed rows
    plain = [SamplingParams(temperature=0.9, top_p=0.9), SamplingParams(repetition_penalty=1.3)]
    prompts = [make_prompt(length, seed=length) for length in (9, 14, 20, 5)]
    bound = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[ab]{4,6}"))

    def run(params: Sequence[SamplingParams]) -> tuple[list[list[int]], list[bytes]]:
        """Tokens, and the logits of the first two rows of every step."""
        scheduler = HandScheduler({SERVICE: folder})
        served = scheduler.models.services[SERVICE]
        seen = []

        def forward(*arguments: Any) -> torch.Tensor:
            logits = served.model.forward(*arguments)
            seen.append(logits[:2].cpu().numpy().tobytes())
            return logits

        scheduler.models.services[SERVICE] = with_forward(served, forward)
        lease = scheduler.executor.grammars.lease(SERVICE, bound.grammar)
        lease.ready.result()
        tokens = scheduler.generate(SERVICE, prompts, 8, sampling=params, seeds=[1, 2, 3, 4])
        scheduler.executor.close()
        return tokens, seen

    alone, logits_alone = run([*plain, SamplingParams(), SamplingParams()])
    together, logits_together = run([*plain, bound, bound])
    assert together[:2] == alone[:2]
    assert logits_together == logits_alone
    for tokens in together[2:]:
        text = letters.text(tokens[: tokens.index(EOS)])
        assert set(text) <= set("ab")
        assert 4 <= len(text) <= 6
