"""Real engines that hold fewer weights than their services have: outputs are those of undisturbed runs."""

from pathlib import Path
from typing import Any

import pytest
from execute_builders import make_model, tiny_config
from service_builders import Walk

from at_hand import on_cpu
from shoal.core import ConfigError
from shoal.execute.model import images
from shoal.execute.model.make_image import make_image
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


def size_of(folders: dict[str, Path], *kinds: str) -> int:
    """Bytes of the weights of these kinds."""
    walk = Walk(folders, [f"{kind}-0" for kind in kinds], weights=WeightsOptions(memory_bytes=1 << 30))
    sizes = {each.weights.num_bytes for each in walk.engine.stats().services.values()}
    walk.engine.close()
    return sum(sizes)


def serve_all(walk: Walk, requests: int = 60) -> None:
    for number in range(requests):
        walk.submit(f"{KINDS[number * 5 % len(KINDS)]}-0")
        walk.step()
    walk.finish()
    walk.check_outputs()


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_outputs_are_those_of_undisturbed_runs(circumstance: str, folders: dict[str, Path]) -> None:
    largest = max(size_of(folders, kind) for kind in KINDS)
    weights = WeightsOptions(memory_bytes=largest, quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights, **CIRCUMSTANCES[circumstance])
    serve_all(walk)
    stats = {name: counted.weights for name, counted in walk.engine.stats().services.items()}
    assert sum(each.evictions for each in stats.values() if each) >= len(KINDS)
    walk.engine.close()


@pytest.mark.parametrize("policy", RESIDENCY_POLICIES)
def test_every_policy_serves_all(policy: str, folders: dict[str, Path]) -> None:
    largest = max(size_of(folders, kind) for kind in KINDS)
    weights = WeightsOptions(memory_bytes=2 * largest, policy=RESIDENCY_POLICIES[policy](), quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights)
    serve_all(walk)
    walk.engine.close()


def test_services_come_and_go_while_weights_do(folders: dict[str, Path]) -> None:
    largest = max(size_of(folders, kind) for kind in KINDS)
    names = [f"{kind}-{number}" for kind in KINDS for number in range(2)]
    weights = WeightsOptions(memory_bytes=round(1.5 * largest), quantum_s=0.02)
    walk = Walk(folders, ["llama-0", "qwen3-0"], weights=weights, preemption_mode="swap")
    walk.walk(8, names, always=("llama-0",))
    walk.finish()
    walk.check_outputs()
    walk.engine.close()


def test_pinned_weights_stay(folders: dict[str, Path]) -> None:
    largest = max(size_of(folders, kind) for kind in KINDS)
    weights = WeightsOptions(memory_bytes=size_of(folders, "llama") + largest, quantum_s=0.02)
    walk = Walk(folders, [f"{kind}-0" for kind in KINDS], weights=weights, pinned=("llama-0",))
    serve_all(walk)
    stats = walk.engine.stats().services
    assert stats["llama-0"].weights.place is Place.RESIDENT
    assert (stats["llama-0"].weights.fetches, stats["llama-0"].weights.evictions) == (1, 0)
    walk.engine.close()


def test_a_budget_that_holds_not_even_one_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"weights\.memory"):
        Walk(folders, ["llama-0"], weights=WeightsOptions(memory_bytes=1000))
