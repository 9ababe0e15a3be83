"""The HTML report of ``shoal tune``."""

import math
from collections.abc import Mapping

from shoal.cli.plan_page import outcome_panels
from shoal.cli.tune_report import DEFAULT, held_out_table, rounds_table
from shoal.config.scheduler_yaml import in_words
from shoal.measure import Panel, Series
from shoal.measure.page import Page, Tile
from shoal.measure.tables import Grid, figure, seconds, share
from shoal.plan.outcomes import mean, tail
from shoal.plan.tune import TuningResult
from shoal.plan.verdict import tune_verdict
from shoal.schedule import SchedulerOptions

_WORDS = (
    "Loss: mean of missed goals plus 0.001 times normalised latency, which decides where no service has "
    "goals. Each round of the search has the best schedulers of the one before on more requests. Held-out "
    "requests are the latest; nothing was decided on them. Normalised latency, x alone: time from arrival to "
    "last token in units of what the mean request of the service takes alone."
)


def tune_page(tuned: TuningResult, default: SchedulerOptions, subject: str, facts: Mapping[str, str]) -> Page:
    """What the report of a search has; subject, facts: of the scenario."""
    conclusion = tune_verdict(tuned, default)
    outcomes = {in_words(each.scheduler, default) or DEFAULT: each.outcomes for each in tuned.table}
    return Page(
        title=subject,
        name="The scheduler for a workload",
        kind=conclusion.kind,
        verdict=conclusion.text,
        facts=facts,
        tiles=_tiles(tuned, default),
        pictures=[search_panel(tuned, default), *outcome_panels(outcomes, {})],
        grids=[
            Grid.of(held_out_table(tuned, default)),
            Grid.of(rounds_table(tuned.rounds, tuned.searched, default)),
        ],
        words=[_WORDS],
    )


def search_panel(tuned: TuningResult, default: SchedulerOptions) -> Panel:
    """Loss by rank in each round; a point is the scheduler as written."""
    series = []
    for number, each in enumerate(tuned.rounds):
        requests = len(tuned.searched.first(each.share))
        ranks = [float(rank) for rank in range(1, len(each.candidates) + 1)]
        label = f"round {number + 1}: {requests:,} requests"
        series.append(Series(label, ranks, each.losses, line=True, colour=number))
    written = [(each, list(each.candidates).index(default)) for each in tuned.rounds]
    places = [place + 1.0 for _, place in written]
    losses = [each.losses[place] for each, place in written]
    series.append(Series(DEFAULT, places, losses, colour=9, shape="D"))
    return Panel(
        title="Schedulers in the search",
        x_label="rank of the scheduler",
        y_label="loss",
        series=series,
        from_zero=True,
    )


def _tiles(tuned: TuningResult, default: SchedulerOptions) -> list[Tile]:
    rows = {row.scheduler: row for row in tuned.table}
    best, written = rows[tuned.best].outcomes, rows[default].outcomes
    tiles = [Tile("Tried", f"{len(tuned.rounds[0].candidates):,}", "schedulers")]
    if not math.isnan(best.attainment):
        tiles.append(Tile("SLO met", share(best.attainment), f"as written {share(written.attainment)}"))
    for name, values, before, write in (
        ("TTFT", best.ttft_s, written.ttft_s, seconds),
        ("x alone", best.latency, written.latency, figure),
    ):
        if not math.isnan(mean(values)):
            tiles.append(Tile(f"{name}, mean", write(mean(values)), f"as written {write(mean(before))}"))
            tiles.append(Tile(f"{name}, p99", write(tail(values)), f"as written {write(tail(before))}"))
    return tiles
