"""Capacity plans for the earlier part of public traces, tested on the later part.

    python -m benchmarks.planner --traces ../shared/traces [--trials 9] [--json FILE]

Prints for each case the cheapest fleet, and the same with one device less, both on held-out requests. A plan
holds if its attainment on these is at most 2 points below the target.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shoal.cli.plan_report import fleets_table, held_out_table, plan_json
from shoal.config.scenario_file import load_scenario
from shoal.plan.capacity import Plan, fleet_name, plan
from shoal.plan.catalog import Catalogue, DeviceKind
from shoal.plan.demand import Demand, build_demand
from shoal.plan.goals import PlanningOptions, parse_goals

TOLERANCE = 0.02
"""Largest shortfall of attainment at which a plan holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trace, services, and devices."""

    trace: str
    """Path below the folder of traces."""
    workload: str
    """Further keys of the workload."""
    services: str
    goals: str
    """SLOs of all services."""
    devices: tuple[DeviceKind, ...]
    """Available devices."""
    attainment: float
    """The target."""


CASES = {
    "azure-conversation": Case(
        trace="azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
        workload="requests: 5000, rate: 30",
        services="[{name: chat, model: llama-3.1-8b}]",
        goals="ttft=1s,tpot=50ms",
        devices=(DeviceKind(name="a100-80", price=1.8, most=8),),
        attainment=0.95,
    ),
    "mooncake-conversation": Case(
        trace="mooncake/conversation_trace.jsonl",
        workload="requests: 2500",
        services="[{name: chat, model: llama-3.1-8b}]",
        goals="ttft=15s,tpot=100ms",
        devices=(DeviceKind(name="h100", price=3.0, most=6),),
        attainment=0.95,
    ),
    "arena": Case(
        trace="vtc_arena/arena_multiclient_trace.csv",
        workload="",
        services="[{name: chat, model: smollm2}, {name: complete, model: gemma3-270m}]",
        goals="ttft=5s,tpot=150ms",
        devices=(DeviceKind(name="cpu", price=0.05, most=16, memory_bytes=4 << 30),),
        attainment=0.9,
    ),
}


def demand_of(case: Case, traces: Path) -> Demand:
    workload = ", ".join(filter(None, [f"trace: {traces.resolve() / case.trace}", case.workload]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(f"services: {case.services}\nworkload: {{{workload}}}\n")
        scenario = load_scenario(file=file)
    return build_demand(scenario, Catalogue(devices=case.devices), parse_goals(case.goals))


def holds(found: Plan) -> bool:
    """Whether the plan reaches the target on held-out requests, within the tolerance."""
    assert found.chosen is not None
    return found.chosen.attainment.mean >= found.options.attainment - TOLERANCE


def fails_with_less(found: Plan) -> bool:
    """Whether no fleet with one device less does."""
    return all(each.attainment.mean < found.options.attainment - TOLERANCE for each in found.one_less)


def main() -> int:
    """Plan every case; returns 1 if a plan does not hold, or holds with less."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, results, wrong = Console(), {}, 0
    for name in arguments.cases:
        case = CASES[name]
        demand = demand_of(case, arguments.traces)
        start_s = time.perf_counter()
        found = plan(demand, PlanningOptions(attainment=case.attainment, trials=arguments.trials))
        console.print(f"{name}: {time.perf_counter() - start_s:.0f} s, wanted {case.attainment:.0%}")
        console.print(fleets_table(demand, found))
        results[name] = plan_json(demand, found)
        if found.chosen is None:
            wrong += 1
            continue
        console.print(held_out_table(demand, found))
        verdicts = ("holds" if holds(found) else "does not hold", fails_with_less(found))
        less = "fails with one device less" if verdicts[1] else "also holds with one device less"
        console.print(f"{fleet_name(demand, found.chosen.plan.fleet)} {verdicts[0]}, {less}\n")
        wrong += not (holds(found) and fails_with_less(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
