"""Steps of a real model that fail change nobody's output but that of a request which always fails."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from end_to_end_builders import Outcome, make_request, run_engine
from execute_builders import VOCAB, make_model, make_prompt, tiny_config
from failing_engine import POISON, Fails, sabotage
from served import run_served

from crossed import crossed, each_nth
from shoal.cluster.router.router import Router
from shoal.core import NO_GOALS, SLO, Request, Service
from shoal.engine import EngineOptions
from shoal.execute.protocol import Executor
from shoal.execute.torch_executor import TorchExecutor
from shoal.kvcache import KVCacheOptions

pytestmark = pytest.mark.failing_steps

OUTPUT = 12
LENGTHS = (1, 9, 16, 33, 48, 60)
POISONED = "a3"
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap"},
    "recompute, depth 2": {"preemption_mode": "recompute", "depth": 2},
    "swap, depth 2": {"preemption_mode": "swap", "depth": 2},
    "recompute, 4 iterations": {"preemption_mode": "recompute", "max_iterations": 4},
    "swap, 4 iterations": {"preemption_mode": "swap", "max_iterations": 4},
    "little memory, swap, depth 2": {
        "preemption_mode": "swap",
        "depth": 2,
        "memory_bytes": 160 << 10,
        "block_size": 4,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("failures")
    return {
        name: make_model(root / name, tiny_config(kind)) for name, kind in (("a", "llama"), ("b", "gemma3"))
    }


def requests() -> list[Request]:
    """Greedy and sampled; two share a beginning."""
    prompts = [make_prompt(length, seed=length) for length in LENGTHS]
    prompts.append(prompts[-1][:40] + make_prompt(8, seed=99))
    return [
        make_request(
            f"{service}{number}", service, prompt, OUTPUT, seed=100 + number, temperature=float(number % 2)
        )
        for number, prompt in enumerate(prompts)
        for service in "ab"
    ]


@pytest.fixture(scope="module")
def undisturbed(folders: dict[str, Path]) -> Outcome:
    return run_engine(folders, [requests()])


def run(folders: dict[str, Path], fails: Fails, goals: SLO = NO_GOALS, **settings: Any) -> Outcome:
    """Two rounds of the same requests, so that the second, whose names end in ``x``, finds prefixes."""

    def prepare(executor: Executor) -> None:
        assert isinstance(executor, TorchExecutor)
        sabotage(executor, fails)

    first = [replace(request, slo=goals) for request in requests()]
    again = [replace(request, id=f"{request.id}x") for request in first]
    return run_engine(folders, [first, again], prepare=prepare, **settings)


def check(outcome: Outcome, undisturbed: Outcome, lost: Callable[[str], bool]) -> None:
    for request in requests():
        for name in (request.id, f"{request.id}x"):
            if lost(name):
                assert "OutOfMemoryError: out of memory, tried to allocate 20 GiB" in outcome.errors[name]
                assert outcome.tokens[name] == []
            else:
                assert name not in outcome.errors
                assert outcome.tokens[name] == undisturbed.tokens[request.id]
    assert outcome.cached_tokens > 0


@pytest.mark.parametrize("settings", each_nth(SETTINGS, 3, at=0))
def test_a_device_too_small_for_larger_batches_serves_everybody(
    settings: str, folders: dict[str, Path], undisturbed: Outcome
) -> None:
    outcome = run(folders, lambda plan, _: len(plan.seq_ids) > 2, **SETTINGS[settings])
    check(outcome, undisturbed, lambda name: False)
    assert min(outcome.failed_steps.values()) > 0
    assert sum(outcome.failed_steps.values()) < 40


@pytest.mark.parametrize("settings", each_nth(SETTINGS, 3, at=1))
def test_only_a_request_that_fails_alone_is_lost(
    settings: str, folders: dict[str, Path], undisturbed: Outcome
) -> None:
    [poison] = [request.prompt for request in requests() if request.id == POISONED]

    def fails(plan: Any, rows: Sequence[Any]) -> bool:
        return plan.service == "a" and any(row.tokens[: len(poison)] == poison for row in rows)

    outcome = run(folders, fails, **SETTINGS[settings])
    check(outcome, undisturbed, lambda name: name.rstrip("x") == POISONED)
    assert 0 < outcome.failed_steps["a"] < 14
    assert outcome.failed_steps["b"] == 0


@pytest.mark.parametrize("settings", each_nth(SETTINGS, 3, at=2))
def test_a_service_that_always_fails_leaves_the_other_alone(
    settings: str, folders: dict[str, Path], undisturbed: Outcome
) -> None:
    outcome = run(folders, lambda plan, _: plan.service == "b", **SETTINGS[settings])
    check(outcome, undisturbed, lambda name: name.startswith("b"))
    assert 14 <= outcome.failed_steps["b"] < 20
    assert outcome.failed_steps["a"] == 0


@pytest.mark.parametrize(
    ("on_hopeless", "settings"),
    crossed(["last", "refuse"], ["recompute, 4 iterations", "little memory, swap, depth 2"]),
)
def test_who_is_too_late_because_steps_fail_is_refused_or_served_whole(
    on_hopeless: str, settings: str, folders: dict[str, Path], undisturbed: Outcome
) -> None:
    outcome = run(
        folders,
        lambda plan, _: len(plan.seq_ids) > 2,
        goals=SLO(ttft_s=0.3),
        on_hopeless=on_hopeless,
        **SETTINGS[settings],
    )
    for request in requests():
        for name in (request.id, f"{request.id}x"):
            if name in outcome.errors:
                assert "(ttft 0.3 s) can no longer be met" in outcome.errors[name]
                assert outcome.tokens[name] == []
            else:
                assert outcome.tokens[name] == undisturbed.tokens[request.id]
    assert min(outcome.failed_steps.values()) > 0
    assert (len(outcome.errors) > 0) == (on_hopeless == "refuse")
    assert len(outcome.errors) < len(outcome.tokens)


class IdTokenizer:
    """Token ids as text."""

    vocab_size = VOCAB
    eos_token_ids = (2,)
    has_chat_template = False

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in tokens)


@pytest.mark.slow
def test_a_served_request_that_fails_alone_gets_an_error_and_the_server_goes_on(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)

    async def ask(client: httpx.AsyncClient, prompt: list[int]) -> httpx.Response:
        body = {"model": "a", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        return await client.post("/v1/completions", json=body)

    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        prompts = [make_prompt(10, seed=seed) for seed in range(6)]
        alone = [(await ask(client, prompt)).json()["choices"][0]["text"] for prompt in prompts]
        failed, *answers = await asyncio.gather(
            ask(client, [POISON, *make_prompt(9)]), *(ask(client, prompt) for prompt in prompts)
        )
        assert failed.status_code == 500
        assert "OutOfMemoryError" in failed.json()["error"]["message"]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
        assert (await client.get("/health")).status_code == 200
        stats = await router.stats("0")
        assert stats.services["a"].failed_steps > 0
        assert stats.pool.live_bytes == 0

    services = (Service(name="a", model="a", dtype="float32"),)
    options = EngineOptions(services=services, kv_cache=KVCacheOptions(memory_bytes=1 << 20))
    run_served(
        options,
        {"a": folders["a"]},
        {"a": IdTokenizer()},
        scenario,
        builder="failing_engine:build_failing_engine",
    )
