"""Services come and go in engines with real models, and nobody else notices but by the time it takes."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from end_to_end_builders import make_request, run_engine
from execute_builders import make_model, make_prompt, needs_native, tiny_config
from grammar_builders import write_tokenizer
from service_builders import Asked, Walk

from at_hand import bundled_model, on_cpu
from crossed import each_nth
from shoal.core import (
    ConfigError,
    FinishReason,
    Grammar,
    GrammarKind,
    InvalidRequest,
    ModelUnavailable,
    ModelUnsupported,
    Service,
)
from shoal.execute.model import loading
from shoal.execute.model.model_set import load_models
from shoal.execute.torch_executor import TorchExecutor
from shoal.schedule import Slice

KINDS = ("llama", "qwen3", "gemma3", "gpt2", "opt", "mixtral")
NAMES = [f"{kind}-{number}" for kind in KINDS for number in range(2)]
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "swap": {"preemption_mode": "swap"},
    "recompute": {"preemption_mode": "recompute"},
    "little swap memory": {"preemption_mode": "swap", "kv": {"swap_bytes": 24 << 10}},
    "depth 2": {"depth": 2},
    "no prefix caching": {"kv": {"prefix_caching": False}},
    "many iterations": {"max_iterations": 4},
    "slices": {"admission": Slice(tokens=5)},
    "little memory": {"kv": {"memory_bytes": 128 << 10}, "depth": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind), seed=at) for at, kind in enumerate(KINDS)}


@pytest.mark.parametrize("circumstance", each_nth(CIRCUMSTANCES, 3, at=1))
def test_outputs_are_those_of_undisturbed_runs(circumstance: str, folders: dict[str, Path]) -> None:
    walk = Walk(folders, ["llama-0", "qwen3-0"], seed=len(circumstance), **CIRCUMSTANCES[circumstance])
    walk.walk(6, NAMES, always=("llama-0",))
    walk.finish()
    walk.check_outputs()
    walk.engine.close()


@needs_native
@on_cpu
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_int8_kv_gives_what_it_gives_undisturbed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    kinds = ("llama", "qwen3", "gemma3")
    made = {kind: make_model(tmp_path / kind, tiny_config(kind), dtype=torch.bfloat16) for kind in kinds}
    int8 = {"memory_bytes": 64 << 10, "dtype": "int8"}
    walk = Walk(made, ["llama-0"], per_change=4, dtype="int8", kv=int8, preemption_mode=mode, depth=2)
    walk.walk(6, [f"{kind}-{number}" for kind in kinds for number in range(2)], always=("llama-0",))
    walk.finish()
    walk.engine.close()
    for kind, folder in made.items():
        own = {name: asked for name, asked in walk.asked.items() if asked.folder == folder}
        if not own:
            continue
        rounds = [[make_request(name, kind, asked.prompt, asked.count)] for name, asked in own.items()]
        settings: dict[str, Any] = {"dtype": "int8", "kv_dtype": "int8", "prefix_caching": False}
        alone = run_engine({kind: folder}, rounds, **settings).tokens
        for name, asked in own.items():
            assert asked.finish is FinishReason.LENGTH or asked.may_end
            assert alone[name][: len(asked.tokens)] == asked.tokens


@pytest.mark.parametrize(
    "scheduler",
    [
        {"preemption_mode": "swap"},
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "depth": 2},
        {"preemption_mode": "recompute", "admission": Slice(tokens=9)},
    ],
    ids=["swap", "recompute", "depth 2", "slices"],
)
def test_a_service_that_does_not_fit_in_is_let_in_by_a_new_layout(
    scheduler: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Those who run keep their KV where there is host memory, and else lose nothing but time."""
    walk = Walk(folders, ["llama-0"], prompts=(30, 60), kv={"memory_bytes": 1 << 20}, **scheduler)
    for _ in range(6):
        walk.submit("llama-0", 190)
    while walk.engine.stats().services["llama-0"].running < 6:
        walk.step()
    walk.add("mixtral-0")
    walk.finish()
    assert walk.relayouts == 1
    stats = walk.engine.stats().services["llama-0"]
    assert stats.preemptions == 6
    swaps = scheduler["preemption_mode"] == "swap"
    assert (stats.swapped_tokens > 0, stats.recomputed_tokens > 0) == (swaps, not swaps)
    for service in sorted(walk.present):
        walk.submit(service)
    walk.finish()
    walk.check_outputs()
    walk.engine.close()


def test_a_service_that_fits_in_moves_nobody_and_keeps_prefixes(folders: dict[str, Path]) -> None:
    walk = Walk(folders, ["llama-0"], prompts=(40, 40))
    walk.submit("llama-0", 150)
    for _ in range(4):
        walk.step()
    tables = [list(r.block_ids) for r in walk.engine._scheduler._services["llama-0"].running.requests]
    assert tables
    walk.add("llama-1")
    while walk.changing:
        walk.step()
    after = [r.block_ids for r in walk.engine._scheduler._services["llama-0"].running.requests]
    assert [table[: len(tables[0])] for table in after] == tables
    walk.finish()
    assert walk.relayouts == 0
    first = walk.asked["r0"]
    walk.engine.submit(make_request("again", "llama-0", first.prompt, first.count))
    walk.asked["again"] = type(first)(first.folder, first.prompt, first.count)
    walk.finish()
    stats = walk.engine.stats().services["llama-0"]
    assert (stats.preemptions, stats.cached_tokens) == (0, 39)
    walk.check_outputs()
    walk.engine.close()


def test_an_engine_may_be_empty_and_counts_go_on_when_a_name_comes_back(folders: dict[str, Path]) -> None:
    walk = Walk(folders, ["llama-0", "gpt2-0"])
    walk.submit("llama-0")
    walk.finish()
    said = walk.engine.stats().services["llama-0"].output_tokens
    for name in ("llama-0", "gpt2-0"):
        walk.remove(name, drain=True)
    walk.finish()
    assert walk.engine.idle or walk.engine.step() == []
    assert walk.engine.idle
    assert walk.engine.stats().services == {}
    with pytest.raises(InvalidRequest, match="not served here"):
        walk.submit("llama-0")
    del walk.asked["r1"]
    for name in ("qwen3-0", "llama-0"):
        walk.add(name)
    walk.finish()
    assert walk.engine.stats().services["llama-0"].output_tokens == said
    for name in ("qwen3-0", "llama-0"):
        walk.submit(name)
    walk.finish()
    stats = walk.engine.stats().services["llama-0"]
    assert (stats.finished, stats.output_tokens > said) == (2, True)
    walk.check_outputs()
    walk.engine.close()


def test_a_service_that_goes_ends_or_finishes_its_requests(folders: dict[str, Path]) -> None:
    walk = Walk(folders, ["llama-0", "gpt2-0", "opt-0"], prompts=(5, 9), max_running=2)
    for name in ("llama-0", "gpt2-0", "opt-0"):
        for _ in range(3):
            walk.submit(name)
    walk.step()
    walk.remove("llama-0", drain=True)
    walk.remove("gpt2-0", drain=False)
    with pytest.raises(InvalidRequest, match="not served here"):
        walk.submit("llama-0")
    with pytest.raises(InvalidRequest, match="not served here"):
        walk.submit("gpt2-0")
    walk.asked = {name: asked for name, asked in walk.asked.items() if int(name[1:]) < 9}
    walk.finish()
    ends = [asked.finish for asked in walk.asked.values()]
    assert ends[:3] == [FinishReason.LENGTH] * 3
    assert ends[3:6] == [FinishReason.CANCELLED] * 3
    assert ends[6:] == [FinishReason.LENGTH] * 3
    walk.check_outputs()
    walk.engine.close()


def test_services_on_one_model_share_its_weights_until_the_last_goes(folders: dict[str, Path]) -> None:
    walk = Walk(folders, ["gpt2-0"])
    walk.add("llama-0")
    walk.finish()
    walk.add("llama-1")
    walk.finish()
    executor = walk.engine._executor
    assert isinstance(executor, TorchExecutor)
    models = {name: served.model for name, served in executor._services.items()}
    assert models["llama-0"] is models["llama-1"]
    module = weakref.ref(models["llama-1"].module)
    states = walk.engine._scheduler._services
    assert (states["llama-0"].companions, states["gpt2-0"].companions) == (["llama-1"], [])
    llama, gpt2 = (models[name].weight_bytes for name in ("llama-1", "gpt2-0"))
    assert walk.engine.weight_bytes == llama + gpt2 > gpt2 > 0
    del models
    walk.remove("llama-0", drain=True)
    walk.finish()
    assert (states["llama-1"].companions, module() is None) == ([], False)
    assert walk.engine.weight_bytes == llama + gpt2
    gc.disable()
    try:
        walk.remove("llama-1", drain=True)
        walk.finish()
        assert module() is None
    finally:
        gc.enable()
    assert walk.engine.weight_bytes == gpt2
    walk.engine.close()


def test_what_cannot_be_is_refused_and_the_engine_goes_on(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Walk(folders, ["opt-0"], kv={"memory_bytes": 12 << 10, "swap_bytes": 12 << 10})
    engine = walk.engine

    def refused(name: str, folder: Path, **service: Any) -> str:
        future = engine.add_service(Service(name=name, model=name, **service), folder)
        while not future.done():
            engine.step()
            time.sleep(0.001)
        with pytest.raises((ConfigError, ModelUnavailable, ModelUnsupported)) as caught:
            future.result()
        return str(caught.value)

    assert "there already" in refused("opt-0", folders["opt"])
    assert "12288 bytes does not hold one block of service 'm', which takes" in (
        refused("m", make_model(tmp_path / "m", _wide()), dtype="float32")
    )
    assert "there is no model 'none'" in refused("none", tmp_path / "nothing")
    assert "beyond the model's context" in refused("far", folders["opt"], max_model_len=10**6)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "free_bytes", lambda device: 1000)
        assert "weights take 0.00 GiB in float32, but 0.00 GiB of memory are free" in (
            refused("llama-0", folders["llama"], dtype="float32")
        )
    with pytest.raises(ConfigError, match=r"no service 'x'; there are: opt-0"):
        engine.remove_service("x", drain=True).result()
    walk.prompts = (3, 9)
    walk.submit("opt-0", 5)
    walk.finish()
    walk.check_outputs()
    engine.close()


def _wide() -> Any:
    config = tiny_config("mistral")
    config.num_hidden_layers = 30
    return config


def test_steps_go_on_while_a_model_loads(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(folders, ["llama-0"])
    go_on, load = threading.Event(), loading.load_model

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(30)
        return load(*arguments)

    monkeypatch.setattr(loading, "load_model", slow)
    walk.add("gpt2-0")
    with pytest.raises(ConfigError, match="being loaded"):
        walk.engine.remove_service("gpt2-0", drain=True).result()
    for _ in range(3):
        walk.submit("llama-0")
        while walk.engine.busy:
            walk.step()
    assert walk.changing
    go_on.set()
    walk.finish()
    walk.submit("gpt2-0")
    walk.finish()
    walk.check_outputs()
    walk.engine.close()


def test_loading_leaves_the_default_dtype_of_other_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dtype: torch.dtype) -> None:
        raise AssertionError("the default dtype is that of all threads")

    monkeypatch.setattr(torch, "set_default_dtype", refuse)
    for kind in KINDS:
        folder = make_model(tmp_path / kind, tiny_config(kind), dtype=torch.bfloat16)
        services = [Service(name="s", model=kind)]
        model = load_models(services, {"s": folder}).services["s"].model
        assert model.dtype == torch.bfloat16
        assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}


def test_the_split_layout_refuses_and_says_what_to_write(folders: dict[str, Path]) -> None:
    walk = Walk(folders, ["llama-0"], kv={"layout": "split"})
    for future in (
        walk.engine.add_service(Service(name="x", model="x"), folders["opt"]),
        walk.engine.remove_service("llama-0", drain=True),
    ):
        with pytest.raises(ConfigError, match="layout: merged"):
            future.result()
    walk.submit("llama-0")
    walk.finish()
    walk.check_outputs()
    walk.engine.close()


def wait_for_children(before: set[psutil.Process], count: int) -> int:
    """How many children there are beyond those of before; waits a while until there are so many."""
    until = time.monotonic() + 20
    while True:
        now = len(set(psutil.Process().children(True)) - before)
        if now == count or time.monotonic() > until:
            return now
        time.sleep(0.01)


def test_processes_of_grammars_end_with_the_last_service_on_their_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "llama", tiny_config("llama"))
    write_tokenizer(folder)
    walk = Walk(folders | {"llama": folder}, ["gpt2-0"])
    children, descriptors = set(psutil.Process().children(True)), len(os.listdir("/proc/self/fd"))
    grammar = Grammar(GrammarKind.REGEX, "[ab]{20}")
    for name in ("llama-0", "llama-1"):
        walk.add(name)
    walk.finish()
    for name in ("llama-0", "llama-1"):
        walk.asked[name] = Asked(folder, make_prompt(9), 12, dtype="with a grammar")
        follows = {"grammar": grammar, "ignore_eos": False}
        walk.engine.submit(make_request(name, name, walk.asked[name].prompt, 12, **follows))
    walk.remove("llama-0", drain=True)
    walk.finish()
    assert len(walk.asked["llama-0"].tokens) > 0
    # One that was too slow, on a busy machine, is replaced, and takes a moment to end.
    assert wait_for_children(children, 2) == 2
    walk.remove("llama-1", drain=True)
    walk.finish()
    assert wait_for_children(children, 0) == 0
    assert set(psutil.Process().children(True)) == children
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(InvalidRequest, match="not served here"):
        walk.engine.prepare("llama-0", grammar)
    walk.engine.close()


class _Resources:
    """Threads, open files and memory of this process."""

    def __init__(self) -> None:
        gc.collect()
        self.process = psutil.Process()
        self.threads = threading.active_count()
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.rss = self.process.memory_info().rss

    def check_left(self) -> None:
        """There are no more of them than before by now, but for a little memory.

        Fewer are no harm: a thread that takes the pool's pages ahead may have been at work before, and memory
        that earlier tests of this process held may have been given back meanwhile.
        """
        now = _Resources()
        assert now.threads <= self.threads
        assert now.descriptors <= self.descriptors
        print(f"RSS {self.rss >> 20} MiB, now {now.rss >> 20}")
        assert now.rss / self.rss < 1.05


@pytest.mark.slow
def test_two_hundred_changes_leave_nothing_behind(folders: dict[str, Path]) -> None:
    kv = {"memory_bytes": 192 << 10}
    walk = Walk(folders, ["llama-0", "qwen3-0"], seed=7, per_change=4, depth=2, kv=kv)
    walk.walk(20, NAMES, always=("llama-0",))
    walk.finish()
    before = _Resources()
    walk.walk(180, NAMES, always=("llama-0",))
    walk.finish()
    before.check_left()
    assert walk.relayouts > 0  # how many depends on how fast models load
    walk.check_outputs()
    walk.engine.close()


@pytest.mark.slow
def test_twenty_changes_beside_smollm2_leave_nothing_behind() -> None:
    """It stays in float32, while services on its weights, and on others in bfloat16, come and go."""
    names = [f"smollm2-{number}" for number in range(4)]
    walk = Walk(
        {"smollm2": bundled_model("smollm2")},
        ["smollm2-0"],
        seed=3,
        per_change=2,
        prompts=(1, 24),
        output=6,
        vocab=40_000,
        dtype=dict(zip(names, ("float32", "bfloat16", "bfloat16", "float32"), strict=True)),
        kv={"memory_bytes": 64 << 20, "block_size": 16},
    )
    walk.walk(4, names, always=("smollm2-0",))
    walk.finish()
    before = _Resources()
    services = frozenset(walk.present)
    walk.walk(16, names, always=("smollm2-0",))
    walk.finish()
    for name in sorted(walk.present ^ services):
        if name in walk.present:
            walk.remove(name, drain=True)
        else:
            walk.add(name)
    walk.finish()
    before.check_left()
    walk.check_outputs()
    walk.engine.close()
