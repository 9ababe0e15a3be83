"""Converts rows of a trace to requests; replaces their lengths and arrival times."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal.core import Client, ConfigError, Request, SamplingParams, SyntheticPrompt, derive_seed
from shoal.workload.arrivals import ArrivalProcess, check_span, check_time_scale
from shoal.workload.distributions import LengthDistribution
from shoal.workload.prefixes import block_hashes
from shoal.workload.rows import TraceRow, request_ids, sort_by_arrival

ServiceOf = Callable[[int, TraceRow], str]
"""The service of a request by its number and row."""


def to_requests(
    rows: Iterable[TraceRow],
    service: str | ServiceOf,
    *,
    block_size: int = 16,
    limit: int | None = None,
    time_scale: float = 1.0,
    prefix: str = "r",
    max_tokens: int | None = None,
    seed: int = 0,
    from_zero: bool = True,
) -> list[Request]:
    """Requests by arrival, the first at 0 unless ``from_zero`` is False.

    Ids are those of the rows, if they are unique, else ``prefix`` and a number. service: a name, or a
    function that chooses one. block_size: tokens of the engine's KV blocks, for hashes of shared prefixes.
    limit: only the earliest requests. time_scale: factor of times (0.5 doubles the load). max_tokens: output
    limit of every request. seed: of the requests. Raises ConfigError for rows without lengths, and for
    arrivals after more than a hundred years.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be more than 0, got {block_size}")
    check_time_scale(time_scale)
    service_of = _constant(service) if isinstance(service, str) else service
    sampling = SamplingParams(max_tokens=max_tokens)
    ordered = sort_by_arrival(rows, from_zero=from_zero)[:limit]
    check_span(ordered[-1].arrival_ns * time_scale / 1e9 if ordered else 0.0, len(ordered))
    requests = []
    for number, (row, name) in enumerate(zip(ordered, request_ids(ordered, prefix), strict=True)):
        if row.prompt_tokens < 1 or row.output_tokens < 1:
            raise ConfigError(
                f"request {number} of the trace has no lengths; draw them, for example with lengths: sharegpt"
            )
        requests.append(
            Request(
                id=name,
                service=service_of(number, row),
                prompt=SyntheticPrompt(row.prompt_tokens, block_hashes(row, block_size)),
                sampling=sampling,
                arrival_ns=row.arrival_ns if time_scale == 1 else round(row.arrival_ns * time_scale),
                seed=derive_seed(seed, number) >> 1,
                true_output_tokens=row.output_tokens,
                client=None if row.client is None else Client(row.client),
            )
        )
    return requests


def generate_rows(
    lengths: LengthDistribution, arrivals: ArrivalProcess, count: int, seed: int = 0
) -> list[TraceRow]:
    """Rows of ``count`` requests from a length distribution and an arrival process."""
    times = arrivals.times_ns(count, derive_seed(seed, 0))
    return with_lengths([TraceRow(time, 0, 0) for time in times], lengths, derive_seed(seed, 1))


def with_lengths(rows: Iterable[TraceRow], lengths: LengthDistribution, seed: int) -> list[TraceRow]:
    """The rows with new lengths, without shared prefixes."""
    old_rows = list(rows)
    prompts, outputs = (side.tolist() for side in lengths.sample(len(old_rows), seed))
    return [
        replace(row, prompt_tokens=prompt, output_tokens=output, hashes=())
        for row, prompt, output in zip(old_rows, prompts, outputs, strict=True)
    ]


def with_arrivals(rows: Iterable[TraceRow], arrivals: ArrivalProcess, seed: int) -> list[TraceRow]:
    """The rows, in their order, with new arrival times."""
    old_rows = list(rows)
    times = arrivals.times_ns(len(old_rows), seed)
    return [replace(row, arrival_ns=time) for row, time in zip(old_rows, times, strict=True)]


def _constant(service: str) -> ServiceOf:
    return lambda number, row: service
