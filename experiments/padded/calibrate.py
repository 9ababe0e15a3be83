"""Calibration: a quick fit of a static executor's serving time, used without a profile."""

from collections.abc import Callable

from experiments.padded.executor import StaticExecutor
from shoal.forecast.latency_fit import PaddedSample, fit_padded
from shoal.forecast.latency_padded import PaddedLatency

SEQUENCES = (1, 4)
LENGTHS = (8, 64)
DECODES = 4


def calibrate(
    executor: StaticExecutor, *, context_tokens: int, progress: Callable[[str], None] | None = None
) -> PaddedLatency:
    """Fit SCLS's serving time (section 4.2) to one small batch at each corner of a grid.

    Takes a few seconds on a CPU. The formulas have four coefficients and the grid has four corners: enough to
    rank batches, not to predict times of much larger ones. progress: called with a description of each
    measurement.
    """
    lengths = [min(length, context_tokens - 1 - DECODES) for length in LENGTHS]
    prefill, decode = [], []
    _serve(executor, 1, lengths[0], 2)  # warm-up
    for number, (sequences, length) in enumerate((n, length) for n in SEQUENCES for length in lengths):
        if progress is not None:
            progress(f"calibrating {number + 1}/{len(SEQUENCES) * len(lengths)}")
        first_s = _serve(executor, sequences, length, 1)
        all_s = _serve(executor, sequences, length, 1 + DECODES)
        prefill.append(PaddedSample(sequences, length, first_s))
        # On a busy machine the shorter run may take longer.
        each_s = max((all_s - first_s) / DECODES, first_s / (100 * length))
        decode.append(PaddedSample(sequences, length + (1 + DECODES) // 2, each_s))
    return fit_padded(prefill, decode)[0]


def _serve(executor: StaticExecutor, sequences: int, length: int, iterations: int) -> float:
    """Seconds of a batch of equally long prompts without stop tokens."""
    prompts = [[1 + (row + position) % 7 for position in range(length)] for row in range(sequences)]
    no_stop_tokens: list[tuple[int, ...]] = [()] * sequences
    result = executor.run(prompts, iterations, [iterations] * sequences, no_stop_tokens)
    return result.duration_ns / 1e9
