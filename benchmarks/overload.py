"""SLO attainment under overload, by scheduling order and by treatment of late requests, in simulation.

    python -m benchmarks.overload [--seconds 30] [--orders fcfs,edf,weighted-turns] [--loads 0.8,1.2,1.6,2]

The scenario examples/scenarios/two_services.yaml (a chat model and one for code on an H100 by roofline,
lengths of ShareGPT's conversations) with the default scheduler except for its order. The TTFT SLO is 1 s for
chat and 4 s for code, the TPOT SLO 200 ms. Loads are multiples of the rate at which the engine finishes
requests of 800 closed-loop clients. The figures of a cell are those of on_hopeless serve, last and refuse,
over the run to its end. MTPOT is the largest inter-token latency (ITL) of an answer.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shoal.config import load_scenario, prepare
from shoal.config.flags import flag_settings
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.scenario_run import PreparedRun
from shoal.core import SLO
from shoal.measure import GroupSummary, RunRecord, Spread, summarise
from shoal.schedule import ORDERS, SchedulerOptions

SCENARIO = Path(__file__).resolve().parent.parent / "examples" / "scenarios" / "two_services.yaml"
MODES: tuple[Literal["serve", "last", "refuse"], ...] = ("serve", "last", "refuse")
CLIENTS = 800
SLOS = {"chat": SLO(ttft_s=1.0, tpot_s=0.2), "code": SLO(ttft_s=4.0, tpot_s=0.2)}
HEADS = (
    "order", "load", "goals met", "requests/s", "tokens/s", "p99 TTFT, s", "mean MTPOT, s", "p99 MTPOT, s",
    "p99 ITL, ms", "refused",
)  # fmt: skip


def prepared(**flags: str) -> PreparedRun:
    """The scenario with flags."""
    return prepare(load_scenario(file=SCENARIO, flags=flag_settings(flags, flags=SCENARIO_FLAGS)))


def run(base: PreparedRun, scheduler: SchedulerOptions) -> RunRecord:
    """Run the requests under another scheduler."""
    services = {name: replace(service, slo=SLOS[name]) for name, service in base.engine.services.items()}
    return replace(base, engine=replace(base.engine, services=services, scheduler=scheduler)).run()


def capacity() -> float:
    """Requests per second that a full engine finishes."""
    record = run(prepared(clients=str(CLIENTS), requests="4000"), SchedulerOptions(order=ORDERS["fcfs"]()))
    ends_ns = sorted(row.finish_ns for row in record.requests)
    first, last = len(ends_ns) // 4, 3 * len(ends_ns) // 4
    return (last - first) * 1e9 / (ends_ns[last] - ends_ns[first])


def cells(groups: list[GroupSummary]) -> list[str]:
    """Figures of the three modes, joined in a cell."""

    def joined(figures: list[str]) -> str:
        return " / ".join(figures)

    def spread(of: Callable[[GroupSummary], Spread | None], figure: str, digits: int, scale: int = 1) -> str:
        spreads = [of(group) for group in groups]
        return joined(["-" if s is None else f"{scale * getattr(s, figure):.{digits}f}" for s in spreads])

    return [
        joined([f"{group.slo_attainment or 0:.0%}" for group in groups]),
        joined([f"{group.throughput or 0:.1f}" for group in groups]),
        joined([f"{group.output_tokens_per_s or 0:,.0f}" for group in groups]),
        spread(lambda group: group.ttft_s, "p99", 1),
        spread(lambda group: group.largest_gap_s, "mean", 2),
        spread(lambda group: group.largest_gap_s, "p99", 2),
        spread(lambda group: group.inter_token_s, "p99", 0, scale=1000),
        joined([f"{group.refused / group.requests:.0%}" for group in groups]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="how long requests arrive")
    parser.add_argument("--orders", default="fcfs,edf,weighted-turns")
    parser.add_argument("--loads", default="0.8,1.2,1.6,2")
    options = parser.parse_args()
    capacity_per_s = capacity()
    print(f"capacity {capacity_per_s:.2f} requests/s\n")
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    loads = [float(load) for load in options.loads.split(",")]
    bases = {
        load: prepared(
            rate=str(load * capacity_per_s), requests=str(round(load * capacity_per_s * options.seconds))
        )
        for load in loads
    }
    for order in options.orders.split(","):
        for load, base in bases.items():
            records = [run(base, SchedulerOptions(order=ORDERS[order](), on_hopeless=mode)) for mode in MODES]
            figures = cells([summarise(record).overall for record in records])
            print(f"| `{order}` | {load:g} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
