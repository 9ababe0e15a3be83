"""Scheduler options written as YAML, and read back."""

import pytest
from config_builders import from_yaml, scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.config.presets import PRESETS
from shoal.config.scheduler_yaml import in_words, scheduler_settings, to_yaml
from shoal.config.setting_tree import parse_yaml
from shoal.config.settings import scheduler_section
from shoal.core.units import LONGEST_S
from shoal.schedule import SchedulerOptions
from shoal.schedule.policies.admissions import ADMISSIONS, PastFuture, Slice
from shoal.schedule.policies.orders import ORDERS, DoublingBudget, Mlfq

times = st.floats(1e-6, LONGEST_S) | st.sampled_from([0.2, 1.0, 10.0, LONGEST_S])
orders = st.sampled_from([cls() for cls in ORDERS.values()]) | st.builds(
    Mlfq, quantum_s=st.floats(1e-6, 1e3), levels=st.integers(1, 30)
)
admissions = st.sampled_from([cls() for cls in ADMISSIONS.values()]) | st.builds(
    PastFuture, reserved=st.floats(0, 0.99), draws=st.sampled_from(["mean", "max"])
)
options = st.builds(
    SchedulerOptions,
    order=orders,
    admission=admissions,
    victim=st.sampled_from(["newest", "lowest-priority"]),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    starvation_s=times,
    max_token_gap_s=times,
    max_running=st.none() | st.integers(1, 10**6),
    max_batched_tokens=st.integers(1, 10**6),
    co_batch=st.booleans(),
)


def read(text):
    section = scheduler_section(offline=True)
    return section.read(parse_yaml(text, "test").entries["scheduler"], "scheduler")


@settings(max_examples=examples(200))
@given(options=options, preset=st.sampled_from(list(PRESETS)))
def test_written_options_are_read_back(options, preset):
    assert read(to_yaml({"scheduler": scheduler_settings(options, preset)})) == (options, preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_name_alone(preset):
    assert scheduler_settings(PRESETS[preset].scheduler, preset) == {"preset": preset}


def test_options_are_written_with_units():
    options = SchedulerOptions(
        order=DoublingBudget(variant="batch"), admission=Slice(tokens=32), max_token_gap_s=0.2, co_batch=False
    )
    lines = to_yaml({"scheduler": scheduler_settings(options, "shoal")}).splitlines()
    assert lines == [
        "scheduler:",
        "  preset: shoal",
        "  order: {policy: doubling-budget, variant: batch}",
        "  admission: {policy: slice, tokens: 32}",
        "  max_token_gap: 200ms",
        "  co_batch: false",
    ]
    assert in_words(options, SchedulerOptions()) == (
        "order doubling-budget (variant batch), admission slice (tokens 32), max_token_gap 200ms, co_batch no"
    )


def test_servers_and_scenarios_read_written_options(tmp_path):
    options = SchedulerOptions(admission=PastFuture(reserved=0.1), max_running=64)
    text = to_yaml({"scheduler": scheduler_settings(options, "shoal")})
    assert from_yaml(tmp_path, text + "services: [smollm2]\n").scheduler == options
    workload = "workload: {lengths: sharegpt, rate: 1, requests: 2}\n"
    assert scenario(tmp_path, text + workload).scheduler == options
