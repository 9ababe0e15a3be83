import math
from collections import deque

import numpy as np
import pytest

from experiments import Effort
from experiments.parallel import map_points
from experiments.past_future.clients import ClosedLoopRun, ServedModel, figures, meets_sla, requests_that_fit
from experiments.past_future.setup import (
    ADMIT_EVERY,
    CAPACITY,
    AssumedLimit,
    FullQueue,
    PublishedPastFuture,
    WarmPastFuture,
    run_full_queue,
)
from experiments.past_future.table1 import TABLE, queue_of, run
from experiments.past_future.traces import FOLDER_VARIABLE, TRACES, outputs_over_time, traces_folder
from experiments.past_future.windows import binned, cosines, histograms, window_similarities
from shoal.core import ConfigError
from shoal.measure import RequestRow, RunRecord
from shoal.schedule import Aggressive, Conservative, Oracle
from shoal.workload import LENGTHS

COUNT = 45


def true_peak(running):
    """M* step by step; running: (held, remaining) tokens of each request."""
    ends = sorted({left for _, left in running}, reverse=True)
    return max(sum(held + end for held, left in running if left >= end) for end in ends)


def step_by_step(lengths, fits):
    """Steps, mean share in use, mean true peak at admissions, and preemptions, one step at a time."""
    prompts, outputs = LENGTHS[lengths].sample(COUNT, 0)
    waiting = deque(range(COUNT))
    done = [0] * COUNT
    running, used, peaks = [], [], []
    preemptions = step = 0
    while waiting or running:
        preempted = False
        while sum(prompts[one] + done[one] for one in running) > CAPACITY:
            waiting.appendleft(running.pop())
            preemptions, preempted = preemptions + 1, True
        if not preempted and (step % ADMIT_EVERY == 0 or not running):
            while waiting:
                held = [
                    (prompts[one] + done[one], outputs[one] - done[one] - 1) for one in [*running, waiting[0]]
                ]
                if running and not fits(held):
                    break
                running.append(waiting.popleft())
        if step % ADMIT_EVERY == 0 and waiting:
            peaks.append(
                true_peak([(prompts[one] + done[one], outputs[one] - done[one] - 1) for one in running])
            )
        used.append(sum(prompts[one] + done[one] for one in running))
        for one in running:
            done[one] += 1
        running = [one for one in running if done[one] < outputs[one]]
        step += 1
    return step, np.mean(used) / CAPACITY, np.mean(peaks) / CAPACITY, preemptions / COUNT


@pytest.mark.parametrize("policy", ["oracle", "aggressive"])
def test_counts_equal_a_step_by_step_simulation(policy):
    watermark = 0.97
    rules = {
        "oracle": lambda held: true_peak(held) <= CAPACITY,
        "aggressive": lambda held: sum(tokens for tokens, _ in held) <= watermark * CAPACITY,
    }
    parameter = watermark if policy == "aggressive" else None
    found = run_full_queue(queue_of(policy, parameter, 1, COUNT, 0))
    steps, in_use, required, preemptions = step_by_step("distribution-1", rules[policy])
    # The first step computes prompts alone, and is no decoding step.
    assert found.steps == steps - 1
    assert found.kv_in_use == pytest.approx(in_use, abs=1e-9)
    assert found.future_required == pytest.approx(required, abs=1e-9)
    assert found.preemptions == pytest.approx(preemptions)
    assert (found.recomputed_tokens > 0) == (preemptions > 0) == (policy == "aggressive")


def test_conservative_reserves_the_assumed_output():
    same = [
        run_full_queue(FullQueue(lengths="distribution-1", longest=4096, admission=admission, requests=COUNT))
        for admission in (
            Conservative(admit_every=ADMIT_EVERY),
            AssumedLimit(assumed=4096, admit_every=ADMIT_EVERY),
            AssumedLimit(assumed=3000, admit_every=ADMIT_EVERY),
        )
    ]
    assert same[0] == same[1]
    assert same[2].steps < same[1].steps
    assert same[1].turned_away == 0


def test_overcommitment_turns_away_requests_that_do_not_fit():
    found = run_full_queue(queue_of("conservative", 1.5, 1, COUNT, 0))
    assert found.turned_away > 0


def test_a_warm_service_forecasts_past_lengths_and_a_new_one_the_maximum():
    generated = np.zeros(1, dtype=np.int64)
    warm = WarmPastFuture(past="distribution-1").new_history(4096)
    assert not warm.censors
    assert warm.mean == pytest.approx(3072, rel=0.03)
    new = PublishedPastFuture(past="").new_history(4096)
    assert new.mean == 4096
    assert set(new.distribution(generated).lengths) == {4096}


def test_more_draws_admit_less():
    runs = [
        run_full_queue(
            FullQueue(
                lengths="distribution-1",
                longest=4096,
                admission=PublishedPastFuture(
                    past="distribution-1", num_draws=draws, reserved=0.0, admit_every=ADMIT_EVERY
                ),
                requests=60,
            )
        )
        for draws in (1, 12)
    ]
    assert runs[0].future_required > runs[1].future_required


def test_the_table_has_every_line_of_the_paper_once():
    assert len(TABLE) == 27
    assert len({line[:3] for line in TABLE}) == 27
    for distribution in (1, 2, 3):
        own = [line for line in TABLE if line[0] == distribution]
        assert [line[1] for line in own] == (
            ["oracle"] + 3 * ["past-future"] + 3 * ["aggressive"] + 2 * ["conservative"]
        )
        best = own[0][3]
        assert all(line[3] < 1.66 * best for line in own)


def test_a_quick_table_has_our_line_beside_the_papers():
    reported = []
    result = run(Effort(quick=True, progress=lambda *what: reported.append(what)))
    assert [row.config["policy"] for row in result.rows].count("shoal") == 1
    for row in result.rows:
        assert set(row.config) == {"distribution", "policy", "parameter"}
        assert (row.paper is None) == (row.config["policy"] == "shoal")
        assert {"decoding_steps", "kv_in_use", "future_required", "preemptions_per_request"} <= set(
            row.metrics
        )
    oracle = result.rows[0]
    assert oracle.config["parameter"] is None
    assert oracle.metrics["steps_over_oracle"] == 0
    assert reported[-1][1:] == (len(result.rows), len(result.rows))


def test_results_of_parallel_points_keep_their_order(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    reported = []
    effort = Effort(progress=lambda what, done, total: reported.append((what, done, total)))
    points = [9.0, 1.0, 4.0]
    assert map_points(effort, "roots", math.sqrt, points, heaviest_first=float) == [3.0, 1.0, 2.0]
    assert reported == [("roots", done, 3) for done in range(4)]


def test_an_error_in_another_process_is_raised(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(ValueError):
        map_points(Effort(), "roots", math.sqrt, [1.0, -1.0])


def row(number, arrival_s, first_s, finish_s, gap_s=0.1, tokens=10):
    return RequestRow(
        request_id=f"r{number}",
        service="s",
        arrival_ns=round(arrival_s * 1e9),
        first_token_ns=round(first_s * 1e9),
        finish_ns=round(finish_s * 1e9),
        prompt_tokens=5,
        output_tokens=tokens,
        engine=0,
        finish="stop",
        largest_gap_ns=round(gap_s * 1e9),
    )


SERVED = ServedModel("llama-2-7b", 1, ttft_s=2.0, gap_s=0.5)


def test_goodput_counts_requests_within_the_sla_while_all_clients_are_active():
    rows = [
        row(0, 0, 1, 10),
        row(1, 0, 1, 11),  # the second of two clients: figures begin here
        row(2, 10, 11, 20),
        row(3, 11, 14, 21),  # first token too late
        row(4, 20, 21, 30, gap_s=0.6),  # a gap too long
        row(5, 21, 22, 31),
        row(6, 31, 32, 40),  # sent last: figures end here
    ]
    run_of = ClosedLoopRun(
        served=SERVED,
        lengths="sharegpt",
        longest=8,
        admission=Oracle(),
        clients=2,
        requests=7,
    )
    found = figures(RunRecord(title="", requests=rows, samples=(), engines=()), run_of)
    assert found["throughput_tokens_per_s"] == pytest.approx(4 * 10 / 20)
    assert found["goodput_tokens_per_s"] == pytest.approx(2 * 10 / 20)
    assert found["within_sla"] == 0.5
    assert found["sla_met"] is False


def test_the_sla_is_on_first_token_and_largest_gap():
    assert meets_sla(row(0, 0, 1.9, 9), SERVED)
    assert not meets_sla(row(0, 0, 2.1, 9), SERVED)
    assert not meets_sla(row(0, 0, 1, 9, gap_s=0.5), SERVED)


def test_requests_that_fit_are_those_an_oracle_runs_at_once():
    room = requests_that_fit(SERVED, "distribution-1", 4096)
    # 3,000 requests of 3,072 tokens take 297,374 steps in 120,000 tokens, nearly what a 7B leaves.
    assert room == pytest.approx(3000 * 3072 / 297_374, rel=0.1)


def test_histograms_and_cosines_of_a_small_example():
    bins = np.array([0, 0, 1, 1, 1, 2])
    found = histograms(bins, np.array([0, 2]), 3)
    assert found[:, :3].tolist() == [[2, 1, 0], [0, 3, 0]]
    assert cosines(found, found)[0].tolist() == pytest.approx([1.0, 1 / math.sqrt(5)])


def test_bins_end_at_the_99th_percentile():
    lengths = np.arange(1, 1001)
    found = binned(lengths)
    assert found.min() == 0
    assert found.max() == 50
    assert (found == 50).sum() == pytest.approx(10, abs=2)


def test_neighbouring_windows_are_more_similar_than_distant_ones_under_drift():
    steady = LENGTHS["azure-conversation"].sample(12_000, 0)[1]
    drifting = steady + np.arange(12_000) // 10
    near, least, everywhere = window_similarities(drifting, 1000, 500)
    assert least <= near
    assert near > everywhere + 0.1
    near, _, everywhere = window_similarities(steady, 1000, 500)
    assert near == pytest.approx(everywhere, abs=0.02)
    assert math.isnan(window_similarities(steady[:1600], 1000, 500)[0])


def test_missing_traces_are_named_and_replaced(tmp_path):
    found, notes = outputs_over_time(None, 100)
    assert {one.name for one in found} == {"synthetic, steady", "synthetic, changing"}
    assert all(len(one.lengths) == 100 for one in found)
    assert all(name in notes[0] for name in TRACES)
    trace = tmp_path / TRACES["BurstGPT"]
    trace.parent.mkdir()
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "1,ChatGPT,5,7,12,Conversation log\n2,GPT-4,5,9,14,API log\n"
    )
    found, notes = outputs_over_time(tmp_path, 100)
    assert {one.name: one.lengths.tolist() for one in found} == {
        "BurstGPT conversation": [7],
        "BurstGPT API": [9],
    }
    assert "Azure code" in notes[0]
    assert len(notes) == 1


def test_a_variable_names_the_folder_of_traces(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert traces_folder() == tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        traces_folder()
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert traces_folder() is None


def test_a_full_queue_is_the_same_every_time():
    point = FullQueue(
        lengths="distribution-3", longest=4096, admission=Aggressive(admit_every=ADMIT_EVERY), requests=60
    )
    assert run_full_queue(point) == run_full_queue(point)
