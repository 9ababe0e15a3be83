"""A quick measurement of a static executor, for where nobody has profiled it."""

from collections.abc import Callable

from shoal.forecast.latency_fit import PaddedSample, fit_padded
from shoal.forecast.latency_padded import PaddedLatency
from shoal.static.serving.executor import StaticExecutor

SEQUENCES = (1, 4)
LENGTHS = (8, 64)
DECODES = 4


def calibrate(
    executor: StaticExecutor, *, context_tokens: int, progress: Callable[[str], None] | None = None
) -> PaddedLatency:
    """SCLS's serving time, fitted to one small batch of each corner of a grid (section 4.2).

    Costs a few seconds on a CPU. The forms have four coefficients, and the grid four corners: enough to rank
    batches by, not to promise times of batches that are far larger. progress: told what is measured.
    """
    lengths = [min(length, context_tokens - 1 - DECODES) for length in LENGTHS]
    prefill, decode = [], []
    _serve(executor, 1, lengths[0], 2)  # what only the first batch does is not measured
    for number, (sequences, length) in enumerate((n, length) for n in SEQUENCES for length in lengths):
        if progress is not None:
            progress(f"calibrating {number + 1}/{len(SEQUENCES) * len(lengths)}")
        first_s = _serve(executor, sequences, length, 1)
        all_s = _serve(executor, sequences, length, 1 + DECODES)
        prefill.append(PaddedSample(sequences, length, first_s))
        # A disturbed machine can make the shorter run the longer one.
        each_s = max((all_s - first_s) / DECODES, first_s / (100 * length))
        decode.append(PaddedSample(sequences, length + (1 + DECODES) // 2, each_s))
    return fit_padded(prefill, decode)[0]


def _serve(executor: StaticExecutor, sequences: int, length: int, iterations: int) -> float:
    """Seconds of a batch of equal prompts that runs to its limit."""
    prompts = [[1 + (row + at) % 7 for at in range(length)] for row in range(sequences)]
    endless: list[tuple[int, ...]] = [()] * sequences
    result = executor.run(prompts, iterations, [iterations] * sequences, endless)
    return result.duration_ns / 1e9
