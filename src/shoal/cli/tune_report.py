"""Results of ``shoal tune``: tables and JSON."""

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.config.scheduler_yaml import in_words, scheduler_settings
from shoal.measure.tables import NOTHING, figure, seconds, share
from shoal.plan.confidence import Interval
from shoal.plan.halving import Ranked
from shoal.plan.outcomes import Outcomes, mean, tail
from shoal.plan.trial import Part
from shoal.plan.tune import HeldOutScheduler, Stopped, TuningResult
from shoal.plan.verdict import tune_verdict
from shoal.schedule import SchedulerOptions

DEFAULT = "as written"


def print_tuned(console: Console, tuned: TuningResult, default: SchedulerOptions) -> None:
    """Print the rounds of a search, the figures on the held-out part, and the conclusion."""
    console.print(rounds_table(tuned.rounds, tuned.searched, default))
    console.print(held_out_table(tuned, default))
    console.print(Text(tune_verdict(tuned, default).text, style="bold"))
    console.print()


def print_stopped(console: Console, stop: Stopped, default: SchedulerOptions) -> None:
    """Print the finished rounds of an interrupted search."""
    if stop.rounds:
        console.print(rounds_table(stop.rounds, stop.searched, default))
    console.print(
        Text("Stopped before the best was compared with the scheduler as it is written.", style="yellow")
    )


def rounds_table(
    rounds: Sequence[Ranked[SchedulerOptions]], searched: Part, default: SchedulerOptions
) -> Table:
    table = _table("Search", "round", "schedulers", "requests", words=("best",))
    for number, each in enumerate(rounds, start=1):
        requests = len(searched.first(each.share))
        best = Text(in_words(each.candidates[0], default) or DEFAULT)
        table.add_row(str(number), str(len(each.candidates)), f"{requests:,}", best)
    return table


def held_out_table(tuned: TuningResult, default: SchedulerOptions) -> Table:
    """One row for the default, and for each of the best schedulers of the last round."""
    goals = not math.isnan(tuned.table[0].outcomes.attainment)
    title = f"Held-out part: {len(tuned.held_out):,} later requests"
    heads = ["SLO met", "gain"] if goals else ["gain"]
    table = _table(title, *heads, "x alone", "TTFT", words=("scheduler",), words_first=True)
    table.caption = "SLO met, gain: below it, 95% confidence; x alone, TTFT: below it, p99"
    for each in tuned.table:
        name = Text(in_words(each.scheduler, default) or DEFAULT)
        if each.scheduler == tuned.best:
            name.stylize("bold")
        met = [_with_interval(each.attainment, goals)] if goals else []
        gain = NOTHING if each.scheduler == default else _gain(each.gain, goals)
        table.add_row(name, *met, gain, *latency_cells(each.outcomes))
    return table


def tuned_json(tuned: TuningResult, preset: str) -> dict[str, Any]:
    """The result as plain values; shares are 0 to 1, times in seconds, NaN is null."""
    return {
        "stopped": False,
        "searched_requests": len(tuned.searched),
        "decided_requests": len(tuned.decided),
        "held_out_requests": len(tuned.held_out),
        "best": scheduler_settings(tuned.best, preset),
        "rounds": _rounds_json(tuned.rounds, tuned.searched, preset),
        "held_out": [_row_json(each, preset) for each in tuned.table],
    }


def stopped_json(stop: Stopped, preset: str) -> dict[str, Any]:
    """The result of an interrupted search, without a best scheduler."""
    return {
        "stopped": True,
        "searched_requests": len(stop.searched),
        "best": None,
        "rounds": _rounds_json(stop.rounds, stop.searched, preset),
    }


def _rounds_json(
    rounds: Sequence[Ranked[SchedulerOptions]], searched: Part, preset: str
) -> list[dict[str, Any]]:
    return [
        {
            "requests": len(searched.first(each.share)),
            "schedulers": [scheduler_settings(candidate, preset) for candidate in each.candidates],
            "losses": list(each.losses),
        }
        for each in rounds
    ]


def _row_json(row: HeldOutScheduler, preset: str) -> dict[str, Any]:
    outcomes = row.outcomes
    return {
        "scheduler": scheduler_settings(row.scheduler, preset),
        "slo_attainment": interval_json(row.attainment),
        "gain": interval_json(row.gain),
        "normalised_latency": number_json(mean(outcomes.latency)),
        "normalised_latency_p99": number_json(tail(outcomes.latency)),
        "ttft_s": number_json(mean(outcomes.ttft_s)),
        "ttft_p99_s": number_json(tail(outcomes.ttft_s)),
    }


def interval_json(interval: Interval) -> list[float | None]:
    """Mean, low and high; NaN is null."""
    return [number_json(value) for value in (interval.mean, interval.low, interval.high)]


def number_json(value: float) -> float | None:
    """A number, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def latency_cells(found: Outcomes) -> tuple[str, str]:
    """Normalised latency and time to first token: the mean, and below it the 99th percentile."""
    latency, ttft = found.latency, found.ttft_s
    if math.isnan(mean(latency)):
        return NOTHING, NOTHING
    return (
        f"{figure(mean(latency))}\n{figure(tail(latency))}",
        f"{seconds(mean(ttft))}\n{seconds(tail(ttft))}",
    )


def _with_interval(interval: Interval, goals: bool) -> str:
    if not goals:
        return NOTHING
    return f"{share(interval.mean)}\n{interval.low * 100:.1f}-{interval.high * 100:.1f}"


def _gain(interval: Interval, goals: bool) -> str:
    """In percentage points of attainment, or in per cent of the default's latency."""
    unit = "" if goals else "%"
    return f"{interval.mean * 100:+.1f}{unit}\n{interval.low * 100:+.1f} to {interval.high * 100:+.1f}"


def _table(title: str, *figures: str, words: Sequence[str], words_first: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    named = [*words, *figures] if words_first else [*figures, *words]
    for name in named:
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    return table
