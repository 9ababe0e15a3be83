"""What becomes of latency goals under overload, for each order and each answer to requests that are too late.

    python -m benchmarks.overload [--seconds 30] [--orders fcfs,edf,weighted-turns] [--loads 0.8,1.2,1.6,2]

The scenario examples/scenarios/two_services.yaml (a chat model and one for code on an H100 by roofline,
lengths of ShareGPT's conversations) with the default scheduler but for its order. The first token of a chat
is to come within 1 s, of code within 4 s, and each further one within 200 ms. Loads are multiples of the
rate at which the engine finishes requests while 800 clients always wait for an answer. Figures in a cell
are those of on_hopeless serve, last and refuse, over the run to its end. MTPOT is the largest gap between two
tokens of an answer, ITL every such gap.
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
GOALS = {"chat": SLO(ttft_s=1.0, tpot_s=0.2), "code": SLO(ttft_s=4.0, tpot_s=0.2)}
HEADS = (
    "order", "load", "goals met", "requests/s", "tokens/s", "p99 TTFT, s", "mean MTPOT, s", "p99 MTPOT, s",
    "p99 ITL, ms", "refused",
)  # fmt: skip


def prepared(**flags: str) -> PreparedRun:
    """The scenario with flags over it."""
    return prepare(load_scenario(file=SCENARIO, flags=flag_settings(flags, flags=SCENARIO_FLAGS)))


def run(base: PreparedRun, scheduler: SchedulerOptions) -> RunRecord:
    """The same requests under another scheduler."""
    services = {name: replace(service, slo=GOALS[name]) for name, service in base.engine.services.items()}
    return replace(base, engine=replace(base.engine, services=services, scheduler=scheduler)).run()


def capacity() -> float:
    """Requests that the engine finishes in a second while it has more than enough to do."""
    record = run(prepared(clients=str(CLIENTS), requests="4000"), SchedulerOptions(order=ORDERS["fcfs"]()))
    ends_ns = sorted(row.finish_ns for row in record.requests)
    first, last = len(ends_ns) // 4, 3 * len(ends_ns) // 4
    return (last - first) * 1e9 / (ends_ns[last] - ends_ns[first])


def cells(groups: list[GroupSummary]) -> list[str]:
    """The figures of the three modes beside each other."""

    def beside(figures: list[str]) -> str:
        return " / ".join(figures)

    def spread(of: Callable[[GroupSummary], Spread | None], figure: str, digits: int, scale: int = 1) -> str:
        spreads = [of(group) for group in groups]
        return beside(["-" if s is None else f"{scale * getattr(s, figure):.{digits}f}" for s in spreads])

    return [
        beside([f"{group.slo_attainment or 0:.0%}" for group in groups]),
        beside([f"{group.throughput or 0:.1f}" for group in groups]),
        beside([f"{group.output_tokens_per_s or 0:,.0f}" for group in groups]),
        spread(lambda group: group.ttft_s, "p99", 1),
        spread(lambda group: group.largest_gap_s, "mean", 2),
        spread(lambda group: group.largest_gap_s, "p99", 2),
        spread(lambda group: group.inter_token_s, "p99", 0, scale=1000),
        beside([f"{group.refused / group.requests:.0%}" for group in groups]),
    ]


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="how long requests arrive")
    parser.add_argument("--orders", default="fcfs,edf,weighted-turns")
    parser.add_argument("--loads", default="0.8,1.2,1.6,2")
    options = parser.parse_args()
    knee = capacity()
    print(f"capacity {knee:.2f} requests/s\n")
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    loads = [float(load) for load in options.loads.split(",")]
    bases = {
        load: prepared(rate=str(load * knee), requests=str(round(load * knee * options.seconds)))
        for load in loads
    }
    for order in options.orders.split(","):
        for load, base in bases.items():
            records = [run(base, SchedulerOptions(order=ORDERS[order](), on_hopeless=mode)) for mode in MODES]
            figures = cells([summarise(record).overall for record in records])
            print(f"| `{order}` | {load:g} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
