import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from experiments import Effort
from experiments.parallel import map_points
from experiments.past_future import goodput, table1
from experiments.past_future.admissions import (
    AssumedLimit,
    OneAtATime,
    PublishedHistory,
    PublishedPastFuture,
)
from experiments.past_future.clients import (
    ClosedLoopRun,
    RetryingClients,
    ServedModel,
    System,
    meets_sla,
    requests_that_fit,
    run_closed_loop,
)
from experiments.past_future.setup import (
    ADMIT_EVERY,
    CAPACITY,
    FullQueue,
    drawn_lengths,
    requests_of,
    run_full_queue,
)
from experiments.past_future.table1 import TABLE, queue_of, run
from experiments.past_future.traces import (
    FOLDER_VARIABLE,
    SHAREGPT_O1,
    TRACES,
    outputs_over_time,
    sharegpt_o1,
    traces_folder,
)
from experiments.past_future.windows import binned, cosines, histograms, window_similarities
from shoal.core import ConfigError
from shoal.measure import RequestRow
from shoal.schedule import Aggressive, Conservative, Oracle
from shoal.schedule.running_batch import RequestTable
from shoal.workload import LENGTHS

COUNT = 80


def true_peak(running):
    """M* step by step; running: (held, remaining) tokens of each request."""
    ends = sorted({left for _, left in running}, reverse=True)
    return max(sum(held + end for held, left in running if left >= end) for end in ends)


def step_by_step(lengths, fits):
    """Steps, mean share in use, mean true peak at admissions, and preemptions, one step at a time.

    It ends with the last admission; preemptions are per request that has ended.
    """
    prompts, outputs = LENGTHS[lengths].sample(COUNT, 0)
    waiting = deque(range(COUNT))
    done = [0] * COUNT
    running, used, peaks = [], [], []
    preemptions = step = ended = 0
    while True:
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
            if not waiting:
                used.append(sum(prompts[one] + done[one] for one in running))
                return step, np.mean(used) / CAPACITY, np.mean(peaks) / CAPACITY, preemptions / ended
        if step % ADMIT_EVERY == 0:
            peaks.append(
                true_peak([(prompts[one] + done[one], outputs[one] - done[one] - 1) for one in running])
            )
        used.append(sum(prompts[one] + done[one] for one in running))
        for one in running:
            done[one] += 1
        ended += sum(done[one] == outputs[one] for one in running)
        running = [one for one in running if done[one] < outputs[one]]
        step += 1


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
    # The first step computes prompts alone, and is no decoding step; that of the last admission is one.
    assert found.steps == steps
    assert found.kv_in_use == pytest.approx(in_use, abs=1e-9)
    # The last token of an output, in flight while its peak is taken, is counted although it is never stored.
    assert found.future_required == pytest.approx(required, abs=1e-5)
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


def test_a_published_history_starts_half_full_and_is_used_as_it_is():
    history = PublishedPastFuture(window=8).new_history(4096)
    assert isinstance(history, PublishedHistory)
    assert not history.censors
    nobody = np.zeros(0, dtype=np.int64)
    assert history.distribution(nobody).lengths.tolist() == [512] * 4
    for length in (100, 900, 700):
        history.record(length)
    found = history.distribution(nobody)
    assert found.lengths.tolist() == [100, 512, 512, 512, 512, 700, 900]
    assert found.cumulative.tolist() == pytest.approx([share / 7 for share in range(1, 8)])


class Rows(RequestTable):
    """Requests of which only the numbers are given."""

    def __init__(self, generated, running):
        super().__init__([None] * len(generated))
        self.num_prompt_tokens = np.full(len(generated), 30)
        self.num_tokens_with_in_flight = np.array(generated) + 30
        self.max_new_tokens = np.full(len(generated), 1000)
        self.seq_id = np.where(running, 5, -1)
        self.forecast_seed = np.arange(len(generated))


def test_waiting_requests_draw_a_length_and_running_ones_interpolate():
    policy = PublishedPastFuture(window=4)
    history = policy.new_history(1000)
    for length in (200, 400):
        history.record(length)
    lengths = history.distribution(np.zeros(0, dtype=np.int64))  # 200, 400, 512, 512
    many = 4000
    waiting = policy.estimate(Rows([0] * many, False), lengths, 5)
    assert set(waiting.ravel().tolist()) == {200, 400, 512}
    preempted = policy.estimate(Rows([300] * many, False), lengths, 5)
    assert set(preempted.ravel().tolist()) == {500, 700, 812}
    running = policy.estimate(Rows([300] * many, True), lengths, 5)
    assert running.shape == (5, many)
    assert (running.min(), running.max()) == (300, 1000)
    # Between 300, 400, 512, 512 and 1000 a quarter each.
    assert (running <= 400).mean() == pytest.approx(0.25, abs=0.02)
    assert (running == 512).mean() == pytest.approx(0.25, abs=0.02)
    assert running[running > 512].mean() == pytest.approx(756, rel=0.02)
    outgrown = policy.estimate(Rows([600] * many, True), lengths, 5)
    assert outgrown.mean() == pytest.approx(800, rel=0.02)


def test_waiting_requests_are_drawn_again_when_others_have_progressed():
    policy = PublishedPastFuture(window=100)
    history = policy.new_history(1000)
    for length in range(1, 90):
        history.record(length)
    lengths = history.distribution(np.zeros(0, dtype=np.int64))
    drawn = [policy.estimate(Rows([0, steps], False), lengths, 5)[:, 0].tolist() for steps in (1, 2, 2)]
    assert drawn[0] != drawn[1] == drawn[2]


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


@pytest.mark.slow
def test_a_quick_table_has_our_line_beside_the_papers(monkeypatch):
    monkeypatch.setattr(table1, "QUICK_REQUESTS", 60)
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


SERVED = ServedModel(
    model="llama-2-7b", tp=1, capacity=120_000, ttft_s=2.0, gap_s=0.5, drop_wait_s=1.5, drop_gap_s=0.4
)


def test_the_sla_is_on_first_token_and_largest_gap_of_answered_requests():
    assert meets_sla(row(0, 0, 1.9, 9), SERVED)
    assert not meets_sla(row(0, 0, 2.1, 9), SERVED)
    assert not meets_sla(row(0, 0, 1, 9, gap_s=0.5), SERVED)
    assert not meets_sla(replace(row(0, 0, 1.9, 9), finish="refused"), SERVED)


def test_clients_send_what_failed_again_behind_all_others():
    clients = RetryingClients(requests_of([(5, 1), (5, 2), (5, 3)], 10, "s"), 2, SERVED)
    sent = [clients.take(), clients.take()]
    assert clients.next_ns is None
    clients.ended(replace(row(0, 0, 3, 10), request_id=sent[0].id))  # its first token was too late
    assert clients.next_ns == 10_000_000_000
    sent.append(clients.take())
    assert clients.next_ns is None
    clients.ended(replace(row(0, 0, 1, 12), request_id=sent[1].id))
    sent.append(clients.take())
    assert [request.true_output_tokens for request in sent] == [1, 2, 3, 1]
    assert [request.arrival_ns for request in sent] == [0, 0, 10_000_000_000, 12_000_000_000]
    assert len({request.id for request in sent}) == 4
    for request in sent[2:]:
        clients.ended(replace(row(0, 12, 13, 20), request_id=request.id))
    assert clients.next_ns is None  # no request is left
    assert clients.total == 4
    assert len(clients.succeeded) == 3
    assert clients.now_ns == 20_000_000_000


def closed_loop(admission, clients, *, drops_running=True, served=None):
    served = goodput.SERVED_MODELS["7B"] if served is None else served
    system = System(admission=admission, drops_running=drops_running)
    run = ClosedLoopRun(
        served=served,
        lengths=drawn_lengths("distribution-1", 60),
        longest=4096,
        system=system,
        clients=clients,
    )
    return run_closed_loop(run)


def test_servers_drop_who_waits_too_long_and_clients_send_them_until_all_succeed():
    few = closed_loop(Oracle(admit_every=10), 10)
    assert few["sent_per_request"] == 1
    assert few["dropped_waiting_per_request"] == 0
    many = closed_loop(Oracle(admit_every=10), 60)
    assert many["succeeded"] == 1
    assert many["dropped_waiting_per_request"] > 0
    assert many["sent_per_request"] == 1 + many["dropped_waiting_per_request"]
    assert many["goodput_tokens_per_s"] > few["goodput_tokens_per_s"]


def test_a_gap_after_a_preemption_fails_the_request_and_may_drop_it():
    kept = closed_loop(Aggressive(watermark=0.99, admit_every=10), 60, drops_running=False)
    dropped = closed_loop(Aggressive(watermark=0.99, admit_every=10), 60)
    assert kept["preemptions_per_request"] > 0
    assert kept["dropped_running_per_request"] == 0 < dropped["dropped_running_per_request"]
    assert kept["sent_per_request"] > 1


def test_one_request_is_admitted_at_a_time():
    all_at_once, one = (
        run_full_queue(
            FullQueue(
                lengths="distribution-1",
                longest=4096,
                admission=policy(assumed=4096, admit_every=ADMIT_EVERY),
                requests=COUNT,
            )
        )
        for policy in (AssumedLimit, OneAtATime)
    )
    assert one.steps > all_at_once.steps
    assert one.kv_in_use < all_at_once.kv_in_use


def test_a_quick_goodput_compares_with_each_baseline(monkeypatch):
    monkeypatch.setattr(goodput, "QUICK_REQUESTS", 40)
    monkeypatch.setattr(goodput, "traces_folder", lambda: None)
    monkeypatch.setattr(goodput, "QUICK_CLIENTS", (10, 40))
    result = goodput.run(Effort(quick=True))
    *rows, over_aggressive, over_conservative = result.rows
    assert {row.config["workload"] for row in rows} == {"distribution-1"}
    assert any(line.startswith("Skipped") and SHAREGPT_O1 in line for line in result.assumptions)
    best = {
        policy: max(row.metrics["goodput_tokens_per_s"] for row in rows if row.config["policy"] == policy)
        for policy in ("past-future", "shoal", "aggressive", "conservative")
    }
    for own in rows:
        assert own.metrics["of_largest"] == own.metrics["goodput_tokens_per_s"] / best[own.config["policy"]]
    own = [row for row in rows if row.config["policy"] == "past-future"]
    for baseline, summary in (("aggressive", over_aggressive), ("conservative", over_conservative)):
        metric = f"over_{baseline}"
        assert summary.metrics[metric] == max(row.metrics[metric] for row in own)
        assert summary.paper == {f"{metric}_least": 2.0, f"{metric}_most": 3.0}


def test_requests_that_fit_are_those_an_oracle_runs_at_once():
    room = requests_that_fit(SERVED, drawn_lengths("distribution-1", 20_000))
    # 3,000 requests of 3,072 tokens take 294,250 steps in 120,000 tokens (Table 1).
    assert room == pytest.approx(3000 * 3072 / 294_250, rel=0.07)


def test_sharegpt_o1_is_read_where_it_is(tmp_path):
    note = sharegpt_o1(None)
    assert "no folder of traces" in note
    assert str(tmp_path) in sharegpt_o1(tmp_path)
    path = tmp_path / SHAREGPT_O1
    path.parent.mkdir()
    path.write_text('[{"prompt_tokens": 40, "completion_tokens": 1822, "total_tokens": 1862}]')
    assert sharegpt_o1(tmp_path) == [(40, 1822)]


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
