"""Tables of lengths: CSV files with a prompt length and an output length in every line."""

from collections.abc import Iterator
from pathlib import Path

from shoal.core import ConfigError
from shoal.workload.lines import ReadOptions, csv_columns, csv_lines, header_of, parse_int, parse_ns
from shoal.workload.rows import TraceRow

COLUMN_PAIRS = (
    ("prompt_tokens", "output_tokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_len", "output_len"),
    ("input_tokens", "output_tokens"),
)
ARRIVAL = "arrival_s"


def lengths_columns(header: list[str]) -> tuple[str, str] | None:
    """The columns of prompt and output lengths in a header, None where it has neither pair."""
    return next((pair for pair in COLUMN_PAIRS if set(pair) <= set(header)), None)


def read_lengths(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Lengths without times (all 0); lines with a length of 0 are skipped."""
    yield from read_timed_lengths(path, options, timed=False)


def read_timed_lengths(path: Path, options: ReadOptions, timed: bool = True) -> Iterator[TraceRow | None]:
    """Lengths with a column ``arrival_s``, in seconds; columns ``client`` and ``service`` are optional."""
    _, header = next(csv_lines(path), (0, list(COLUMN_PAIRS[0])))
    pair = lengths_columns(header_of(",".join(header)))
    if pair is None:
        possible = " or ".join(",".join(pair) for pair in COLUMN_PAIRS)
        raise ConfigError(f"{path}:1: no columns of lengths; expected {possible}")
    required = (*pair, ARRIVAL) if timed else pair
    for line, (prompt, output, *more) in csv_columns(path, required, ("client", "service")):
        lengths = parse_int(prompt, pair[0], path, line, 0), parse_int(output, pair[1], path, line, 0)
        arrival = parse_ns(more[0], ARRIVAL, path, line) if timed else 0
        client, service = more[-2] or None, more[-1] or None
        yield TraceRow(arrival, *lengths, client, service=service) if all(lengths) else None
