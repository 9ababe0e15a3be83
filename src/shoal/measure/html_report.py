"""HTML report of a run: verdict, figures, pictures, tables, and the slowest requests."""

import heapq
from collections import Counter
from pathlib import Path

from shoal.measure.curves import first_panels, further_panels
from shoal.measure.page import Page, Tile, page_html, write_page
from shoal.measure.records import RequestRow, RunRecord
from shoal.measure.service_colours import MAX_NAMED
from shoal.measure.summary import Summary, met_goals, summarise
from shoal.measure.tables import NOTHING, Grid, figure, seconds, share, summary_grids
from shoal.measure.verdict import verdict

SLOWEST = 20
FAILURES = 20

_SIGNS = {"served": "good", "late": "fair", "unanswered": "bad", "saturated": "bad", "nothing": "bad"}
"""``Page.kind`` by kind of the verdict."""
_MANY = (
    f"Of many services the {MAX_NAMED} with most requests are shown by name. The line of all requests is "
    "that of every service."
)
_LATENCIES = (
    "TTFT: arrival to first token. TPOT: mean time per output token after the first. MTPOT: the longest time "
    "between two tokens of one answer. E2E: arrival to last token. Normalised latency, x alone: E2E in units "
    "of what the mean request of the service takes alone. Latencies are those of answered requests; TPOT and "
    "MTPOT of answers of two tokens or more. A distribution shows the share of requests up to each latency; "
    "where it crosses the line of a goal, that is the share that met it."
)
_OTHERS = (
    "SLO met: share of the requests with goals that met all of them; refused and failed ones missed theirs, "
    "cancelled ones do not count. Goodput: answered requests per second that met their goals. Recomputed: "
    "tokens computed again after a preemption, or on another engine. Cut: answers that ended at a limit "
    "(max_tokens, the context, the pool) before their end. Cached: prompt tokens found in the prefix cache."
)


def write_report(run: RunRecord, path: Path) -> None:
    """Write ``report_html``; raises ConfigError without matplotlib."""
    write_page(report_page(run), path)


def report_html(run: RunRecord) -> str:
    """The report of a run. Equal runs give equal bytes. Raises ConfigError without matplotlib."""
    return page_html(report_page(run))


def report_page(run: RunRecord) -> Page:
    """What the report of a run has."""
    summary = summarise(run)
    found = verdict(run)
    return Page(
        title=run.subject or run.title,
        # What a client calls its run is in the subject.
        name=run.title if run.subject and run.engines else "",
        kind=_SIGNS[found.kind],
        verdict=found.text,
        facts=run.facts,
        tiles=_tiles(summary),
        pictures=first_panels(run),
        further_pictures=further_panels(run),
        note=_MANY if len(summary.services) > MAX_NAMED else "",
        grids=summary_grids(summary) if run.requests else [],
        further_grids=[grid for grid in (failures_grid(run), slowest_grid(run)) if grid.rows],
        words=[_LATENCIES, _OTHERS],
    )


def slowest_grid(run: RunRecord) -> Grid:
    """The answered requests with the largest end-to-end latency."""
    answered = (row for row in run.requests if row.answered)
    slowest = heapq.nlargest(SLOWEST, answered, key=lambda row: row.finish_ns - row.arrival_ns)
    heads = ["request", "service", "engine", "arrival", "E2E", "TTFT", "TPOT", "MTPOT", "prompt", "output",
             "cached", "preemptions", "recomputed", "goals"]  # fmt: skip
    return Grid(title="Slowest requests", heads=heads, rows=[_slow_row(row) for row in slowest], words=2)


def failures_grid(run: RunRecord) -> Grid:
    """Reasons why requests were not answered, most frequent first."""
    reasons = Counter((row.finish, row.service, row.error or "") for row in run.requests if not row.answered)
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:FAILURES]
    rows = [[*reason, f"{count:,}"] for reason, count in ordered]
    return Grid(
        title="Not answered", heads=["end", "service", "why", "requests"], rows=rows, words=3, long=(2,)
    )


def _slow_row(row: RequestRow) -> list[str]:
    multi_token = row.output_tokens > 1
    goals = met_goals(row)
    return [
        row.request_id,
        row.service,
        str(row.engine),
        f"{row.arrival_ns / 1e9:,.3f} s",
        seconds(row.e2e_s),
        seconds(row.ttft_s),
        seconds(row.tpot_s if multi_token else None),
        seconds(row.mtpot_s if multi_token else None),
        f"{row.prompt_tokens:,}",
        f"{row.output_tokens:,}",
        f"{row.cached_tokens:,}",
        f"{row.preemptions:,}",
        f"{row.recomputed_tokens:,}",
        NOTHING if goals is None else ("met" if goals else "missed"),
    ]


def _tiles(summary: Summary) -> list[Tile]:
    group = summary.overall
    tiles = [
        Tile("Answered", f"{group.answered:,}", f"of {group.requests:,}"),
        Tile("Throughput", figure(group.throughput), "requests/s"),
        Tile("Output", figure(group.output_tokens_per_s), "tokens/s"),
    ]
    for name, spread in (("TTFT", group.ttft_s), ("TPOT", group.tpot_s), ("E2E", group.e2e_s)):
        if spread is not None:
            tiles.append(Tile(f"{name}, mean", seconds(spread.mean), f"p99 {seconds(spread.p99)}"))
    if group.normalised_latency is not None:
        alone = group.normalised_latency
        tiles.append(Tile("x alone, mean", figure(alone.mean), f"p99 {figure(alone.p99)}"))
    if group.slo_attainment is not None:
        note = f"goodput {figure(group.goodput)}/s"
        tiles.append(Tile("SLO met", share(group.slo_attainment), note))
    if summary.kv_used_peak is not None:
        note = f"peak {share(summary.kv_used_peak)}"
        tiles.append(Tile("KV, mean", share(summary.kv_used_mean), note))
    if summary.engines:
        note = f"{group.recomputed_tokens:,} tokens again"
        tiles.append(Tile("Preemptions", f"{group.preemptions:,}", note))
    return tiles
