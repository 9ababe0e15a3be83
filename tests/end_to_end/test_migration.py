"""A real model says the same whether its requests move between engines with their KV or stay."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import make_request
from engine_pairs import Answer, Client, Host, Move, hosts
from execute_builders import make_model, make_prompt, tiny_config

from shoal.core import Request, Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine
from shoal.execute.loading import load_models
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions

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
    models = [
        load_models(services, folders, device="cpu", threads=1, attention="auto", progress=None)
        for _ in range(2)
    ]

    def build(memory_bytes: Sequence[int] = (4 << 20, 4 << 20), **options: Any) -> list[Engine]:
        cache = {name: options.pop(name) for name in ("layout", "prefix_caching", "dtype") if name in options}
        return [
            assemble_engine(
                EngineOptions(
                    services=services,
                    kv_cache=KVCacheOptions(memory_bytes=size, block_size=4, **cache),
                    scheduler=SchedulerOptions(**options),
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
        for one, other in zip(answer.logprobs, plain.logprobs, strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [lp for _, lp in one.top] == pytest.approx([lp for _, lp in other.top], abs=1e-3)


def move_all(
    source: Host, destination: Host, moves: Sequence[Move], others: Sequence[Request] = ()
) -> dict[str, Answer]:
    """Submit requests with ``others`` to the source, move some, and wait for the ends of all."""
    client = Client(source, destination, moves)
    client.submit(source, *[move.request for move in moves], *others)
    client.run()
    return client.answers


@pytest.mark.parametrize("live", [True, False], ids=["live", "stop"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", ["merged", "split"])
def test_requests_move_after_every_token(live: bool, depth: int, layout: str, two_engines: Engines) -> None:
    """Two at once, beside one of the other service; prefixes are cached in half of the cases."""
    options = {"depth": depth, "layout": layout, "prefix_caching": live}
    requests = [ask("r", "greedy"), ask("s", "seeded", prompt=21), ask("other", "greedy", "b", 30)]
    expected = undisturbed(two_engines, requests, **options)
    stopped_at = set()
    with hosts(*two_engines(**options)) as (source, destination):
        for at in range(1, OUTPUT):
            moves = [Move(request, at, live) for request in requests[:2]]
            check_same(move_all(source, destination, moves, requests[2:]), expected)
            for move in moves:
                # The last ones end before they are stopped.
                assert move.state == "done" or at > OUTPUT - 4
                if move.stopped is not None:
                    stopped_at.add(move.stopped.output_tokens)
        served = [host.engine.stats().services for host in (source, destination)]
    assert len(stopped_at & set(range(OUTPUT - 2))) >= (OUTPUT // 2 if live else OUTPUT - 5)
    for services in served:
        assert sum(service.recomputed_tokens + service.evictions for service in services.values()) == 0
