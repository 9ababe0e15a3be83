"""Options of a scenario's workload, and the requests built from them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core import ConfigError, Request, derive_seed, uniform
from shoal.workload.arrivals import ARRIVALS, ArrivalProcess, AtOnce, Replay, check_time_scale
from shoal.workload.distributions import LengthDistribution
from shoal.workload.presets import LENGTHS
from shoal.workload.readers import load_trace
from shoal.workload.requests import ServiceOf, to_requests, with_arrivals, with_lengths
from shoal.workload.rows import LARGEST_REQUESTS, TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Source of requests and arrival times; raises ConfigError for invalid values."""

    trace: Path | None = None
    """File or folder."""
    format: str | None = None
    """Format of the trace; None: guessed."""
    lengths: LengthDistribution | None = None
    """None: the trace's lengths."""
    arrivals: ArrivalProcess | None = None
    """None: the trace's arrival times."""
    requests: int | None = None
    """Number of requests; with a trace, from the beginning of the file."""
    seed: int = 0
    time_scale: float = 1.0
    """Factor of arrival times; 0.5 doubles the load."""
    max_tokens: int | None = None
    """Output limit of every request."""
    clients: int | None = None
    """Closed loop with this concurrency: each request is followed by the next when it ends. Arrival times are
    ignored."""
    services: Mapping[str, float] | None = None
    """Shares of the requests by service. None: the trace's services; else each client of the trace has one
    service; else equal shares."""

    def __post_init__(self) -> None:
        for name in ("requests", "max_tokens", "clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"workload.{name} must be at least 1, got {value}")
        if self.requests is not None and self.requests > LARGEST_REQUESTS:
            raise ConfigError(
                f"workload.requests must be at most {LARGEST_REQUESTS:,}, which are held in memory; got "
                f"{self.requests:,}"
            )
        check_time_scale(self.time_scale)
        if self.trace is None and (self.lengths is None or self.requests is None):
            raise ConfigError(
                "a workload needs a trace (trace: FILE), or lengths and a number of requests "
                f"(lengths: NAME, requests: 1000; as flags --workload NAME --requests 1000); lengths are "
                f"{', '.join(LENGTHS)}"
            )
        shares = self.services
        if shares is not None and (
            not all(0 <= share < math.inf for share in shares.values()) or not any(shares.values())
        ):
            raise ConfigError(f"workload.services needs shares, at least one above 0; got {dict(shares)}")


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a workload, by arrival."""

    requests: list[Request]
    note: str = ""
    """As in ``Trace``."""


def build_requests(options: WorkloadOptions, services: Sequence[str], block_size: int = 16) -> list[Request]:
    """The requests of ``build_workload``."""
    return build_workload(options, services, block_size).requests


def build_workload(options: WorkloadOptions, services: Sequence[str], block_size: int = 16) -> Workload:
    """The requests of a workload, and a note on its trace.

    services: names of all services. Raises ConfigError for a broken trace, for arrivals or lengths that are
    in neither the trace nor the options, and for shares of unknown services.
    """
    rows, timed, note = _rows(options)
    if options.clients is not None:
        rows = with_arrivals(rows, AtOnce(), 0)
    elif options.arrivals is not None:
        rows = with_arrivals(rows, _process(options.arrivals, rows, timed), derive_seed(options.seed, 2))
    elif not timed and rows:
        raise ConfigError(
            "nothing says when requests arrive: give a rate (--rate 2, or workload.rate: 2), a process "
            "(workload.arrivals: {process: poisson, rate: 2}, or at-once; there are "
            f"{', '.join(ARRIVALS)}), or a closed loop (--clients 8, or workload.clients: 8)"
        )
    requests = to_requests(
        rows,
        _service_chooser(options, services, rows),
        block_size=block_size,
        time_scale=options.time_scale,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    return Workload(requests, note)


def assign_clients(clients: Sequence[str], services: Sequence[str]) -> dict[str, str]:
    """The service of each client: round-robin, in the order of the clients' first requests.

    AlpaServe and SeaLLM make traffic of LLM services from serverless functions in this way.
    """
    return {client: services[turn % len(services)] for turn, client in enumerate(dict.fromkeys(clients))}


def _rows(options: WorkloadOptions) -> tuple[list[TraceRow], bool, str]:
    """Rows with lengths, whether they have arrival times, and the note of the trace."""
    if options.trace is None:
        rows = [TraceRow(0, 0, 0)] * (options.requests or 0)
        timed, sized, note = False, False, ""
    else:
        seed = derive_seed(options.seed, 0)
        trace = load_trace(options.trace, options.format, seed=seed, limit=options.requests)
        rows, timed, sized, note = trace.rows, trace.timed, trace.sized, trace.note
    if options.lengths is not None:
        rows = with_lengths(rows, options.lengths, derive_seed(options.seed, 1))
    elif not sized and rows:
        raise ConfigError(f"{options.trace} has arrivals only; give lengths: one of {', '.join(LENGTHS)}")
    return rows, timed, note


def _process(arrivals: ArrivalProcess, rows: Sequence[TraceRow], timed: bool) -> ArrivalProcess:
    if not isinstance(arrivals, Replay) or arrivals.times:
        return arrivals
    if not timed and rows:
        raise ConfigError("nothing to replay: the workload's lengths come without times; try poisson")
    return replace(arrivals, times=tuple(row.arrival_ns for row in rows))


def _service_chooser(
    options: WorkloadOptions, services: Sequence[str], rows: Sequence[TraceRow]
) -> ServiceOf:
    shares = options.services
    unknown = sorted(set(shares or ()) - set(services))
    if not services or unknown:
        raise ConfigError(f"no service {', '.join(unknown)}; there are {', '.join(services) or 'none'}")
    if shares is None:
        trace_services = {row.service for row in rows}
        if None not in trace_services and (len(trace_services) > 1 or len(services) > 1):
            _require_known(trace_services, services, options.trace)
            return lambda number, row: row.service or ""
        clients = [row.client for row in rows if row.client is not None]
        if len(services) > 1 and len(clients) == len(rows):
            assigned = assign_clients(clients, services)
            return lambda number, row: assigned[row.client or ""]
    weights = dict.fromkeys(services, 1.0) if shares is None else shares
    return _by_shares(weights, derive_seed(options.seed, 3))


def _require_known(trace_services: Iterable[str | None], services: Sequence[str], trace: Path | None) -> None:
    """Raise ConfigError for services of a trace that are not in ``services``."""
    unknown = sorted(name for name in trace_services if name is not None and name not in services)
    if unknown:
        raise ConfigError(
            f"{trace} has requests of service {', '.join(unknown)}, but the services are "
            f"{', '.join(services)}: name them alike (--service, or services), or say which share each gets "
            "(workload.services)"
        )


def _by_shares(shares: Mapping[str, float], seed: int) -> ServiceOf:
    names = [name for name, share in shares.items() if share > 0]
    total = math.fsum(shares.values())

    def service_of(number: int, row: TraceRow) -> str:
        remaining = uniform(seed, number) * total
        for name in names:
            remaining -= shares[name]
            if remaining < 0:
                return name
        return names[-1]

    return service_of
