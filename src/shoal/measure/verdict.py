"""The verdict on a run: whether its load was served, and by what it was limited, in one sentence.

The rules, in this order; requests that their clients cancelled do not count:

1. ``nothing``: no request was answered.
2. ``saturated``: less than ``SERVED`` of the load was kept up with (``kept_share``). Where the run has
   samples of its engines, ``limit_of`` says what the limit was.
3. ``unanswered``: less than ``SERVED`` of the requests were answered; the rest were refused on arrival or
   failed.
4. ``late``: less than ``SERVED`` of the requests with goals met them.
5. ``served``: none of these.

A closed loop (``RunRecord.clients``) has no rate of its own, and so is never saturated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from shoal.measure.records import RequestRow, RunRecord, Sample
from shoal.measure.summary import GroupSummary, Summary, summarise
from shoal.measure.tables import figure, seconds, share

SERVED = 0.95
"""Share of the load from which it counts as served, and of the goals from which they count as met."""
KV_FULL = 0.9
"""Share of a pool's blocks from which it counts as full: a request needs several at once."""
MOSTLY = 0.5
"""Share of the samples with waiting requests in which a limit holds, from which it is the limit."""
PREEMPTED = 0.05
"""Preemptions per request from which memory is the limit: running requests outgrew the pool."""
BUSY = 0.9
"""Share of the time that engines step, from which compute is the limit if nothing else is."""

MOST_COUNTED = 100
"""Moments at which requests are counted, at most."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the load."""

    kind: str
    """"served", "late", "unanswered", "saturated" or "nothing"."""
    text: str
    """One sentence."""


def verdict(run: RunRecord) -> Verdict:
    """Whether the load of a run was served, by the rules above."""
    summary = summarise(run)
    group = summary.overall
    counted = group.requests - group.cancelled
    if not group.answered:
        return Verdict("nothing", f"Nothing served: {_endings(group)}{_early(run)}.")
    kept = kept_share(run)
    goals_met = group.slo_attainment
    if kept < SERVED:
        kind = "saturated"
        limit = limit_of(run)
        begin = (
            "Saturated: " + (f"limited by {limit}; " if limit else "") + f"{_of_offered(run, group)} served"
        )
    elif group.answered < SERVED * counted:
        kind, begin = "unanswered", f"Not all served: {_endings(group)}"
    elif goals_met is not None and goals_met < SERVED:
        kind, begin = "late", f"Served late: {_load(run, group)}"
    else:
        kind, begin = "served", f"Served: {_load(run, group)}"
    return Verdict(kind, f"{begin}; {_latency(group)}{_goals(group, summary)}{_early(run)}.")


def kept_share(run: RunRecord) -> float:
    """Share of the load that was kept up with, 0 to 1.

    Requests that arrive at their times are kept up with if their first tokens and their ends come as fast as
    they do. For each of the two the share is the larger one of

    - the time from first to last arrival over the time from first to last token (or end), and
    - 1 - b / n, where b of n requests are behind while the last tenth of them arrives. For first tokens these
      are the ones that wait. For ends they are the ones in the system beyond as many as there would be if all
      took as long as the first quarter did, less the chance in these two numbers (the root of their sum).

    The first alone would count the time that the last answers take, the second alone what all answers take.
    Requests refused after they had waited were not kept up with. A closed loop, and arrivals at one time,
    keep up.
    """
    answered = sorted((row for row in run.requests if row.answered), key=lambda row: row.arrival_ns)
    gave_up = sum(row.finish == "refused" and row.finish_ns > row.arrival_ns for row in run.requests)
    if not answered:
        return 0.0
    waited = len(answered) / (len(answered) + gave_up)
    arrivals = np.array([row.arrival_ns for row in answered], dtype=np.int64)
    if run.clients is not None or arrivals[0] == arrivals[-1]:
        return waited
    count = len(arrivals)
    firsts = np.array([row.first_token_ns for row in answered], dtype=np.int64)
    ends = np.array([row.finish_ns for row in answered], dtype=np.int64)
    waiting = _present(arrivals, firsts)
    present = _present(arrivals, ends)
    early_ns = (ends - arrivals)[: max(1, count // 4)]
    expected = _expected(arrivals, early_ns)
    behind = max(0.0, present - expected - sqrt(present + expected))
    by_first = max(_span_ratio(arrivals, firsts), 1 - waiting / count)
    by_end = max(_span_ratio(arrivals, ends), 1 - behind / count)
    return waited * min(by_first, by_end)


def limit_of(run: RunRecord) -> str | None:
    """What limited a saturated run; None: a run without samples of its engines, as a client measures it.

    - absent weights, if requests waited for weights for ``MOSTLY`` of the time that all waited for their
      first tokens;
    - KV memory, if in ``MOSTLY`` of the samples with waiting requests the pool was full (``KV_FULL``), or
      requests were preempted (``PREEMPTED``);
    - compute, if in ``MOSTLY`` of these samples as many requests ran as may, or engines stepped ``BUSY`` of
      the time;
    - else the admission, which let requests wait though there was room.
    """
    if not run.samples or not run.engines:
        return None
    to_first_s = sum([row.ttft_s for row in run.requests if row.output_tokens])
    for_weights_s = sum([each.waiting_s for engine in run.engines for each in engine.weights.values()])
    if for_weights_s and for_weights_s >= MOSTLY * to_first_s:
        return "absent weights"
    waiting = [sample for sample in run.samples if sample.waiting]
    full = [sample for sample in waiting if sample.kv_used >= KV_FULL]
    preemptions = sum(row.preemptions for row in run.requests)
    if (full and len(full) >= MOSTLY * len(waiting)) or preemptions >= PREEMPTED * len(run.requests):
        return "KV memory"
    slots = [sample for sample in waiting if _all_slots_taken(run, sample)]
    if slots and len(slots) >= MOSTLY * len(waiting):
        return "compute (as many requests ran as may)"
    span_ns = max(row.finish_ns for row in run.requests) - min(row.arrival_ns for row in run.requests)
    busy = sum(engine.busy_ns for engine in run.engines) / (len(run.engines) * max(span_ns, 1))
    return "compute" if busy >= BUSY else "the admission of requests, not by memory or compute"


def _all_slots_taken(run: RunRecord, sample: Sample) -> bool:
    most = run.engines[sample.engine].max_running
    return most is not None and sample.running >= most


def _span_ratio(arrivals: Ints, events: Ints) -> float:
    """Time between first and last arrival over that between first and last event, at most 1."""
    span = int(events.max() - events.min())
    return min(1.0, int(arrivals[-1] - arrivals[0]) / span) if span else 1.0


def _present(arrivals: Ints, events: Ints) -> float:
    """Mean number of requests that have arrived and have no event yet, while the last tenth arrives."""
    places = _last_tenth(arrivals)
    over = np.searchsorted(np.sort(events), arrivals[places], side="right")
    return float(np.maximum(places - over, 0).mean())


def _expected(arrivals: Ints, spans: Ints) -> float:
    """The same if the times from arrival to event were distributed as ``spans``."""
    ordered = np.sort(spans)
    found = []
    for place in _last_tenth(arrivals):
        ages = arrivals[place] - arrivals[:place]
        found.append(float((1 - np.searchsorted(ordered, ages, side="right") / len(ordered)).sum()))
    return sum(found) / len(found)


def _last_tenth(arrivals: Ints) -> Ints:
    """Places of the latest arrivals, at least one and at most ``MOST_COUNTED``."""
    count = len(arrivals)
    first = min(int(0.9 * count), count - 1)
    return np.unique(np.linspace(first, count - 1, min(count - first, MOST_COUNTED)).astype(np.int64))


def offered_rate(rows: Sequence[RequestRow]) -> float | None:
    """Requests per second of the arrivals; None for fewer than two different times."""
    arrivals = [row.arrival_ns for row in rows]
    span_ns = max(arrivals, default=0) - min(arrivals, default=0)
    return (len(arrivals) - 1) / (span_ns / 1e9) if span_ns else None


def _load(run: RunRecord, group: GroupSummary) -> str:
    """The load of which (nearly) all was served."""
    unanswered = group.requests - group.cancelled - group.answered
    if run.clients is not None:
        clients = f"{run.clients:,} client{'s' if run.clients > 1 else ''}"
        tokens = figure(group.output_tokens_per_s)
        load = f"{clients} with {figure(group.throughput)} requests/s and {tokens} tokens/s"
    elif (rate := offered_rate(run.requests)) is not None:
        load = f"{figure(rate)} requests/s"
    elif group.requests == 1:
        return "the only request"
    else:
        load = f"{group.requests:,} requests at once"
    if run.clients is not None:
        return f"{load}, {_endings(group)}" if unanswered else load
    return (
        f"{share(group.answered / (group.answered + unanswered))} of {load}"
        if unanswered
        else f"all of {load}"
    )


def _of_offered(run: RunRecord, group: GroupSummary) -> str:
    """Requests served each second, of those that came."""
    rate = offered_rate(run.requests)
    if rate is None:
        return f"{group.answered:,} of {group.requests:,} requests"
    return f"{figure(group.throughput)} of {figure(rate)} requests/s"


def _endings(group: GroupSummary) -> str:
    """How requests ended that were not answered."""
    counts = [(group.refused, "refused"), (group.failed, "failed"), (group.cancelled, "cancelled")]
    if not group.requests:
        return "there were no requests"
    whole = next((word for count, word in counts if count == group.requests), None)
    if whole is not None:
        return (
            f"all {group.requests:,} requests {whole}" if group.requests > 1 else f"the only request {whole}"
        )
    ended = ", ".join(f"{count:,} {word}" for count, word in counts if count)
    return f"{ended} of {group.requests:,} requests"


def _latency(group: GroupSummary) -> str:
    assert group.ttft_s is not None  # requests were answered
    if group.answered == 1:
        return f"TTFT {seconds(group.ttft_s.p50)}"
    return f"p99 TTFT {seconds(group.ttft_s.p99)}"


def _goals(group: GroupSummary, summary: Summary) -> str:
    """Share of requests that met their goals, and that of the service with the lowest if it is short."""
    if group.slo_attainment is None:
        return ""
    met = f", goals met by {share(group.slo_attainment)}"
    known = [(each.slo_attainment, name) for name, each in summary.services.items()]
    short = [(value, name) for value, name in known if value is not None and value < SERVED]
    if len(known) < 2 or not short:
        return met
    value, name = min(short)
    return f"{met} (of {name} by {share(value)})"


def _early(run: RunRecord) -> str:
    return " (until it was stopped)" if run.stopped else ""
