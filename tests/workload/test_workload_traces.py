"""Public traces are read whole, and the presets fitted to them resemble them."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shoal.workload import LENGTHS, Empirical, TraceRow, block_hashes, load_trace
from shoal.workload.presets import figures

WHOLE = [
    ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", "azure", 19_366, 0),
    ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", "azure", 8_819, 0),
    ("mooncake/conversation_trace.jsonl", "mooncake", 12_031, 0),
    ("sharegpt_lengths/sharegpt_first_pair_qwen.csv", "lengths", 17_387, 13),
    ("sharegpt_lengths/sharegpt_turns_qwen.csv", "turns", 61_236, 6_372),
    ("etalon/bwb_stats_llama2_tokenizer_filtered_v2.csv", "lengths", 33_768, 0),
    ("task_lengths/gsm8k_test_qwen.csv", "lengths", 1_319, 0),
    ("vtc_arena/arena_multiclient_trace.csv", "timed-lengths", 1_500, 0),
    ("azure_functions_sample/azure2019_example_invocations.csv", "maf-counts", 4_525, 0),
    ("azure_functions_sample/Azure2021_200.csv", "maf-invocations", 199, 0),
    ("../calibration/vllm_rtx4090_llama31_8b/measured/requests.jsonl", "requests", 300, 0),
]


@pytest.mark.parametrize(("name", "format", "rows", "skipped"), WHOLE)
def test_every_line_is_a_request_or_was_skipped(
    name: str, format: str, rows: int, skipped: int, traces: Path
) -> None:
    trace = load_trace(traces / name)
    assert (trace.format, len(trace.rows), trace.skipped) == (format, rows, skipped)
    assert trace.rows[0].arrival_ns == 0
    assert all(row.arrival_ns <= later.arrival_ns for row, later in pairwise(trace.rows))


def test_servegen_begins(traces: Path) -> None:
    rows = load_trace(traces / "servegen" / "deepseek_r1", limit=3000).rows
    assert len({row.client for row in rows}) > 20
    assert len(rows) / (rows[-1].arrival_ns / 1e9) == pytest.approx(14.4, rel=0.15)


def reuse(rows: list[TraceRow], block_size: int) -> float:
    """Share of prompt tokens whose block some earlier prompt had."""
    seen: set[int] = set()
    reused = 0
    for row in rows:
        hashes = block_hashes(row, block_size)
        reused += sum(number in seen for number in hashes) * block_size
        seen.update(hashes)
    return reused / sum(row.prompt_tokens for row in rows)


def test_block_size_hardly_changes_how_much_of_mooncake_is_shared(traces: Path) -> None:
    rows = load_trace(traces / "mooncake" / "conversation_trace.jsonl", limit=1500).rows
    whole, fine = reuse(rows, 512), reuse(rows, 32)
    assert 0.05 < whole <= fine < whole + 0.01


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("azure-conversation", "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"),
        ("azure-code", "azure_llm_2023/AzureLLMInferenceTrace_code.csv"),
        ("sharegpt", "sharegpt_lengths/sharegpt_first_pair_qwen.csv"),
    ],
)
def test_presets_resemble_their_traces(preset: str, name: str, traces: Path) -> None:
    pairs = [
        (min(row.prompt_tokens, 8192 if preset == "sharegpt" else 10**9), row.output_tokens)
        for row in load_trace(traces / name).rows
    ]
    data, fit = figures(Empirical(tuple(pairs))), figures(LENGTHS[preset])
    for side in ("prompt", "output"):
        assert fit[side]["mean"] == pytest.approx(data[side]["mean"], rel=0.06)
        for key in ("p50", "p75", "p90"):
            assert fit[side][key] == pytest.approx(data[side][key], rel=0.12)


def test_reasoning_resembles_servegen(traces: Path) -> None:
    rows = load_trace(traces / "servegen" / "deepseek_r1", limit=150_000).rows
    outputs = np.array([row.output_tokens for row in rows])
    fit = figures(LENGTHS["reasoning"])["output"]
    assert fit["mean"] == pytest.approx(outputs.mean(), rel=0.15)
    assert fit["p50"] == pytest.approx(np.median(outputs), rel=0.15)
