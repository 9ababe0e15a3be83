"""The figures of a run are those of the formulas, also for empty runs."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_builders import NS, make_row, make_run, make_totals, random_run, refused_row
from rich.console import Console

from shoal.core import SLO
from shoal.measure import Spread, WeightsTotals, compare, summarise, summary_tables
from shoal.measure.tables import figure, latency_grid, requests_grid, seconds, share, weights_grid


def printed(*tables, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def test_the_figures_of_a_hand_made_run():
    run = make_run(
        [
            make_row(
                "a",
                arrival=1,
                first=2,
                end=4,
                output=5,
                largest_gap_ns=NS,
                slo=SLO(ttft_s=1.0),
                preemptions=2,
                recomputed_tokens=30,
                cached_tokens=4,
            ),
            make_row("b", arrival=2, first=5, end=5, output=1, slo=SLO(ttft_s=1.0)),
            make_row("c", service="other", arrival=3, first=4, end=9, output=11),
        ],
        end_ns=11 * NS,
        execution_s={"chat": 1.5},
    )
    summary = summarise(run)
    chat, both = summary.services["chat"], summary.overall
    assert summary.duration_s == 10.0
    assert (chat.requests, chat.answered, chat.throughput, chat.output_tokens_per_s) == (2, 2, 0.2, 0.6)
    assert (both.requests, both.throughput, both.output_tokens_per_s) == (3, 0.3, 1.7)
    assert chat.ttft_s.mean == both.ttft_s.p50 * 2 == 2.0
    assert chat.tpot_s == Spread(mean=0.5, p50=0.5, p90=0.5, p95=0.5, p99=0.5)  # a single token has none
    assert chat.largest_gap_s.mean == 1.0
    assert chat.normalised_latency.mean == pytest.approx((3 / 1.5 + 3 / 1.5) / 2)
    assert both.normalised_latency == chat.normalised_latency
    assert summary.services["other"].normalised_latency is None
    assert (chat.slo_attainment, chat.goodput, both.goodput) == (0.5, 0.1, 0.1)
    assert summary.services["other"].slo_attainment is summary.services["other"].goodput is None
    assert (chat.preemptions, chat.recomputed_tokens) == (2, 30)
    assert (chat.cached_tokens, chat.prompt_tokens) == (4, 20)


def test_goodput_counts_requests_without_a_long_gap():
    slo = SLO(ttft_s=2.0, mtpot_s=0.5)
    gaps = (NS // 2, NS // 2 + 1, 0)
    rows = [make_row(f"r{n}", slo=slo, largest_gap_ns=gap, arrival=n) for n, gap in enumerate(gaps)]
    overall = summarise(make_run(rows)).overall
    assert overall.slo_attainment == pytest.approx(2 / 3)
    assert overall.goodput == pytest.approx(overall.throughput * 2 / 3)


def test_tokens_on_time_are_a_share_of_those_with_deadlines():
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    rows = [
        make_row("a", output=5, slo=slo, tokens_on_time=2),
        make_row("b", output=3, slo=slo, tokens_on_time=3, finish="cancelled"),
        make_row("c", output=50, slo=SLO(ttft_s=1.0)),
        make_row("d", service="other", output=9),
        refused_row(slo=slo, tokens_on_time=0),
    ]
    summary = summarise(make_run(rows))
    assert summary.overall.tokens_on_time == summary.services["chat"].tokens_on_time == 5 / 8
    assert summary.services["other"].tokens_on_time is None
    grid = requests_grid(summary)
    assert grid.heads[-1] == "on time"
    assert [row[-1] for row in grid.rows] == ["62.5%", "-", "62.5%"]
    assert "on time" not in requests_grid(summarise(make_run(rows[2:4]))).heads


def test_answers_that_were_cut_are_counted_and_prompts_that_were_refused_are_not():
    rows = [make_row("a"), make_row("b", finish="length"), refused_row("c")]
    summary = summarise(make_run(rows))
    assert (summary.overall.answered, summary.overall.cut, summary.overall.refused) == (2, 1, 1)
    assert summary.overall.prompt_tokens == 20
    [head] = [line for line in printed(requests_grid(summary).to_rich()).splitlines() if "goodput" in line]
    assert head.split()[:4] == ["service", "answered", "refused", "cut"]
    assert " cut " not in printed(requests_grid(summarise(make_run(rows[:1]))).to_rich())


def test_which_requests_count_for_attainment():
    goal = SLO(e2e_s=10.0)
    rows = [
        make_row("met", slo=goal),
        make_row("late", end=11, slo=goal),
        make_row("failed", finish="error", slo=goal),
        refused_row("refused", slo=goal),
        make_row("gone", finish="cancelled", slo=goal),
        make_row("without goals"),
    ]
    group = summarise(make_run(rows)).overall
    assert group.slo_attainment == 0.25
    assert (group.answered, group.failed, group.refused, group.cancelled) == (3, 1, 1, 1)
    assert group.goodput == pytest.approx(1 / 11)
    assert group.e2e_s.mean == pytest.approx((3 + 11 + 3) / 3)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_spreads_are_those_of_numpy(values):
    spread = Spread.of(values)
    expected = np.percentile(values, (50, 90, 95, 99))
    assert (spread.p50, spread.p90, spread.p95, spread.p99) == pytest.approx(tuple(expected))
    assert spread.mean == pytest.approx(np.mean(values))


def test_services_add_up_to_all():
    summary = summarise(random_run(requests=400, seed=3))
    for count in ("requests", "answered", "refused", "failed", "cancelled", "output_tokens", "preemptions"):
        parts = sum(getattr(group, count) for group in summary.services.values())
        assert parts == getattr(summary.overall, count)
    assert sum(group.throughput for group in summary.services.values()) == pytest.approx(
        summary.overall.throughput
    )
    assert list(summary.services) == sorted(summary.services)


def test_memory_is_weighted_by_steps():
    engines = (make_totals(30, 0.2, 0.5), make_totals(10, 0.6, 0.8), make_totals(0, 0.0, 0.0))
    summary = summarise(make_run([make_row()], engines=engines))
    assert summary.kv_used_mean == pytest.approx(0.3)
    assert summary.kv_used_peak == 0.8
    assert summary.engines == engines


@pytest.mark.parametrize(
    "run",
    [
        make_run(engines=()),
        make_run(engines=(make_totals(0, 0.0, 0.0),) * 2),
        make_run([refused_row(slo=SLO(ttft_s=1.0))]),
        make_run([make_row(first=0, end=0, output=1)]),
    ],
)
def test_runs_with_next_to_nothing(run):
    summary = summarise(run)
    plain = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert plain["overall"]["requests"] == len(run.requests)
    if not run.requests or not run.requests[0].answered:
        assert plain["overall"]["e2e_s"] is None
        assert "nan" not in printed(*summary_tables(summary), compare({"run": run})).lower()
    assert plain["overall"]["throughput"] is None  # no time has passed


def test_json_holds_every_figure():
    plain = summarise(random_run()).to_dict()
    assert set(plain) == {
        "title",
        "duration_s",
        "overall",
        "services",
        "kv_used_mean",
        "kv_used_peak",
        "engines",
        "engines_up",
        "moves",
        "withdrawn",
    }
    assert set(plain["overall"]["tpot_s"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert plain["engines"][0]["steps"] == 5000


def test_tables_have_a_row_for_each_service_and_one_for_all():
    summary = summarise(random_run())
    names = [row[0] for row in requests_grid(summary).rows]
    assert names == ["chat", "complete", "summarise", "all"]
    assert requests_grid(summarise(random_run(services=("chat",)))).rows[0][0] == "chat"
    assert len(requests_grid(summarise(random_run(services=("chat",)))).rows) == 1
    assert [row[1] for row in latency_grid(summary).rows][:5] == ["TTFT", "TPOT", "E2E", "MTPOT", "x alone"]
    assert [row[1] for row in latency_grid(summary).rows].count("x alone") == 2  # chat's, and all


def test_a_table_says_how_many_requests_moved_if_any_did():
    assert "Moves" not in printed(*summary_tables(summarise(make_run([make_row()]))))
    moves = {"live": {"done": 1234, "aborted": 5}, "tokens": {"ended": 2}}
    summary = summarise(make_run([make_row()], moves=moves))
    assert summary.to_dict()["moves"] == moves
    lines = printed(*summary_tables(summary)).splitlines()
    told = [line.split() for line in lines if line.split()[:1] in (["live"], ["tokens"])]
    assert told == [["live", "1,234", "5", "0"], ["tokens", "0", "0", "2"]]


def test_a_table_counts_weights_that_come_and_go_over_all_engines():
    assert "Weights" not in printed(*summary_tables(summarise(make_run([make_row()]))))

    def totals(*services, waiting_s, longest_wait_s):
        return WeightsTotals(
            services=services, num_bytes=3 * 2**30, fetches=2, evictions=1, fetching_s=0.5, waits=4,
            waiting_s=waiting_s, longest_wait_s=longest_wait_s,
        )  # fmt: skip

    engines = (
        make_totals(weights={"w": totals("chat", "code", waiting_s=2.0, longest_wait_s=0.9)}),
        make_totals(
            weights={
                "w": totals("chat", waiting_s=6.0, longest_wait_s=1.5),
                "x": totals("[red]base", waiting_s=0.0, longest_wait_s=0.0),
            }
        ),
    )
    summary = summarise(make_run([make_row()], engines=engines))
    assert summary.to_dict()["engines"][1]["weights"]["x"]["waits"] == 4
    assert weights_grid(summary).rows == [
        ["chat, code", "3.00 GiB", "4", "2", "12.0 GiB", "8", "1.00 s", "1.50 s"],
        ["[red]base", "3.00 GiB", "2", "1", "6.00 GiB", "4", "0 s", "0 s"],
        ["all", "6.00 GiB", "6", "3", "18.0 GiB", "12", "667 ms", "1.50 s"],
    ]
    text = printed(*summary_tables(summary), width=80)
    assert all(head in text for head in weights_grid(summary).heads)


def test_tables_fit_a_narrow_terminal_and_take_names_as_they_are():
    run = random_run(requests=2000, services=("[red]chat", "complete"))
    text = printed(*summary_tables(summarise(run)), width=80)
    assert "[red]chat" in text
    assert "2,000 requests" in text
    assert "…" not in text
    assert "engine" in text
    assert "cancelled" in text
    group = summarise(run).overall
    line = next(line for line in text.splitlines() if line.split()[:1] == ["all"])
    assert line.split()[1:5] == [
        f"{group.answered:,}/2,000", str(group.refused), str(group.failed), str(group.cancelled)
    ]  # fmt: skip
    assert line.endswith(share(group.slo_attainment) + " ")
    assert "engine " not in printed(*summary_tables(summarise(random_run(engines=1))))


def test_comparison_has_a_row_for_each_run():
    runs = {"fcfs": random_run(seed=1), "doubling": random_run(seed=2)}
    text = printed(compare(runs), width=110)
    assert all(head in text for head in ("done", "x alone", "goodput", "SLO"))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for name, run in runs.items():
        at = next(number for number, line in enumerate(lines) if line[0] == name)
        group = summarise(run).overall
        assert figure(group.ttft_s.mean) in lines[at]
        assert figure(group.ttft_s.p99) == lines[at + 1][0]


def test_comparison_leaves_out_what_says_nothing():
    text = printed(compare({"one": make_run([make_row()]), "two": make_run([make_row(end=4)])}), width=80)
    assert not any(head in text for head in ("done", "alone", "goodput", "SLO"))
    assert "Runs" in printed(compare({}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (2.5e-7, "250 ns"),
        (0.0123456, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (59.96, "60.0 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_times_for_people(value, text):
    assert seconds(value) == text


def test_figures_for_people():
    assert [figure(value) for value in (None, 0, 0.01234, 9.996, 99.94, 99.96, 1234.5)] == [
        "-", "0", "0.0123", "10.0", "99.9", "100", "1,234",
    ]  # fmt: skip
    assert [share(value) for value in (None, 0.0, 0.9996, 1.0)] == ["-", "0.0%", "99.9%", "100.0%"]
