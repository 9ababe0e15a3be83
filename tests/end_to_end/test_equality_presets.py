"""Output does not depend on the scheduler: it equals that of `transformers` under every preset.

Two tiny models share a pool that is too small for everybody. What a preset is about (preemption by
recomputation or swapping, preemption, compaction) must really have happened.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import Outcome, make_request, run_engine
from execute_builders import make_model, make_prompt, tiny_config
from references import assert_greedy

from crossed import crossed, each_nth
from shoal.config import PRESETS
from shoal.config.batch_presets import BATCH_PRESETS
from shoal.core import Request, derive_seed
from shoal.schedule import Conservative, PastFuture, Slice

MANY, ONE = "gemma3", "gpt2"
PAIR = (MANY, ONE)
"""Three blocks of the first fit into a merged block, one of the second."""
OUTPUT = 24
SMALL: dict[str, Any] = {
    "memory_bytes": 160 << 10,
    "block_size": 4,
    "step_s": 0.05,
    "every": 2,
    "execution_s": {MANY: 0.5, ONE: 1.0},
}

# What makes a preset show itself within a few short requests.
TUNED: dict[str, dict[str, Any]] = {
    "past-future": {
        "admission": PastFuture(cold_start="max", draws="max", admit_every=10, window=4),
        "every": 0,
    },
    "scls-cb": {"admission": Slice(tokens=6)},
}
NEVER_PREEMPTS = ("orca",)
BATCH_TOKENS = 9
"""Slices of the preset of batches."""
KINDS = tuple(name for name in PRESETS if name == "sls" or name not in BATCH_PRESETS)
"""All presets of batches have one scheduler."""
SWAPPING = tuple(name for name, preset in PRESETS.items() if preset.scheduler.preemption_mode == "swap")
PREEMPTING = tuple(
    name for name, preset in PRESETS.items() if preset.scheduler.preempt_for_waiting == "less-urgent"
)
MERGED = tuple(name for name in PRESETS if PRESETS[name].layout == "merged" and name not in BATCH_PRESETS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in PAIR}


def prompts() -> list[list[int]]:
    """Of several lengths; two share a beginning."""
    made = [make_prompt(length, seed=length) for length in (1, 9, 16, 33, 48)]
    return [*made, made[-1][:40] + make_prompt(8, seed=99)]


def run(
    folders: dict[str, Path], preset: str, rounds: Sequence[Sequence[Request]], **options: Any
) -> Outcome:
    """Run a preset in the small pool; every greedy output in float32 must equal the reference."""
    options = SMALL | TUNED.get(preset, {}) | options
    outcome = run_engine(folders, rounds, preset=preset, **options)
    dtypes = options.get("dtype", {})
    for request in (request for requests in rounds for request in requests):
        if request.sampling.temperature == 0 and dtypes.get(request.service, "float32") == "float32":
            most = request.sampling.max_tokens or 0
            assert_greedy(folders[request.service], request.prompt, outcome.tokens[request.id], most)
    return outcome


def in_batches(rounds: Sequence[Sequence[Request]]) -> list[list[Request]]:
    """The same requests, four to a batch, in slices."""
    return [
        [replace(one, batch=at // 4, slice_tokens=BATCH_TOKENS) for at, one in enumerate(requests)]
        for requests in rounds
    ]


def requests(suffix: str = "", count: int = OUTPUT) -> list[Request]:
    return [
        make_request(f"{name}-{i}{suffix}", name, prompt, count)
        for i, prompt in enumerate(prompts())
        for name in PAIR
    ]


def crowded() -> list[list[Request]]:
    """Short outputs, which teach those who believe in the past, then long ones that do not fit."""
    return [requests("-short", 3), requests(), requests("-again")]


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", each_nth(KINDS, 3))
def test_greedy_output_equals_transformers(preset: str, depth: int, folders: dict[str, Path]) -> None:
    rounds = in_batches(crowded()) if preset in BATCH_PRESETS else crowded()
    outcome = run(folders, preset, rounds, depth=depth)
    assert (outcome.slices > 0) == (preset in BATCH_PRESETS)
    assert (outcome.preemptions > 0) == (preset not in NEVER_PREEMPTS)
    assert (outcome.swapped_tokens > 0) == (preset in SWAPPING)
    assert outcome.cached_tokens > 0
    if preset not in (*SWAPPING, *NEVER_PREEMPTS):
        assert outcome.recomputed_tokens > 0


@pytest.mark.parametrize(("preset", "layout"), crossed(each_nth(SWAPPING, 2), ["merged", "split"]))
def test_swapping_in_both_layouts_with_and_without_prefix_caching(
    preset: str, layout: str, folders: dict[str, Path]
) -> None:
    for caching in (True, False):
        outcome = run(folders, preset, crowded(), layout=layout, prefix_caching=caching)
        assert outcome.swapped_tokens > 0
        assert outcome.recomputed_tokens == 0, "the host holds as much as the pool"


def test_what_the_host_cannot_hold_is_computed_again(folders: dict[str, Path]) -> None:
    outcome = run(folders, "fastserve", crowded(), swap_bytes=60 << 10)
    assert outcome.swapped_tokens > 0
    assert outcome.recomputed_tokens > 0


@pytest.mark.parametrize(("preset", "layout"), crossed(each_nth(PREEMPTING, 3), ["merged", "split"]))
def test_preemption_alone(preset: str, layout: str, folders: dict[str, Path]) -> None:
    """Where memory is set aside for the longest outputs, nobody but a more urgent one preempts anybody."""
    patient = {"admission": Conservative(), "every": 3, "layout": layout}
    rounds = [requests("-short", 3), requests()]
    assert run(folders, preset, rounds, **patient).preemptions > 0
    assert run(folders, preset, rounds, **patient, preempt_for_waiting="never").preemptions == 0


HOLES: dict[str, Any] = {
    "prefix_caching": False,
    "every": 0,
    "execution_s": {MANY: 1.0, ONE: 0.1},
}


def holes(after: int) -> list[list[Request]]:
    """Two of three that share merged blocks end early; then one is served that needs its own.

    after: how many of the many are submitted before it.
    """
    counts = [14, *(11 if i % 3 else OUTPUT for i in range(1, 18))]
    many = [
        make_request(f"{MANY}-{i}", MANY, make_prompt(3, seed=i), count) for i, count in enumerate(counts)
    ]
    return [[*many[:after], make_request(ONE, ONE, make_prompt(62), 8), *many[after:]]]


@pytest.mark.parametrize(("preset", "depth"), crossed(MERGED, [1, 2]))
def test_compaction(preset: str, depth: int, folders: dict[str, Path]) -> None:
    # Longer slices than one token would come in merged blocks of their own, which leave no holes.
    tuned: dict[str, Any] = {"admission": Slice(tokens=1)} if preset == "scls-cb" else {}
    # A strict order serves the one only when it is the oldest, the others only later than the many.
    strict = preset == "alpaserve"
    rounds, after = holes(1 if strict else 18), {ONE: 0 if strict else 14}
    outcome = run(folders, preset, rounds, depth=depth, after=after, **(HOLES | tuned))
    assert outcome.compacted_blocks > 0
    assert outcome.preemptions == 0, "compaction goes before eviction"


def test_the_split_layout_needs_no_compaction(folders: dict[str, Path]) -> None:
    assert run(folders, "muxserve", holes(18), after={ONE: 14}, **HOLES).compacted_blocks == 0


@pytest.mark.parametrize("preset", each_nth(["fastserve", "scls-cb", "seallm-join"], 3))
def test_beside_a_service_of_another_dtype(preset: str, folders: dict[str, Path]) -> None:
    for exact in PAIR:
        dtypes = {name: "float32" if name == exact else "bfloat16" for name in PAIR}
        outcome = run(folders, preset, crowded(), dtype=dtypes, memory_bytes=110 << 10)
        assert outcome.preemptions > 0


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_k": 11, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize(
    ("preset", "layout"),
    crossed(each_nth(["shoal", "fastserve", "seallm-join", "scls-cb"], 2), ["merged", "split"]),
)
def test_sampled_output_with_a_seed_is_the_same_when_preempted(
    preset: str, layout: str, folders: dict[str, Path]
) -> None:
    sampled = [
        make_request(f"{name}-{i}", name, prompt, OUTPUT, derive_seed(i, 0), **SAMPLING[i % 3])
        for i, prompt in enumerate(prompts())
        for name in PAIR
    ]
    alone = run(folders, "orca", [[request] for request in sampled], memory_bytes=1 << 20).tokens
    outcome = run(folders, preset, [sampled], layout=layout, preemption_mode="swap")
    assert outcome.swapped_tokens > 0
    assert outcome.tokens == alone
