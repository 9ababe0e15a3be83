"""Engines with a GpuExecutor answer as those with a TorchExecutor: on the CPU, with graphs called again."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end_builders import OVERCOMMIT, make_request, run_engine
from execute_builders import make_model, make_prompt, needs_triton, tiny_config
from failing_engine import sabotage
from graph_builders import FakeCapturer, RecordingCapturer
from references import assert_greedy
from service_builders import Walk
from strict_interpreter import strict_interpreter

from at_hand import on_cpu
from shoal.core import StepPlan, derive_seed
from shoal.execute.linear.merged_products import DenseProductBuilder
from shoal.execute.model.fused_forward import FusedForward
from shoal.execute.protocol import Executor
from shoal.execute.sequences import RunningSequence
from shoal.execute.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from gpu_builders import GpuOnCpu

pytestmark = [needs_triton, on_cpu]

KINDS = ("llama", "gemma3", "gpt2")
OUTPUT = 12
SMALL = {"preset": "vllm", "memory_bytes": 96 << 10, "block_size": 4, **OVERCOMMIT}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "depth 2, chunks of 7": {"depth": 2, "max_batched_tokens": 7},
    "depth 2, recompute": {**SMALL, "depth": 2, "preemption_mode": "recompute"},
    "depth 2, swap": {**SMALL, "depth": 2, "preemption_mode": "swap", "swap_bytes": 1 << 20},
    "many iterations": {"max_iterations": 4},
}
ON_DEVICE: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.0, "min_p": 0.05},
]
"""Tokens are sampled there, and steps overlap."""
WITH_HOST: list[dict[str, Any]] = [
    *ON_DEVICE,
    {"temperature": 1.2, "top_k": 11, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logprobs": 2, "min_tokens": 3},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> "GpuOnCpu":
    from gpu_builders import GpuOnCpu

    return GpuOnCpu(monkeypatch)


def requests(sampling: list[dict[str, Any]], count: int = 12) -> list[Any]:
    lengths = (1, 9, 16, 33, 5, 21, 2, 40)
    return [
        make_request(
            str(at),
            KINDS[at % 2],
            make_prompt(lengths[at % 8], seed=at),
            OUTPUT,
            derive_seed(at, 7),
            **sampling[at // 2 % len(sampling)],
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("sampling", [ON_DEVICE, WITH_HOST], ids=["on the device", "with the host"])
@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_sampled_outputs_are_those_of_a_torch_executor(
    circumstance: str,
    sampling: list[dict[str, Any]],
    folders: dict[str, Path],
    gpu: "GpuOnCpu",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {kind: folders[kind] for kind in KINDS[:2]}
    settings = CIRCUMSTANCES[circumstance]
    ours = run_engine(models, [requests(sampling)], **settings)
    monkeypatch.undo()
    theirs = run_engine(models, [requests(sampling)], **settings)
    assert ours.tokens == theirs.tokens
    assert ours.logprobs.keys() == theirs.logprobs.keys()
    assert gpu.queue.waiting == 0
    if sampling is ON_DEVICE:
        assert gpu.queue.read_count > 0
        assert gpu.queue.most_waiting == settings.get("depth", 1)
    assert (ours.preemptions > 0) == ("preemption_mode" in settings)


@pytest.mark.parametrize("tokens", [9, 24, 2048])
def test_prompts_beside_decodes_of_two_services_on_one_model(
    tokens: int, folders: dict[str, Path], gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of some tokens, and with prefixes that are in the pool. Steps of both are recorded together,
    but for those that are too large."""
    models = dict.fromkeys(("a", "b"), folders["gemma3"])
    shared = make_prompt(40, seed=0)
    several = [
        make_request(
            str(at),
            "ab"[at % 2],
            shared[: 9 * (at % 4)] + make_prompt(2 + 7 * at, seed=at),
            9,
            derive_seed(at, 7),
            **ON_DEVICE[at % 4],
        )
        for at in range(9)
    ]
    settings: dict[str, Any] = {"depth": 2, "max_batched_tokens": tokens, "every": 3, "block_size": 4}
    ours = run_engine(models, [several], **settings)
    monkeypatch.undo()
    theirs = run_engine(models, [several], **settings)
    assert ours.tokens == theirs.tokens
    [graphs] = gpu.executors[0].slot_steps.graphs.values()
    largest = max(shape.tokens for shape in graphs.shapes if shape.prompts)
    assert largest == (12 if tokens == 9 else 40)
    assert 0 < gpu.capturer.replayed <= gpu.queue.read_count


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "that cannot be recorded"])
def test_steps_of_which_some_run_without_a_graph(
    recorded: bool, folders: dict[str, Path], gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers of one: those that report log-probabilities of prompts or embeddings, or all."""
    if not recorded:
        gpu.capturer = FakeCapturer(*(RuntimeError("it looks at a number") for _ in range(99)))
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"embed": True, "max_tokens": 1},
    ]
    models = {kind: folders[kind] for kind in ("llama", "gpt2")}
    several = [
        make_request(str(at), ("llama", "gpt2")[at % 2], make_prompt(3 + 5 * at, seed=at), 6, **kinds[at % 3])
        for at in range(6)
    ]
    settings: dict[str, Any] = {"depth": 2, "max_batched_tokens": 17, "every": 2}
    ours = run_engine(models, [several], **settings)
    monkeypatch.undo()
    theirs = run_engine(models, [several], **settings)
    assert ours.tokens == theirs.tokens
    assert ours.prompt_logprobs.keys() == theirs.prompt_logprobs.keys() == {"1", "4"}
    for at, told in ours.prompt_logprobs.items():
        assert [each.token for each in told] == [each.token for each in theirs.prompt_logprobs[at]]
    assert ours.embeddings.keys() == theirs.embeddings.keys() == {"2", "5"}
    assert (gpu.capturer.replayed > 0) == recorded


def test_rows_that_need_more_candidates_are_computed_again(
    folders: dict[str, Path], gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two candidates most rows with top-p are incomplete, and the plan behind them began with a wrong
    token."""
    again: list[int] = []
    compute = type(gpu)._make

    def made(self: "GpuOnCpu", *arguments: Any, **keywords: Any) -> Any:
        executor = compute(self, *arguments, **keywords)
        plain = executor._compute_again

        def counted(launched: Any, places: Any) -> None:
            again.append(len(places))
            plain(launched, places)

        monkeypatch.setattr(executor, "_compute_again", counted)
        return executor

    monkeypatch.setattr("shoal.execute.executors.make_executor", lambda *a, **k: made(gpu, *a, **k))
    monkeypatch.setattr("shoal.execute.sampling.choose.CANDIDATES", 2)
    models = {kind: folders[kind] for kind in KINDS[:2]}
    ours = run_engine(models, [requests(ON_DEVICE)], depth=2, prefix_caching=False)
    monkeypatch.undo()
    theirs = run_engine(models, [requests(ON_DEVICE)], depth=2, prefix_caching=False)
    assert max(again) > 1, "rows of one plan are not computed one by one"
    assert ours.tokens == theirs.tokens


@pytest.mark.failing_steps
@pytest.mark.parametrize("sampling", [ON_DEVICE, WITH_HOST], ids=["on the device", "with the host"])
def test_failed_steps_change_no_output(
    sampling: list[dict[str, Any]], folders: dict[str, Path], gpu: "GpuOnCpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more than three rows fail, while the one before them is in flight."""
    models = {kind: folders[kind] for kind in KINDS[:2]}
    failed = 0

    def fails(plan: StepPlan, rows: Sequence[RunningSequence]) -> bool:
        nonlocal failed
        failed += len(rows) > 3
        return len(rows) > 3

    def prepare(executor: Executor) -> None:
        assert isinstance(executor, TorchExecutor)
        sabotage(executor, fails)

    ours = run_engine(models, [requests(sampling)], depth=2, prepare=prepare)
    monkeypatch.undo()
    theirs = run_engine(models, [requests(sampling)], depth=2)
    assert failed
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_transformers(kind: str, folders: dict[str, Path], gpu: "GpuOnCpu") -> None:
    prompts = [make_prompt(length, seed=length) for length in (1, 9, 33)]
    some = [make_request(str(at), kind, prompt, OUTPUT) for at, prompt in enumerate(prompts)]
    outcome = run_engine({kind: folders[kind]}, [some], depth=2)
    for at, prompt in enumerate(prompts):
        assert_greedy(folders[kind], prompt, outcome.tokens[str(at)], OUTPUT)
    [graphs] = gpu.executors[0].slot_steps.graphs.values()
    assert {(shape.tokens, shape.prompts) for shape in graphs.shapes} >= {(4, 0), (40, 16)}


@pytest.mark.parametrize(("kind", "layout"), [("gemma3", "merged"), ("llama", "merged"), ("llama", "split")])
def test_interpreted_kernels_give_the_tokens_of_transformers(
    kind: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers that are fused as on a GPU. In the merged layout all steps are recorded, and replays have
    nothing of the step that was there when they were captured."""
    from gpu_builders import GpuOnCpu

    from shoal.execute.gpu.kernels.layer import TritonLayerKernels

    gpu = GpuOnCpu(monkeypatch, attention=None)
    products = DenseProductBuilder(TritonLayerKernels())
    monkeypatch.setattr("shoal.execute.model.loading.choose_products", lambda device, **options: products)
    folder = make_model(tmp_path / kind, tiny_config(kind))
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23)]
    some = [make_request(str(at), kind, prompt, 4) for at, prompt in enumerate(prompts)]
    with strict_interpreter():
        outcome = run_engine(
            {kind: folder},
            [some],
            depth=2,
            layout=layout,
            block_size=4,
            memory_bytes=256 << 10,
            max_running=3,
            max_batched_tokens=12,
        )
    for at, prompt in enumerate(prompts):
        assert_greedy(folder, prompt, outcome.tokens[str(at)], 4)
    [executor] = gpu.executors
    assert isinstance(executor._services[kind].model.forward, FusedForward)
    assert isinstance(gpu.capturer, RecordingCapturer)
    if layout == "split":
        assert gpu.queue.read_count == gpu.capturer.tried == 0
        return
    [graphs] = executor.slot_steps.graphs.values()
    assert [(shape.tokens, shape.prompts > 0) for shape in graphs.shapes] == [
        (12, True), (6, True), (4, False), (2, False), (1, False)
    ]  # fmt: skip
    assert gpu.capturer.replayed == gpu.queue.read_count > 5


def test_an_engine_starts_without_memory_for_recording(
    folders: dict[str, Path],
    gpu: "GpuOnCpu",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from shoal.execute.gpu.slot_steps import SlotSteps

    def fail(self: SlotSteps, service: str) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(SlotSteps, "compute_padding", fail)
    prompt = make_prompt(9, seed=1)
    outcome = run_engine({"llama": folders["llama"]}, [[make_request("a", "llama", prompt, 4)]], depth=2)
    assert_greedy(folders["llama"], prompt, outcome.tokens["a"], 4)
    assert "llama: a step without requests failed: OutOfMemoryError" in caplog.text
    [graphs] = gpu.executors[0].slot_steps.graphs.values()
    assert [shape.tokens for shape in graphs.shapes] == [12, 1]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_services_come_and_go(mode: str, folders: dict[str, Path], gpu: "GpuOnCpu") -> None:
    kinds = ("llama", "gemma3")
    walk = Walk(
        {kind: folders[kind] for kind in kinds}, ["llama-0"], seed=len(mode), depth=2, preemption_mode=mode
    )
    walk.walk(5, [f"{kind}-{number}" for kind in kinds for number in range(2)], always=("llama-0",))
    walk.finish()
    walk.check_outputs()
    walk.engine.close()
    assert gpu.queue.read_count > 10
    assert gpu.queue.waiting == 0
