"""Scenarios from a log of a real run: simulates its requests, compares times, and fits the host overhead."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.config.flags import overlay
from shoal.config.scenario import Scenario
from shoal.config.scenario_file import load_scenario
from shoal.config.scenario_run import PreparedRun, prepare
from shoal.config.setting_tree import Scalar, Table
from shoal.core import ConfigError
from shoal.forecast import NO_OVERHEAD, HostOverhead, OverheadTimes, ScaledTimes
from shoal.forecast.latency_sources import FitLatency, Latency, RooflineLatency
from shoal.measure import Comparison, RunRecord, compare_with_measured
from shoal.simulate import OverheadFit, fit_overhead
from shoal.workload import read_measured, read_trace

_EXCLUDED_KEYS = ("trace", "format", "lengths", "rate", "clients", "requests")
"""Keys of the workload that exclude a log."""
_DIGITS = 7
"""Decimal places of a fitted time: tenths of a microsecond."""


def load_measured_scenario(log: Path, flag: str, *, file: Path | None, flags: Table) -> Scenario:
    """The scenario of ``file`` and ``flags``, with all requests of ``log`` as its workload.

    No request can be left out: a log is in the order of their ends, and requests slow each other down. If the
    log has services, the scenario's shares are ignored. flag: name of the log in errors. Raises ConfigError
    as ``load_scenario``, for flags that conflict, and for a log without times.
    """
    workload = flags.entries.get("workload")
    for name in _EXCLUDED_KEYS if isinstance(workload, Table) else ():
        if isinstance(workload, Table) and name in workload.entries:
            where = workload.entries[name].where
            raise ConfigError(f"{flag} takes its requests, all of them, from {log}; leave out {where}")
    of_log = {"trace": str(log.expanduser()), "format": "requests"}
    keys = {name: Scalar(text, flag) for name, text in of_log.items()}
    whole = Table({"workload": Table(keys, flag, dict.fromkeys(keys, flag))}, flag, {"workload": flag})
    scenario = load_scenario(file=file, flags=overlay(flags, whole))
    if scenario.workload.clients is not None:
        raise ConfigError(f"{flag}: requests of a log come at their times; leave out workload.clients")
    read_measured(log.expanduser())  # errors in its times should be raised before the run
    has_services = all(row.service is not None for row in read_trace(log.expanduser(), "requests"))
    shares = None if has_services else scenario.workload.services
    return replace(scenario, workload=replace(scenario.workload, requests=None, services=shares))


def compare_run(prepared: PreparedRun, run: RunRecord, log: Path) -> Comparison:
    """Compare the run, and runs with step times 1% shorter and longer, with the times in ``log``."""
    measured = read_measured(log.expanduser())
    runs = [
        run,
        *(prepared.with_times(partial(ScaledTimes, factor=factor)).run() for factor in (0.99, 1.01)),
    ]
    return compare_with_measured(measured, *([row for row in each.requests if row.answered] for each in runs))


def is_part(log: Path, whole: Path) -> bool:
    """Whether all requests of ``log`` are in ``whole``, at the same times after the first one."""
    part, all_of_them = (
        {
            (one.request_id, one.arrival_ns, one.prompt_tokens, one.output_tokens)
            for one in read_measured(path)
        }
        for path in (log, whole)
    )
    return part <= all_of_them


def fit_scenario(scenario: Scenario, log: Path, count: int | None) -> tuple[HostOverhead, OverheadFit]:
    """Fit the host overhead to the times in ``log``; returns it rounded, and the fit.

    count: number of leading requests that are compared; all are simulated. Raises ConfigError for a scenario
    whose step times include the host's part, and for several services.
    """
    if len(scenario.services) > 1:
        raise ConfigError("--fit-overhead needs a scenario of one service, as the log is of one engine's")
    prepared = prepare(with_overhead(scenario, NO_OVERHEAD))
    [model] = prepared.models.values()
    if model is None:
        raise ConfigError("--fit-overhead needs to know the model; write it in latency or services")
    measured = read_measured(log.expanduser())[:count]

    def simulate(overhead: HostOverhead) -> RunRecord:
        times = partial(OverheadTimes, overhead=overhead, layers=model.layers)
        return prepared.with_times(times).run(spans=True)

    fit = fit_overhead(measured, simulate, model.layers, lock_step=prepared.ranks > 1)
    found = fit.overhead
    rounded = replace(found, step_s=round(found.step_s, _DIGITS), layer_s=round(found.layer_s, _DIGITS))
    return rounded, fit


def with_overhead(scenario: Scenario, overhead: HostOverhead) -> Scenario:
    """The scenario with ``overhead`` on all step times from tables or a data sheet."""
    services = tuple(
        service if service.latency is None else replace(service, latency=_with(service.latency, overhead))
        for service in scenario.services
    )
    latency = None if scenario.latency is None else _with(scenario.latency, overhead)
    return replace(scenario, services=services, latency=latency)


def _with(latency: Latency, overhead: HostOverhead) -> Latency:
    if isinstance(latency, FitLatency):
        raise ConfigError("latency.fit holds what the host adds; only a profile or roofline has an overhead")
    if isinstance(latency, RooflineLatency):
        return replace(latency, roofline=replace(latency.roofline, overhead=overhead))
    return replace(latency, overhead=overhead)
