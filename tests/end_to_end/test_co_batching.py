"""Two services on one real model: what they say together is what each says by itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import OVERCOMMIT, make_request, run_engine
from execute_builders import KINDS, make_model, make_prompt, tiny_config
from failing_engine import sabotage
from references import assert_greedy

from shoal.core import Request, StepPlan
from shoal.execute.protocol import Executor
from shoal.execute.torch_executor import TorchExecutor

NAMES = ("chat", "code")
COUNT = 24
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """All plans that executors get."""
    seen: list[StepPlan] = []
    apply = TorchExecutor._apply

    def note(self: TorchExecutor, plan: StepPlan, *others: Any) -> None:
        seen.append(plan)
        apply(self, plan, *others)

    monkeypatch.setattr(TorchExecutor, "_apply", note)
    return seen


def make_requests(names: Sequence[str] = NAMES) -> list[Request]:
    """Of each service the same, greedy and sampled; with prompts that begin alike."""
    return [
        make_request(
            f"{number}",
            names[number % len(names)],
            make_prompt(12) + make_prompt(3 + 5 * number, seed=number),
            COUNT - number,
            seed=number,
            **(SAMPLED if number % 4 > 1 else {}),
        )
        for number in range(8)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers(models: dict[str, Path], kind: str, plans: list[StepPlan]) -> None:
    folders = dict.fromkeys(NAMES, models[kind])
    requests = [
        make_request(f"{number}", NAMES[number % 2], make_prompt(9 + 4 * number, seed=number), COUNT)
        for number in range(4)
    ]
    outcome = run_engine(folders, [requests])
    for request in requests:
        assert_greedy(models[kind], request.prompt, outcome.tokens[request.id], COUNT)
    assert any(plan.co_batched for plan in plans)


@pytest.mark.parametrize(
    "circumstances",
    [
        {},
        {"depth": 2},
        {"max_iterations": 4},
        {"co_batch_rows": 1, "every": 3},
        {"memory_bytes": 96 << 10, "block_size": 4, **OVERCOMMIT},
        {"memory_bytes": 96 << 10, "block_size": 4, "preemption_mode": "recompute", **OVERCOMMIT},
        {"memory_bytes": 96 << 10, "block_size": 4, "prefix_caching": False, "depth": 2, **OVERCOMMIT},
        {"max_batched_tokens": 7, "max_running": 8},
        {"attention": "reference"},
    ],
    ids=str,
)
def test_outputs_are_those_of_services_that_step_by_themselves(
    models: dict[str, Path], plans: list[StepPlan], circumstances: dict[str, Any]
) -> None:
    folder = models["llama"]
    requests = make_requests()
    together = run_engine(dict.fromkeys(NAMES, folder), [requests], **circumstances)
    assert any(plan.co_batched for plan in plans)
    assert (together.preemptions > 0) == ("memory_bytes" in circumstances)
    plans.clear()
    apart = run_engine(dict.fromkeys(NAMES, folder), [requests], co_batch=False)
    assert not any(plan.co_batched for plan in plans)
    alone = run_engine({NAMES[0]: folder}, [make_requests(NAMES[:1])])
    assert together.tokens == apart.tokens == alone.tokens


@pytest.mark.failing_steps
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_fail_because_of_all_together_change_no_output(
    models: dict[str, Path], plans: list[StepPlan], depth: int
) -> None:
    folders, requests = dict.fromkeys(NAMES, models["llama"]), make_requests()
    apart = run_engine(folders, [requests], co_batch=False)

    def prepare(executor: Executor) -> None:
        assert isinstance(executor, TorchExecutor)
        sabotage(executor, lambda plan, _: len(plan.seq_ids) > 5)

    plans.clear()
    together = run_engine(folders, [requests], depth=depth, prepare=prepare)
    assert together.tokens == apart.tokens
    assert any(len(plan.seq_ids) > 5 and plan.co_batched for plan in plans)
    assert sum(together.failed_steps.values()) > 0


def test_services_that_differ_in_dtype_or_model_step_by_themselves(
    models: dict[str, Path], plans: list[StepPlan]
) -> None:
    folders = dict.fromkeys(NAMES, models["llama"])
    run_engine(folders, [make_requests()], dtype=dict(zip(NAMES, ("float32", "bfloat16"), strict=True)))
    run_engine(dict(zip(NAMES, (models["llama"], models["mistral"]), strict=True)), [make_requests()])
    run_engine(folders, [make_requests()], layout="split")
    assert plans
    assert not any(plan.co_batched for plan in plans)
