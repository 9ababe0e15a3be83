"""Roofline step times: shapes of models, sheets of devices, and what must hold whatever the factors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core import ConfigError
from shoal.forecast.device_specs import DEVICE_SPECS, device_spec
from shoal.forecast.model_spec import MODEL_SPECS, ModelSpec, model_spec
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import RooflineTimes, expected_active_experts, kv_tokens
from shoal.forecast.roofline_ops import Efficiency, Link
from shoal.forecast.step_times import StepRows

LLAMA = MODEL_SPECS["llama-2-7b"]
pairs = st.tuples(st.sampled_from(sorted(MODEL_SPECS)), st.sampled_from(sorted(DEVICE_SPECS)))


def roofline(names: tuple[str, str], tp: int = 1) -> RooflineTimes:
    return RooflineTimes(MODEL_SPECS[names[0]], DEVICE_SPECS[names[1]], tp)


@settings(deadline=None)
@given(pairs, st.integers(1, 300), st.integers(0, 10**6), st.integers(1, 30))
def test_decode_times_are_step_times_to_the_bit(
    names: tuple[str, str], sequences: int, beyond: int, steps: int
) -> None:
    times, context = roofline(names), sequences + beyond
    one_by_one = [
        times.step_time(StepRows(sequences, context + sequences * step, (), sequences))
        for step in range(steps)
    ]
    assert times.decode_times(sequences, context, steps).tolist() == one_by_one


@settings(deadline=None)
@given(pairs, st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 8000), st.integers(0, 8000))
def test_more_work_never_takes_less_time(
    names: tuple[str, str], chunk: int, more: int, before: int, further: int
) -> None:
    times = roofline(names)
    base = times.step_time(StepRows(4, 400, ((chunk, before),), 5))
    assert base > 0
    assert times.step_time(StepRows(4, 400, ((chunk + more, before),), 5)) >= base
    assert times.step_time(StepRows(4, 400, ((chunk, before + further),), 5)) >= base
    assert times.step_time(StepRows(4, 400 + further, ((chunk, before),), 5)) >= base
    assert times.step_time(StepRows(4, 400, ((chunk, before), (more, 0)), 5)) >= base


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("device", ["a100-80", "h100", "h200", "a800"])
def test_parallel_devices_help_but_not_beyond_their_number(device: str, tp: int) -> None:
    for rows in (StepRows(32, 32 * 1000, (), 32), StepRows(0, 0, ((4096, 0),), 1)):
        one = roofline(("llama-2-70b", device)).step_time(rows)
        many = roofline(("llama-2-70b", device), tp).step_time(rows)
        assert one / tp < many < one


@pytest.mark.parametrize("device", ["a100-80", "h100", "l40s", "rtx-4090"])
def test_a_lone_decode_is_bound_by_reading_the_weights(device: str) -> None:
    sheet = DEVICE_SPECS[device]
    read = LLAMA.parameters - LLAMA.vocab * LLAMA.hidden
    floor = read * 2 / sheet.bandwidth
    seconds = RooflineTimes(LLAMA, sheet).step_time(StepRows(1, 100, (), 1))
    assert floor < seconds < 1.5 * floor / sheet.efficiencies.matmul.memory


@pytest.mark.parametrize("device", ["a100-80", "h100", "rtx-4090"])
def test_a_long_prefill_is_bound_by_arithmetic(device: str) -> None:
    sheet = DEVICE_SPECS[device]
    layers = LLAMA.parameters - 2 * LLAMA.vocab * LLAMA.hidden
    floor = 2 * layers * 4096 / sheet.flops
    seconds = RooflineTimes(LLAMA, sheet).step_time(StepRows(0, 0, ((4096, 0),), 1))
    assert floor < seconds < 1.5 * floor / sheet.efficiencies.matmul.compute


@given(st.floats(1, 1e15), st.floats(1, 1e12), st.floats(1, 50))
def test_kernels_lie_between_the_roofline_and_the_sum(flops: float, moved: float, overlap: float) -> None:
    compute, memory = flops / (1e14 * 0.5), moved / (1e12 * 0.8)
    seconds = Efficiency(0.5, 0.8, 1e-5, overlap).seconds(flops, moved, 1e14, 1e12) - 1e-5
    assert max(compute, memory) * (1 - 1e-9) - 1e-15 <= seconds <= (compute + memory) * (1 + 1e-9) + 1e-15


def test_kernels_without_work_take_their_start() -> None:
    assert Efficiency(0.5, 0.8, 1e-5, 2.0).seconds(0, 0, 1e14, 1e12) == 1e-5
    with pytest.raises(ConfigError, match="efficiencies must be in"):
        Efficiency(0.5, 1.5, 0.0)


def test_reductions_move_their_share_of_the_message() -> None:
    link = Link(1e9, 1e-5, 1e-6, 1.0)
    assert link.all_reduce(1e6, 1) == 0
    assert link.all_reduce(1e6, 2) == pytest.approx(1e-5 + 1e-3)
    assert link.all_reduce(1e6, 4) == pytest.approx(1.2e-5 + 2 * 1.5e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3.1-8b", 8.03),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-32b", 32.8),
        ("qwen3-32b", 32.8),
        ("mixtral-8x7b", 46.7),
        ("opt-6.7b", 6.66),
        ("opt-13b", 12.85),
        ("gpt-j-6b", 6.05),
        ("chatglm2-6b", 6.24),
        ("bloom-176b", 176.2),
        ("smollm2-135m", 0.1345),
        ("gemma3-270m", 0.268),
    ],
)
def test_parameters_are_those_that_the_models_are_known_for(name: str, billions: float) -> None:
    assert MODEL_SPECS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_of_a_token() -> None:
    assert LLAMA.kv_bytes_per_token() == 524_288
    assert MODEL_SPECS["llama-2-70b"].kv_bytes_per_token(4) == 2 * 80 * 2 * 128 * 2
    assert MODEL_SPECS["llama-2-70b"].kv_bytes_per_token(16) == 2 * 80 * 1 * 128 * 2


def test_kv_that_fits() -> None:
    room = 0.9 * 80 * 2**30 - LLAMA.parameters * 2
    assert kv_tokens(LLAMA, DEVICE_SPECS["a100-80"]) == pytest.approx(room / 524_288, abs=1)
    with pytest.raises(ConfigError, match="raise tp"):
        kv_tokens(MODEL_SPECS["llama-2-70b"], DEVICE_SPECS["a100-80"])
    assert kv_tokens(MODEL_SPECS["llama-2-70b"], DEVICE_SPECS["a100-80"], tp=4) > 400_000


def test_experts_touched_by_brute_force() -> None:
    generator = np.random.default_rng(0)
    counts = [
        len({int(e) for _ in range(5) for e in generator.choice(8, 2, replace=False)}) for _ in range(4000)
    ]
    assert expected_active_experts(8, 2, 5) == pytest.approx(np.mean(counts), rel=0.01)
    assert expected_active_experts(8, 2, 1) == pytest.approx(2)


def test_experts_cost_less_than_a_dense_mlp_of_their_sum() -> None:
    mixtral = MODEL_SPECS["mixtral-8x7b"]
    dense = replace(mixtral, experts=0, experts_per_token=0, intermediate=8 * mixtral.intermediate)
    rows = StepRows(0, 0, ((2048, 0),), 1)
    h100 = DEVICE_SPECS["h100"]
    assert RooflineTimes(mixtral, h100).step_time(rows) < RooflineTimes(dense, h100).step_time(rows)


def test_shapes_from_configurations() -> None:
    llama = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert ModelSpec.from_config(llama, "llama-3.1-8b") == MODEL_SPECS["llama-3.1-8b"]
    opt = {
        "model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "ffn_dim": 16_384, "vocab_size": 50_272, "torch_dtype": "float16",
    }  # fmt: skip
    assert ModelSpec.from_config(opt, "opt-6.7b") == MODEL_SPECS["opt-6.7b"]
    mixtral = {**llama, "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert ModelSpec.from_config(mixtral, "mixtral-8x7b") == MODEL_SPECS["mixtral-8x7b"]
    gpt_j = {
        "model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "vocab_size": 50_400,
        "n_inner": None, "tie_word_embeddings": False,
    }  # fmt: skip
    assert ModelSpec.from_config(gpt_j, "gpt-j-6b") == MODEL_SPECS["gpt-j-6b"]
    assert ModelSpec.from_config({**llama, "dtype": "float32"}).weight_bytes_each == 4
    with pytest.raises(ConfigError, match="none of num_hidden_layers, n_layer"):
        ModelSpec.from_config({"hidden_size": 8, "num_attention_heads": 2})


def test_names_are_forgiving_and_errors_helpful() -> None:
    assert model_spec("meta-llama/Llama-3.1-8B-Instruct") is MODEL_SPECS["llama-3.1-8b"]
    assert model_spec("Llama-2-70b-hf") is MODEL_SPECS["llama-2-70b"]
    assert device_spec("RTX4090") is DEVICE_SPECS["rtx-4090"]
    with pytest.raises(ConfigError, match=r"near are .*qwen2\.5-7b"):
        model_spec("qwen2-7b")
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        device_spec("h10")
    with pytest.raises(ConfigError, match="tp=3 does not divide"):
        RooflineTimes(LLAMA, DEVICE_SPECS["h100"], 3)


def test_whole_steps_agree_with_a_profile(calibration: Path) -> None:
    measured = ProfileTimes.load(calibration / "vllm_rtx4090_llama31_8b" / "profile")
    times = roofline(("llama-3.1-8b", "rtx-4090"))
    for decodes in (1, 8, 64):
        for length in (128, 1024):
            rows = StepRows(decodes, decodes * length, (), decodes)
            assert times.step_time(rows) == pytest.approx(measured.step_time(rows), rel=0.1)
    rows = StepRows(8, 8 * 500, ((2048, 0),), 9)
    assert times.step_time(rows) == pytest.approx(measured.step_time(rows), rel=0.1)
