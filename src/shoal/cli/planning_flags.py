"""Options shared by ``shoal plan`` and ``shoal place``, and reading of their inputs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from shoal.cli.flags import parse_share
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.setting_tree import Table

if TYPE_CHECKING:
    from shoal.config.scenario import Scenario
    from shoal.plan.demand import Demand
    from shoal.plan.goals import PlanningOptions

WANTED = "What is wanted"
SEARCH = "Search"
RESULTS = "Results"
_EXCLUDED = {"model", "device", "tp", "clients", "engines", "dispatch", "kv-memory", "kv-tokens"}
_EXCLUDED |= {"kv-cache-dtype", "prefix-caching", "swap"}
PLAN_FLAGS = tuple(flag for flag in SCENARIO_FLAGS if flag.name not in _EXCLUDED)
"""The flags of a scenario that planning uses."""

Slo = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="KEY=VALUE[,..]",
        help="Latency goals of services without their own: ttft=2s,tpot=100ms, e2e=20s or e2e_scale=5.",
        rich_help_panel=WANTED,
    ),
]
Attainment = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Share of the requests of every service that must meet their goals.",
        rich_help_panel=WANTED,
    ),
]
SearchShare = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Share of the requests, the earliest, to plan for; the rest is held out.",
        rich_help_panel=SEARCH,
    ),
]
ServerFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Write the plan as shoal.yaml, for shoal serve; - is standard output.",
        rich_help_panel=RESULTS,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="Write all results as JSON; - is standard output.",
        rich_help_panel=RESULTS,
    ),
]


class PlanningInputs(NamedTuple):
    """Inputs of a planning command."""

    scenario: "Scenario"
    options: "PlanningOptions"
    demand: "Demand"


def read_inputs(
    devices: Path,
    config: Path | None,
    settings: Table,
    slo: str | None,
    attainment: str,
    search_share: str,
    *,
    trials: int = 1,
    to_serve: bool,
) -> PlanningInputs:
    """Read the scenario and the catalogue; raises ConfigError for the first mistake.

    to_serve: also reject what only simulations support.
    """
    from shoal.config.scenario_file import load_scenario
    from shoal.plan.catalog import load_catalogue
    from shoal.plan.demand import build_demand
    from shoal.plan.deployment import check_servable
    from shoal.plan.goals import PlanningOptions, parse_goals

    share = parse_share(attainment, "--attainment", whole=True)
    scenario = load_scenario(file=config, flags=settings)
    catalogue = load_catalogue(devices)
    if to_serve:
        check_servable(scenario, catalogue)
    options = PlanningOptions(
        attainment=share,
        trials=trials,
        share=parse_share(search_share, "--search-share", whole=False),
        seed=scenario.workload.seed,
    )
    return PlanningInputs(scenario, options, build_demand(scenario, catalogue, parse_goals(slo)))
