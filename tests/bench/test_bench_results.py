"""Records, verdicts, and the figures of ``vllm bench serve``."""

import json

import numpy as np
import pytest
from bench_builders import MS, make_answer, make_call, make_run
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench import run_record, vllm_figures
from shoal.core import NO_GOALS, SLO
from shoal.measure import summarise, verdict
from shoal.measure.tables import tokens_grid
from shoal.workload import read_measured

CHUNKS = st.lists(st.integers(1, 500), max_size=12).map(lambda gaps: np.cumsum(gaps).tolist())


def test_a_row_has_the_times_of_the_stream():
    answer = make_answer(make_call(3), sent_ms=40, chunks_ms=[10, 30, 80], tokens=6)
    run = make_run([answer])
    run.begin_ns = 15 * MS
    [row] = run_record(run, "title", {}).requests
    assert (row.request_id, row.service, row.finish) == ("r3", "chat", "length")
    assert (row.arrival_ns, row.first_token_ns, row.finish_ns) == (25 * MS, 35 * MS, 105 * MS)
    assert (row.ttft_s, row.tpot_s, row.e2e_s) == (0.01, pytest.approx(0.07 / 5), 0.08)
    assert (row.largest_gap_ns, row.output_tokens, row.prompt_tokens) == (50 * MS, 6, 5)


def test_a_call_without_tokens_ends_when_it_failed():
    answer = make_answer(make_call(), sent_ms=5, finish="error", error="gone", tokens=0)
    [row] = run_record(make_run([answer]), "", {}).requests
    assert (row.first_token_ns, row.finish_ns, row.output_tokens) == (6 * MS, 6 * MS, 0)
    assert (row.finish, row.error) == ("error", "gone")


def test_gaps_are_collected_by_service():
    answers = [
        make_answer(make_call(0, service="a"), chunks_ms=[5, 15, 35]),
        make_answer(make_call(1, service="b"), chunks_ms=[5]),
    ]
    record = run_record(make_run(answers), "", {})
    assert {name: len(each) for name, each in record.inter_token_latencies.items()} == {"a": 2, "b": 0}
    assert record.inter_token_latencies["a"].mean_s == pytest.approx(0.015)


@given(chunks=CHUNKS, extra=st.integers(0, 20))
def test_tokens_on_time_are_those_of_chunks_before_their_deadlines(chunks, extra):
    """Tokens of a chunk come together, and chunks have about as many each."""
    slo = SLO(ttft_s=0.1, tpot_s=0.05)
    tokens = len(chunks) + (extra if chunks else 0)
    answer = make_answer(make_call(slo=slo), chunks_ms=chunks, tokens=tokens)
    [row] = run_record(make_run([answer]), "", {}).requests
    ends = [round(tokens * (place + 1) / len(chunks)) for place in range(len(chunks))]
    chunk_of = [next(place for place, end in enumerate(ends) if number < end) for number in range(tokens)]
    expected = sum(chunks[place] <= 100 + 50 * number for number, place in enumerate(chunk_of))
    assert row.tokens_on_time == expected


@given(st.lists(CHUNKS, min_size=1, max_size=6))
def test_vllm_figures_are_by_its_definitions(streams):
    answers = [
        make_answer(
            make_call(number), sent_ms=7 * number, chunks_ms=chunks, finish="stop" if chunks else "error"
        )
        for number, chunks in enumerate(streams)
    ]
    run = make_run(answers, seconds=20)
    figures = vllm_figures(run, run_record(run, "", {}))
    done = [chunks for chunks in streams if chunks]
    assert (figures["completed"], figures["failed"]) == (len(done), len(streams) - len(done))
    assert figures["total_input_tokens"] == 5 * len(done)
    assert figures["output_throughput"] == pytest.approx(sum(map(len, done)) / 20)
    assert figures["request_throughput"] == pytest.approx(len(done) / 20)
    by_name = {
        "ttft": [chunks[0] for chunks in done],
        "tpot": [(chunks[-1] - chunks[0]) / (len(chunks) - 1) for chunks in done if len(chunks) > 1],
        "itl": [gap for chunks in done for gap in np.diff(chunks)],
        "e2el": [chunks[-1] for chunks in done],
    }
    for name, values in by_name.items():
        found = [figures[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", "p99")]
        expected = [
            f(values) if values else 0 for f in (np.mean, np.median, np.std, lambda v: np.percentile(v, 99))
        ]
        assert found == pytest.approx(expected, abs=1e-6)
    json.dumps(figures, allow_nan=False)


def steady(count, *, apart_ms, takes_ms, slo=NO_GOALS):
    """Calls ``apart_ms`` apart, answered one after another if they take longer than that."""
    answers, free_ms = [], 0
    for number in range(count):
        free_ms = max(free_ms, number * apart_ms) + takes_ms
        call = make_call(number, at_ms=number * apart_ms, slo=slo)
        chunk_ms = free_ms - number * apart_ms
        answers.append(make_answer(call, sent_ms=number * apart_ms, chunks_ms=[chunk_ms]))
    return make_run(answers)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (steady(100, apart_ms=100, takes_ms=90), "Served: all of 10.0 requests/s; "),
        (steady(100, apart_ms=100, takes_ms=150), "Saturated: 6.67 of 10.0 requests/s served; "),
        (
            steady(100, apart_ms=100, takes_ms=90, slo=SLO(ttft_s=0.1)),
            "Served: all of 10.0 requests/s; p99 TTFT 90.0 ms, goals met by 100.0%.",
        ),
        (
            steady(100, apart_ms=100, takes_ms=90, slo=SLO(ttft_s=0.05)),
            "Served late: all of 10.0 requests/s; p99 TTFT 90.0 ms, goals met by 0.0%.",
        ),
        (make_run([]), "Nothing served: there were no requests."),
    ],
)
def test_the_verdict_says_whether_the_server_keeps_up(run, words):
    assert verdict(run_record(run, "", {})).text.startswith(words)


def test_refusals_of_a_server_are_load_that_was_not_served():
    """A client hears of a refusal later than it sent its request: the server has too much to do."""
    answers = list(steady(100, apart_ms=100, takes_ms=90).answers)
    refused = [
        make_answer(make_call(number), sent_ms=100 * number, finish="refused", error="429", tokens=0)
        for number in range(100, 120)
    ]
    found = verdict(run_record(make_run([*answers, *refused]), "", {}))
    assert found.text.startswith("Saturated: ")


def test_a_record_says_what_was_measured():
    run = steady(10, apart_ms=0, takes_ms=100)
    record = run_record(run, "", {}, subject="chat at home, 4 clients", clients=4, stopped=True)
    assert (record.subject, record.clients, record.stopped) == ("chat at home, 4 clients", 4, True)
    assert verdict(record).text.startswith("Served: 4 clients with 10.0 requests/s and 10.0 tokens/s; ")


def test_a_simulation_can_be_compared_with_the_log(tmp_path):
    from shoal.measure import write_run

    run = steady(5, apart_ms=100, takes_ms=40)
    write_run(run_record(run, "", {}), tmp_path, formats=("jsonl", "summary"))
    rows = read_measured(tmp_path / "requests.jsonl")
    assert len(rows) == 5
    assert summarise(run_record(run, "", {})).overall.answered == 5


def test_tables_have_only_what_a_client_knows():
    summary = summarise(run_record(steady(5, apart_ms=100, takes_ms=40), "", {}))
    assert tokens_grid(summary).heads == ["service", "prompt", "output", "output/s"]
    assert tokens_grid(summary).rows == [["chat", "25", "5", "11.4"]]
