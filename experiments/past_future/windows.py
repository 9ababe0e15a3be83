"""Similarity of output lengths between windows of requests in real traces (Past-Future, Figs. 3 and 4)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from experiments.past_future.setup import PAPER
from experiments.past_future.traces import IntArray, Outputs, outputs_over_time, traces_folder
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from shoal.measure import Panel

FloatArray = npt.NDArray[np.float64]

NAME = "past-future-windows"
WINDOW = 1000
PAST_WINDOWS = (100, 300, 1000, 3000)
RUNNING_WINDOWS = (50, 200, 500)
BINS = 50
QUICK_REQUESTS = 6_000
FEWEST_WINDOWS = 3


def binned(lengths: IntArray) -> IntArray:
    """The bin of each length: 50 of equal width up to the 99th percentile, and one for longer lengths."""
    width = max(1.0, float(np.percentile(lengths, 99)) / BINS)
    numbers: IntArray = np.minimum((lengths - 1) // width, BINS).astype(np.int64)
    return numbers


def histograms(bins: IntArray, starts: IntArray, size: int) -> FloatArray:
    """Counts of each bin in windows of ``size`` requests, one for each start [starts, bins]."""
    return np.stack([np.bincount(bins[at : at + size], minlength=BINS + 1) for at in starts]).astype(float)


def cosines(left: FloatArray, right: FloatArray) -> FloatArray:
    """Cosine similarity of each row of ``left`` with each row of ``right`` [lefts, rights]."""
    norms = [np.linalg.norm(side, axis=1, keepdims=True) for side in (left, right)]
    product: FloatArray = (left / norms[0]) @ (right / norms[1]).T
    return product


def window_similarities(lengths: IntArray, past: int, running: int) -> tuple[float, float, float]:
    """Similarity of windows of ``running`` requests to windows of ``past`` requests.

    Mean and minimum over windows and the requests just before them, and mean over all disjoint pairs; NaN if
    there are too few windows.
    """
    starts = np.arange(past, len(lengths) - running + 1, max(running, past // 4))
    if len(starts) < FEWEST_WINDOWS:
        return float("nan"), float("nan"), float("nan")
    bins = binned(lengths)
    found = cosines(histograms(bins, starts, running), histograms(bins, starts - past, past))
    near = found.diagonal()
    first, last = (starts - past)[None, :], starts[None, :]
    apart = (starts[:, None] >= last) | (starts[:, None] + running <= first)
    return float(near.mean()), float(near.min()), float(found[apart].mean())


def run(effort: Effort) -> Result:
    """Fig. 3: windows of 1,000 requests. Fig. 4: other sizes of both windows."""
    folder = traces_folder()
    traces, notes = outputs_over_time(folder, *([QUICK_REQUESTS] if effort.quick else []))
    rows = [
        _row(3, trace, WINDOW, WINDOW)
        for trace in effort.each(f"{NAME}, Fig. 3", traces)
        if len(trace.lengths) >= (FEWEST_WINDOWS + 1) * WINDOW
    ]
    for trace in effort.each(f"{NAME}, Fig. 4", traces):
        for running in RUNNING_WINDOWS:
            for past in PAST_WINDOWS:
                if len(trace.lengths) >= past + FEWEST_WINDOWS * max(running, past // 4):
                    rows.append(_row(4, trace, past, running))
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 3 and 4",
        assumptions=[
            "The paper draws both figures without printing them: neighbouring windows are similar in all "
            "traces, distant ones if a service has one task; 1,000 past requests suit all.",
            f"Lengths are counted in {BINS} bins up to the 99th percentile; the paper names no bins. "
            "neighbours: a window and the requests just before it; all_pairs: any two disjoint windows.",
            *notes,
        ],
        rows=rows,
        panels=_panels(rows, traces),
    )


def _row(figure: int, trace: Outputs, past: int, running: int) -> Row:
    near, least, everywhere = window_similarities(trace.lengths, past, running)
    return Row(
        config={"figure": figure, "trace": trace.name, "past_window": past, "running_window": running},
        metrics={"neighbours": near, "least_neighbours": least, "all_pairs": everywhere},
    )


def _panels(rows: Sequence[Row], traces: Sequence[Outputs]) -> list[list[Panel]]:
    """Fig. 4: similarity over the past window, a line for each running window, a row for each trace."""
    return [
        [
            line_panel(
                rows,
                x="past_window",
                y=metric,
                by="running_window",
                where={"figure": 4, "trace": trace.name},
                x_label="past requests",
                y_label=f"cosine similarity, {label}",
                title=f"{trace.name}, by running requests",
            )
            for metric, label in (("neighbours", "neighbours"), ("all_pairs", "all pairs"))
        ]
        for trace in traces
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Past-Future, Figs. 3 and 4",
    measures="similarity of output lengths between neighbouring windows, by their sizes, in real traces",
    run=run,
)
