"""A real model says the same whether its requests move between engines with their KV or stay."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import make_request
from engine_pairs import Answer, Client, EngineHost, Migration, hosts
from execute_builders import make_model, make_prompt, tiny_config

from at_hand import DEVICE, on_cpu
from crossed import crossed
from shoal.core import Request, Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine
from shoal.engine.migration.kv_format import kv_format
from shoal.execute.model.model_set import ModelSet, load_models, weight_bytes
from shoal.kvcache import KVCacheOptions, KVShape, LayerShape, plan_layout
from shoal.schedule import SchedulerOptions, Slice, WeightsOptions

OUTPUT = 14
MODELS = {"a": "llama", "b": "gemma3"}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 1.0, "logprobs": 1, "repetition_penalty": 1.2},
}
Engines = Callable[..., list[Engine]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / kind, tiny_config(kind)) for name, kind in MODELS.items()}


@pytest.fixture(scope="module")
def two_engines(folders: dict[str, Path]) -> Engines:
    """Makes two engines with the same models, and pools and schedulers of their own."""
    services = tuple(Service(name=name, model=name, dtype="float32") for name in folders)
    return engine_maker(
        services,
        [
            load_models(services, folders, device=DEVICE, threads=1, attention="auto", progress=None)
            for _ in range(2)
        ],
    )


def engine_maker(
    services: tuple[Service, ...], models: Sequence[ModelSet], weights: WeightsOptions | None = None
) -> Engines:
    """Makes engines, one for each of ``models``."""

    def build(memory_bytes: Sequence[int] = (4 << 20, 4 << 20), **options: Any) -> list[Engine]:
        cache = {name: options.pop(name) for name in ("layout", "prefix_caching", "dtype") if name in options}
        return [
            assemble_engine(
                EngineOptions(
                    services=services,
                    kv_cache=KVCacheOptions(memory_bytes=size, block_size=4, **cache),
                    scheduler=SchedulerOptions(**options),
                    weights=weights or WeightsOptions(),
                ),
                own,
                threads=1,
            )[0]
            for size, own in zip(memory_bytes, models, strict=True)
        ]

    return build


def ask(name: str, case: str, service: str = "a", prompt: int = 13, output: int = OUTPUT) -> Request:
    seed = sum(name.encode())
    return make_request(name, service, make_prompt(prompt, seed), output, seed, **SAMPLING[case])


def undisturbed(two_engines: Engines, requests: Sequence[Request], **options: Any) -> dict[str, Answer]:
    with hosts(*two_engines(**options)) as (source, destination):
        client = Client(source, destination, [])
        for request in requests:
            client.submit(source, request)
        client.run()
    return client.answers


def check_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        plain = expected[name]
        assert answer.tokens == plain.tokens
        assert answer.finish == plain.finish
        mine, its = answer.prompt_logprobs + answer.logprobs, plain.prompt_logprobs + plain.logprobs
        for one, other in zip(mine, its, strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [lp for _, lp in one.top] == pytest.approx([lp for _, lp in other.top], abs=1e-3)


def move_all(
    source: EngineHost, destination: EngineHost, moves: Sequence[Migration], others: Sequence[Request] = ()
) -> dict[str, Answer]:
    """Submit requests with ``others`` to the source, move some, and wait for the ends of all."""
    client = Client(source, destination, moves)
    client.submit(source, *[move.request for move in moves], *others)
    client.run()
    return client.answers


@on_cpu
@pytest.mark.parametrize(("depth", "live"), crossed([1, 2], [True, False]), ids=str)
def test_requests_move_while_their_weights_come_and_go(
    depth: int, live: bool, folders: dict[str, Path], two_engines: Engines, image_cache: Path
) -> None:
    """Each engine holds the weights of one service, and both have requests."""
    services = tuple(Service(name=name, model=name, dtype="float32") for name in folders)
    models = [load_models(services, folders, threads=1, weights_bytes=1 << 30) for _ in range(2)]
    largest = max([weight_bytes(served.model) for served in models[0].services.values()])
    weights = WeightsOptions(memory_bytes=largest, quantum_s=0.005)
    limited = engine_maker(services, models, weights)
    options = {"depth": depth}
    requests = [ask("r", "greedy"), ask("s", "seeded", prompt=21)]
    others = [ask("other", "greedy", "b", 30), ask("another", "seeded", "b", 9, 30)]
    expected = undisturbed(two_engines, [*requests, *others], **options)
    with hosts(*limited(**options)) as (source, destination):
        for at in range(1, OUTPUT, 3):
            moves = [Migration(request, at, live) for request in requests]
            check_same(move_all(source, destination, moves, others), expected)
        stats = source.engine.stats().services
        assert all(stats[name].weights.evictions for name in folders)
        assert source.is_free
        assert destination.is_free


@pytest.mark.parametrize(
    ("layout", "depth", "live"),
    crossed(["merged", "split"], [1, 2], [True, False]),
    ids=lambda value: ("stop", "live")[value] if isinstance(value, bool) else str(value),
)
def test_requests_move_after_every_token(layout: str, depth: int, live: bool, two_engines: Engines) -> None:
    """Two at once, beside one of the other service; prefixes are cached in half of the cases."""
    options = {"depth": depth, "layout": layout, "prefix_caching": live}
    requests = [ask("r", "greedy"), ask("s", "seeded", prompt=21), ask("other", "greedy", "b", 30)]
    expected = undisturbed(two_engines, requests, **options)
    stopped_at = set()
    with hosts(*two_engines(**options)) as (source, destination):
        for at in range(1, OUTPUT):
            moves = [Migration(request, at, live) for request in requests[:2]]
            check_same(move_all(source, destination, moves, requests[2:]), expected)
            for move in moves:
                # The last ones end before they are stopped.
                assert move.state == "done" or at > OUTPUT - 4
                if move.stopped is not None:
                    stopped_at.add(move.stopped.output_tokens)
        served = [host.engine.stats().services for host in (source, destination)]
    assert len(stopped_at & set(range(OUTPUT - 2))) >= (OUTPUT // 3 if live else OUTPUT - 5)
    for services in served:
        assert sum(service.recomputed_tokens + service.preemptions for service in services.values()) == 0


@on_cpu
@pytest.mark.parametrize("layout", ["merged", "split"])
def test_int8_kv_of_two_services_moves_within_prompts_and_answers(layout: str, two_engines: Engines) -> None:
    """What has been computed is not rounded again."""
    options = {"dtype": "int8", "layout": layout, "max_batched_tokens": 9, "depth": 2, "max_running": 8}
    requests = [
        ask(f"{service}{at}", case, service, prompt=40 + at)
        for at, (service, case) in enumerate(product(MODELS, SAMPLING))
    ]
    expected = undisturbed(two_engines, requests, **options)
    with hosts(*two_engines(**options)) as (source, destination):
        for at, turns in ((0, 2), (0, 5), (4, 0)):
            moves = [Migration(request, at, live=False, after_turns=turns) for request in requests]
            check_same(move_all(source, destination, moves), expected)
            assert sum(move.state == "done" for move in moves) >= 2


@pytest.mark.parametrize("turns", range(1, 6))
def test_log_probabilities_of_a_prompt_are_told_once(turns: int, two_engines: Engines) -> None:
    options = {"max_batched_tokens": 9}
    request = make_request("r", "a", make_prompt(50), OUTPUT, prompt_logprobs=2)
    expected = undisturbed(two_engines, [request], **options)
    assert len(expected["r"].prompt_logprobs) == 49
    with hosts(*two_engines(**options)) as (source, destination):
        moves = [Migration(request, 0, live=False, after_turns=turns)]
        check_same(move_all(source, destination, moves), expected)
        assert moves[0].stopped is not None
        assert 0 < moves[0].stopped.computed < 50


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_prefixes_that_both_engines_know_move_and_are_found_behind_it(
    prefix_caching: bool, two_engines: Engines
) -> None:
    options = {"prefix_caching": prefix_caching}
    request, again = ask("r", "greedy", prompt=30), ask("again", "greedy", prompt=30)
    again = replace(again, prompt=request.prompt)
    expected = undisturbed(two_engines, [request, again], **options)
    with hosts(*two_engines(**options)) as (source, destination):
        check_same(move_all(source, destination, [], [request]), expected)
        check_same(move_all(destination, source, [], [request]), expected)
        moves = [Migration(request, 4)]
        check_same(move_all(source, destination, moves), expected)
        assert moves[0].state == "done"
        check_same(move_all(destination, source, [], [again]), expected)
        cached = destination.engine.stats().services["a"].cached_tokens
        assert cached == (28 if prefix_caching else 0)


def test_formats_are_equal_where_kv_means_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    llama, other = folders["a"], make_model(tmp_path / "other", tiny_config("llama"), seed=1)
    shape = KVShape(dtype="float32", layers=(LayerShape(2, 8, 8),) * 3)

    def form(folder: Path = llama, shape: KVShape = shape, weights: str = "float32", **cache: Any) -> str:
        sizes = {"memory_bytes": 1 << 20, "block_size": 4, "kind": "merged"} | cache
        return kv_format(plan_layout({"a": shape, "b": shape}, **sizes), "a", folder, weights)

    same = [form(), form(shutil.copytree(llama, tmp_path / "copy")), form(memory_bytes=2 << 20)]
    assert len(set(same)) == 1
    others = [
        form(other),
        form(shape=replace(shape, int8=True)),
        form(weights="int8"),
        form(kind="split"),
        form(block_size=8),
    ]
    assert len({*same, *others}) == 1 + len(others)


def test_an_engine_says_in_what_form_its_kv_is(folders: dict[str, Path]) -> None:
    services = tuple(Service(name=name, model=name, dtype="float32") for name in folders)
    models = load_models(services, folders, device=DEVICE, threads=1, attention="auto", progress=None)
    cache = KVCacheOptions(memory_bytes=1 << 20)
    forms = []
    for scheduler in (SchedulerOptions(), SchedulerOptions(depth=2), SchedulerOptions(admission=Slice())):
        options = EngineOptions(services=services, kv_cache=cache, scheduler=scheduler)
        engine, info = assemble_engine(options, models, threads=1)
        engine.close()
        forms.append([info.services[name].kv_format for name in folders])
    assert forms[0] == forms[1]
    assert len({*forms[0], ""}) == 3
    assert forms[2] == ["", ""], "slices are handed out with their blocks"
