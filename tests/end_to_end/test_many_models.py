"""Real engines that hold fewer weights than their services have: outputs are those of undisturbed runs."""

from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import Outcome, _answer, make_request
from execute_builders import make_model, make_prompt, tiny_config
from grammar_builders import write_tokenizer
from service_builders import Walk

from at_hand import on_cpu
from crossed import each_nth
from shoal.core import ConfigError, Grammar, GrammarKind, Request, Service
from shoal.engine import EngineOptions, build_engine
from shoal.execute.model import images
from shoal.execute.model.make_image import make_image
from shoal.kvcache import KVCacheOptions
from shoal.schedule import WeightsOptions
from shoal.schedule.policies.residency import RESIDENCY_POLICIES, Place

pytestmark = on_cpu
KINDS = ("llama", "qwen3", "gemma3", "gpt2", "opt", "mixtral")
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "swap": {"preemption_mode": "swap"},
    "recompute": {"preemption_mode": "recompute"},
    "little KV": {"preemption_mode": "swap", "kv": {"memory_bytes": 96 << 10}},
    "little KV, recomputed": {"preemption_mode": "recompute", "kv": {"memory_bytes": 96 << 10}},
    "little swap memory": {
        "preemption_mode": "swap",
        "kv": {"memory_bytes": 96 << 10, "swap_bytes": 24 << 10},
    },
    "depth 2": {"depth": 2},
    "many iterations": {"max_iterations": 4},
    "split layout": {"kv": {"layout": "split"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind), seed=at) for at, kind in enumerate(KINDS)}


@pytest.fixture(scope="module", autouse=True)
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache of its own, in which images are made without a child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(images, "_make_in_child", lambda order, target: make_image(*order, target))
        yield


def sizes_of(folders: dict[str, Path]) -> dict[str, int]:
    """Bytes of the weights of each kind."""
    walk = Walk(folders, [f"{kind}-0" for kind in folders], weights=WeightsOptions(memory_bytes=1 << 30))
    stats = walk.engine.stats().services
    walk.engine.close()
    return {kind: stats[f"{kind}-0"].weights.num_bytes for kind in folders}


@pytest.fixture(scope="module")
def sizes(folders: dict[str, Path]) -> dict[str, int]:
    return sizes_of(folders)


def serve_all(walk: Walk, requests: int = 60) -> None:
    for number in range(requests):
        walk.submit(f"{KINDS[number * 5 % len(KINDS)]}-0")
        walk.step()
    walk.finish()
    walk.check_outputs()


@pytest.mark.parametrize("circumstance", each_nth(CIRCUMSTANCES, 3))
def test_outputs_are_those_of_undisturbed_runs(
    circumstance: str, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    largest = max(sizes.values())
    weights = WeightsOptions(memory_bytes=largest, quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights, **CIRCUMSTANCES[circumstance])
    serve_all(walk)
    stats = {name: counted.weights for name, counted in walk.engine.stats().services.items()}
    assert sum(each.evictions for each in stats.values() if each) >= len(KINDS)
    walk.engine.close()


@pytest.mark.parametrize("policy", RESIDENCY_POLICIES)
def test_every_policy_serves_all(policy: str, folders: dict[str, Path], sizes: dict[str, int]) -> None:
    largest = max(sizes.values())
    weights = WeightsOptions(memory_bytes=2 * largest, policy=RESIDENCY_POLICIES[policy](), quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights)
    serve_all(walk)
    walk.engine.close()


def test_services_come_and_go_while_weights_do(folders: dict[str, Path], sizes: dict[str, int]) -> None:
    largest = max(sizes.values())
    names = [f"{kind}-{number}" for kind in KINDS for number in range(2)]
    weights = WeightsOptions(memory_bytes=round(1.5 * largest), quantum_s=0.02)
    walk = Walk(folders, ["llama-0", "qwen3-0"], weights=weights, preemption_mode="swap")
    walk.walk(8, names, always=("llama-0",))
    walk.finish()
    walk.check_outputs()
    walk.engine.close()


def test_pinned_weights_stay(folders: dict[str, Path], sizes: dict[str, int]) -> None:
    largest = max(sizes.values())
    weights = WeightsOptions(memory_bytes=sizes["llama"] + largest, quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights, pinned=("llama-0",))
    serve_all(walk)
    stats = walk.engine.stats().services
    assert stats["llama-0"].weights.place is Place.RESIDENT
    assert (stats["llama-0"].weights.fetches, stats["llama-0"].weights.evictions) == (1, 0)
    walk.engine.close()


def test_weights_that_are_pinned_while_others_come_and_go_stay(
    folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    largest = max(sizes.values())
    weights = WeightsOptions(memory_bytes=sizes["llama"] + largest, quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights)
    serve_all(walk)
    walk.engine.pin_service("llama-0", True).result()
    before = walk.engine.stats().services["llama-0"].weights
    serve_all(walk)
    after = walk.engine.stats().services["llama-0"].weights
    assert (after.place, after.pinned, after.evictions) == (Place.RESIDENT, True, before.evictions)
    assert after.fetches <= before.fetches + 1
    walk.engine.close()


def test_a_budget_that_holds_not_even_one_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"weights\.memory"):
        Walk(folders, ["llama-0"], weights=WeightsOptions(memory_bytes=1000))


def answers(folders: dict[str, Path], requests: list[Request], weights: WeightsOptions) -> Outcome:
    """What an engine answers to requests that come two steps apart."""
    options = EngineOptions(
        services=tuple(Service(name=name, model=name, dtype="float32") for name in folders),
        kv_cache=KVCacheOptions(memory_bytes=1 << 20, block_size=4),
        weights=weights,
        threads=1,
    )
    engine, _ = build_engine(options, folders)
    outcome = Outcome()
    _answer(engine, [(2 * at, request) for at, request in enumerate(requests)], outcome, lambda _: None)
    evictions = [each.weights.evictions for each in engine.stats().services.values() if each.weights]
    assert not weights.memory_bytes or min(evictions) > 0
    engine.close()
    return outcome


def test_grammars_penalties_and_logprobs_stay_where_they_are(tmp_path: Path) -> None:
    models = {kind: make_model(tmp_path / kind, tiny_config(kind)) for kind in ("llama", "qwen3")}
    for folder in models.values():
        write_tokenizer(folder)
    sampling: list[dict[str, Any]] = [
        {"grammar": Grammar(GrammarKind.REGEX, "[abc]{3}(0|1)+x[ab01]{10,14}"), "ignore_eos": False},
        {"temperature": 1.3, "top_k": 11, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_p": 0.95, "logprobs": 2},
        {"prompt_logprobs": 1},
        {"embed": True, "max_tokens": 1},
    ]
    requests = [
        make_request(
            str(at),
            list(models)[at % 2],
            make_prompt(5 + 4 * at, seed=at),
            30,
            seed=at,
            **sampling[at // 2 % 5],
        )
        for at in range(20)
    ]
    with_all = answers(models, requests, WeightsOptions())
    one = max(sizes_of(models).values())
    with_one = answers(models, requests, WeightsOptions(memory_bytes=one, quantum_s=0.01))
    assert with_one.tokens == with_all.tokens
    assert not with_one.errors
    assert with_one.embeddings.keys() == with_all.embeddings.keys()
    for given, expected in (
        (with_one.logprobs, with_all.logprobs),
        (with_one.prompt_logprobs, with_all.prompt_logprobs),
    ):
        assert given.keys() == expected.keys()
        for name, entries in given.items():
            assert [entry.token for entry in entries] == [entry.token for entry in expected[name]]
