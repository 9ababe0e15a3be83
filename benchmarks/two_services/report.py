"""Metrics of `benchmarks.two_services`, as tables and as a picture."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.two_services.outcome import Run
from benchmarks.two_services.run import E2E_SCALE
from shoal.core import SLO, RequestRecord, attainment, met, normalised_latency, percentile
from shoal.measure import InterTokenLatencies, require_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = "all"
TICKS = (1.0, 2.0, 5.0)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One policy at one load, for one service or all.

    normalised: E2E latency over the service's execution time. attainment: share of requests within E2E_SCALE
    times that. Unfinished requests count with the time so far, and as missed. tpot_s, gap_s and gap_p99_s
    (mean and 99th percentile of the largest inter-token latency): over requests of at least two tokens.
    itl_p99_s: of all inter-token latencies.
    """

    policy: str
    load: float
    service: str
    requests: int
    unfinished: int
    normalised: float
    normalised_p99: float
    attainment: float
    ttft_s: float
    ttft_p99_s: float
    tpot_s: float
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    gap_s: float = math.nan
    gap_p99_s: float = math.nan
    itl_p99_s: float = math.nan
    """These three are missing in old files."""


def figures_of(
    policy: str, load: float, runs: Sequence[Run], execution_s: Mapping[str, float]
) -> list[Figures]:
    """Figures for all services and for each, over all ``runs``."""
    services = sorted({outcome.service for run in runs for outcome in run.outcomes})
    groups = [ALL, *services] if len(services) > 1 else [ALL]
    return [_figures(policy, load, group, runs, execution_s) for group in groups]


def _figures(
    policy: str, load: float, service: str, runs: Sequence[Run], execution_s: Mapping[str, float]
) -> Figures:
    records, ended = [], []
    for run in runs:
        for number, one in enumerate(run.outcomes):
            if service in (ALL, one.service):
                finish_s = run.ended_s if one.finish_s is None else one.finish_s
                records.append(
                    RequestRecord(
                        request_id=str(number),
                        service=one.service,
                        arrival_ns=round(one.at_s * 1e9),
                        first_token_ns=round((finish_s if one.first_s is None else one.first_s) * 1e9),
                        finish_ns=round(finish_s * 1e9),
                        prompt_tokens=one.prompt_tokens,
                        output_tokens=one.output_tokens,
                    )
                )
                ended.append(one.finish_s is not None)
    normalised = [normalised_latency(record, execution_s[record.service]) for record in records]
    goals = {name: SLO(e2e_s=E2E_SCALE * seconds) for name, seconds in execution_s.items()}
    counts = [c for run in runs for name, c in run.counts.items() if service in (ALL, name)]
    ttft = [record.ttft_s for record in records]
    tpot = [record.tpot_s for record in records if record.output_tokens > 1]
    largest = [
        one.largest_gap_s
        for run in runs
        for one in run.outcomes
        if service in (ALL, one.service) and one.output_tokens > 1
    ]
    gaps = InterTokenLatencies.merge(
        gaps for run in runs for name, gaps in run.gaps.items() if service in (ALL, name)
    )
    return Figures(
        policy=policy,
        load=load,
        service=service,
        requests=len(records),
        unfinished=ended.count(False),
        normalised=fmean(normalised),
        normalised_p99=percentile(normalised, 99),
        attainment=attainment(
            done and met(record, goals[record.service]) for done, record in zip(ended, records, strict=True)
        ),
        ttft_s=fmean(ttft),
        ttft_p99_s=percentile(ttft, 99),
        tpot_s=fmean(tpot) if tpot else math.nan,
        preemptions=sum(c.preemptions for c in counts),
        recomputed_tokens=sum(c.recomputed_tokens for c in counts),
        swapped_tokens=sum(c.swapped_tokens for c in counts),
        gap_s=fmean(largest) if largest else math.nan,
        gap_p99_s=percentile(largest, 99),
        itl_p99_s=gaps.percentile_s(99) if len(gaps) else math.nan,
    )


def show(results: Sequence[Figures]) -> None:
    """A table for every load."""
    console = Console(width=190)
    for load in sorted({one.load for one in results}):
        table = Table(title=f"load {load:g} x capacity")
        table.add_column("policy", no_wrap=True)
        table.add_column("service")
        for column in (
            "requests", "unfinished", "latency / L^", "p99", f"within {E2E_SCALE:g} L^", "TTFT, s", "p99, s",
            "TPOT, ms", "ITL p99, ms", "MTPOT, s", "p99, s", "preemptions", "recomputed", "swapped",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for one in results:
            if one.load == load:
                if one.service == ALL:
                    table.add_section()
                table.add_row(
                    one.policy if one.service == ALL else "",
                    one.service,
                    str(one.requests),
                    str(one.unfinished or ""),
                    f"{one.normalised:.2f}",
                    f"{one.normalised_p99:.1f}",
                    f"{one.attainment:.1%}",
                    f"{one.ttft_s:.2f}",
                    f"{one.ttft_p99_s:.2f}",
                    f"{one.tpot_s * 1000:.0f}",
                    _or_dash(one.itl_p99_s * 1000, ".0f"),
                    _or_dash(one.gap_s, ".2f"),
                    _or_dash(one.gap_p99_s, ".2f"),
                    str(one.preemptions or ""),
                    str(one.recomputed_tokens or ""),
                    str(one.swapped_tokens or ""),
                    style="bold" if one.service == ALL else "dim",
                )
        console.print(table)


def _or_dash(value: float, digits: str) -> str:
    return "-" if math.isnan(value) else format(value, digits)


def title_of(report: Mapping[str, dict[str, Any]]) -> str:
    """Title with the settings and the calibration of a file."""
    settings, calibration = report["settings"], report["calibration"]
    alone = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in calibration["execution_s"].items())
    return (
        f"{' and '.join(calibration['execution_s'])} on {settings['model']}, "
        f"KV pool {settings['kv_memory'] / 2**20:.0f} MiB, L^ {alone}, "
        f"capacity {calibration['capacity']:.1f} requests/s"
    )


def save_picture(results: Sequence[Figures], path: Path, title: str) -> None:
    """Figures over all services against the load, a line for each policy; needs matplotlib.

    Figures that old files lack are left out.
    """
    require_plots()
    from matplotlib.figure import Figure

    panels: Sequence[tuple[str, str, bool, Callable[[Figures], float]]] = (
        ("normalised latency", "mean latency / L^", True, lambda one: one.normalised),
        ("normalised latency, p99", "latency / L^", True, lambda one: one.normalised_p99),
        (f"ended within {E2E_SCALE:g} L^", "requests, %", False, lambda one: 100 * one.attainment),
        ("time to first token", "mean, s", True, lambda one: one.ttft_s),
        ("time per output token", "mean, ms", True, lambda one: 1000 * one.tpot_s),
        ("time between tokens (ITL)", "p99, ms", True, lambda one: 1000 * one.itl_p99_s),
        ("largest gap of an answer (MTPOT)", "mean, s", True, lambda one: one.gap_s),
        ("largest gap of an answer (MTPOT)", "p99, s", True, lambda one: one.gap_p99_s),
    )
    overall = [one for one in results if one.service == ALL]
    policies = list(dict.fromkeys(one.policy for one in overall))
    known = [panel for panel in panels if not any(math.isnan(panel[3](one)) for one in overall)]
    rows = len(known) // 3 + 1
    figure = Figure(figsize=(14, 4 * rows), layout="constrained")
    axes: list[Any] = list(figure.subplots(rows, 3).flat)
    for axis in axes[len(known) :]:
        axis.set_axis_off()
    for axis, (name, label, logarithmic, value) in zip(axes, known, strict=False):
        for number, policy in enumerate(policies):
            points = sorted((one.load, value(one)) for one in overall if one.policy == policy)
            loads, values = zip(*points, strict=True)
            axis.plot(loads, values, label=policy, **_style(policy, number))
        axis.set_title(name)
        axis.set_xlabel("arrivals / capacity")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        _tick(axis, sorted({one.load for one in overall}), logarithmic)
    axes[2].set_ylim(0, 102)
    axes[len(known)].legend(
        *axes[0].get_legend_handles_labels(), loc="center left", fontsize="large", frameon=False
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _style(policy: str, number: int) -> dict[str, object]:
    """A bold black line for the default policy; colours and markers for others."""
    if policy == "shoal":
        return {"color": "black", "marker": "o", "linewidth": 2.5, "zorder": 3}
    return {
        "color": f"C{number % 10}",
        "marker": "svDP^<>Xhd*"[number % 11],
        "markersize": 5,
        "linewidth": 1.3,
        "linestyle": "--" if policy == "dedicated" else "-",
    }


def _tick(axis: "Axes", loads: Sequence[float], logarithmic: bool) -> None:
    """Ticks at the loads and, on a logarithmic axis, at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_xticks(loads, [f"{load:g}" for load in loads])
    if logarithmic:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=TICKS))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
