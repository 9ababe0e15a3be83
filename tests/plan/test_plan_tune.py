"""Tuning: which schedulers are tried, on what, and which is taken."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from plan_builders import SCENARIO, prepared
from typer.testing import CliRunner

from shoal.cli.app import app, run
from shoal.config.scenario_file import load_scenario
from shoal.core import ConfigError
from shoal.plan.candidates import CHOICES, scheduler_candidates
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part, Trial, simulate, split
from shoal.plan.tune import Search, tune
from shoal.schedule import SchedulerOptions
from shoal.schedule.policies.admissions import Conservative, Slice
from shoal.schedule.policies.orders import Fcfs
from small_searches import small_searches

HERE = Search(trials=4, processes=1)


def test_candidates_begin_with_the_default_and_are_different():
    default = SchedulerOptions(order=Fcfs(), victim="newest")
    found = scheduler_candidates(default, 100, seed=0)
    assert found[0] == default
    assert len(set(found)) == len(found) == 100
    assert {each.victim for each in found} == {"newest"}


def test_candidates_have_all_single_changes_before_drawn_ones():
    default = SchedulerOptions()
    single = {replace(default, **{name: value}) for name, values in CHOICES.items() for value in values}
    assert single <= set(scheduler_candidates(default, len(single) + 1, seed=0))
    few = scheduler_candidates(default, 8, seed=0)
    assert len(few) == 8
    assert set(few) <= single
    assert few != scheduler_candidates(default, 8, seed=1)


@pytest.mark.slow
def test_where_weights_come_and_go_no_admission_is_by_slices(tmp_path):
    default = SchedulerOptions()
    assert any(each.admission.slice_tokens for each in scheduler_candidates(default, 81, seed=0))
    found = scheduler_candidates(default, 81, seed=0, slices=False)
    assert len(set(found)) == 81
    assert not any(each.admission.slice_tokens for each in found)
    limited = SCENARIO.replace("workload:", "weights: {memory: 16GiB}\nworkload:")
    tune(prepared(tmp_path, limited), replace(HERE, trials=12))


def test_the_later_part_is_held_out():
    assert split(10, 0.6) == (Part(0, 6), Part(6, 10))
    assert split(10, 0.999) == (Part(0, 9), Part(9, 10))
    assert Part(2, 12).first(0.5) == Part(2, 7)


def test_a_part_is_served_behind_all_that_came_before(tmp_path):
    """Under more load than can be served, later requests wait longer and longer."""
    run = prepared(tmp_path, SCENARIO.replace("rate: 30", "rate: 300"))
    found = simulate(run, Trial(run.scenario.scheduler, Part(100, 160)))
    first_ns = run.requests[0].arrival_ns
    served = [replace(each, arrival_ns=each.arrival_ns - first_ns) for each in run.requests[:160]]
    rows = {row.request_id: row for row in replace(run, requests=served).run().requests}
    assert found.ttft_s.tolist() == [rows[each.id].ttft_s for each in run.requests[100:160]]
    early = simulate(run, Trial(run.scenario.scheduler, Part(0, 60)))
    assert found.ttft_s.mean() > 2 * early.ttft_s.mean()
    assert len(found.met) == 60


@pytest.mark.slow
def test_a_bad_default_is_replaced_by_what_beats_it(tmp_path):
    """One request at a time misses nearly every goal here; nearly everything else meets them."""
    text = SCENARIO + "scheduler: {max_running: 1}\n"
    tuned = tune(prepared(tmp_path, text), HERE)
    assert tuned.best.max_running != 1
    assert tuned.gain.low > 0
    default, *others = tuned.table
    assert default.scheduler.max_running == 1
    assert others[0].outcomes.attainment > default.outcomes.attainment + 0.5
    assert others[0].gain.low > 0
    assert (tuned.searched, tuned.decided, tuned.held_out) == (Part(0, 180), Part(180, 240), Part(240, 400))


def test_a_default_that_nothing_surely_beats_stays(tmp_path):
    """With enough memory for all requests, all schedulers do nearly the same."""
    text = SCENARIO.replace("rate: 30", "rate: 2")
    run = prepared(tmp_path, text)
    with small_searches():
        tuned = tune(run, HERE)
    assert tuned.best == run.scenario.scheduler
    assert tuned.table[0].outcomes.attainment == 1


def test_the_luckiest_of_many_equal_schedulers_does_not_replace_the_default(tmp_path, monkeypatch):
    """If only chance distinguishes two schedulers, the default changes as rarely as the confidence says."""
    run = prepared(tmp_path)
    changed = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)

        def chance(workers, schedulers, part, tell, draw=draw):
            names = ["chat"] * len(part)
            return [Outcomes(names, *draw.uniform(size=(3, len(part)))) for _ in schedulers]

        monkeypatch.setattr("shoal.plan.tune._simulate", chance)
        changed += tune(run, Search(trials=27, processes=1)).best != run.scenario.scheduler
    assert changed <= 3


@pytest.mark.slow
def test_without_goals_latency_counts(tmp_path):
    text = SCENARIO.replace(", slo: {ttft: 100ms}", "") + "scheduler: {max_running: 1}\n"
    tuned = tune(prepared(tmp_path, text), HERE)
    assert tuned.best.max_running != 1
    assert np.isnan(tuned.table[0].outcomes.attainment)
    assert 0 < tuned.table[1].gain.mean <= 1


@pytest.mark.slow
def test_processes_change_nothing(tmp_path):
    run = prepared(tmp_path, SCENARIO.replace("400", "100"))
    with small_searches():
        here, there = (tune(run, replace(HERE, processes=count)) for count in (1, 2))
    assert here.rounds == there.rounds
    assert here.best == there.best


@pytest.mark.parametrize(
    ("search", "says"),
    [(lambda: Search(trials=1), "at least 2 trials"), (lambda: Search(share=1.0), "above 0 and below 1")],
)
def test_a_search_without_meaning_is_refused(search, says):
    with pytest.raises(ConfigError, match=says):
        search()


def test_a_workload_too_small_to_split_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 400 requests, got 20"):
        tune(prepared(tmp_path, SCENARIO.replace("400", "20")), HERE)


def test_the_command_writes_a_scheduler_that_simulate_takes(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO + "scheduler: {preset: vllm, max_running: 1}\n")
    out, figures = tmp_path / "scheduler.yaml", tmp_path / "figures.json"
    arguments = ["tune", "-c", str(file), "-o", str(out), "--json", str(figures), "--trials", "4"]
    arguments += ["--html", str(tmp_path / "tuned.html")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Held-out part: 160 later requests" in result.output
    assert "as written" in result.output
    page = (tmp_path / "tuned.html").read_text()
    assert "<title>llama-3.1-8b on 1 a100-80, 30 requests/s</title>" in page
    [verdict] = re.findall(r'class="verdict good.*?<span>(.*?)</span>', page)
    assert verdict.startswith("Best: max_running ")
    assert verdict in " ".join(result.output.split())
    for words in ("Schedulers in the search", "Normalised latency, held-out requests", "Held-out part: 160"):
        assert words in page
    found = json.loads(figures.read_text())
    flags = ["--model", "llama-3.1-8b", "--device", "a100-80", "--workload", "sharegpt"]
    assert run(["simulate", "-c", str(out), *flags, "--rate", "5", "--requests", "10"]) == 0
    (tmp_path / "both.yaml").write_text(SCENARIO + out.read_text())
    scenario = load_scenario(file=tmp_path / "both.yaml")
    assert scenario.preset == found["best"]["preset"] == "vllm"
    assert scenario.scheduler.max_running == found["best"]["max_running"] != 1
    assert found["held_out"][0]["gain"] == [0, 0, 0]
    assert found["held_out"][1]["slo_attainment"][0] > found["held_out"][0]["slo_attainment"][0]


def test_the_command_prints_the_scheduler_where_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.replace("rate: 30", "rate: 1"))
    result = CliRunner().invoke(app, ["tune", "-c", str(file), "--trials", "3"], catch_exceptions=False)
    assert "preset: shoal" in result.output
    assert "as it is written" in result.output


def test_slices_and_reserves_are_among_the_choices():
    admissions = CHOICES["admission"]
    assert any(isinstance(each, Slice) for each in admissions)
    assert any(isinstance(each, Conservative) for each in admissions)
