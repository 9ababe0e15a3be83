"""A real model says the same whether it is interrupted or not: after every token, under every preset."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import make_request, run_batch
from execute_builders import make_model, make_prompt, tiny_config
from references import assert_greedy

from at_hand import DEVICE
from crossed import crossed, each_nth
from shoal.config import PRESETS
from shoal.core import FinishReason, Request, SamplingParams, Service, TokenLogprobs, derive_seed
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine
from shoal.execute.model.model_set import load_models
from shoal.frontend.offline_batch import Completion, OfflineBatch
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions, Slice

OUTPUT = 24
EOS = 2
MANY, ONE = "gemma3", "gpt2"
PROMPT = make_prompt(13, seed=3)
NewEngine = Callable[..., Engine]


class Letters:
    """A letter for each token."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in (MANY, ONE)}


@pytest.fixture(scope="module")
def new_engine(folders: dict[str, Path]) -> NewEngine:
    """Makes engines of the same two models, with pools and schedulers of their own."""
    services = tuple(Service(name=name, model=name, dtype="float32") for name in folders)
    models = load_models(services, folders, device=DEVICE, threads=1, attention="auto", progress=None)

    def build(
        scheduler: SchedulerOptions, memory_bytes: int = 4 << 20, prefix_caching: bool = True, **cache: Any
    ) -> Engine:
        kv_cache = KVCacheOptions(
            memory_bytes=memory_bytes, block_size=4, prefix_caching=prefix_caching, **cache
        )
        options = EngineOptions(services=services, kv_cache=kv_cache, scheduler=scheduler)
        return assemble_engine(options, models, threads=1)[0]

    return build


def answer(engine: Engine, calls: Sequence[tuple[SamplingParams, Sequence[int]]]) -> list[Completion]:
    """What becomes of the prompt for each (parameters, output to go on from), all at once."""
    batch = OfflineBatch(engine)
    for sampling, output in calls:
        batch.add("", MANY, PROMPT, sampling, Letters(), output=output, eos_token_ids=(EOS,))
    return [completion for output in run_batch(engine, batch) for completion in output.outputs]


def check_logprobs(mine: Sequence[TokenLogprobs] | None, its: Sequence[TokenLogprobs] | None) -> None:
    for one, other in zip(mine or (), its or (), strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [lp for _, lp in one.top] == pytest.approx([lp for _, lp in other.top], abs=1e-4)


PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True, "logprobs": 3},
    "greedy, penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "min_tokens": 20, "logprobs": 1},
    "seeded": {"temperature": 1.0, "seed": 3, "logprobs": 0},
    "seeded, penalties": {"temperature": 0.9, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2},
    "seeded, presence": {"temperature": 0.9, "seed": 5, "top_k": 20, "presence_penalty": 1.0, "logprobs": 2},
    "no most": {"temperature": 1.0, "seed": 6, "max_tokens": None, "stop_token_ids": tuple(range(7, 20))},
}


def params_of(case: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": OUTPUT} | PLAIN[case])


def with_ends(completion: Completion, params: SamplingParams) -> list[SamplingParams]:
    """The same with stop strings and stop tokens that come within the output."""
    cut = len(completion.tokens) // 2
    text, token = completion.text, completion.tokens[cut]
    return [
        replace(params, stop=(text[cut - 1 : cut + 3],)),
        replace(params, stop=(text[cut], text[cut - 2 : cut + 2], "not said"), min_tokens=cut - 2),
        replace(params, stop_token_ids=(token,)),
        replace(params, stop_token_ids=(token,), min_tokens=cut + 3),
    ]


@pytest.mark.parametrize(("case", "depth"), crossed(PLAIN, [1, 2]))
def test_the_rest_is_the_same_after_every_token(case: str, depth: int, new_engine: NewEngine) -> None:
    engine, params = new_engine(SchedulerOptions(depth=depth)), params_of(case)
    [plain] = answer(engine, [(params, ())])
    stop_reasons = check_every_cut(engine, [params, *with_ends(plain, params)])
    assert {type(reason) for reason in stop_reasons} >= {str, int}


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "no prefix caching": {"prefix_caching": False},
    "chunks of 7": {"max_batched_tokens": 7},
    "several iterations": {"max_iterations": 4},
}


@pytest.mark.parametrize(("case", "circumstance"), crossed(["greedy", "seeded, penalties"], CIRCUMSTANCES))
def test_the_rest_is_the_same_in_other_circumstances(
    case: str, circumstance: str, new_engine: NewEngine
) -> None:
    options = dict(CIRCUMSTANCES[circumstance])
    prefix_caching = options.pop("prefix_caching", True)
    engine = new_engine(SchedulerOptions(**options), prefix_caching=prefix_caching)
    check_every_cut(engine, [params_of(case)])


def check_every_cut(engine: Engine, cases: Sequence[SamplingParams]) -> list[str | int | None]:
    """Go on from every beginning of each output, all at once; returns their stop reasons."""
    stop_reasons = []
    for params in cases:
        [whole] = answer(engine, [(params, ())])
        stop_reasons.append(whole.stop_reason)
        cuts = range(len(whole.tokens) + 1)
        resumed = answer(engine, [(params, whole.tokens[:cut]) for cut in cuts])
        for cut, completion in enumerate(resumed):
            check_logprobs(completion.logprobs, (whole.logprobs or ())[cut:])
            apart = {"logprobs": None, "record": None, "cached_tokens": 0}
            assert replace(completion, **apart) == replace(whole, **apart)
            assert completion.record is not None
            assert completion.record.output_tokens == len(whole.tokens)
    assert engine._pool.live_blocks(MANY) == 0
    engine._pool.check_integrity()
    engine.close()
    return stop_reasons


TUNED: dict[str, dict[str, Any]] = {"scls-cb": {"admission": Slice(tokens=6)}}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 1.2, "top_k": 11, "frequency_penalty": 0.5},
]


def some_requests() -> list[Request]:
    return [
        make_request(
            f"{name}-{i}", name, make_prompt(length, seed=i), OUTPUT, derive_seed(i, 0), **SAMPLING[i % 3]
        )
        for i, length in enumerate((1, 9, 16, 33, 48, 20))
        for name in (MANY, ONE)
    ]


class Told:
    """What the engines told of every request."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        self.logprobs: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
        self.ends: dict[str, FinishReason] = {}

    def step(self, engine: Engine) -> None:
        for event in engine.step():
            assert event.request_id not in self.ends
            self.tokens[event.request_id] += event.tokens
            self.logprobs[event.request_id] += event.logprobs or ()
            if event.finish is not None:
                self.ends[event.request_id] = event.finish

    def finish(self, engine: Engine) -> None:
        while engine.busy:
            self.step(engine)


@pytest.fixture(scope="module")
def alone(new_engine: NewEngine, folders: dict[str, Path]) -> Told:
    """Each request by itself, without interruption."""
    told, engine = Told(some_requests()), new_engine(SchedulerOptions(), prefix_caching=False)
    for request in some_requests():
        engine.submit(request)
        told.finish(engine)
        if request.sampling.temperature == 0:
            assert_greedy(folders[request.service], request.prompt, told.tokens[request.id], OUTPUT)
    engine.close()
    return told


@pytest.mark.parametrize("preset", each_nth(PRESETS, 5, at=1))
def test_requests_move_between_engines_under_every_preset(
    preset: str, new_engine: NewEngine, alone: Told
) -> None:
    """All that are unfinished move to and fro every few steps, one engine with depth 1, the other with 2."""
    chosen = replace(PRESETS[preset].scheduler, **TUNED.get(preset, {}))
    build = partial(new_engine, layout=PRESETS[preset].layout)
    engines = [build(replace(chosen, depth=1), 160 << 10), build(replace(chosen, depth=2), 110 << 10)]
    requests, told = some_requests(), Told(some_requests())
    moves = 0
    while requests:
        engine = engines[moves % 2]
        engine.submit(*requests)
        for _ in range(9):
            told.step(engine)
        moved = [engine.detach(request.id) for request in requests]
        requests = [request for request in moved if request is not None]
        told.finish(engine)
        assert all(engine._pool.live_blocks(name) == 0 for name in (MANY, ONE))
        engine._pool.check_integrity()
        for request in requests:
            assert request.output_tokens == tuple(told.tokens[request.id])
        moves += 1
        assert moves < 60, "no end in sight"
    assert moves > 4
    assert told.tokens == alone.tokens
    assert told.ends == alone.ends
    for name, logprobs in told.logprobs.items():
        check_logprobs(logprobs, alone.logprobs[name])
    counted = [engine.stats().services[name] for engine in engines for name in (MANY, ONE)]
    assert sum(service.prompt_tokens for service in counted) == sum(
        len(request.prompt) for request in some_requests()
    )
    for engine in engines:
        engine.close()
