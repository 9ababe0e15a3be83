"""Presets, and keys that override them."""

import dataclasses

import pytest
from config_builders import from_flags, from_yaml

from shoal.config import PRESETS
from shoal.schedule import Aggressive, DoublingBudget, Fcfs, Mlfq, PastFuture, SchedulerOptions

YAML = "services: [smollm2]\n"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_written_in_a_file_and_as_a_flag(tmp_path, name):
    written = from_yaml(tmp_path, f"{YAML}scheduler: {{preset: {name}}}")
    assert written.scheduler == PRESETS[name].scheduler
    assert written.kv_cache.layout == PRESETS[name].layout
    assert from_flags("smollm2", preset=name) == written


def test_the_default_is_the_preset_shoal(tmp_path):
    assert PRESETS["shoal"].scheduler == SchedulerOptions()
    assert from_yaml(tmp_path, YAML) == from_yaml(tmp_path, f"{YAML}scheduler: {{preset: shoal}}")


def test_presets_are_distinct():
    points = [(each.scheduler, each.layout, each.batching, each.dispatch) for each in PRESETS.values()]
    assert all(points.count(point) == 1 for point in points)
    assert all(preset.summary for preset in PRESETS.values())


def test_single_keys_override_the_preset(tmp_path):
    text = f"{YAML}scheduler: {{preset: fastserve, order: fcfs, preempt_for_waiting: never, max_running: 3}}"
    expected = dataclasses.replace(
        PRESETS["fastserve"].scheduler, order=Fcfs(), preempt_for_waiting="never", max_running=3
    )
    assert from_yaml(tmp_path, text).scheduler == expected
    flags = {"preset": "fastserve", "order": "fcfs", "preempt_for_waiting": "never", "max_running": "3"}
    assert from_flags("smollm2", **flags).scheduler == expected


def test_a_key_with_its_default_value_overrides_the_preset(tmp_path):
    config = from_yaml(tmp_path, f"{YAML}scheduler: {{preset: vllm, preemption_mode: swap}}")
    assert PRESETS["vllm"].scheduler.preemption_mode == "recompute"
    assert config.scheduler.preemption_mode == SchedulerOptions().preemption_mode == "swap"


def test_a_policy_inherits_no_parameters_from_the_preset(tmp_path):
    config = from_yaml(tmp_path, f"{YAML}scheduler: {{preset: past-future, admission: past-future:window=9}}")
    assert config.scheduler.admission == PastFuture(window=9)


def test_flags_override_keys_of_the_file_and_both_the_preset(tmp_path):
    config = from_yaml(tmp_path, f"{YAML}scheduler: {{preset: vllm, victim: large-young}}", preset="seallm")
    assert config.scheduler == dataclasses.replace(PRESETS["seallm"].scheduler, victim="large-young")


def test_a_written_layout_overrides_that_of_the_preset(tmp_path):
    mux = f"{YAML}scheduler: {{preset: muxserve}}\n"
    assert from_yaml(tmp_path, mux).kv_cache.layout == "split"
    config = from_yaml(tmp_path, mux + "kv_cache: {block_size: 8}")
    assert (config.kv_cache.layout, config.kv_cache.block_size) == ("split", 8)
    assert from_yaml(tmp_path, mux + "kv_cache: {layout: merged}").kv_cache.layout == "merged"
    assert from_yaml(tmp_path, mux, layout="merged").kv_cache.layout == "merged"
    assert from_flags("smollm2", preset="muxserve", layout="merged").kv_cache.layout == "merged"
    split = f"{YAML}scheduler: {{preset: vllm}}\nkv_cache: {{layout: split}}"
    assert from_yaml(tmp_path, split).kv_cache.layout == "split"


@pytest.mark.parametrize(
    ("written", "order"),
    [
        ("mlfq", Mlfq()),
        ("mlfq:levels=4", Mlfq(levels=4)),
        ("mlfq:levels=4,quantum=20ms", Mlfq(levels=4, quantum_s=0.02)),
        ("mlfq:prefill_tokens_per_s=2500", Mlfq(prefill_tokens_per_s=2500)),
        ("doubling-budget:variant=literal", DoublingBudget(variant="literal")),
        ("{policy: mlfq, levels: 4, quantum: 20ms}", Mlfq(levels=4, quantum_s=0.02)),
        ("{policy: doubling-budget, variant: batch}", DoublingBudget(variant="batch")),
    ],
)
def test_an_order_may_have_parameters(tmp_path, written, order):
    quoted = written if written.startswith("{") else f"'{written}'"
    config = from_yaml(tmp_path, f"{YAML}scheduler: {{order: {quoted}}}")
    assert config.scheduler == SchedulerOptions(order=order)
    if quoted != written:
        assert from_flags("smollm2", order=written) == config


def test_an_admission_may_have_parameters_beside_a_preset():
    config = from_flags("smollm2", preset="seallm", admission="aggressive:watermark=80%")
    seallm = PRESETS["seallm"].scheduler
    assert config.scheduler == dataclasses.replace(seallm, admission=Aggressive(watermark=0.8))


def test_presets_of_published_systems_do_not_co_batch():
    assert {name for name, preset in PRESETS.items() if preset.scheduler.co_batch} == {"shoal"}
