"""Services come and go in engines with tiny models, and nobody else notices but by the time it takes."""

from pathlib import Path
from typing import Any

import pytest
from execute_builders import make_model, tiny_config
from service_builders import Walk

KINDS = ("llama", "qwen3", "gemma3", "gpt2", "opt", "mixtral")
NAMES = [f"{kind}-{number}" for kind in KINDS for number in range(2)]
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "swap": {"preemption_mode": "swap"},
    "recompute": {"preemption_mode": "recompute"},
    "little swap memory": {"preemption_mode": "swap", "kv": {"swap_bytes": 24 << 10}},
    "depth 2": {"depth": 2},
    "no prefix caching": {"kv": {"prefix_caching": False}},
    "many iterations": {"max_iterations": 4},
    "little memory": {"kv": {"memory_bytes": 128 << 10}, "depth": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind), seed=at) for at, kind in enumerate(KINDS)}


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_outputs_are_those_of_undisturbed_runs(circumstance: str, folders: dict[str, Path]) -> None:
    settings = CIRCUMSTANCES[circumstance]
    walk = Walk(folders, ["llama-0", "qwen3-0"], seed=len(circumstance), **settings)
    walk.walk(12, NAMES, always=("llama-0",))
    walk.finish()
    walk.check_outputs()
    walk.engine.close()
    print(circumstance, len(walk.asked), walk.relayouts, walk.unlike)
